"""The answer to one speech request: audio as the engine makes it, in one of six formats, as a file that streams or as events."""

from __future__ import annotations

import asyncio
import base64
import os
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import structlog
from litestar.exceptions import HTTPException
from litestar.types import Receive, Scope, Send

from serving import protocol
from serving.engine_client import EngineClient
from serving.http import encode
from serving.http.errors import AWAY_RETRY_S, error_of, refusal
from serving.http.metrics import Metrics
from serving.http.references import References
from serving.http.schemas import OUR_NAME, AudioDelta, AudioDone, AudioError, Model, SpeechRequest, TextDelta, Usage

ENCODING = ThreadPoolExecutor(os.cpu_count(), "encode")  # of its own: a slow look-up of a reference's host must hold up no stream

log = structlog.get_logger()


class Speech:
    """An ASGI application for one request.

    Status and headers go out with the first audio or event, so whatever goes wrong before it is a proper error. What goes wrong after it
    is an `error` event, or else ends the body without its end: a client never takes a cut answer for a whole one. A client that leaves
    cancels at once, whether its reference is being read or it is queued or speaking. Raises the refusal of a rate that the format has not.
    """

    def __init__(self, link: EngineClient, references: References, metrics: Metrics, request: SpeechRequest, model: Model):
        self.link, self.references, self.metrics = link, references, metrics
        self.request, self.model = request, model
        self.id = f"req_{uuid.uuid4().hex}"
        self.seed_and_more = request.for_engine()
        self.is_sse = request.stream_format == "sse"
        try:
            self.encoder = encode.Encoder(request.response_format, model.sample_rate_hz, request.sample_rate)
        except ValueError as error:
            raise refusal(400, f"sample_rate: {error}", "sample_rate") from None
        self.began = time.perf_counter()
        self.ttfa_s: float | None = None
        self.num_bytes = 0  # of PCM, as the engine made it
        self.is_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = asyncio.create_task(self.answer(send))
        left = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait((answer, left), return_when=asyncio.FIRST_COMPLETED)
        finally:  # reached by a shutdown too
            left.cancel()
            if not answer.done():
                answer.cancel()
                self.ended("cancelled", 499)
        if answer.done():
            answer.result()

    async def answer(self, send: Send) -> None:
        fields, clip = await self.for_engine()
        whole = bytearray()  # of a request that does not stream
        with self.link.speak(self.id, self.model.id, fields, clip) as inbox:
            while True:
                match await inbox.get():
                    case protocol.Audio(pcm=pcm):
                        if self.ttfa_s is None:
                            self.ttfa_s = time.perf_counter() - self.began
                            self.metrics.began(self.model.id, self.ttfa_s)
                        self.num_bytes += len(pcm)
                        if self.request.stream:
                            await self.send_audio(send, await self.encode(self.encoder.feed, pcm))
                        else:
                            whole += pcm
                    case protocol.Text(text=text):
                        if self.is_sse:  # the other formats hold audio alone
                            await self.send_event(send, TextDelta(text))
                    case protocol.Finished() as finished:
                        if self.request.stream:
                            await self.send_audio(send, await self.encode(self.encoder.finish))
                            last = event(AudioDone(Usage.of(finished))) if self.is_sse else b""
                        else:
                            last = await asyncio.get_running_loop().run_in_executor(ENCODING, self.file, bytes(whole))
                            await self.start(send, num_bytes=len(last))
                        await body(send, last, more=False)
                        return self.ended(finished.reason, 200)
                    case protocol.Rejected(message=message, param=param, code=code, status=status, retry_after_s=retry_after_s):
                        name = OUR_NAME.get(param, param) if param is not None else None
                        raise refusal(status, message, name, code, retry_after_s=retry_after_s, request_id=self.id)
                    case protocol.Failed(message=message, status=status):
                        retry_after_s = AWAY_RETRY_S if status == 503 else None
                        failure = refusal(status, message, code="engine_failed", retry_after_s=retry_after_s, request_id=self.id)
                        if not self.is_started:
                            raise failure
                        return await self.break_off(send, failure)

    async def for_engine(self) -> tuple[dict[str, Any], protocol.AudioClip | None]:
        """The request as the engine takes it, and its reference audio."""
        fields = dict(self.seed_and_more)
        reference = await self.references.find(self.request, self.model)
        if reference is None:
            if self.request.voice_name is not None:
                fields["voice"] = self.request.voice_name
            return fields, None
        if reference.text is not None:
            fields["reference_text"] = reference.text
        return {**fields, "x_vector_only": reference.x_vector_only}, reference.clip

    async def encode(self, step: Callable[..., bytes], *args: bytes) -> bytes:
        """A codec's milliseconds are no time for the event loop to stand still."""
        if self.encoder.is_light:
            return step(*args)
        return await asyncio.get_running_loop().run_in_executor(ENCODING, step, *args)

    def file(self, pcm: bytes) -> bytes:
        return encode.file(self.request.response_format, pcm, self.model.sample_rate_hz, self.request.sample_rate)

    async def send_audio(self, send: Send, audio: bytes) -> None:
        """Encoders keep some audio back, so there may be nothing yet."""
        if not self.is_started:
            await self.start(send)
        if audio and self.is_sse:
            await self.send_event(send, AudioDelta(base64.b64encode(audio).decode()))
        elif audio:
            await body(send, audio, more=True)

    async def send_event(self, send: Send, message: msgspec.Struct) -> None:
        if not self.is_started:
            await self.start(send)
        await body(send, event(message), more=True)

    async def start(self, send: Send, num_bytes: int | None = None) -> None:
        self.is_started = True
        headers = {
            "content-type": "text/event-stream; charset=utf-8" if self.is_sse else encode.FORMATS[self.request.response_format].media_type,
            "cache-control": "no-store",
            "x-accel-buffering": "no",  # or a proxy may hold back what should be heard now
            "x-request-id": self.id,
            "x-sample-rate": str(self.encoder.sample_rate_hz),
            "x-seed": str(self.seed_and_more["seed"]),
        }
        if num_bytes is not None:
            headers["content-length"] = str(num_bytes)
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": encoded})

    async def break_off(self, send: Send, failure: HTTPException) -> None:
        """An error after audio. A body that is left open makes the server cut the connection."""
        self.ended("failed", 200, error=failure.detail)
        if self.is_sse:
            await body(send, event(AudioError(error_of(failure))), more=False)

    def ended(self, outcome: str, status: int, **more: Any) -> None:
        """The request's one line, and its place in the metrics."""
        took_s = time.perf_counter() - self.began
        audio_s = self.num_bytes / 2 / self.model.sample_rate_hz
        self.metrics.ended(self.model.id, outcome, took_s, audio_s)
        rtf = round(took_s / audio_s, 4) if audio_s else None
        ttfa_ms = round(1000 * self.ttfa_s, 1) if self.ttfa_s is not None else None
        facts = {"status": status, "reason": outcome, "ttfa_ms": ttfa_ms, "audio_s": round(audio_s, 3), "rtf": rtf, **more}
        log.info("speech", id=self.id, model=self.model.id, **facts)


def event(message: msgspec.Struct) -> bytes:
    """A server-sent event as OpenAI sends it: the type is a field of the data."""
    return b"data: " + msgspec.json.encode(message) + b"\n\n"


async def body(send: Send, chunk: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": chunk, "more_body": more})


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
