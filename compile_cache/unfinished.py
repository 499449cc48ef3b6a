"""What a process that was killed left half written in the compile cache.

A compiler writes a library under its own name, so a library that was being linked when its process was killed
stays as it is, and every later start would load it. Each process therefore keeps a mark in the directory and
a lock on it, which ends with the process however it ends. A mark that nobody holds is of a process that was
killed: what was compiled after its last `settle` is dropped, and compiled again.

Whoever may write to this directory can run code as this user: it is made for its owner alone.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import sys
from pathlib import Path

COMPILED = (".so", ".o", ".gch", ".pch")
SLACK_S = 1.0  # file systems keep times in steps
_marks: dict[Path, int] = {}  # directory -> this process's mark, open and locked


def begin(directory: Path) -> None:
    """From now on this process compiles into the directory. Drops what a killed process left half written,
    with a line on stderr."""
    if directory in _marks:
        return
    dropped = [name for mark in directory.glob("unfinished-*") for name in _drop_after(mark)]
    if dropped:
        said = f"{len(dropped)} compiled files in {directory} were not finished when a process was killed; they are compiled again"
        sys.stderr.write(f"zoo: {said}\n")
    path = directory / f"unfinished-{os.getpid()}"
    handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    os.utime(path)
    _marks[directory] = handle
    atexit.register(_end, path, handle)


def settle() -> None:
    """All that this process has compiled so far is whole."""
    for handle in _marks.values():
        os.utime(handle)


def _end(path: Path, handle: int) -> None:
    path.unlink(missing_ok=True)
    os.close(handle)


def _drop_after(mark: Path) -> list[str]:
    """The names of the compiled files that a killed process wrote after its mark was last set, all removed;
    none for a live process."""
    try:
        handle = os.open(mark, os.O_RDWR)
    except FileNotFoundError:  # it has just ended
        return []
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return []
    else:
        since_s = os.fstat(handle).st_mtime - SLACK_S
        files = [
            file
            for file in mark.parent.rglob("*")
            if file.suffix in COMPILED and file.stat().st_mtime >= since_s
        ]
        for file in files:
            file.unlink(missing_ok=True)
        mark.unlink(missing_ok=True)
        return [file.name for file in files]
    finally:
        os.close(handle)
