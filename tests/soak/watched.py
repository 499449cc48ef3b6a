"""A server whose log and processes are watched, however long it runs."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import zoo
from benchmarks.zoo_server import descendants
from tests.attack.target import Target, command_line

MAX_LINES = 1000  # of its log are kept


class Watched(Target):
    """`errors` are the lines of the log with level error or critical."""

    def __init__(self, models: str, directory: Path, **env: str):
        super().__init__(models, directory, **env)
        self.errors: list[str] = []
        self.recent: deque[str] = deque(maxlen=MAX_LINES)

    def __enter__(self) -> Any:
        try:
            super().__enter__()
        except BaseException:  # also an interrupt while it starts
            if hasattr(self, "process"):
                self.process.kill()
            raise
        return self

    @property
    def said(self) -> str:
        return "".join(self.recent)

    def _read(self) -> None:
        assert self.process.stderr is not None, "stderr is not a pipe"
        for line in self.process.stderr:
            self.recent.append(line)
            if is_error(line):
                self.errors.append(line)

    def processes(self) -> dict[str, int]:
        """Return the process ids of the named children that run now."""
        running = {pid: command_line(pid) for pid in alive(self.process.pid)[1:]}
        return {
            name: max(pids)
            for name, module in self.modules.items()
            if (pids := [pid for pid, line in running.items() if module in line])
        }


def write_demo(directory: Path, family: str, size: str) -> Path:
    return directory if directory.exists() else zoo.families()[family].write_demo(directory, size)


def is_error(line: str) -> bool:
    """Return whether a line of the log reports an error. A line that is not JSON is one, too: a traceback."""
    try:
        return json.loads(line)["level"] in ("error", "critical")
    except ValueError:
        return not line.startswith("zoo: ")


def alive(pid: int) -> list[int]:
    """Return a process and its descendants, without those that end in between."""
    try:
        return descendants(pid)
    except (FileNotFoundError, ProcessLookupError):
        return [pid]
