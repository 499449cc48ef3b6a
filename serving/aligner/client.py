"""The client of the aligner process. Pieces that wait are sent together."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections import deque
from contextlib import suppress

import structlog

from serving.aligner import messages
from serving.aligner.messages import Answer, Piece
from zoo.align.words import WordTime

MAX_PIECES, MAX_BATCH_S = 16, 120.0  # of one batch
MAX_WAIT_S = 120.0  # for a batch; the first one waits for the model
ENDED = "the aligner has ended, or gave no answer; ask again, or leave out the word times"

log = structlog.get_logger()


class AlignerFailed(Exception):
    """The words of a piece cannot be had; the message says why."""


class Aligner:
    """Starts the process when it is first needed, and again when it has ended. `close` ends it."""

    def __init__(self, directory: str, device: str = "cpu"):
        self.directory, self.device = directory, device
        self.fault = ""  # why the model cannot be loaded
        self._waiting: deque[tuple[Piece, asyncio.Future[list[WordTime]]]] = deque()
        self._working: asyncio.Task[None] | None = None
        self._process: Process | None = None

    async def align(self, piece: Piece) -> list[WordTime]:
        """Return the words of a piece. Raises AlignerFailed."""
        if self.fault:
            raise AlignerFailed(self.fault)
        words: asyncio.Future[list[WordTime]] = asyncio.get_running_loop().create_future()
        self._waiting.append((piece, words))
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        return await words

    async def _work(self) -> None:
        while batch := self._next_batch():
            given = [piece for piece, _ in batch]
            try:
                found = await self._asked(given)
            except AlignerFailed as error:
                for _, words in batch:
                    if not words.done():
                        words.set_exception(AlignerFailed(str(error)))
                continue
            for (_, words), each in zip(batch, found, strict=True):
                if not words.done():
                    words.set_result(each)

    def _next_batch(self) -> list[tuple[Piece, asyncio.Future[list[WordTime]]]]:
        """Return the next pieces for which a request still waits."""
        batch: list[tuple[Piece, asyncio.Future[list[WordTime]]]] = []
        batch_s = 0.0
        while self._waiting and len(batch) < MAX_PIECES:
            piece, words = self._waiting[0]
            if batch and batch_s + piece.duration_s > MAX_BATCH_S:
                break
            self._waiting.popleft()
            if not words.done():
                batch.append((piece, words))
                batch_s += piece.duration_s
        return batch

    async def _asked(self, pieces: list[Piece]) -> list[list[WordTime]]:
        """Raises AlignerFailed."""
        if self.fault:
            raise AlignerFailed(self.fault)
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                if self._process is None:
                    self._process = await Process.start(self.directory, self.device)
                answer = await self._process.ask(pieces)
        except (asyncio.IncompleteReadError, TimeoutError, OSError) as error:
            log.error("aligner", error=f"{type(error).__name__}: {error}")
            self._end()
            raise AlignerFailed(ENDED) from None
        if answer.fault:
            self.fault = answer.fault
            log.error("aligner", error=answer.fault)
            self._end()
            raise AlignerFailed(answer.fault)
        return answer.words

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None

    async def close(self) -> None:
        if self._working is not None:
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)
        process = self._process
        self._end()
        if process is not None:
            await process.wait()


class Process:
    """A running aligner process and our end of its socket."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ):
        self._process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def start(cls, directory: str, device: str) -> Process:
        """Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [
                sys.executable,
                "-m",
                "serving.aligner.process",
                str(theirs.fileno()),
                directory,
                device,
            ]
            env = {name: value for name, value in os.environ.items() if name != "ZOO_API_KEY"}
            process = await asyncio.create_subprocess_exec(
                *command, pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL, env=env
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, pieces: list[Piece]) -> Answer:
        """Raises IncompleteReadError, OSError."""
        self._writer.write(messages.pack(pieces))
        size = int.from_bytes(await self._reader.readexactly(4), "big")
        return messages.answer.decode(await self._reader.readexactly(size))

    def kill(self) -> None:
        self._writer.close()
        with suppress(ProcessLookupError):
            self._process.kill()

    async def wait(self) -> None:
        await self._process.wait()
