"""Bench all families next to their references on this machine, and print one table.

    python -m benchmarks.families DIR [--family qwen3_tts ...]

DIR keeps a demo checkpoint of size `mid` for each family; missing ones are written. A family is compared with
its reference if its environment (tests/parity/environments.sh) is in this directory. Each runs in a process
of its own and prints a row as soon as it is done.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zoo
from benchmarks.device_http import last_line
from benchmarks.device_parts import tell

# whole renders, as their references do
POLICY = dict.fromkeys(("cosyvoice2", "glm4_voice", "step_audio2"), "throughput")
HEADER = "| family | streams | audio-s/s | reference | ratio | of the floor |\n|---|---|---|---|---|---|"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--family", nargs="+", default=sorted(zoo.families()), choices=sorted(zoo.families()))
    parser.add_argument("--frames", type=int, default=50)
    parser.add_argument("--limit-s", type=float, default=300.0, help="of one family, after which it is ended")
    options = parser.parse_args()
    print(HEADER, flush=True)
    for family in options.family:
        command = bench_command(family, checkpoint(family, options.directory), options.frames)
        print(measured(family, command, options.limit_s), flush=True)


def checkpoint(family: str, directory: Path) -> Path:
    """Return the family's demo checkpoint of size `mid`, which is written if it is missing."""
    place = directory / f"{family}-mid"
    if not place.exists():
        zoo.families()[family].write_demo(place, "mid")
    return place


def bench_command(family: str, place: Path, frames: int) -> list[str]:
    command = [sys.executable, "-m", "serving", "bench", str(place), "--device", "cpu", "--json"]
    command += ["--frames", str(frames), "--rounds", "1", "--policy", POLICY.get(family, "streaming")]
    has_reference = Path(f".venv-parity-{family}").exists()
    return [*command, "--against", "reference"] if has_reference else command


def measured(family: str, command: list[str], limit_s: float) -> str:
    """Run a command and return its rows of the table, or one that says why there are none."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as running:
        try:
            told, complaint = running.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return f"| {family} | took longer than {limit_s:g} s | | | | |"
        finally:
            tell(running, signal.SIGKILL)  # and the reference, which runs in a separate process
    if running.returncode:
        return f"| {family} | status {running.returncode}: {last_line(complaint)} | | | | |"
    return "\n".join(rows(json.loads(told)))


def rows(result: dict[str, Any]) -> Iterator[str]:
    """Yield a row for each number of streams of a `zoo bench --json`."""
    theirs = result.get("reference", {}).get("runs", [{}] * len(result["runs"]))
    for run, other in zip(result["runs"], theirs, strict=True):
        reference = f"{other['audio_s_per_s']:.2f}" if other else ""
        ratio = f"{run['speedup']:.1f}" if other else ""
        cells = [result["family"], str(run["streams"]), f"{run['audio_s_per_s']:.2f}", reference, ratio]
        cells.append(f"{run['floor_fraction']:.0%}")
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
