"""A session over a WebSocket: the client sends text while the server sends speech.

    client  session.config   input.text input.text input.done   input.text ...   input.cancel
    server  session.configured       audio.start ~~~~~~~~ audio.done     audio.start ~~~ audio.done

An utterance is all text up to an input.done. Utterances are spoken one after the other. Three things cancel
all of them immediately: input.cancel, a client that disconnects, and a new utterance if `barge_in` is
"cancel". The engine then frees the slot at its next step. Each utterance ends with one audio.done or one
error. When the server stops, utterances that have begun may finish within its grace period. A message that
is wrong gets an error and has no other effect.

Close codes: 1012 the server is stopping, 1003 a binary message, 1008 too many wrong messages, 4408 idle.
uvicorn adds 1007 (not UTF-8) and 1009 (too large).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
import structlog
from litestar.exceptions import HTTPException
from litestar.types import Receive, ReceiveMessage, Send

from serving.audio import encode
from serving.engine_client import Away
from serving.http.errors import AWAY_RETRY_S, cut, error_of, log_refused, outcome_of, refusal, uncapitalized
from serving.http.events import (
    AudioDone,
    Config,
    ConfigFields,
    Configured,
    Failure,
    InputCancel,
    InputDone,
    InputText,
    ServerEvent,
    any_object,
    client_event,
)
from serving.http.listener import STOPPING
from serving.http.requests import check, drop_foreign, is_default, options_of, request_of
from serving.http.schemas import Model, SpeechRequest, fields_of
from serving.http.server import Server
from serving.http.utterance import Idle, Settings, Utterance

PATH = "/v1/audio/speech/stream"
STOPS, UNSUPPORTED, POLICY, SILENT = 1012, 1003, 1008, 4408
MAX_QUEUED = 16  # utterances
MAX_WRONG = 100  # messages
OWN = fields_of(ConfigFields)
NO_TOKENS = "model {!r} cannot take text token by token with these settings; use auto or sentence"
EVENTS = "session.config, input.text, input.done and input.cancel"

log = structlog.get_logger()
T = TypeVar("T")


class Closed(Exception):
    """The session must close, with a code and a reason."""

    def __init__(self, code: int, reason: str):
        super().__init__(reason)
        self.code, self.reason = code, reason


class Left(Exception):
    """The client has disconnected."""


class Session:
    """A session on a WebSocket that is already accepted. `run` returns when it ends."""

    def __init__(self, server: Server, receive: Receive, send: Send, id: str | None = None):
        """id: the client's request ID."""
        self.server, self.receive, self.send, self.id = server, receive, send, id
        self.settings: Settings | None = None
        self.open: Utterance | None = None  # the one that takes text
        self.queue: deque[Utterance] = deque()  # all that have not ended; the first one speaks
        self.turn = asyncio.Event()  # the queue has changed
        self.early: ReceiveMessage | None = None  # arrived while a config's recordings were decoded
        self.speaking: asyncio.Task[AudioDone | Failure] | None = None
        self.num_utterances = self.num_wrong = 0
        self.is_stopping = False  # whether the server is stopping: utterances that have begun may finish
        self.active_s = time.monotonic()  # time of the last message or of the end of the last utterance

    async def run(self) -> None:
        tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._talk())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for index in range(len(tasks)):
                if tasks[index].done():
                    tasks[index].result()
        except Closed as closed:
            await self._close(closed)
        except (Left, OSError):
            pass
        finally:
            await ended(*tasks, self.speaking)
            tasks.clear()  # an error's traceback has this frame, and its task has the error
            self._forget()

    def _forget(self) -> None:
        """Drop the settings and utterances. Otherwise the recordings would stay until the next garbage
        collection, because a session and its utterances hold each other."""
        self.settings = self.open = self.speaking = None
        self.queue.clear()

    async def _close(self, closed: Closed) -> None:
        await self.send({"type": "websocket.close", "code": closed.code, "reason": closed.reason})

    # Messages from the client.

    async def _listen(self) -> None:
        while True:
            text = await self._next()
            try:
                await self._take(text)
                self.num_wrong = 0
            except HTTPException as error:
                await self._wrong(error)
            except Away as error:
                await self._tell(Failure(error_of(away(error))))

    async def _next(self) -> str:
        """Return the next text message. Raises Left, Closed."""
        self.active_s, idle_s = time.monotonic(), self.server.limits.session_idle_s
        while True:
            until_s = (time.monotonic() if self.queue else self.active_s) + idle_s
            try:
                message = await asyncio.wait_for(self._receive(), until_s - time.monotonic())
            except TimeoutError:
                if not self.queue and time.monotonic() >= self.active_s + idle_s:
                    raise Closed(SILENT, f"the session was idle for {idle_s:g} s") from None
                continue
            match message:
                case {"type": "websocket.disconnect"}:
                    raise Left
                case {"type": "websocket.stopping"}:  # listener.py sends it
                    self.is_stopping = True
                    self.turn.set()
                case {"type": "websocket.receive", "text": str(text)}:
                    return text
                case {"type": "websocket.receive"}:
                    raise Closed(UNSUPPORTED, "messages must be JSON in text messages")

    async def _receive(self) -> ReceiveMessage:
        message, self.early = self.early, None
        return await self.receive() if message is None else message

    async def _while_connected(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, and cancel it if the client disconnects. One other message may arrive
        in the meantime; it is handled afterwards. Raises Left, and the errors of `work`."""
        working, arriving = asyncio.create_task(work), asyncio.create_task(self._receive())
        try:
            await asyncio.wait((working, arriving), return_when=asyncio.FIRST_COMPLETED)
            if arriving.done() and arriving.result()["type"] == "websocket.disconnect":
                raise Left
            return await working
        finally:
            if arriving.done():
                self.early = arriving.result()
            await ended(working, arriving)
            del working, arriving  # an error's traceback has this frame, and the task has the error

    async def _wrong(self, error: HTTPException) -> None:
        self.num_wrong += 1
        await self._tell(Failure(error_of(error)))
        if self.num_wrong >= MAX_WRONG:
            raise Closed(POLICY, f"{self.num_wrong} messages in a row were wrong")

    async def _take(self, text: str) -> None:
        """Handle a message. Raises the refusal, Away."""
        match decoded(text):
            case Config():
                self.settings = await self._configure(any_object.decode(text))
                await self._tell(self._configured(self.settings))
            case InputText(said):
                await self._say(said)
            case InputDone():
                self._end()
            case InputCancel():
                await self._cancel()

    async def _configure(self, message: dict[str, Any]) -> Settings:
        """Check a session.config and find its voice. Raises the refusal, Away."""
        own = self._own_fields(message)
        fields = {
            name: value
            for name, value in message.items()
            if name not in OWN and name != "type" and not is_default(name, value)
        }
        if "input" in fields:
            raise refusal(400, "session.config takes no input; send text as input.text", "input")
        request = request_of({"response_format": "pcm", **fields, "input": ""})
        model, warnings = self.server.chosen_model(request)
        warnings += drop_foreign(fields, model, self.server)
        options = options_of(fields, model)
        check(request, model, self.server)
        voice = self.server.chosen_voice(request, model)
        must_wait = request.normalize or request.text_format == "markdown"
        can_feed = model.feeds and options.get("text_mode") != "full" and not must_wait
        if own.split_granularity == "token" and not can_feed:
            raise refusal(400, NO_TOKENS.format(model.id), "split_granularity")
        loaded = await self._while_connected(self.server.references.find(voice, request, model))
        request.forget_audio()
        return Settings(
            request=request,
            model=model,
            options=options,
            voice=voice,
            loaded=loaded,
            is_base64=own.audio == "base64",
            is_fed=can_feed and own.split_granularity != "sentence",
            may_fall_back=own.split_granularity == "auto",
            is_cancelling=own.barge_in == "cancel",
            sample_rate_hz=decoded_hz(request, model),
            warnings=[*warnings, *voice.warnings],
        )

    def _own_fields(self, message: dict[str, Any]) -> ConfigFields:
        given = {name: message[name] for name in OWN if message.get(name) is not None}
        try:
            return msgspec.convert(given, ConfigFields)
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at `$.")
            field = where.rstrip("`")
            raise refusal(400, f"{field}: {uncapitalized(what)}; {field} takes {OWN[field]}", field) from None

    def _configured(self, settings: Settings) -> Configured:
        return Configured(
            settings.model.id,
            settings.sample_rate_hz,
            settings.request.response_format,
            "token" if settings.is_fed else "sentence",
            settings.warnings,
        )

    async def _say(self, text: str) -> None:
        """Add text to the open utterance, or begin one with it. Raises the refusal, Away."""
        if self.open is None and not text:
            return
        if self.settings is None:
            self.settings = await self._configure({})
        if self.open is None:
            await self._begin(self.settings)
        assert self.open is not None, "an utterance has begun but is not open"
        self.open.say(text)

    async def _begin(self, settings: Settings) -> None:
        if self.is_stopping:
            raise refusal(503, STOPPING, code="stopping", retry_after_s=AWAY_RETRY_S)
        if settings.is_cancelling:
            await self._cancel()
        if len(self.queue) >= MAX_QUEUED:
            message = (
                f"{len(self.queue)} utterances are queued, the maximum; cancel them, or wait until one ends"
            )
            raise refusal(400, message, code="too_many_utterances")
        self.num_utterances += 1
        seed = settings.request.seed
        seed = secrets.randbits(63) if seed is None else seed
        self.open = Utterance(self.num_utterances, self.server, settings, seed, self._tell, self._send_bytes)
        self.queue.append(self.open)
        self.turn.set()

    def _end(self) -> None:
        """End the text of the open utterance. Raises the refusal."""
        if self.open is None:
            raise refusal(400, "no utterance is open; input.text begins one")
        self.open.end()
        self.open = None

    async def _cancel(self) -> None:
        """Cancel all utterances and report what was spoken of each."""
        gone, self.open = list(self.queue), None
        self.queue.clear()
        await ended(self.speaking)
        for utterance in gone:
            await self._tell(utterance.done("cancelled"))

    # Messages to the client.

    async def _talk(self) -> None:
        """Speak the queued utterances, one after the other. Raises Closed."""
        while True:
            while not self.queue:
                if self.is_stopping:
                    raise Closed(STOPS, STOPPING)
                self.turn.clear()
                await self.turn.wait()
            utterance = self.queue[0]
            speaking = self.speaking = asyncio.create_task(self._speak(utterance))
            await asyncio.wait((speaking,))
            self.speaking, utterance.is_over, self.active_s = None, True, time.monotonic()
            # Otherwise the utterance was cancelled, and `_cancel` has reported it.
            if self.queue and self.queue[0] is utterance:
                self.queue.popleft()
                await self._tell(speaking.result())

    async def _speak(self, utterance: Utterance) -> AudioDone | Failure:
        """Speak an utterance, and return its last event. Raises Closed."""
        try:
            return await utterance.speak()
        except HTTPException as error:
            return self._failure(error, utterance)
        except Away as error:
            return self._failure(away(error), utterance)
        except Idle:
            idle = f"no text and no input.done for {self.server.limits.text_idle_s:g} s"
            await self._tell(self._failure(refusal(408, idle, code="idle"), utterance))
            raise Closed(SILENT, idle) from None

    def _failure(self, error: HTTPException, utterance: Utterance) -> Failure:
        facts = {"id": self.id, "path": PATH, "utterance": utterance.number}
        facts |= {"model": utterance.settings.model.id, "reason": outcome_of(error)}
        return Failure(log_refused(error, **facts), utterance.number)

    async def _tell(self, event: ServerEvent) -> None:
        await self.send(
            {"type": "websocket.send", "bytes": None, "text": msgspec.json.encode(event).decode()}
        )

    async def _send_bytes(self, data: bytes) -> None:
        await self.send({"type": "websocket.send", "bytes": data, "text": None})


async def ended(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks and wait until they have ended."""
    there = [task for task in tasks if task is not None]
    for task in there:
        task.cancel()
    await asyncio.gather(*there, return_exceptions=True)


def decoded(text: str) -> Config | InputText | InputDone | InputCancel:
    """Decode a client's message. Raises the refusal."""
    try:
        return client_event.decode(text)
    except msgspec.ValidationError as error:
        message = f"a message must be an object whose type is one of {EVENTS}: {uncapitalized(str(error))}"
        raise refusal(400, cut(message, 300), code="invalid_event") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise refusal(400, f"the message is not valid JSON: {error}", code="invalid_json") from None


def decoded_hz(request: SpeechRequest, model: Model) -> int:
    """Return the sample rate that the answers decode to. Raises the refusal for a rate that the format does
    not support."""
    form = encode.FORMATS[request.response_format]
    try:
        rate_hz = form.codec_hz(model.sample_rate_hz, request.sample_rate)
    except ValueError as error:
        raise refusal(400, f"sample_rate: {error}", "sample_rate") from None
    return form.decoded_hz or rate_hz


def away(error: Away) -> HTTPException:
    return refusal(503, str(error), code="engine_not_ready", retry_after_s=AWAY_RETRY_S)
