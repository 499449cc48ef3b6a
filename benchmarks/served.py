"""A server that runs while a benchmark uses it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Thread


@contextmanager
def served(arguments: Sequence[str], url: str | None = None) -> Iterator[str]:
    """Yield the address of a ready `zoo serve ARGUMENTS` on this machine's CPU, or `url` if one is given.

    Raises SystemExit with the server's output if it ends before it is ready."""
    if url is not None:
        yield url
        return
    command = [sys.executable, "-m", "serving", "serve", "--port", "0", "--device", "cpu", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if "ready on" in line:
                break
        else:
            raise SystemExit("".join(said).rstrip())
        Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would block the server
        yield line.split()[-1]
    finally:
        process.terminate()
        process.wait()
