"""A session over a WebSocket: the client sends text while the server sends speech.

    client  session.config   input.text input.text input.done   input.text ...   input.cancel
    server  session.configured       audio.start ~~~~~~~~ audio.done     audio.start ~~~ audio.done

An utterance is all text up to an input.done. Utterances are spoken one after the other. Three things cancel
all of them immediately: input.cancel, a client that disconnects, and a new utterance if `barge_in` is
"cancel". The engine then frees the slot at its next step. Each utterance ends with one audio.done or one
error. When the server stops, utterances that have begun may finish within its grace period. A message that
is wrong gets an error and has no other effect. socket.py lists the close codes.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from typing import Any

import msgspec
import structlog
from litestar.exceptions import HTTPException
from litestar.types import Receive, Send

from serving.aligner.client import AlignerFailed
from serving.audio import encode
from serving.engine_client import Away
from serving.http.errors import (
    AWAY_RETRY_S,
    SESSION,
    cut,
    error_of,
    json_fault,
    log_refused,
    outcome_of,
    refusal,
    uncapitalized,
    wrong,
)
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
from serving.http.foreign_fields import translated
from serving.http.keys import admit
from serving.http.listener import STOPPING
from serving.http.objects import Model
from serving.http.references import LoadedVoice
from serving.http.requests import check, drop_foreign, is_default, options_of, request_of
from serving.http.schemas import SpeechRequest, fields_of
from serving.http.server import Server
from serving.http.socket import SILENT, STOPS, Closed, Socket, away, ended
from serving.http.utterance import Idle, Settings, Utterance, heard
from serving.http.vllm_events import SessionDone, with_their_fields
from serving.http.voice_choice import possible_voices
from serving.http.word_times import Word

PATH = SESSION
MAX_QUEUED = 16  # utterances
OWN = fields_of(ConfigFields)
NO_TOKENS = "model {!r} cannot take text token by token with these settings; use auto or sentence"
EVENTS = "session.config, input.text, input.done and input.cancel"

log = structlog.get_logger()


class Session:
    """A session on a WebSocket that is already accepted. `run` returns when it ends."""

    def __init__(self, server: Server, receive: Receive, send: Send, id: str | None = None, path: str = PATH):
        """id: the client's request ID. path: of the route, for the log."""
        self.server, self.id, self.path = server, id, path
        idle_s = server.limits.session_idle_s
        self.socket = Socket(receive, send, idle_s, lambda: bool(self.queue), lambda: self.turn.set())
        self.settings: Settings | None = None
        self.open: Utterance | None = None  # the one that takes text
        self.queue: deque[Utterance] = deque()  # all that have not ended; the first one speaks
        self.turn = asyncio.Event()  # the queue has changed
        self.speaking: asyncio.Task[AudioDone | Failure] | None = None
        # the words of the last utterances
        self.over: deque[tuple[int, list[Word]]] = deque(maxlen=2 * MAX_QUEUED)
        self.cut: Utterance | None = None  # the one that is being interrupted
        self.listing: set[asyncio.Task[None]] = set()  # the words of utterances that were cut off
        self.num_utterances = 0
        self.is_vllms = False  # whether the client is vLLM-Omni's (vllm_events.py)

    async def run(self) -> None:
        try:
            await self.socket.run(self._listen(), self._talk())
        finally:
            await ended(self.speaking, *self.listing)
            self._forget()

    def _forget(self) -> None:
        """Drop the settings and utterances. Otherwise the recordings would stay until the next garbage
        collection, because a session and its utterances hold each other."""
        for utterance in self.queue:
            utterance.close()
        self.settings = self.open = self.speaking = None
        self.queue.clear()
        self.listing.clear()

    # Messages from the client.

    async def _listen(self) -> None:
        while True:
            text = await self.socket.next()
            try:
                await self._take(text)
                self.socket.note(is_wrong=False)
            except HTTPException as error:
                await self._tell(Failure(error_of(error)))
                self.socket.note(is_wrong=True)
            except Away as error:
                await self._tell(Failure(error_of(away(error))))

    async def _take(self, text: str) -> None:
        """Handle a message. Raises the refusal, Away."""
        match decoded(text):
            case Config():
                self.settings = await self._configure(fields_in(text))
                await self._tell(self._configured(self.settings))
            case InputText(said):
                await self._say(said)
            case InputDone():
                self._end()
            case InputCancel(played_s, number):
                await self._interrupt(played_s, number)

    async def _configure(self, message: dict[str, Any]) -> Settings:
        """Check a session.config and find its voice. Raises the refusal, Away."""
        self.is_vllms = "task_type" in message  # before a refusal, so that its client can read the error
        own = self._own_fields(message)
        message = translated(message, is_strict=self.server.names.is_strict)
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
        check(request, model, self.server, is_session=True)
        voice = self.server.chosen_voice(request, model)
        if own.split_granularity != "token":
            request.sentence_gap_s = self.server.sentence_gap(request, model)
        elif request.sentence_gap_s is None:
            request.sentence_gap_s = 0.0  # sentences, and gaps between them, are not known
        must_wait = request.normalize or request.sentence_gap_s or request.text_format == "markdown"
        can_feed = model.feeds and options.get("text_mode") != "full" and not must_wait
        if own.split_granularity == "token" and not can_feed:
            raise refusal(400, NO_TOKENS.format(model.id), "split_granularity")
        loaded = await self.socket.while_connected(self.server.references.find(voice, request, model))
        request.forget_audio()
        check_has_voice(model, loaded)
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
        if self.socket.is_stopping:
            raise refusal(503, STOPPING, code="stopping", retry_after_s=AWAY_RETRY_S)
        if settings.is_cancelling and self.queue:
            await self._interrupt(None, None)
        if len(self.queue) >= MAX_QUEUED:
            message = (
                f"{len(self.queue)} utterances are queued, the maximum; cancel them, or wait until one ends"
            )
            raise refusal(400, message, code="too_many_utterances")
        admit(0)  # its characters count as they are spoken
        self.num_utterances += 1
        seed = settings.request.seed
        seed = secrets.randbits(63) if seed is None else seed
        self.open = Utterance(
            self.num_utterances, self.server, settings, seed, self._tell, self.socket.send_bytes
        )
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
            self._keep(utterance)

    async def _interrupt(self, played_s: float | None, number: int | None) -> None:
        """Cancel all utterances, and report later which words of one were heard. Raises the refusal."""
        cut = self.queue[0] if self.queue and self.queue[0].words is not None else None
        words = dict(self.over)  # before `_cancel`, which may push the oldest out
        if cut is not None:
            words[cut.number] = cut.found  # grows once it is cut off
        if number is not None and number not in words:
            known = ", ".join(map(str, words)) or "none"
            message = f"utterance {number} has no word times here; these have some: {known}"
            raise refusal(400, message, "utterance")
        self.cut = cut
        await self._cancel()
        self.cut = None
        if words:
            number = number or list(words)[-1]
            listing = asyncio.create_task(self._list_heard(cut, number, words[number], played_s))
            self.listing.add(listing)
            listing.add_done_callback(self.listing.discard)

    async def _list_heard(
        self, cut: Utterance | None, number: int, words: list[Word], played_s: float | None
    ) -> None:
        """Report which words of an utterance were heard, once those of the one that was cut off are known."""
        try:
            if cut is not None:
                await cut.cut_off()
        except AlignerFailed as error:
            await self._tell(Failure(error_of(refusal(503, str(error), code="aligner_failed"))))
            return
        finally:
            if cut is not None:
                cut.close()
        await self._tell(heard(number, words, played_s))

    def _keep(self, utterance: Utterance) -> None:
        """Keep the words of an utterance that is over: the client may still play it."""
        if utterance.words is None:
            return
        self.over.append((utterance.number, utterance.found))
        if utterance is not self.cut:
            utterance.close()

    # Messages to the client.

    async def _talk(self) -> None:
        """Speak the queued utterances, one after the other. Raises Closed."""
        while True:
            while not self.queue:
                if self.socket.is_stopping:
                    raise Closed(STOPS, STOPPING)
                self.turn.clear()
                await self.turn.wait()
            utterance = self.queue[0]
            speaking = self.speaking = asyncio.create_task(self._speak(utterance))
            await asyncio.wait((speaking,))
            self.speaking, utterance.is_over, self.socket.active_s = None, True, time.monotonic()
            # Otherwise the utterance was cancelled, and `_cancel` has reported it.
            if self.queue and self.queue[0] is utterance:
                self.queue.popleft()
                self._keep(utterance)
                await self._tell(speaking.result())
                if self.is_vllms and not self.queue and self.open is None:
                    await self._send_text(SessionDone(self.num_utterances))

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
        facts = {"id": self.id, "path": self.path, "utterance": utterance.number}
        facts |= {"model": utterance.settings.model.id, "reason": outcome_of(error)}
        return Failure(log_refused(error, **facts), utterance.number)

    async def _tell(self, event: ServerEvent) -> None:
        text = self.queue[0].text if self.queue else ""
        await self._send_text(with_their_fields(event, text) if self.is_vllms else event)

    async def _send_text(self, message: object) -> None:
        await self.socket.send_text(msgspec.json.encode(message).decode())


def decoded(text: str) -> Config | InputText | InputDone | InputCancel:
    """Decode a client's message. Raises the refusal."""
    try:
        return client_event.decode(text)
    except msgspec.ValidationError as error:
        message = f"a message must be an object whose type is one of {EVENTS}: {uncapitalized(str(error))}"
        raise refusal(400, cut(message, 300), code="invalid_event") from None
    except (msgspec.DecodeError, RecursionError) as error:
        why = json_fault(text, error)
        raise refusal(400, f"the message is not valid JSON: {why}", code="invalid_json") from None


def fields_in(text: str) -> dict[str, Any]:
    """Return all fields of a message that `decoded` has taken. Raises the refusal: `decoded` skips a field that it does
    not know, and with it a number that is too large or a list that is nested too deeply."""
    try:
        return any_object.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise refusal(400, f"the message is not valid JSON: {error}", code="invalid_json") from None


def decoded_hz(request: SpeechRequest, model: Model) -> int:
    """Return the sample rate that the answers decode to. Raises the refusal for a rate that the format does
    not support."""
    form = encode.FORMATS[request.response_format]
    try:
        rate_hz = form.codec_hz(model.sample_rate_hz, request.sample_rate)
    except ValueError as error:
        raise refusal(wrong("sample_rate"), f"sample_rate: {error}", "sample_rate") from None
    return form.decoded_hz or rate_hz


def check_has_voice(model: Model, voice: LoadedVoice) -> None:
    """Refuse the settings of a model that only clones if they give it nothing to clone."""
    if list(model.modes) == ["clone"] and voice.name is None and not voice.references:
        raise refusal(400, f"model {model.id!r} needs a voice; {possible_voices(model)}", "voice")
