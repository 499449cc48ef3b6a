"""The route POST /v1/audio/speech/batch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
from litestar import post
from litestar.exceptions import HTTPException
from litestar.openapi.datastructures import ResponseSpec
from litestar.types import ASGIApp, Receive, Scope, Send

from serving.engine_client import Away
from serving.http.disconnect import run_while_connected
from serving.http.errors import AWAY_RETRY_S, error_of, log_refused, new_id, outcome_of, refusal
from serving.http.foreign_fields import translated
from serving.http.keys import admit
from serving.http.objects import BatchResult, BatchResults, Model, Usage
from serving.http.quota import RETRY_S
from serving.http.references import LoadedVoice
from serving.http.requests import ForgetfulRequest, check, drop_foreign, is_default, options_of, request_of
from serving.http.schemas import SpeechBatch, SpeechRequest
from serving.http.server import REFUSALS, TOO_LARGE, WRONG, Server
from serving.http.socket import ended
from serving.http.voice_choice import VoiceChoice
from serving.http.whole_file import WholeFile
from serving.protocol import Speak

RESPONSES = {
    200: ResponseSpec(BatchResults, description="a file or an error for each item"),
    400: WRONG,
    413: TOO_LARGE,
    **REFUSALS,
}
BATCH = "/v1/audio/speech/batch"
START, END = b'{"data":[', b'],"object":"audio.speech.batch"}'  # BatchResults as JSON, around its items
BUSY = ("engine_full", "server_busy")  # codes of refusals that pass
PATIENCE_S = 60.0  # how long an item waits for a busy server after the last item was spoken

T = TypeVar("T")


@post(BATCH, status_code=200, responses=RESPONSES, request_class=ForgetfulRequest)
async def speak_batch(data: SpeechBatch, request: ForgetfulRequest, server: Server) -> ASGIApp:
    """Speak several texts in one request. Each item has its own file or its own error."""
    _ = server.models  # raises Away
    body = await request.take_json()
    shared = {name: value for name, value in body.items() if name != "items"}
    items = [shared | {k: v for k, v in item.items() if not is_default(k, v)} for item in data.items]
    return Batch(server, items, request.state.get("request_id") or new_id())


class Batch:
    """An ASGI application for one batch. If the client disconnects, all items are cancelled."""

    def __init__(self, server: Server, items: list[dict[str, Any]], id: str):
        """id: the request ID of the batch."""
        self.server, self.items, self.id = server, items, id
        self.memory = server.memory.take(0)  # of the results that are ready
        self.last_end_s = time.monotonic()  # when the last item was spoken
        self.findings: dict[Hashable, asyncio.Task[LoadedVoice]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.memory:
            results = await run_while_connected(self.results(), receive)
            parts = [START, *between(results, b","), END]
            size = sum(map(len, parts))
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % size)]
            headers.append((b"x-request-id", self.id.encode()))
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for part in parts:
                more = part is not parts[-1]
                await send({"type": "http.response.body", "body": part, "more_body": more})

    async def results(self) -> list[bytes]:
        """Speak all items, and return the JSON of their results."""
        prepared = [self.prepared(index, item) for index, item in enumerate(self.items)]
        self.items.clear()
        findings = list(self.findings.values())
        self.findings.clear()  # its keys hold the recordings as the client sent them
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.result(item)) for item in prepared]
            return [task.result() for task in tasks]
        finally:
            await ended(*findings)

    def prepared(self, index: int, fields: dict[str, Any]) -> Prepared | bytes:
        """Return an item that has passed its checks, or the JSON of its error."""
        model_id = ""
        try:
            fields = translated(fields, is_strict=self.server.names.is_strict)
            request = request_of(fields)
            model, warnings = self.server.chosen_model(request)
            model_id = model.id
            warnings += drop_foreign(fields, model, self.server)
            options = options_of(fields, model)
            check(request, model, self.server)
            voice = self.server.chosen_voice(request, model)
            if request.service_tier == "auto":
                request.service_tier = "flex"  # a batch has no listeners
            checked = WholeFile(self.server, request, options, model, voice)  # refuses a wrong rate
            admit(checked.num_chars)
            finding = self.finding(voice, request, model)
            make = partial(Item, self.server, request, options, model, voice, warnings, finding)
            return Prepared(index, model.id, make)
        except (HTTPException, Away) as error:
            return self.failed(index, model_id, error)

    def finding(self, voice: VoiceChoice, request: SpeechRequest, model: Model) -> asyncio.Task[LoadedVoice]:
        """Return the task that finds the voice of a request, and of all that have the same one."""
        key = (model.id, voice, tuple(request.given_references))
        if key not in self.findings:
            find = partial(self.server.references.find, voice, request, model)
            self.findings[key] = asyncio.create_task(self.when_there_is_room(find))
        return self.findings[key]

    async def result(self, item: Prepared | bytes) -> bytes:
        """Return the JSON of an item's result."""
        if isinstance(item, bytes):
            return item
        try:
            result = msgspec.json.encode(await self.when_there_is_room(item.result))
            self.memory.resize(self.memory.num + len(result))
            self.last_end_s = time.monotonic()
            return result
        except (HTTPException, Away) as error:
            return self.failed(item.index, item.model_id, error)

    def failed(self, index: int, model_id: str, error: HTTPException | Away) -> bytes:
        """Log and count an item that failed, and return the JSON of its result."""
        if isinstance(error, Away):
            error = refusal(503, str(error), code="engine_not_ready", retry_after_s=AWAY_RETRY_S)
        outcome = outcome_of(error)
        self.server.metrics.ended(model_id, outcome)
        facts = {"id": self.id, "path": BATCH, "item": index, "model": model_id or None, "reason": outcome}
        return msgspec.json.encode(BatchResult(index=index, error=log_refused(error, **facts)))

    async def when_there_is_room(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of `work`. While the server is too busy for it, wait and try again, for as long
        as other items are spoken. Raises its errors."""
        while True:
            try:
                return await work()
            except HTTPException as error:
                if error_of(error).code not in BUSY or time.monotonic() > self.last_end_s + PATIENCE_S:
                    raise
            await asyncio.sleep(RETRY_S)


@dataclass(frozen=True)
class Prepared:
    """An item that has passed its checks. make: returns it anew, because an answer can be made only once."""

    index: int
    model_id: str
    make: Callable[[], Item]

    async def result(self) -> BatchResult:
        """Speak the item. Raises the refusal, Away."""
        item = self.make()
        return item.result(self.index, await item.spoken())


class Item(WholeFile):
    """One try to speak an item of a batch. finding: finds its voice."""

    def __init__(
        self,
        server: Server,
        request: SpeechRequest,
        options: dict[str, Any],
        model: Model,
        voice: VoiceChoice,
        warnings: Sequence[str],
        finding: asyncio.Task[LoadedVoice],
    ):
        super().__init__(server, request, options, model, voice, None, warnings)
        self.finding = finding

    async def message(self) -> Speak:
        voice = await self.finding
        self.request.forget_audio()
        return self.speak_message(voice)

    def result(self, index: int, file: bytes) -> BatchResult:
        assert self.finished is not None, "the answer neither finished nor failed"
        return BatchResult(
            index=index,
            audio=file,
            response_format=self.request.response_format,
            sample_rate=self.encoder.sample_rate_hz,
            seed=self.fields.seed,
            finish_reason=self.finished.reason,
            usage=Usage.of(self.finished),
            warning="; ".join(self.warnings) or None,
        )


def between(parts: list[bytes], separator: bytes) -> list[bytes]:
    """Return the parts with a separator between each two."""
    return [piece for part in parts for piece in (separator, part)][1:]
