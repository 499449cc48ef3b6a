"""Shared code of the examples: split a stream of text into sentences, and have a server speak them in
order."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import sentencex
import soundfile

T = TypeVar("T")
Hear = Callable[[bytes], Awaitable[None]]
AHEAD = 2  # sentences that are generated while one is played


def connect(server: str, key: str | None = None) -> httpx.AsyncClient:
    """Return a client of a speech server. An answer may take long, but not stall for a minute."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(base_url=server, headers=headers, timeout=httpx.Timeout(60, connect=5))


class Refused(Exception):
    """The server refused a request; the message is the server's."""


async def checked(answer: httpx.Response) -> None:
    """Raise Refused if the answer is an error."""
    if answer.is_error:
        await answer.aread()
        try:
            said = answer.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):  # not an error in OpenAI's shape
            said = f"status {answer.status_code}"
        raise Refused(f"{answer.url} says: {said}")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine. An error of a server or the connection ends the program with one line."""
    try:
        return asyncio.run(work)
    except* (Refused, httpx.HTTPError, openai.OpenAIError) as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise SystemExit(f"{type(first).__name__}: {first}") from None


async def sample_rate_hz(client: httpx.AsyncClient, model: str | None = None) -> int:
    """Return the sample rate of a served model, by default the first one. Raises Refused."""
    answer = await client.get("/v1/models")
    await checked(answer)
    models = answer.json()["data"]
    for one in models:
        if model in (None, one["id"], *one["aliases"]):
            return int(one["sample_rate_hz"])
    raise Refused(f"{answer.url} has no model {model!r}; possible: {', '.join(one['id'] for one in models)}")


async def sentences(deltas: AsyncIterator[str], language: str = "en") -> AsyncIterator[str]:
    """Yield each sentence as soon as the next one begins, or the text ends. Joined, they are the text."""
    text = ""
    async for delta in deltas:
        text += delta
        *whole, text = list(sentencex.segment(language, text)) or [""]
        for sentence in whole:
            yield sentence
    if text.strip():
        yield text


async def speak(
    client: httpx.AsyncClient,
    lines: AsyncIterator[str],
    hear: Hear,
    began: Callable[[str], None] = lambda line: None,
    **fields: Any,
) -> None:
    """Speak every line, in one stream of 16-bit PCM, and call `began` when a line begins to play.

    The next lines are generated while one plays. If this is cancelled, their requests are cancelled too, and
    the server frees their slots immediately."""
    speeches: asyncio.Queue[tuple[str, asyncio.Queue[bytes]] | None] = asyncio.Queue(AHEAD)

    async def ask(line: str, chunks: asyncio.Queue[bytes]) -> None:
        body = {"input": line, "response_format": "pcm", **fields}
        async with client.stream("POST", "/v1/audio/speech", json=body) as answer:
            await checked(answer)
            async for chunk in answer.aiter_bytes():
                await chunks.put(chunk)
        await chunks.put(b"")

    async def ask_all() -> None:
        async for line in lines:
            if line.strip():
                chunks: asyncio.Queue[bytes] = asyncio.Queue()
                asking.create_task(ask(line.strip(), chunks))
                await speeches.put((line, chunks))
        await speeches.put(None)

    async with asyncio.TaskGroup() as asking:
        asking.create_task(ask_all())
        while (speech := await speeches.get()) is not None:
            line, chunks = speech
            began(line)
            while chunk := await chunks.get():
                await hear(chunk)


@contextlib.asynccontextmanager
async def listener(out: Path | None, rate_hz: int) -> AsyncIterator[Hear]:
    """Yield a function that takes PCM: it writes a sound file, or plays with ffplay if `out` is None."""
    if out is not None:
        with soundfile.SoundFile(out, "w", rate_hz, 1, subtype="PCM_16") as file:

            async def write(chunk: bytes) -> None:
                file.buffer_write(chunk, "int16")

            yield whole_samples(write)
        return
    if shutil.which("ffplay") is None:
        raise SystemExit("ffplay is not installed (it comes with ffmpeg); use --out FILE.wav to write a file")
    command = f"ffplay -nodisp -autoexit -loglevel error -f s16le -ar {rate_hz} -".split()
    player = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
    assert player.stdin is not None, "ffplay was started with a pipe"
    pipe = player.stdin

    async def play(chunk: bytes) -> None:
        pipe.write(chunk)
        await pipe.drain()  # do not run ahead of the player

    try:
        yield play
    finally:
        pipe.close()
        await player.wait()


def whole_samples(write: Hear) -> Hear:
    """Return `write` for chunks that may end within a sample."""
    rest = b""

    async def hear(chunk: bytes) -> None:
        nonlocal rest
        chunk = rest + chunk
        even = len(chunk) // 2 * 2
        rest = chunk[even:]
        await write(chunk[:even])

    return hear
