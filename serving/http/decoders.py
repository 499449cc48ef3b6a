"""Decoder processes: every audio file from a client is decoded outside the HTTP process, which carries all
streams.

    HTTP process ── file ──> decoder process (decode_worker.py) ── samples ──> HTTP process

The processes are started once and stay warm. A process is killed and replaced if its file takes too much
memory or time, or if the client disconnects.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress

import structlog
from litestar.exceptions import HTTPException

from serving.http.decode_worker import ANSWER, JOB, MAX_CPU_S, max_clip_bytes
from serving.http.errors import refusal
from serving.protocol import AudioClip
from serving.settings import URL_SECRET

MAX_PROCESSES = 4  # each decodes a minute of audio in a tenth of a second
MAX_WAIT_S = 20.0  # for a file, on a busy machine and in a process that has just been started
END_S = 1.0  # from the end of a process's socket to its own
RETRY_S = 1.0
EXCEEDED = f"decoding it takes more than {MAX_CPU_S} s or too much memory; send it as WAV or FLAC"

log = structlog.get_logger()


class Broken(Exception):
    """A decoder process has ended, or must be ended."""


class Decoders:
    """A bounded pool of decoder processes. `decode` starts them if `start` has not; `close` ends them."""

    def __init__(self, num_processes: int | None = None):
        if num_processes is None:
            num_processes = min(MAX_PROCESSES, max(1, (os.cpu_count() or 2) // 2))
        self._all = [Decoder() for _ in range(num_processes)]
        self._idle = list(self._all)
        self._places = asyncio.Semaphore(num_processes)

    def start(self) -> None:
        """Start all processes in the background."""
        for decoder in self._all:
            decoder.start()

    async def decode(self, data: bytes, max_s: float) -> AudioClip:
        """Decode an audio file of at most `max_s` seconds, after the files that came before it. Cancelling
        kills the process. Raises ValueError, and the refusal."""
        async with self._places:
            decoder = self._idle.pop()
            try:
                return await decoder.decode(data, max_s)
            finally:
                self._idle.append(decoder)

    async def close(self) -> None:
        await asyncio.gather(*(decoder.close() for decoder in self._all))


class Decoder:
    """One decoder process and its replacements."""

    def __init__(self) -> None:
        self._starting: asyncio.Task[Process] | None = None

    def start(self) -> asyncio.Task[Process]:
        """Start the process if none is starting or running."""
        if self._starting is None or has_ended(self._starting):
            self._starting = asyncio.create_task(Process.start())
        return self._starting

    async def decode(self, data: bytes, max_s: float) -> AudioClip:
        """Raises ValueError, and the refusal if the server is to blame."""
        process = await asyncio.shield(self.start())
        is_intact = False
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                rate_hz, content = await process.ask(data, max_s)
            is_intact = True
        except TimeoutError:  # a file that takes long ends its process sooner
            raise failed(f"was not done within {MAX_WAIT_S:g} s") from None
        except (Broken, OSError):
            if await process.was_killed():
                raise failed("was killed, perhaps because this machine's memory is full") from None
            raise ValueError(EXCEEDED) from None
        finally:
            if not is_intact:
                self._replace(process)
        if not rate_hz:
            raise ValueError(content.decode())
        return AudioClip(content, rate_hz)

    def _replace(self, process: Process) -> None:
        log.info(
            "decoder", pid=process.pid, reason="its recording was not decoded; a new process replaces it"
        )
        process.kill()
        self._starting = asyncio.create_task(Process.start())

    async def close(self) -> None:
        if self._starting is not None:
            with suppress(OSError):  # it did not start
                process = await self._starting
                process.kill()
                await process.wait()


def has_ended(starting: asyncio.Task[Process]) -> bool:
    """Whether a process did not start, or has ended since."""
    if not starting.done():
        return False
    return starting.exception() is not None or not starting.result().is_running


class Process:
    """A running decoder process and our end of its socket."""

    def __init__(self, process: asyncio.subprocess.Process, connection: socket.socket):
        self._process, self._connection = process, connection

    @classmethod
    async def start(cls) -> Process:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "serving.http.decode_worker", str(theirs.fileno())]
            process = await asyncio.create_subprocess_exec(
                *command, pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL, env=environment()
            )
        ours.setblocking(False)
        return cls(process, ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    async def ask(self, data: bytes, max_s: float) -> tuple[int, bytes]:
        """Return the sample rate and the samples of a file, or 0 and a message. Raises Broken, OSError."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._connection, JOB.pack(max_s, len(data)))
        await loop.sock_sendall(self._connection, data)
        rate_hz, num_bytes = ANSWER.unpack(await self._receive(ANSWER.size))
        if num_bytes > max_clip_bytes(max_s):
            raise Broken(f"the decoder announces {num_bytes} bytes of samples for {max_s:g} s")
        return rate_hz, await self._receive(num_bytes)

    async def _receive(self, num_bytes: int) -> bytes:
        loop, received = asyncio.get_running_loop(), bytearray(num_bytes)
        rest = memoryview(received)
        while rest:
            count = await loop.sock_recv_into(self._connection, rest)
            if not count:
                raise Broken("the decoder has ended")
            rest = rest[count:]
        return bytes(received)

    def kill(self) -> None:
        self._connection.close()
        with suppress(ProcessLookupError):
            self._process.kill()

    async def wait(self) -> None:
        await self._process.wait()

    async def was_killed(self) -> bool:
        """Return whether another process has killed this one. Its own limits end it in other ways."""
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._process.wait()
        return self._process.returncode == -signal.SIGKILL


def failed(why: str) -> HTTPException:
    return refusal(
        503, f"a decoder of this server {why}; try again", code="decoder_failed", retry_after_s=RETRY_S
    )


def environment() -> dict[str, str]:
    """Return the environment of a decoder: without the API key, and without threads that take memory."""
    kept = {name: value for name, value in os.environ.items() if name not in ("ZOO_API_KEY", URL_SECRET)}
    return {**kept, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
