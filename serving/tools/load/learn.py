"""What a speech server offers, found out before anything is measured: its model, a format that streams, the rate of its
samples, and whether it takes seeds. Public routes are enough."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import aiohttp

from serving.tools.load.client import Target, connections, models, speak
from serving.tools.load.metrics import Record
from serving.tools.load.plan import Work
from serving.tools.load.samples import FORMATS

# what may be different with another format
REFUSALS = ("http_400", "http_404", "http_415", "http_422", "unreadable", "no_audio")


def address(url: str) -> str:
    """What a user gives -> where the API begins. Raises ValueError."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is no address of a server; http://HOST:PORT is")
    base = url.rstrip("/").removesuffix("/audio/speech")
    return base if base.endswith("/v1") else f"{base}/v1"


async def learn(
    target: Target, work: Work, model: str | None, formats: Sequence[str], log_line: Callable[[str], None]
) -> None:
    """Completes target and work. formats: each of them; none: the first that there is. Raises ValueError."""
    async with connections(target) as session:
        if "model" not in work.fields:
            work.fields = {"model": model or await only_model(session, target), **work.fields}
        for form in formats:
            work.formats = [form]
            if (refused := await settle(session, target, work)) is not None:
                raise ValueError(f"the server gave no {form}: {refused}")
        if not formats:
            await choose(session, target, work, log_line)
        else:
            work.formats = list(formats)
        if "pcm" in work.formats and not target.sample_rate_hz:
            await find_rate(session, target, work)


async def only_model(session: aiohttp.ClientSession, target: Target) -> str:
    """Raises ValueError."""
    there = await models(session, target)
    if len(there) != 1:
        raise ValueError(
            f"--model must say which; {target.url}/models lists: {', '.join(there) or 'nothing'}"
        )
    return there[0]


async def choose(
    session: aiohttp.ClientSession, target: Target, work: Work, log_line: Callable[[str], None]
) -> None:
    """The first format that the server speaks. Raises ValueError."""
    refusals: list[str] = []
    for form in FORMATS:
        work.formats = [form]
        if (refused := await settle(session, target, work)) is None:
            if refusals:
                log_line(
                    f"the server gave no {', no '.join(FORMATS[: len(refusals)])} ({refusals[0]}); measured in {form}"
                )
            return
        refusals.append(refused)
    raise ValueError(f"the server gave no audio: {refusals[0]}")


async def settle(session: aiohttp.ClientSession, target: Target, work: Work) -> str | None:
    """-> why the server takes neither of our bodies, if so: with a seed, or without. Raises ValueError for what another body
    would not mend."""
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
            raise ValueError(f"the server gave no audio: {refused}")
    return refused


async def find_rate(session: aiohttp.ClientSession, target: Target, work: Work) -> None:
    """Of pcm that says nothing of it: a WAV of the same server does. Raises ValueError."""
    formats, work.formats = work.formats, ["wav"]
    record = await ask(session, target, work)
    work.formats = formats
    if not record.sample_rate_hz:
        raise ValueError(
            "the server does not say at which rate its pcm is: give --sample-rate, or --format wav"
        )
    target.sample_rate_hz = record.sample_rate_hz


async def ask(session: aiohttp.ClientSession, target: Target, work: Work) -> Record:
    planned = work.request(0)
    planned.role, planned.leaves_after_s = "listener", None
    return await speak(session, target, planned, 0, time.monotonic())
