"""All works of a server: it adds, removes and describes them, and speaks one after the other."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import structlog
from litestar.exceptions import HTTPException

from serving.books.manuscript import manuscript_at
from serving.http.errors import cut, error_of, refusal
from serving.http.keys import current
from serving.http.metrics import STATES
from serving.http.objects import Error
from serving.http.quota import Quota
from serving.http.references import LoadedVoice
from serving.http.server import Server
from serving.http.works import process
from serving.http.works.maker import PART_CHARS, Maker, Request, UsedUp, request_for, to_its_end
from serving.http.works.schemas import WORKS, State, WorkObject
from serving.http.works.store import ChapterFacts, Facts, Store, Taken, Work
from serving.settings import WorksSettings

ENDINGS = (".epub", ".md", ".markdown", ".txt")
MAX_READING = 4  # documents that are read at once; further ones get 503
MAX_NAME_CHARS = 60
OPEN_AGAIN_S = 5.0  # between tries to open the directory
QUOTA_RETRY_S = 60.0  # between tries of a work whose key has used its quota of the day
# Fields of a speech request that mean nothing for a work.
NOT_OF_WORKS = (
    *("input", "response_format", "sample_rate", "bit_rate", "stream", "stream_format", "service_tier"),
    *("timestamp_granularities", "conversation", "text_format"),
)

log = structlog.get_logger()


class Works:
    """The works of a server. Without a directory it has none. now_s: the time of new works."""

    def __init__(self, server: Server, settings: WorksSettings, now_s: Callable[[], float] = time.time):
        self.server, self.settings, self.now_s = server, settings, now_s
        self.store = None if settings.directory is None else Store(Path(settings.directory))
        self.problem: str | None = "the works are being read from the disk"
        self.all: dict[str, Work] = {}  # the oldest first
        self.num_new = 0  # works that are being added
        self.reading = Quota(MAX_READING, "documents are being read")
        self._news = asyncio.Event()
        self._making: tuple[Work, asyncio.Task[None]] | None = None
        for state in STATES:
            server.metrics.works.labels(state).set_function(partial(self.num_in, state))
        server.metrics.works_bytes.set_function(lambda: self.num_bytes)

    # The background.

    async def run(self) -> None:
        """Speak all works that are not complete, and those that come, until cancelled."""
        if self.store is None:
            return
        found = await self._opened(self.store)
        self.all = {work.facts.id: work for work in found}
        self.problem = None
        try:
            while True:
                self._news.clear()
                waiting = [work for work in self.all.values() if work.state == "waiting"]
                work = next((work for work in waiting if work.not_before_s <= time.monotonic()), None)
                if work is not None:
                    await self._make(work)
                    continue
                with suppress(TimeoutError):
                    async with asyncio.timeout(QUOTA_RETRY_S if waiting else None):
                        await self._news.wait()
        finally:
            self.store.close()

    async def _opened(self, store: Store) -> list[Work]:
        """Open the directory, and return its works. Try again while another server uses it, or the disk refuses."""
        while True:
            try:
                return await asyncio.to_thread(store.open)
            except Taken as error:
                problem = f"works cannot be kept: {error}"
            except OSError as error:  # its text may name another temporary file each time
                problem = f"works cannot be kept in {store.directory}: {error.strerror}"
            if problem != self.problem:
                log.error("works", problem=problem)
            self.problem = problem
            await asyncio.sleep(OPEN_AGAIN_S)

    async def _make(self, work: Work) -> None:
        task = asyncio.create_task(self._try(work))
        self._making = (work, task)
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            await asyncio.wait([task])
            self._making = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("unexpected", work=work.facts.id, exc_info=error)
            work.error = Error("internal server error; see the server's log", "server_error", None, None)

    async def _try(self, work: Work) -> None:
        """Make a work, or keep the error."""
        log.info("work", id=work.facts.id, state="speaking")
        try:
            await Maker(self.server, work, self._has_room).make()
        except HTTPException as error:
            work.error = error_of(error)
        except UsedUp:  # works of other keys go on
            work.not_before_s = time.monotonic() + QUOTA_RETRY_S
        except OSError as error:
            if error.errno is None:
                what, code = "this server cannot join the work's speech", "join_failed"
            else:
                what, code = "this server cannot read or write the work's files", "disk"
            work.error = Error(f"{what}: {error.strerror or error}", "server_error", None, code)
            log.error(code, work=work.facts.id, error=str(error))
        finally:
            work.doing = "waiting"
        log.info("work", id=work.facts.id, state=work.state, error=work.error and work.error.message)

    @property
    def num_bytes(self) -> int:
        return sum(work.num_bytes for work in self.all.values())

    def num_in(self, state: State) -> int:
        return sum(work.state == state for work in self.all.values())

    def _has_room(self, num_bytes: int) -> bool:
        return self.num_bytes + num_bytes <= self.settings.disk_bytes

    # For the routes.

    @property
    def accepts(self) -> list[str]:
        """The endings of documents that can become works."""
        if self.store is None:
            return []
        return [ending for ending in ENDINGS if ending != ".epub" or find_spec("bs4") is not None]

    def check_is_on(self) -> Store:
        """Raises the refusal if this server keeps no works."""
        if self.store is None:
            message = "this server keeps no works; its operator chooses a directory with --works-dir"
            raise refusal(404, message, code="works_off")
        if self.problem is not None:
            raise refusal(503, self.problem, code="works_unavailable", retry_after_s=1)
        return self.store

    def of_client(self) -> list[Work]:
        """Return the works of the current API key."""
        return [work for work in self.all.values() if work.facts.key == key_name()]

    def find(self, id: str) -> Work:
        """Raises the refusal."""
        self.check_is_on()
        work = self.all.get(id)
        if work is None or work.facts.key != key_name():
            raise refusal(404, f"there is no work {cut(id)!r}; GET {WORKS} lists them", code="work_not_found")
        return work

    def checked(self, fields: dict[str, Any]) -> Request:
        """Return a request with the fields of a new work. Raises Away, the refusal."""
        if named := [name for name in NOT_OF_WORKS if name in fields]:
            raise refusal(400, f"options: {named[0]} has no meaning for a work; leave it out", "options")
        asked = request_for(self.server, fields, "")
        is_random = asked.voice.name is None and not asked.speech.given_references
        if asked.model.keeps_voice and is_random:
            message = (
                f"model {asked.model.id!r} draws another voice for each part; choose an uploaded voice, or give "
                "ref_audio in options"
            )
            raise refusal(400, message, "voice", "missing_field")
        return asked

    async def voice(self, asked: Request) -> LoadedVoice:
        """Read the recordings of a new work, so that wrong ones are refused at once. Raises the refusal."""
        return await self.server.references.find(asked.voice, asked.speech, asked.model)

    async def add(self, name: str, document: bytes, fields: dict[str, Any], asked: Request) -> WorkObject:
        """Add a work. The caller holds a unit of `reading`. Raises the refusal, OSError."""
        store = self.check_is_on()
        name = clean_name(name)
        if PurePosixPath(name).suffix.lower() not in ENDINGS:
            message = f"document {cut(name)!r} cannot be read; its name must end in {', '.join(ENDINGS)}"
            raise refusal(400, message, "document", "invalid_document")
        if len(self.all) + self.num_new >= self.settings.num:
            message = f"the limit of works ({self.settings.num}) is reached; delete one first"
            raise refusal(400, message, code="too_many_works")
        if not self._has_room(len(document)):
            raise refusal(
                507, "the works on this server have reached their limit; delete one", code="no_room"
            )
        self.num_new += 1
        try:
            work = await self._added(store, name, document, fields, asked)
        finally:
            self.num_new -= 1
        self.all[work.facts.id] = work
        self._news.set()
        return work.described(has_chapters=True)

    async def _added(
        self, store: Store, name: str, document: bytes, fields: dict[str, Any], asked: Request
    ) -> Work:
        new = await to_its_end(asyncio.to_thread(store.new))
        id = f"work_{secrets.token_hex(12)}"
        work = None
        try:
            upload = new / name
            await to_its_end(asyncio.to_thread(upload.write_bytes, document))
            try:
                await process.read(upload, new, min(PART_CHARS, self.server.limits.text_chars))
            except ValueError as error:
                raise refusal(400, str(error), "document", "invalid_document") from None
            upload.unlink()
            facts = await to_its_end(asyncio.to_thread(self._facts, id, new, name, fields, asked))
            work = await to_its_end(asyncio.to_thread(store.add, new, facts, fields))
        finally:
            if work is None:  # refused, or the client has left
                await to_its_end(asyncio.to_thread(store.drop, new, id))
        return work

    def _facts(self, id: str, new: Path, name: str, fields: dict[str, Any], asked: Request) -> Facts:
        texts = manuscript_at(new)
        chapters = [ChapterFacts(each.title, tuple(map(len, each.parts))) for each in texts.chapters]
        return Facts(
            id=id,
            title=texts.title,
            author=texts.author,
            document=name,
            model=asked.model.id,
            voice=asked.voice.label,
            seed=fields["seed"],
            key=key_name(),
            created_at=int(self.now_s()),
            chapters=chapters,
        )

    async def remove(self, work: Work) -> None:
        """Remove a work, at any time. Raises OSError."""
        assert self.store is not None, "a work without a directory"
        self.all.pop(work.facts.id, None)
        if self._making is not None and self._making[0] is work:
            _, task = self._making
            task.cancel()
            await asyncio.wait([task])
        await to_its_end(asyncio.to_thread(self.store.remove, work))

    def resume(self, work: Work) -> None:
        """Try a failed work again."""
        work.error = None
        self._news.set()


def key_name() -> str | None:
    key = current.get()
    return None if key is None else key.name


def clean_name(name: str) -> str:
    """Return the name of an uploaded file without directories and control characters, and not too long."""
    last = "".join(letter for letter in PurePosixPath(name.replace("\\", "/")).name if letter.isprintable())
    path = PurePosixPath(last.lstrip(".") or "document")
    return path.stem[:MAX_NAME_CHARS] + path.suffix[:MAX_NAME_CHARS]


def options_in(text: str | None) -> dict[str, Any]:
    """Return the fields in the form's field `options`. Null fields are defaults. Raises the refusal."""
    try:
        fields = msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise refusal(400, f"options must be a JSON object: {error}", "options") from None
    return {name: value for name, value in fields.items() if value is not None}
