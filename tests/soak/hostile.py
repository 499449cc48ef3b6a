"""Hostile input, reused from `tests.fuzz` and `tests.attack`: generated once at the start, from the seed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from schemathesis.generation import GenerationMode

from tests.attack.connecting import HALF
from tests.fuzz.recordings import damaged, files

NUM_EACH = 40
ROUTES = ("/v1/audio/speech", "/v1/audio/speech/batch")
WAIT_S = 0.5  # a half-sent request stays open
HEADERS = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n"
REQUESTS = (
    *HALF,
    HEADERS + b"x: " + b"y" * 100_000 + b"\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /\x00 HTTP/1.1\r\n\r\n",
    b"POST /v1/audio/speech HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/audio/speech HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
)
MESSAGES: tuple[str | bytes, ...] = (
    b"\0\1\2",
    "not JSON",
    "[]",
    '{"type": "unknown"}',
    '{"type": "input.text"}',
    '{"type": "session.config", "voice": 7}',
    '{"type": "session.config", "unknown": true}',
    '{"type": "session.config", "ref_audio": "!"}',
)


@dataclass
class Corpus:
    """Damaged recordings, and pairs of a route and a body that its schema does not allow."""

    recordings: list[bytes]
    bodies: list[tuple[str, Any]]


def corpus(url: str, seed: int) -> Corpus:
    schema = schemathesis.openapi.from_url(url + "/schema/openapi.json")
    bodies: list[tuple[str, Any]] = []
    for route in ROUTES:
        cases = schema[route]["POST"].as_strategy(generation_mode=GenerationMode.NEGATIVE)
        found = drawn(cases, seed)
        bodies += [(route, case.body) for case in found if isinstance(case.body, dict | list | str)]
    recordings = [data for data in drawn(damaged(), seed) if data not in files()]
    return Corpus(recordings, bodies)


def drawn(strategy: st.SearchStrategy[Any], seed: int) -> list[Any]:
    """Return examples of a strategy. Equal seeds give equal examples."""
    found: list[Any] = []

    @seeded(seed)
    @settings(
        max_examples=NUM_EACH,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(example=strategy)
    def draw(example: Any) -> None:
        found.append(example)

    draw()
    return found


async def break_http(url: str, index: int) -> str:
    """Send bytes that are no complete request, and return how the server reacted."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(REQUESTS[index % len(REQUESTS)])
        async with asyncio.timeout(WAIT_S):
            data = await reader.read(100)
    except (TimeoutError, ConnectionError):
        return "open"
    finally:
        writer.close()
    return "refused" if data.startswith(b"HTTP/1.1 4") else "closed"
