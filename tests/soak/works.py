"""Long works in a soak: uploaded, read, sought in, and deleted in the middle of everything."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import httpx

from tests.soak import answers
from tests.soak.answers import NO_STATUS, Refused, Wrong, check_status
from tests.soak.cases import Case

WORKS = "/v1/audio/works"
DOCUMENT = b"# The sea\n\nThe old man told a story.\n\n# The door\n\nShe opened it.\n"
FRAMES = 12  # of each part
FIRST_S = 120.0  # for the first book
LOOK_S = 0.5
MAX_OPEN = 2  # works at once: each takes four processes of a second
DELETED_WITHIN_S = 3.0


@dataclass(frozen=True)
class Volume:
    """A document and how it is spoken. first: the book that the server made at first."""

    form: dict[str, str]
    first: bytes = b""


def volume_of(cases: Sequence[Case]) -> Volume:
    """Return a work in a voice of the first model whose equal requests give equal bytes."""
    case = next(case for case in cases if case.is_exact and isinstance(case.body.get("voice"), str))
    options = {"seed": 7, "max_new_tokens": FRAMES}
    form = {"model": case.body["model"], "voice": case.body["voice"], "options": json.dumps(options)}
    return Volume(form)


def record_work(client: httpx.Client, volume: Volume) -> Volume:
    """Return the volume with its first book."""
    answer = client.post(WORKS, data=volume.form, files={"document": ("book.md", DOCUMENT)})
    assert answer.status_code == 200, answer.text
    path, end_s = f"{WORKS}/{answer.json()['id']}", time.monotonic() + FIRST_S
    while (work := client.get(path).json())["state"] != "complete":
        assert work["state"] != "failed" and time.monotonic() < end_s, work
        time.sleep(LOOK_S)
    book = client.get(f"{path}/book.m4b").content
    client.delete(path)
    return replace(volume, first=book)


class Library:
    """The works of a soak's clients."""

    def __init__(self, session: aiohttp.ClientSession, url: str, volume: Volume):
        self.session, self.url, self.volume = session, url, volume
        self.num_open = 0

    async def work(self, chance: random.Random) -> str:
        """Let a work be spoken, read it and delete it. Returns how that ended."""
        if self.num_open >= MAX_OPEN:
            return "left out"
        self.num_open += 1
        try:
            path = await self.added()
            try:
                await self.complete(path)
                await self.check_book(path, chance)
            finally:
                await self.called("DELETE", path)
        finally:
            self.num_open -= 1
        return "whole"

    async def deleted(self, chance: random.Random) -> str:
        """Delete a work in the middle of its speech, or while it waits."""
        if self.num_open >= MAX_OPEN:
            return "left out"
        self.num_open += 1
        try:
            path = await self.added()
            await asyncio.sleep(DELETED_WITHIN_S * chance.random())
            await self.called("DELETE", path)
            with suppress(Refused):
                await self.called("GET", path)
                raise Wrong("a deleted work is there")
        finally:
            self.num_open -= 1
        return "deleted"

    async def abandoned(self, after_s: float) -> str:
        """Disconnect while the document is read. A work that was added already is deleted at the part's end."""
        try:
            async with asyncio.timeout(after_s):
                path = await self.added()
        except TimeoutError:
            return "disconnected"
        await self.called("DELETE", path)
        return "deleted"

    async def added(self) -> str:
        """Upload the document, and return the work's path. Raises Refused, Wrong."""
        form = aiohttp.FormData(self.volume.form)
        form.add_field("document", DOCUMENT, filename="book.md")
        async with self.session.post(self.url + WORKS, data=form) as answer:
            data = await answer.read()
            check_status(answer.status, data, answer.headers.get("retry-after"))
            return f"{WORKS}/{json.loads(data)['id']}"

    async def complete(self, path: str) -> None:
        """Wait until a work is complete. Raises Refused for one that failed."""
        while (work := await self.seen(path))["state"] != "complete":
            if work["state"] == "failed":
                raise answers.refusal(NO_STATUS, work["error"])
            await asyncio.sleep(LOOK_S)

    async def seen(self, path: str) -> dict[str, Any]:
        return json.loads(await self.called("GET", path))

    async def check_book(self, path: str, chance: random.Random) -> None:
        """Read the book whole and in a part. Raises Wrong if it is not the first one again."""
        first = self.volume.first
        begin, end = sorted(chance.sample(range(len(first)), 2))
        part = await self.called("GET", f"{path}/book.m4b", {"range": f"bytes={begin}-{end}"})
        book = await self.called("GET", f"{path}/book.m4b")
        if book != first:
            raise Wrong(f"a book of {len(book)} bytes differs from the first, of {len(first)} bytes")
        if part != first[begin : end + 1]:
            raise Wrong(f"{len(part)} bytes of a book are not those from {begin} to {end}")

    async def called(self, method: str, path: str, headers: dict[str, str] | None = None) -> bytes:
        async with self.session.request(method, self.url + path, headers=headers) as answer:
            data = await answer.read()
            check_status(answer.status, data, answer.headers.get("retry-after"))
            return data

    async def delete_all(self) -> None:
        """Delete the works that interrupted clients have left."""
        for work in json.loads(await self.called("GET", WORKS))["data"]:
            await self.called("DELETE", f"{WORKS}/{work['id']}")
