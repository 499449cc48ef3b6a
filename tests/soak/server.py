"""The server under soak: `zoo serve` with tiny demo checkpoints of several families, and what it holds."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zoo
from tests.soak.demand import OnDemand
from tests.soak.watched import Watched, alive, write_demo

# name of a model: its family and the size of its demo checkpoint
MODELS = {name: (name, "tiny") for name in zoo.families()}
MODELS["qwen3_tts_base"] = ("qwen3_tts", "tiny-base")
SHORT_FORM = ("qwen3_tts", "higgs_v3", "voxcpm2")  # models of a short run: codes, delayed codes, latents
OPTIONS = (
    *("--max-slots", "4", "--max-ttfa", "3", "--max-waiting", "24"),
    *("--max-unread", "2", "--max-stall", "6", "--max-text-idle", "5"),
    *("--max-reference-bytes", "1MiB", "--max-reference-s", "20", "--max-voices", "100"),
    *("--grace-s", "1"),
)
COMPILE_START_S = 1800.0  # for a server that compiles every model first
GAUGES = ("running", "waiting", "preparing", "held", "paused")


class Soaked(Watched):
    """A server for `models`. demand: the server of models on demand next to it, if there is one."""

    demand: OnDemand | None = None

    def __init__(
        self,
        models: Sequence[str],
        directory: Path,
        *,
        is_compiled: bool = False,
        has_works: bool = False,
    ):
        super().__init__(" ".join(models), directory, TMPDIR=str(directory / "tmp"), ZOO_LOG="json")
        (directory / "tmp").mkdir()
        self.is_compiled, self.has_works = is_compiled, has_works
        self.start_s = COMPILE_START_S if is_compiled else self.start_s

    @property
    def command(self) -> list[str]:
        demos = [write_demo(self.directory / name, *MODELS[name]) for name in self.models]
        quick = [] if self.is_compiled else ["--no-compile", "--no-warm"]
        kept = ["--voices-dir", str(self.directory / "voices")]
        kept += ["--works-dir", str(self.directory / "works")] if self.has_works else []
        options = ["--device", "cpu", "--port", "0", *quick, *kept, *OPTIONS]
        return [sys.executable, "-m", "serving", "serve", *map(str, demos), *options]

    @property
    def logged(self) -> list[str]:
        """The lines of level error in the logs of both servers."""
        return self.errors + (self.demand.errors if self.demand is not None else [])

    @property
    def num_errors(self) -> int:
        return len(self.logged)

    def find_children(self) -> None:
        """Update the process ids after a restart."""
        self.pids |= self.processes()

    def disk_files(self) -> dict[str, int]:
        """Return the sizes of the files in the directories of voices, works and temporary files, by their
        paths."""
        return {
            str(path.relative_to(self.directory)): size_bytes(path)
            for name in ("voices", "works", "tmp")
            for path in (self.directory / name).rglob("*")
            if path.is_file()
        }


def size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # deleted in between
        return 0


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
    works: float = 0.0
    models_on_demand: int = 0  # processes of models that are loaded

    @property
    def is_idle(self) -> bool:
        is_held = self.sessions or self.reference_bytes or self.works or self.models_on_demand
        return not (any(self.requests.values()) or is_held)


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
    processes = held_by(server, named, "others")
    if server.demand is not None:
        found = {f"{name} on demand": pid for name, pid in server.demand.processes().items()}
        processes |= held_by(server.demand, found, "others on demand")
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
        values.get("zoo_works", 0.0),
        0 if server.demand is None else len(server.demand.engines()),
    )


def held_by(server: Watched, named: dict[str, int], others: str) -> dict[str, Process]:
    """Return what the named processes of a server hold, and all its other ones together."""
    rest = [held(pid) for pid in alive(server.process.pid) if pid not in named.values()]
    together = Process(
        sum(one.resident_mib for one in rest),
        sum(one.descriptors for one in rest),
        sum(one.sockets for one in rest),
        sum(one.threads for one in rest),
    )
    return {name: held(pid) for name, pid in named.items()} | {others: together}


def summed(metrics: str) -> dict[str, float]:
    """Return the metrics by name, each summed over its labels, without histograms."""
    found: dict[str, float] = {}
    for line in metrics.splitlines():
        if line.startswith("zoo_") and "_bucket" not in line:
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found
