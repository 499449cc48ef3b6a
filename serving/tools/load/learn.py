"""Find out what a speech server offers before measuring it: its model, a format that streams, its sample
rate, and whether it accepts seeds. Only public routes are used."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import aiohttp

from serving.tools.load.client import Target, connections, models, speak
from serving.tools.load.metrics import Record
from serving.tools.load.plan import Work
from serving.tools.load.samples import FORMATS

# Failures that another format may avoid.
REFUSALS = ("http_400", "http_404", "http_415", "http_422", "unreadable", "no_audio")


def address(url: str) -> str:
    """Return the base URL of the API, up to /v1, from what the user gave. Raises ValueError."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
    except ValueError:  # a port that is too large, or half of an IPv6 address
        is_address = False
    if not is_address:
        raise ValueError(f"{url!r} is not the address of a server; use http://HOST:PORT")
    base = url.rstrip("/").removesuffix("/audio/speech")
    return base if base.endswith("/v1") else f"{base}/v1"


async def learn(
    target: Target, work: Work, model: str | None, formats: Sequence[str], log_line: Callable[[str], None]
) -> None:
    """Fill in what target and work lack. The server must offer all of `formats`; without any, the first that
    works is chosen. Raises ValueError."""
    async with connections(target) as session:
        if "model" not in work.fields:
            work.fields = {"model": model or await only_model(session, target), **work.fields}
        for form in formats:
            work.formats = [form]
            if (refused := await settle(session, target, work)) is not None:
                raise ValueError(f"the server returned no {form}: {refused}")
        if not formats:
            await choose(session, target, work, log_line)
        else:
            work.formats = list(formats)
        if "pcm" in work.formats and not target.sample_rate_hz:
            await find_rate(session, target, work)


async def only_model(session: aiohttp.ClientSession, target: Target) -> str:
    """Return the server's model. Raises ValueError unless it has exactly one."""
    there = await models(session, target)
    if len(there) != 1:
        raise ValueError(
            f"choose a model with --model; {target.url}/models lists: {', '.join(there) or 'nothing'}"
        )
    return there[0]


async def choose(
    session: aiohttp.ClientSession, target: Target, work: Work, log_line: Callable[[str], None]
) -> None:
    """Choose the first format that the server offers. Raises ValueError if it offers none."""
    refusals: list[str] = []
    for form in FORMATS:
        work.formats = [form]
        if (refused := await settle(session, target, work)) is None:
            if refusals:
                log_line(
                    f"the server returned no {' or '.join(FORMATS[: len(refusals)])} ({refusals[0]}); "
                    f"measuring {form}"
                )
            return
        refusals.append(refused)
    raise ValueError(f"the server returned no audio: {refusals[0]}")


async def settle(session: aiohttp.ClientSession, target: Target, work: Work) -> str | None:
    """Try a request with a seed, then without. Returns None if one works, else the server's refusal. Raises
    ValueError for a failure that another body would not avoid."""
    refused = None
    for has_seeds in (True, False):
        work.has_seeds = has_seeds
        record = await ask(session, target, work)
        if record.failure is None:
            target.sample_rate_hz = target.sample_rate_hz or (
                record.sample_rate_hz if work.formats == ["pcm"] else 0
            )
            return None
        refused = refused or f"{record.failure} {record.detail}".strip()
        if record.failure not in REFUSALS:
            raise ValueError(f"the server returned no audio: {refused}")
    return refused


async def find_rate(session: aiohttp.ClientSession, target: Target, work: Work) -> None:
    """Learn the sample rate of pcm from a WAV of the same server. Raises ValueError."""
    formats = work.formats
    work.formats = ["wav"]
    record = await ask(session, target, work)
    work.formats = formats
    if not record.sample_rate_hz:
        raise ValueError(
            "the server does not report the sample rate of its pcm; give --sample-rate or --format wav"
        )
    target.sample_rate_hz = record.sample_rate_hz


async def ask(session: aiohttp.ClientSession, target: Target, work: Work) -> Record:
    """Make a request and return its record. Raises CancelledError if it is interrupted."""
    planned = work.request(0)
    planned.role = "listener"
    planned.leaves_after_s = None
    record = await speak(session, target, planned, 0, time.monotonic())
    if record.outcome == "interrupted":  # `speak` has caught Ctrl-C
        raise asyncio.CancelledError
    return record
