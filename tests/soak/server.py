"""The server under soak: `zoo serve` with tiny demo checkpoints of several families, and what it holds."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zoo
from benchmarks.under_load import descendants
from tests.attack.target import CHILDREN, Target, command_line

# name of a model: its family and the size of its demo checkpoint
LEFT_OUT = ("bagpiper", "glm4_voice", "step_audio2")  # they answer, for which there are no cases yet
MODELS = {name: (name, "tiny") for name in zoo.families() if name not in LEFT_OUT}
MODELS["qwen3_tts_base"] = ("qwen3_tts", "tiny-base")
SHORT_FORM = ("qwen3_tts", "higgs_v3", "voxcpm2")  # models of a short run: codes, delayed codes, latents
OPTIONS = (
    *("--max-slots", "4", "--max-ttfa", "3", "--max-waiting", "24"),
    *("--max-unread", "2", "--max-stall", "6", "--max-text-idle", "5"),
    *("--max-reference-bytes", "1MiB", "--max-reference-s", "20", "--max-voices", "100"),
    *("--grace-s", "1"),
)
COMPILE_START_S = 1800.0  # for a server that compiles every model first
MAX_LINES = 1000  # of its log are kept
GAUGES = ("running", "waiting", "preparing", "held", "paused")


class Soaked(Target):
    """A server for `models`. `errors` are the lines of its log with level error or critical."""

    def __init__(self, models: Sequence[str], directory: Path, *, is_compiled: bool = False):
        super().__init__(" ".join(models), directory, TMPDIR=str(directory / "tmp"), ZOO_LOG="json")
        (directory / "tmp").mkdir()
        self.is_compiled = is_compiled
        self.errors: list[str] = []
        self.recent: deque[str] = deque(maxlen=MAX_LINES)
        self.start_s = COMPILE_START_S if is_compiled else self.start_s

    def __enter__(self) -> Soaked:
        try:
            super().__enter__()
        except BaseException:  # also an interrupt while it starts
            if hasattr(self, "process"):
                self.process.kill()
            raise
        return self

    @property
    def command(self) -> list[str]:
        demos = [write_demo(self.directory / name, *MODELS[name]) for name in self.models]
        quick = [] if self.is_compiled else ["--no-compile", "--no-warm"]
        voices = ["--voices-dir", str(self.directory / "voices")]
        options = ["--device", "cpu", "--port", "0", *quick, *voices, *OPTIONS]
        return [sys.executable, "-m", "serving", "serve", *map(str, demos), *options]

    @property
    def said(self) -> str:
        return "".join(self.recent)

    def _read(self) -> None:
        assert self.process.stderr is not None, "stderr is not a pipe"
        for line in self.process.stderr:
            self.recent.append(line)
            if is_error(line):
                self.errors.append(line)

    def find_children(self) -> None:
        """Update the process ids after a restart."""
        self.pids |= self.processes()

    def processes(self) -> dict[str, int]:
        """Return the process ids of the children that run now."""
        running = {pid: command_line(pid) for pid in alive(self.process.pid)[1:]}
        return {
            name: max(pids)
            for name, module in CHILDREN.items()
            if (pids := [pid for pid, line in running.items() if module in line])
        }

    def disk_files(self) -> dict[str, int]:
        """Return the sizes of the files in the directories of voices and temporary files, by their paths."""
        return {
            str(path.relative_to(self.directory)): size_bytes(path)
            for name in ("voices", "tmp")
            for path in (self.directory / name).rglob("*")
            if path.is_file()
        }


def write_demo(directory: Path, family: str, size: str) -> Path:
    return directory if directory.exists() else zoo.families()[family].write_demo(directory, size)


def is_error(line: str) -> bool:
    """Return whether a line of the log reports an error. A line that is not JSON is one, too: a traceback."""
    try:
        return json.loads(line)["level"] in ("error", "critical")
    except ValueError:
        return not line.startswith("zoo: ")


def size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # deleted in between
        return 0


def alive(pid: int) -> list[int]:
    """Return a process and its descendants, without those that end in between."""
    try:
        return descendants(pid)
    except (FileNotFoundError, ProcessLookupError):
        return [pid]


@dataclass(frozen=True)
class Process:
    """What a process, or all other descendants together, holds at a moment."""

    resident_mib: float = 0.0
    descriptors: int = 0
    sockets: int = 0
    threads: int = 0


@dataclass(frozen=True)
class Sample:
    """What the server holds at a moment. at_s: since the load began."""

    at_s: float
    level: float  # load, in multiples of the capacity
    processes: dict[str, Process] = field(default_factory=dict)
    requests: dict[str, float] = field(default_factory=dict)  # by state, over all models
    sessions: float = 0.0
    pages: float = 0.0  # in use
    reference_bytes: float = 0.0
    files: int = 0
    disk_mib: float = 0.0

    @property
    def is_idle(self) -> bool:
        return not (any(self.requests.values()) or self.sessions or self.reference_bytes)


def held(pid: int) -> Process:
    """Return what a process holds: nothing if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        links = [link_of(Path(entry.path)) for entry in os.scandir(f"/proc/{pid}/fd")]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return Process()
    resident = re.search(r"VmRSS:\s+(\d+)", status)
    threads = re.search(r"Threads:\s+(\d+)", status)
    if resident is None or threads is None:  # a process that has just ended
        return Process()
    num_sockets = sum(link.startswith("socket:") for link in links)
    return Process(int(resident[1]) / 1024, len(links), num_sockets, int(threads[1]))


def link_of(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def sample(server: Soaked, metrics: str, at_s: float, level: float) -> Sample:
    """Return what the server holds, from /proc, its directories and the text of /metrics."""
    named = {"supervisor": server.process.pid, **server.processes()}
    processes = {name: held(pid) for name, pid in named.items()}
    others = [held(pid) for pid in alive(server.process.pid) if pid not in named.values()]
    processes["others"] = Process(
        sum(one.resident_mib for one in others),
        sum(one.descriptors for one in others),
        sum(one.sockets for one in others),
        sum(one.threads for one in others),
    )
    values = summed(metrics)
    files = server.disk_files()
    return Sample(
        at_s,
        level,
        processes,
        {name: values.get(f"zoo_requests_{name}", 0.0) for name in GAUGES},
        values.get("zoo_sessions", 0.0),
        values.get("zoo_pages", 0.0) - values.get("zoo_pages_free", 0.0),
        values.get("zoo_reference_bytes", 0.0),
        len(files),
        sum(files.values()) / (1 << 20),
    )


def summed(metrics: str) -> dict[str, float]:
    """Return the metrics by name, each summed over its labels, without histograms."""
    found: dict[str, float] = {}
    for line in metrics.splitlines():
        if line.startswith("zoo_") and "_bucket" not in line:
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found
