"""The answer to one speech request: audio in one of ten formats, sent while the engine generates it, as a
file or as server-sent events."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec
import structlog
from litestar.exceptions import HTTPException
from litestar.types import Receive, Scope, Send

from serving import protocol
from serving.aligner.client import AlignerFailed
from serving.audio import encode
from serving.audio.playback import Playback
from serving.engine_client import Away, Inbox
from serving.http.bodies import read_beside
from serving.http.disconnect import until_left
from serving.http.errors import AWAY_RETRY_S, LEFT, error_of, new_id, outcome_of, refusal, wrong
from serving.http.keys import current
from serving.http.objects import (
    AudioDelta,
    AudioDone,
    AudioError,
    AudioSegment,
    Model,
    ModelLoading,
    TextDelta,
    Usage,
)
from serving.http.references import LoadedVoice
from serving.http.schemas import SpeechRequest
from serving.http.sentences import said_s
from serving.http.server import Server
from serving.http.voice_choice import VoiceChoice
from serving.http.word_times import AudioWords, WordTimes
from zoo.request import SOUND_ONLY
from zoo.text.markdown import spoken

# A separate pool: a slow DNS lookup for a reference must not delay streams.
ENCODING = ThreadPoolExecutor(os.cpu_count(), "encode")
FLEX_RETRY_S = 60.0  # after a flexible request has waited in vain

log = structlog.get_logger()


class Speech:
    """An ASGI application for one request.

    Status and headers go out with the first audio or event, so an error before that is a normal HTTP error.
    A later error becomes an `error` event, or cuts off the body, so that a client never takes a partial
    answer for a complete one. A client that disconnects cancels its request immediately, at any stage:
    while its reference is read, in the queue, or speaking. Raises the refusal for a rate that the format
    does not support.
    """

    def __init__(
        self,
        server: Server,
        request: SpeechRequest,
        options: dict[str, Any],
        model: Model,
        voice: VoiceChoice,
        given_id: str | None = None,
        warnings: Sequence[str] = (),
    ):
        self.server, self.request, self.options, self.model = server, request, options, model
        self.voice = voice
        self.key = current.get()
        self.num_chars = len(request.input)  # that count for the key
        self.id = new_id()  # for the engine, because clients may repeat their own IDs
        self.given_id = given_id
        self.warnings = (*warnings, *voice.warnings)
        self.fields = request.for_engine()
        self.fields.conversation = server.name_of_conversation(request.conversation)
        self.fields.sentence_gap_s = server.sentence_gap(request, model)
        self.lexicon = server.lexicon(request, model, voice)
        self.is_sse = request.stream_format == "sse"
        try:
            self.encoder = encode.Encoder(request.response_format, model.sample_rate_hz, *request.encoding)
        except ValueError as error:
            raise refusal(wrong("sample_rate"), f"sample_rate: {error}", "sample_rate") from None
        self.began = time.perf_counter()
        self.ttfa_s: float | None = None
        self.playback = Playback(model.sample_rate_hz)
        self.held_s = 0.0  # time that sending waited because the client did not read
        self.num_bytes = 0  # of PCM from the engine
        self.num_frames = 0
        self.outcome: str | None = None
        self.pcm = bytearray()  # all audio of a request that does not stream
        self.finished: protocol.Finished | None = None
        self.replicas: list[str] = []  # behind a gateway: those that it offered the request to
        self.is_judged = True  # whether its gaps count: they are ours, not waits for the client's text
        self.words = self.word_times()
        self.is_started = False
        self.has_left = False
        self.is_ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = asyncio.create_task(self.answer(send))
        left = asyncio.create_task(self.until_left(receive))
        try:
            await asyncio.wait((answer, left), return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
        finally:  # a shutdown cancels this task
            left.cancel()
            if not answer.done() or self.has_left:
                answer.cancel()
                self.ended("cancelled", LEFT)
            del answer, left  # an error's traceback has this frame, and the task has the error

    async def until_left(self, receive: Receive) -> None:
        await until_left(receive)
        self.has_left = True

    @property
    def usage(self) -> Usage | None:
        return None if self.finished is None else Usage.of(self.finished)

    async def answer(self, send: Send) -> None:
        tracing = self.server.tracing
        with tracing.speech(self) if tracing is not None else nullcontext():
            await self.ask(send)

    async def ask(self, send: Send) -> None:
        await self.prepare_text()
        with (
            self.server.memory.take(self.expected_bytes) as self.memory,
            self.own_words(),
            self.server.engine.speak(await self.message()) as inbox,
        ):
            self.begin()
            while not self.has_left:
                message = await self.next_message(inbox)
                try:
                    goes_on = await self.take(message, send)
                except AlignerFailed as error:
                    await self.fail(protocol.Failed(self.id, str(error), 503, "aligner_failed"), send)
                    break
                if not goes_on:
                    break
                if isinstance(message, protocol.Audio):  # `take` has waited until the client read enough
                    self.server.engine.heard(self.id, message.frames)

    async def next_message(self, inbox: Inbox) -> protocol.Outcome:
        """Return the engine's next message. A flexible request fails if its audio has not begun in time."""
        try:
            async with asyncio.timeout(self.patience_s):
                return await inbox.get()
        except TimeoutError:
            limit_s = self.server.limits.flex_wait_s
            why = f"no audio of this flexible request began within {limit_s:g} s; try again later"
            return protocol.Failed(self.id, why, 503, "engine_full", FLEX_RETRY_S)

    @property
    def patience_s(self) -> float | None:
        """Return how long this request still waits for its first audio; None if nothing limits that."""
        limit_s = self.server.limits.flex_wait_s
        if limit_s is None or self.ttfa_s is not None or not self.request.listener.is_flexible:
            return None
        return limit_s - (time.perf_counter() - self.began)

    async def prepare_text(self) -> None:
        """Set the words that the model reads. A long text takes tenths of a second. Raises the refusal."""
        if self.request.text_format == "markdown":
            self.fields.text = await read_beside(spoken, self.fields.text)
        if self.lexicon is not None:
            self.fields.text = await read_beside(self.lexicon.said, self.fields.text)
            check_length(self.fields.text, self.server.limits.text_chars)

    @property
    def expected_bytes(self) -> int:
        """The memory that this answer is expected to take, if it does not stream."""
        if self.request.stream:
            return 0
        audio_s = said_s(self.request.input)
        if self.request.max_new_tokens is not None:
            audio_s = min(audio_s, self.request.max_new_tokens / self.model.frame_rate_hz)
        return self.whole_bytes(2 * int(audio_s * self.model.sample_rate_hz))

    def whole_bytes(self, pcm_bytes: int) -> int:
        """Return the peak memory of this much PCM while it becomes a file (measured: at most three times what
        leaves the stretch and the resampler)."""
        model_hz, rate_hz, speed = (
            self.model.sample_rate_hz,
            self.encoder.sample_rate_hz,
            self.request.speed,
        )
        is_plain = speed == 1 and rate_hz == model_hz and self.request.loudness is None
        num_copies = 1 if is_plain else 3
        return int(pcm_bytes * (1 + num_copies * (1 + rate_hz / model_hz) / speed))

    def begin(self) -> None:
        """Called when the request was sent to the engine; a subclass overrides it."""

    async def take(self, message: protocol.Outcome, send: Send) -> bool:
        """Handle a message from the engine, and return whether more follow. Raises the refusal if nothing
        was sent yet."""
        match message:
            case protocol.Loading(state=state):
                await self.tell_loading(state, send)
            case protocol.Audio(pcm=pcm, frames=frames):
                self.num_frames += frames
                if pcm:  # empty while the renderer holds everything back
                    if self.words is not None:
                        self.words.hear(pcm)
                    await self.take_audio(pcm, send)
            case protocol.Text(text=text) if self.is_sse:  # a file has no place for text
                await self.send_event(send, TextDelta(text))
            case protocol.Spoken():
                await self.take_piece(message, send)
            case protocol.Finished(replicas=replicas):
                self.replicas = replicas
                await self.finish(message, send)
            case protocol.Rejected():  # a model on demand has told of its loading before
                await self.fail(message, send)
            case protocol.Failed(replicas=replicas):
                self.replicas = replicas
                await self.fail(message, send)
        await self.send_words(send)
        return isinstance(message, protocol.Loading | protocol.Audio | protocol.Text | protocol.Spoken)

    async def tell_loading(self, state: protocol.ModelState, send: Send) -> None:
        """Tell a client of events how far its model is loaded. Others wait."""
        if self.is_sse:
            await self.send_event(send, ModelLoading(self.model.id, state.stage, state.progress))

    async def take_piece(self, piece: protocol.Spoken, send: Send) -> None:
        """Send the times of a piece, and begin to align its words. Raises AlignerFailed."""
        if self.words is not None:
            self.words.spoken(piece.text, piece.start, piece.stop)
        if "segment" in (self.request.timestamp_granularities or ()):
            rate_hz = self.model.sample_rate_hz * self.request.speed
            segment = AudioSegment(
                piece.text, round(piece.start / rate_hz, 6), round(piece.stop / rate_hz, 6)
            )
            await self.send_event(send, segment)

    def word_times(self) -> WordTimes | None:
        """Return the word times of this answer. Parts of a session share theirs."""
        return self.server.word_times(self.request, self.model)

    def own_words(self) -> AbstractContextManager[Any]:
        """Return the word times that end with this request."""
        return self.words or nullcontext()

    async def send_words(self, send: Send) -> None:
        """Send the words that are aligned. Raises AlignerFailed."""
        for words in self.words.ready() if self.words is not None else ():
            await self.send_event(send, AudioWords(words))

    async def send_last_words(self, send: Send) -> None:
        """Wait for all words, and send them. Raises AlignerFailed."""
        if self.words is not None:
            self.words.spoken_whole(self.fields.text)
            for words in await self.words.rest():
                await self.send_event(send, AudioWords(words))

    async def take_audio(self, pcm: bytes, send: Send) -> None:
        if self.ttfa_s is None:
            self.ttfa_s = time.perf_counter() - self.began
            self.server.metrics.began(self.model.id, self.ttfa_s)
        self.num_bytes += len(pcm)
        self.playback.hear(time.perf_counter() - self.held_s, round(len(pcm) / 2 / self.request.speed))
        if self.request.stream:
            await self.send_audio(send, await self.encode(self.encoder.feed, pcm))
        else:
            self.pcm += pcm
            self.memory.resize(max(self.memory.num, self.whole_bytes(len(self.pcm))))

    async def finish(self, finished: protocol.Finished, send: Send) -> None:
        """Send the rest of the answer, or all of it if it is not streamed."""
        self.finished, self.num_frames = finished, finished.frames
        if self.request.stream:
            await self.finish_stream(finished, send)
        else:
            whole = await asyncio.get_running_loop().run_in_executor(ENCODING, self.whole, finished)
            await self.start(send, num_bytes=len(whole))
            await body(send, whole, more=False)
        if not self.has_left:  # otherwise the client disconnected during the last send
            self.ended(finished.reason, 200)

    async def finish_stream(self, finished: protocol.Finished, send: Send) -> None:
        await self.send_audio(send, await self.encode(self.encoder.finish))
        await self.send_last_words(send)
        usage = Usage.of(finished)
        await body(send, event(AudioDone(usage, usage)) if self.is_sse else b"", more=False)

    def whole(self, finished: protocol.Finished) -> bytes:
        """Return the body of an answer that is not streamed."""
        return self.file()

    def refused(self, rejected: protocol.Rejected) -> HTTPException:
        """Return the engine's rejection as a refusal, with the client's names for the fields."""
        param, message = rejected.param, rejected.message
        if param is not None:
            name = self.client_field(param)
            message = re.sub(rf"^{re.escape(param)}\b", name, message)
            param = name
        code, retry_after_s = rejected.code, rejected.retry_after_s
        return refusal(rejected.status, message, param, code, retry_after_s=retry_after_s, request_id=self.id)

    def client_field(self, param: str) -> str:
        """Return the client's name for a field of zoo.request.Request."""
        return self.voice.client_field(param)

    @property
    def media_type(self) -> str:
        if self.is_sse:
            return "text/event-stream; charset=utf-8"
        return encode.FORMATS[self.request.response_format].media_type

    async def fail(self, failed: protocol.Failed | protocol.Rejected, send: Send) -> None:
        """Raise the engine's error if nothing was sent. Otherwise log it and leave the body incomplete, so that
        uvicorn cuts the connection; events end with an `error` event instead."""
        if not self.is_started:
            raise self.error_in(failed)  # no variable holds it, so its traceback makes no reference cycle
        error = self.error_in(failed)
        is_known = isinstance(failed, protocol.Rejected) or failed.code == "no_audio"
        self.ended(outcome_of(error) if is_known else "failed", 200, error=failed.message)
        if self.is_sse:
            await body(send, event(AudioError(error_of(error))), more=False)

    def error_in(self, failed: protocol.Failed | protocol.Rejected) -> HTTPException:
        return self.refused(failed) if isinstance(failed, protocol.Rejected) else self.failure(failed)

    def failure(self, failed: protocol.Failed) -> HTTPException:
        """Return an engine failure as an error answer."""
        retry_after_s = failed.retry_after_s or (AWAY_RETRY_S if failed.status == 503 else None)
        return refusal(
            failed.status, failed.message, code=failed.code, retry_after_s=retry_after_s, request_id=self.id
        )

    async def message(self) -> protocol.Speak:
        """Return the request for the engine. After this, no other object holds its recordings."""
        voice = await self.server.references.find(self.voice, self.request, self.model)
        self.request.forget_audio()
        return self.speak_message(voice)

    def speak_message(self, voice: LoadedVoice) -> protocol.Speak:
        options = {SOUND_ONLY: True} | self.options if voice.is_sound_only else self.options
        request = msgspec.structs.replace(self.fields, voice=voice.name, options=options)
        return protocol.Speak(self.id, self.model.id, request, voice.references, self.request.listener)

    async def encode(self, step: Callable[..., bytes], *args: bytes) -> bytes:
        """Run a step of the encoder. Codecs take milliseconds, so they run on the pool for encoding."""
        if self.encoder.is_light:
            return step(*args)
        return await asyncio.get_running_loop().run_in_executor(ENCODING, step, *args)

    def file(self) -> bytes:
        form, rate_hz = self.request.response_format, self.model.sample_rate_hz
        return encode.file(form, bytes(self.pcm), rate_hz, *self.request.encoding)

    async def send_audio(self, send: Send, audio: bytes) -> None:
        """Send audio, and the headers before it. Encoders hold some audio back, so it may be empty."""
        if not self.is_started:
            await self.start(send)
        if audio and self.is_sse:
            await self.send_event(send, AudioDelta(base64.b64encode(audio).decode()))
        elif audio:
            await self.send_body(send, audio)

    async def send_event(self, send: Send, message: msgspec.Struct) -> None:
        if not self.is_started:
            await self.start(send)
        await self.send_body(send, event(message))

    async def send_body(self, send: Send, chunk: bytes) -> None:
        began_s = time.perf_counter()
        await body(send, chunk, more=True)
        self.held_s += time.perf_counter() - began_s

    async def start(self, send: Send, num_bytes: int | None = None) -> None:
        self.is_started = True
        headers = {
            "content-type": self.media_type,
            "cache-control": "no-store",
            "x-accel-buffering": "no",  # nginx would buffer the audio otherwise
            "x-request-id": self.id,
            "x-sample-rate": str(self.encoder.sample_rate_hz),
            "x-seed": str(self.fields.seed),
        }
        if self.warnings:
            headers["x-warning"] = "; ".join(self.warnings)
        if num_bytes is not None:
            headers["content-length"] = str(num_bytes)
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": encoded})

    @property
    def audio_s(self) -> float:
        """Seconds of audio generated so far."""
        return self.num_bytes / 2 / self.model.sample_rate_hz

    def ended(self, outcome: str, status: int, **more: Any) -> None:
        """Log the request and count it in the metrics. Only the first call has an effect."""
        if self.is_ended:
            return
        self.is_ended, self.outcome = True, outcome
        took_s = time.perf_counter() - self.began
        audio_s = self.audio_s
        self.server.metrics.ended(self.model.id, outcome, took_s, audio_s)
        if self.key is not None and audio_s:
            self.key.spoke(self.num_chars, audio_s)
        if self.request.stream and self.is_judged:
            self.server.metrics.streamed(self.model.id, self.playback, outcome)
        rtf = round(took_s / audio_s, 4) if audio_s else None
        ttfa_ms = round(1000 * self.ttfa_s, 1) if self.ttfa_s is not None else None
        facts = {
            "given_id": self.given_id,
            "status": status,
            "reason": outcome,
            "voice": self.voice.label,
            "format": self.request.response_format,
            "chars": len(self.request.input),
            "frames": self.num_frames,
            "ttfa_ms": ttfa_ms,
            "audio_s": round(audio_s, 3),
            "took_s": round(took_s, 3),
            "rtf": rtf,
            **({"key": self.key.name} if self.key is not None else {}),
            **({"replicas": self.replicas} if self.replicas else {}),
            **more,
        }
        log.info("speech", id=self.id, model=self.model.id, **facts)


class PartOfSession(Speech):
    """A request of a WebSocket session, which has no HTTP answer: it raises its errors."""

    async def tell_loading(self, state: protocol.ModelState, send: Send) -> None:
        """A subclass may have an event for it."""

    async def fail(self, failed: protocol.Failed | protocol.Rejected, send: Send) -> None:
        """Raise the engine's error: a session has no HTTP body to cut off."""
        raise self.error_in(failed)

    async def speak(self, send: Send) -> protocol.Finished:
        """Run the request to its end. Raises the refusal, Away."""
        try:
            await self.answer(send)
        except asyncio.CancelledError:
            self.ended("cancelled", LEFT)
            raise
        except HTTPException as error:
            self.server.metrics.ended(self.model.id, outcome_of(error))
            raise
        except Away:
            self.server.metrics.ended(self.model.id, "unavailable")
            raise
        assert self.finished is not None, "the answer neither finished nor failed"
        return self.finished


def check_length(text: str, text_chars: int) -> None:
    """Raise the refusal if a text is too long once its terms are replaced."""
    if len(text) > text_chars:
        message = f"the text has {len(text)} characters with its pronunciations; this server takes up to {text_chars}"
        raise refusal(400, message, "pronunciations")


def event(message: msgspec.Struct) -> bytes:
    """Return a server-sent event in OpenAI's form: the type is a field of the data."""
    return b"data: " + msgspec.json.encode(message) + b"\n\n"


async def body(send: Send, chunk: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": chunk, "more_body": more})
