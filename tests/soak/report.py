"""The report of a soak: JSON, Markdown with one table, and a picture."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.soak import judge
from tests.soak.run import Run

HARDWARE = ("Architecture", "Model name", "CPU(s)", "Thread(s) per core", "L3 cache", "Hypervisor vendor")
PACKAGES = ("torch", "numpy", "litestar", "uvicorn", "aiohttp", "av")
MAX_WRONG = 100  # failures in full
MAX_LINE = 500  # characters of a line of the log
MAX_SAMPLES = 300  # in the JSON; the picture has all of them
BIN_S = 10.0


@dataclass(frozen=True)
class About:
    command: str
    models: Sequence[str]
    began: datetime


def facts_of(said: About, run: Run) -> dict[str, Any]:
    return {
        "date": said.began.astimezone(UTC).isoformat(timespec="seconds"),
        "command": said.command,
        "seed": run.plan.seed,
        "duration_s": run.plan.duration_s,
        "is_complete": run.is_complete,
        "models": list(said.models),
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}},
    }


def hardware() -> dict[str, str]:
    """Return some lines of lscpu, and the memory."""
    try:
        lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout.splitlines()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return {"Model name": platform.processor() or platform.machine()}
    pairs = dict(line.partition(":")[::2] for line in lines)
    found = {name: pairs[name].strip() for name in HARDWARE if name in pairs}
    memory_kib = int(Path("/proc/meminfo").read_text().split()[1])
    return found | {"Memory": f"{memory_kib / (1 << 20):.0f} GiB"}


def version_of(package: str) -> str:
    try:
        return version(package)
    except ModuleNotFoundError:
        return "none"


def write(directory: Path, said: About, run: Run, errors: Sequence[str]) -> None:
    """Write soak.json, soak.md and soak.png into the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    facts = facts_of(said, run)
    found = judge.rows(run)
    result = {
        **facts,
        "capacity_requests_per_s": run.capacity,
        "requests": len(run.ended),
        "unsent": run.num_unsent,
        "has_failed": judge.failed(run),
        "rows": [asdict(row) for row in found],
        "failures": [asdict(one) for one in run.ended if one.wrong][:MAX_WRONG],
        "log_errors": [line[:MAX_LINE] for line in errors[:MAX_WRONG]],
        "strikes": [asdict(strike) for strike in run.strikes],
        "parts": run.parts,
        "idle": {part: one and asdict(one) for part, one in run.idle.items()},
        "samples": [asdict(one) for one in run.samples[:: -(-len(run.samples) // MAX_SAMPLES) or 1]],
    }
    (directory / "soak.json").write_text(json.dumps(result, indent=1) + "\n")
    (directory / "soak.md").write_text(markdown(facts, run))
    draw(directory / "soak.png", run)


def markdown(facts: dict[str, Any], run: Run) -> str:
    num_failed = sum(row.failed for row in judge.rows(run))
    verdict = "Nothing failed." if not judge.failed(run) else f"{num_failed} failures."
    if not run.is_complete:
        verdict += " The run was interrupted."
    lines = [
        f"# Soak of {facts['date'][:10]}",
        "",
        f"{verdict} {len(run.ended)} requests, {run.capacity:.1f} a second at capacity, loads from 0.1 to 5 times that.",
        "",
        f"    {facts['command']}",
        "",
        f"- Date: {facts['date']}, seed {facts['seed']}, {facts['duration_s'] / 60:g} minutes",
        f"- Models: {', '.join(facts['models'])} (tiny demo checkpoints)",
        "- Hardware: " + ", ".join(f"{name} {value}" for name, value in facts["hardware"].items()),
        "- Versions: " + ", ".join(f"{name} {value}" for name, value in facts["versions"].items()),
        "",
        "| what | tried | failed | seen |",
        "|---|---|---|---|",
        *(
            f"| {row.attack} | {row.tried} | {row.failed} | {row.seen.replace('|', '/')} |"
            for row in judge.rows(run)
        ),
        "",
        "![curves](soak.png)",
        "",
    ]
    return "\n".join(lines)


def draw(path: Path, run: Run) -> None:
    """Draw the curves over time. Dotted lines are signals to processes, and grey steps are the load."""
    figure = Figure(figsize=(9, 17), layout="constrained")
    drawn = curves_of(run)
    *panels, last = figure.subplots(len(drawn) + 1, sharex=True)
    at_s = [one.at_s for one in run.samples]
    for panel, (label, lines) in zip(panels, drawn.items(), strict=True):
        for name, values in lines.items():
            panel.plot(at_s, values, label=name, linewidth=1)
        panel.set(ylabel=label)
    last.plot(*ttfa_p95(run), marker=".", label="p95")
    last.set(ylabel="first audio, s", xlabel="seconds", yscale="log")
    for panel in (*panels, last):
        dress(panel, run)
    figure.savefig(path)


def curves_of(run: Run) -> dict[str, dict[str, list[float]]]:
    """Return the lines of each panel, by its label and their names."""
    states = ("running", "waiting")
    requests = {state: [one.requests.get(state, 0) for one in run.samples] for state in states}
    return {
        "memory, MiB": of_processes(run, "resident_mib"),
        "descriptors": of_processes(run, "descriptors"),
        "sockets": of_processes(run, "sockets"),
        "threads": of_processes(run, "threads"),
        "requests": requests | {"sessions": [one.sessions for one in run.samples]},
        "pages in use": {"pages": [one.pages for one in run.samples]},
        "disk, MiB": {"voices and temporary files": [one.disk_mib for one in run.samples]},
    }


def of_processes(run: Run, name: str) -> dict[str, list[float]]:
    return {
        process: [judge.of_process(process, name)(one) for one in run.samples] for process in judge.PROCESSES
    }


def ttfa_p95(run: Run) -> tuple[list[float], list[float]]:
    """Return p95 of first audio in bins of BIN_S, as (times, values)."""
    bins: dict[int, list[float]] = {}
    for one in judge.listeners(run.ended):
        bins.setdefault(int(one.at_s // BIN_S), []).append(one.ttfa_s or 0.0)
    times = sorted(bins)
    return [(time + 0.5) * BIN_S for time in times], [float(np.quantile(bins[time], 0.95)) for time in times]


def dress(panel: Axes, run: Run) -> None:
    load = panel.twinx()
    load.fill_between(
        [one.at_s for one in run.samples],
        [one.level for one in run.samples],
        color="grey",
        alpha=0.15,
        step="post",
    )
    load.set(ylim=(0, 15), yticks=[])
    for strike in run.strikes:
        panel.axvline(strike.at_s, color="red", linestyle=":", linewidth=1)
    panel.grid(alpha=0.3)
    if panel.get_legend_handles_labels()[0]:
        panel.legend(loc="upper left", fontsize="small")
