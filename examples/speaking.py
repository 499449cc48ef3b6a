"""What the examples share: sentences out of a stream of text, and their speech, in order, from a server."""

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
AHEAD = 2  # sentences that are being made while one is heard


def connect(server: str, key: str | None = None) -> httpx.AsyncClient:
    """To a speech server. An answer may take long, but not stand still."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(base_url=server, headers=headers, timeout=httpx.Timeout(60, connect=5))


class Refused(Exception):
    """What a server says is wrong."""


async def checked(answer: httpx.Response) -> None:
    """Raises Refused."""
    if answer.is_error:
        await answer.aread()
        try:
            said = answer.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):  # no server of OpenAI's kind
            said = f"status {answer.status_code}"
        raise Refused(f"{answer.url} says: {said}")


def run(work: Coroutine[Any, Any, T]) -> T:
    """asyncio.run; what a server or the way to it got wrong is one line."""
    try:
        return asyncio.run(work)
    except* (Refused, httpx.HTTPError, openai.OpenAIError) as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise SystemExit(f"{type(first).__name__}: {first}") from None


async def sample_rate_hz(client: httpx.AsyncClient, model: str | None = None) -> int:
    """Of a served model; of the first one without a name."""
    answer = await client.get("/v1/models")
    await checked(answer)
    models = answer.json()["data"]
    return next(one["sample_rate_hz"] for one in models if model in (None, one["id"]))


async def sentences(deltas: AsyncIterator[str], language: str = "en") -> AsyncIterator[str]:
    """Each as soon as the next one begins, or the text ends. Joined they are the text."""
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
    """Every line, in one stream of 16-bit PCM; `began` is told of each when it begins to be heard. The next lines are
    made while one is heard; whoever cancels this cancels them too, and the server frees their places at once."""
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
    """Where PCM goes: a sound file, or without one ffplay, which plays to the end."""
    if out is not None:
        with soundfile.SoundFile(out, "w", rate_hz, 1, subtype="PCM_16") as file:

            async def write(chunk: bytes) -> None:
                file.buffer_write(chunk, "int16")

            yield whole_samples(write)
        return
    if shutil.which("ffplay") is None:
        raise SystemExit(
            "there is no ffplay (it comes with ffmpeg) to play with; --out FILE.wav writes a file"
        )
    command = f"ffplay -nodisp -autoexit -loglevel error -f s16le -ar {rate_hz} -".split()
    player = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
    assert player.stdin is not None, "ffplay was started with a pipe"
    pipe = player.stdin

    async def play(chunk: bytes) -> None:
        pipe.write(chunk)
        await pipe.drain()  # no more than it can play soon

    try:
        yield play
    finally:
        pipe.close()
        await player.wait()


def whole_samples(write: Hear) -> Hear:
    """Chunks of a stream may end within a sample."""
    rest = b""

    async def hear(chunk: bytes) -> None:
        nonlocal rest
        chunk = rest + chunk
        even = len(chunk) // 2 * 2
        rest = chunk[even:]
        await write(chunk[:even])

    return hear
