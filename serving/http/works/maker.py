"""Speak a work: its parts in order, a few at a time, as requests that no listener waits for. A chapter is joined
as soon as its parts are there, and the book at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec
from litestar.exceptions import HTTPException

from serving.books.manuscript import Manuscript, chapter_file, manuscript_at, part_file
from serving.engine_client import Away
from serving.http.errors import error_of, outcome_of, refusal
from serving.http.keys import admit, current
from serving.http.objects import Model
from serving.http.requests import check, drop_foreign, options_of, request_of
from serving.http.schemas import SpeechRequest
from serving.http.server import Server
from serving.http.voice_choice import VoiceChoice
from serving.http.whole_file import WholeFile
from serving.http.works import process
from serving.http.works.store import Work, fields_at

PART_CHARS = 800  # about 50 s of speech: little is lost, and little memory is taken
AT_ONCE = 4  # parts
RETRY_S, MAX_RETRY_S = 1.0, 60.0  # while the server is busy, or a key's rate is used up
# If the engine stops this many times on one part, or the model cannot be loaded, the work fails and names the part.
MAX_STOPS = 2
# Fields of a speech request that a work decides itself.
DECIDED: dict[str, Any] = {
    "stream": False,  # so that equal requests give equal bytes
    "stream_format": "audio",
    "response_format": "flac",
    "service_tier": "flex",
}

STOPS = ("engine_stopped", "model_not_loaded")
HOPELESS = "model_too_large"

T = TypeVar("T")


class UsedUp(Exception):
    """The work's API key has used its quota of today."""


class Part(NamedTuple):
    chapter: int  # from 1
    number: int  # within the chapter, from 1
    text: str


class Request(NamedTuple):
    """A request of a work, after all checks that need no engine."""

    speech: SpeechRequest
    options: dict[str, Any]
    model: Model
    voice: VoiceChoice
    warnings: list[str]


def request_for(server: Server, fields: dict[str, Any], text: str) -> Request:
    """Return the request for a part. fields: of a speech request, without the text. Raises Away, the refusal."""
    fields = dict(fields)
    speech = request_of(fields | {"input": text}, DECIDED)
    model, warnings = server.chosen_model(speech)
    warnings += drop_foreign(fields, model, server)
    options = options_of(fields, model)
    check(speech, model, server)
    voice = server.chosen_voice(speech, model)
    return Request(speech, options, model, voice, warnings)


class Maker:
    """Speaks one work. has_room: returns whether the files of all works may grow by a number of bytes."""

    def __init__(self, server: Server, work: Work, has_room: Callable[[int], bool]):
        self.server, self.work, self.has_room = server, work, has_room
        self.fields: dict[str, Any] = {}
        self.joining: set[int] = set()  # chapters
        self.is_used_up = False
        self.saving = asyncio.Lock()

    async def make(self) -> None:
        """Speak and join what is missing. Raises the refusal, UsedUp, OSError."""
        work = self.work
        if work.facts.key is not None:
            current.set(self.server.keys.named(work.facts.key))
        if current.get() is None and self.server.keys:
            message = "the API key that this work belongs to is not one of this server's"
            raise refusal(401, message, code="invalid_api_key")
        self.fields = await asyncio.to_thread(fields_at, work.directory)
        texts = await asyncio.to_thread(manuscript_at, work.directory)
        work.doing = "speaking"
        missing = self._missing(texts)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(self._speak_all(missing))
        except ExceptionGroup as errors:
            _, unexpected = errors.split((HTTPException, OSError))
            raise (unexpected or errors).exceptions[0] from None
        if self.is_used_up:
            raise UsedUp
        for number in range(1, len(work.facts.chapters) + 1):  # those that an end of the server left behind
            await self._join_chapter(number)
        await self._join_book()

    def _missing(self, texts: Manuscript) -> Iterator[Part]:
        for chapter, each in enumerate(texts.chapters, 1):
            for number, text in enumerate(each.parts, 1):
                if (chapter, number) not in self.work.spoken:
                    yield Part(chapter, number, text)

    async def _speak_all(self, missing: Iterator[Part]) -> None:
        while not self.is_used_up and (part := next(missing, None)) is not None:
            try:
                file = await self._spoken(part)
            except UsedUp:  # parts that are being spoken are finished
                self.is_used_up = True
                return
            if not self.has_room(len(file)):
                raise refusal(
                    507, "the works on this server have reached their limit; delete one", code="no_room"
                )
            name = part_file(part.chapter, part.number)
            await to_its_end(asyncio.to_thread(self.work.write, name, file))
            self.work.num_bytes += len(file)
            self.work.mark_spoken(part.chapter, part.number)
            await self._join_chapter(part.chapter)

    async def _spoken(self, part: Part) -> bytes:
        """Return the file of a part. While the server is busy, wait and try again. Raises the refusal, UsedUp."""
        num_stops = 0
        while True:
            wait_s = RETRY_S
            try:
                asked = request_for(self.server, self.fields, part.text)
                admit(len(part.text))
                file = WholeFile(self.server, asked.speech, asked.options, asked.model, asked.voice)
                return await file.spoken()
            except Away:
                pass  # the engine is being started
            except HTTPException as error:
                code = error_of(error).code
                if code == "insufficient_quota":
                    raise UsedUp from None
                num_stops += code in STOPS
                if error.status_code not in (429, 503) or code == HOPELESS or num_stops == MAX_STOPS:
                    raise self._failed(part, error) from None
                wait_s = float((error.headers or {}).get("retry-after", RETRY_S))
            await asyncio.sleep(min(wait_s, MAX_RETRY_S))

    def _failed(self, part: Part, error: HTTPException) -> HTTPException:
        """Count a part that failed, and return its error with the place in the book."""
        model = str(self.fields.get("model", ""))
        self.server.metrics.ended(model, outcome_of(error))
        title = self.work.facts.chapters[part.chapter - 1].title
        found = error_of(error)
        message = f"chapter {part.chapter} ({title!r}), part {part.number}: {found.message}"
        return refusal(error.status_code, message, found.param, found.code)

    async def _join_chapter(self, number: int) -> None:
        """Join a chapter if all of its parts are there."""
        work, chapter = self.work, self.work.facts.chapters[number - 1]
        parts = range(1, len(chapter.num_chars) + 1)
        if number in self.joining or chapter.audio_s is not None:
            return
        if all((number, part) in work.spoken for part in parts):
            self.joining.add(number)
            chapter.audio_s = await process.join(work.directory, number)
            work.num_bytes += (work.directory / chapter_file(number)).stat().st_size
            async with self.saving:
                await to_its_end(asyncio.to_thread(work.save, work.facts))

    async def _join_book(self) -> None:
        work = self.work
        work.doing = "joining"
        facts = msgspec.structs.replace(work.facts, audio_s=await process.join(work.directory))
        await to_its_end(asyncio.to_thread(work.save, facts))
        await to_its_end(asyncio.to_thread(work.drop_parts))
        await asyncio.to_thread(work.look)
        work.facts = facts


async def to_its_end(writing: Awaitable[T]) -> T:
    """Return the result of work in a thread. If this task is cancelled, wait for the thread first."""
    task = asyncio.ensure_future(writing)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
