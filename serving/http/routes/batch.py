"""The route POST /v1/audio/speech/batch."""

from __future__ import annotations

import asyncio
import base64
from contextlib import suppress
from typing import Any

import msgspec
from litestar import post
from litestar.exceptions import HTTPException
from litestar.openapi.datastructures import ResponseSpec
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from serving.engine_client import Away
from serving.http.errors import AWAY_RETRY_S, LEFT, log_refused, outcome_of, refusal
from serving.http.requests import ForgetfulRequest, check, is_default, options_of, request_of
from serving.http.schemas import (
    BatchResult,
    BatchResults,
    SpeechBatch,
    Usage,
)
from serving.http.server import REFUSALS, TOO_LARGE, WRONG, Server
from serving.http.speech import Speech

RESPONSES = {
    200: ResponseSpec(BatchResults, description="a file or an error for each item"),
    400: WRONG,
    413: TOO_LARGE,
    **REFUSALS,
}
BATCH = "/v1/audio/speech/batch"


@post(BATCH, status_code=200, responses=RESPONSES, request_class=ForgetfulRequest)
async def speak_batch(data: SpeechBatch, request: ForgetfulRequest, server: Server) -> ASGIApp:
    """Speak several texts in one request. Each item has its own file or its own error."""
    _ = server.models  # raises Away
    body = await request.take_json()
    shared = {name: value for name, value in body.items() if name != "items"}
    items = [shared | {k: v for k, v in item.items() if not is_default(k, v)} for item in data.items]
    return Batch(server, items, request.state.get("request_id"))


class Batch:
    """An ASGI application for one batch. If the client disconnects, all items are cancelled."""

    def __init__(self, server: Server, items: list[dict[str, Any]], id: str | None):
        """id: the client's request ID for the batch."""
        self.server, self.items, self.id = server, items, id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def until_left() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        answers = asyncio.gather(*(self.result(i, item) for i, item in enumerate(self.items)))
        left = asyncio.create_task(until_left())
        try:
            await asyncio.wait((answers, left), return_when=asyncio.FIRST_COMPLETED)
        finally:  # a shutdown cancels this task
            left.cancel()
            if not (are_done := answers.done()):
                answers.cancel()
                with suppress(asyncio.CancelledError):
                    await answers  # else asyncio logs that nobody did
        if are_done:
            body = msgspec.json.encode(BatchResults(answers.result()))
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body, "more_body": False})

    async def result(self, index: int, item: dict[str, Any]) -> BatchResult:
        model_id = ""
        try:
            request = request_of(item)
            model, warnings = self.server.chosen_model(request)
            model_id = model.id
            options = options_of(item, model)
            check(request, model, self.server)
            return await spoken(index, Speech(self.server, request, options, model, None, warnings))
        except Away as error:
            away = refusal(503, str(error), code="engine_not_ready", retry_after_s=AWAY_RETRY_S)
            return self.failed(index, model_id, away)
        except HTTPException as error:
            return self.failed(index, model_id, error)

    def failed(self, index: int, model_id: str, error: HTTPException) -> BatchResult:
        outcome = outcome_of(error)
        self.server.metrics.ended(model_id, outcome)
        facts = {"id": self.id, "path": BATCH, "item": index, "model": model_id or None, "reason": outcome}
        return BatchResult(index=index, error=log_refused(error, **facts))


async def spoken(index: int, speech: Speech) -> BatchResult:
    """Speak one item into a file. Raises the refusal, Away."""
    file = bytearray()

    async def take(message: Message) -> None:
        if message["type"] == "http.response.body":
            file.extend(message["body"])

    try:
        await speech.answer(take)
    except asyncio.CancelledError:
        speech.ended("cancelled", LEFT)
        raise
    assert speech.finished is not None, "the answer neither finished nor failed"
    return BatchResult(
        index=index,
        audio=base64.b64encode(file).decode(),
        response_format=speech.request.response_format,
        sample_rate=speech.encoder.sample_rate_hz,
        seed=speech.fields.seed,
        finish_reason=speech.finished.reason,
        usage=Usage.of(speech.finished),
        warning="; ".join(speech.warnings) or None,
    )
