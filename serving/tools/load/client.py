"""Send a request to a speech server and record when its audio arrives.

It uses aiohttp, where a chunk costs a quarter of the time it costs in httpx (benchmarks/clients.py).
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from serving.tools.load import samples
from serving.tools.load.metrics import Record
from serving.tools.load.plan import Planned

SLOW_SPEED = 0.25  # seconds of audio that a slow reader reads per second
SLOW_BUFFER_BYTES = 4096
READ_BUFFER_BYTES = 1 << 16
RATE_HEADERS = ("x-sample-rate", "x-audio-sample-rate")
MAX_DETAIL = 300
REFUSES_CLIENT = (401, 403)
SERVER_FAILS = 500
NO_AUDIO = ("text/", "application/json")  # content types


class Target(msgspec.Struct):
    """The server under test."""

    url: str  # up to and including /v1
    api_key: str | None = None
    sample_rate_hz: int = 0  # of its pcm; 0: unknown
    timeout_s: float = 60.0  # from the submission to the end

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}


@asynccontextmanager
async def connections(target: Target, *, is_slow: bool = False) -> AsyncIterator[aiohttp.ClientSession]:
    """Open a session that makes a connection for each request, as separate listeners do.

    is_slow: use small receive buffers, so that the server notices a client that does not read.
    """

    def small(address: Any) -> socket.socket:
        family, kind, protocol, *_ = address
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER_BYTES)
        return made

    connector = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=small if is_slow else None)
    async with aiohttp.ClientSession(
        connector=connector,
        headers=target.headers,
        timeout=aiohttp.ClientTimeout(),  # `speak` sets the deadline
        read_bufsize=SLOW_BUFFER_BYTES if is_slow else READ_BUFFER_BYTES,
    ) as session:
        yield session


async def speak(
    session: aiohttp.ClientSession, target: Target, planned: Planned, index: int, submitted_s: float
) -> Record:
    """Make a request and return its record, which holds any failure."""
    record = Record(index, planned.role, submitted_s, time.monotonic(), 0.0, "ok")
    left_s = (
        target.timeout_s if planned.leaves_after_s is None else min(planned.leaves_after_s, target.timeout_s)
    )
    deadline_s = submitted_s + left_s
    try:
        async with asyncio.timeout(deadline_s - time.monotonic()):
            await listen(session, target, planned, record)
    except TimeoutError:
        record.outcome = "left" if planned.leaves_after_s == left_s else "timeout"
    except aiohttp.ClientConnectorError as error:
        record.outcome = "no_connection"
        record.detail = str(error)
    except aiohttp.ClientPayloadError as error:
        record.outcome = "cut"
        record.detail = str(error)
    except (aiohttp.ClientError, OSError) as error:
        record.outcome = "connection_lost"
        record.detail = str(error) or type(error).__name__
    except samples.Unreadable as error:
        record.outcome = "unreadable"
        record.detail = str(error)
    except asyncio.CancelledError:
        record.outcome = "interrupted"
    record.end_s = time.monotonic()
    record.detail = record.detail[:MAX_DETAIL]
    return record


async def listen(session: aiohttp.ClientSession, target: Target, planned: Planned, record: Record) -> None:
    """Read the answer as it arrives and record its samples."""
    async with session.post(f"{target.url}/audio/speech", json=planned.body) as answer:
        if answer.status != 200:
            record.outcome = f"http_{answer.status}"
            record.detail = said(await answer.text("utf-8", "replace"))
            return
        if answer.content_type.startswith(NO_AUDIO):  # as pcm, any bytes would count
            raise samples.Unreadable(f"the answer is {answer.content_type}, not audio")
        counter = samples.counter(planned.format, rate_of(answer) or target.sample_rate_hz)
        began_s = time.monotonic()
        async for data in answer.content.iter_any():
            num_samples = counter.feed(data)
            if num_samples:
                record.arrivals.append((time.monotonic(), num_samples))
                record.sample_rate_hz = counter.sample_rate_hz
            if planned.role == "slow" and record.sample_rate_hz:
                taken_s = sum(num for _, num in record.arrivals) / record.sample_rate_hz
                await asyncio.sleep(began_s + taken_s / SLOW_SPEED - time.monotonic())


def rate_of(answer: aiohttp.ClientResponse) -> int:
    """Return the sample rate of raw pcm from the headers, or 0 if they do not give it."""
    for name in RATE_HEADERS:
        if (given := answer.headers.get(name, "")).isdecimal():
            return int(given)
    found = re.search(r";\s*rate=(\d+)", answer.headers.get("content-type", ""))
    return int(found[1]) if found else 0


def said(text: str) -> str:
    """Return the message of an error answer: in OpenAI's form, in FastAPI's, or as it is."""
    try:
        body = json.loads(text)
    except json.JSONDecodeError:
        return text
    error = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)


async def models(session: aiohttp.ClientSession, target: Target) -> list[str]:
    """Return the ids of the models that the server lists. Raises ValueError if there is no server, if it fails, or if
    it refuses this client."""
    try:
        async with asyncio.timeout(target.timeout_s), session.get(f"{target.url}/models") as answer:
            status, text = answer.status, await answer.text("utf-8", "replace")
    except aiohttp.ClientConnectorError as error:
        raise ValueError(f"there is no server at {target.url}: {error}") from None
    except TimeoutError:
        raise ValueError(f"{target.url}/models did not answer within {target.timeout_s:g} s") from None
    except aiohttp.ClientError as error:
        raise ValueError(
            f"{target.url}/models did not answer ({error}); choose a model with --model"
        ) from None
    if status in REFUSES_CLIENT:
        raise ValueError(
            f"{target.url}/models refused the request ({said(text)}); give an API key with --api-key"
        )
    if status >= SERVER_FAILS:
        raise ValueError(
            f"{target.url}/models answered {status} ({said(text)[:MAX_DETAIL]}); choose a model with --model"
        )
    try:
        listed = json.loads(text) if status == 200 else {}
    except json.JSONDecodeError:
        return []
    data = listed.get("data") if isinstance(listed, dict) else None
    return [
        model["id"] for model in data or () if isinstance(model, dict) and isinstance(model.get("id"), str)
    ]
