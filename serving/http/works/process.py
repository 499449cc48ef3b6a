"""Run serving/books/process.py, which reads documents and joins speech."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import msgspec

from serving.books.manuscript import Outcome
from serving.http.decoders import environment

MAX_READ_S = 120.0  # for a document, on a busy machine


async def read(document: Path, out: Path, max_chars: int) -> None:
    """Write the texts of a document into a directory. Raises ValueError with a line for the client, OSError."""
    try:
        async with asyncio.timeout(MAX_READ_S):
            outcome = await _run("read", str(document), str(out), str(max_chars))
    except TimeoutError:
        outcome = None
    if outcome is None:
        raise ValueError(f"{document.name} takes too long or too much memory to read")
    if outcome.errno is not None:
        raise OSError(outcome.errno, outcome.error)
    if outcome.error is not None:
        raise ValueError(outcome.error.replace(f"{document.parent}/", ""))


async def join(directory: Path, chapter: int | None = None) -> float:
    """Join the speech of a chapter, or of the book. Returns its seconds.

    Raises OSError. Without an errno it says that the process was killed, or that the speech cannot be joined.
    """
    outcome = await _run("join", str(directory), *([] if chapter is None else [str(chapter)]))
    if outcome is None or outcome.audio_s is None:
        why = "the process that joins speech was killed" if outcome is None else outcome.error
        raise OSError(outcome.errno if outcome is not None else None, why)
    return outcome.audio_s


async def _run(*arguments: str) -> Outcome | None:
    """Return the outcome that the process reports, or None if it was killed. Cancelling kills it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "serving.books.process", *arguments),
        stdin=PIPE,  # closes with this process, and then the other one ends
        stdout=PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    try:
        said = await process.stdout.read()
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return msgspec.json.decode(said, type=Outcome) if process.returncode == 0 else None
