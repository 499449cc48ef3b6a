"""Text in while speech goes out, for ElevenLabs' clients.

    client  text text flush text close_context              text ...        one context after the other,
    server       audio ~~~ audio ~~~~~~~~~ isFinal          audio ~~~       or several at once

A context is one utterance of a session (session.py): it has one voice and one seed. Without names of contexts, a
connection has one, which ends with an empty text. A context is spoken to its end if a flush came before its
close_context. Otherwise the client has interrupted it, and it is cancelled.
"""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import msgspec
from litestar.exceptions import HTTPException
from litestar.types import Receive, Send

from serving.http.elevenlabs.bodies import MANY_INPUTS, ONE_INPUT, CharacterAlignment, VoiceSettings
from serving.http.elevenlabs.characters import Alignments, Characters
from serving.http.errors import cut, error_of, json_fault, refusal, uncapitalized
from serving.http.inner_session import InnerSession, told
from serving.http.listener import STOPPING
from serving.http.objects import Error
from serving.http.server import Server
from serving.http.socket import POLICY, STOPS, Closed, Left, Socket, ended
from serving.http.word_times import Word

MAX_CONTEXTS = 8  # of a connection, at once
MAX_WAITING = 64  # texts that a context has not read yet
FLUSH = "[pause:0s]"  # text before a pause is spoken at once
ENDED = 1000  # close code


class Input(msgspec.Struct):
    """A message from a client. Other fields, as generation_config, have no meaning here."""

    text: str | None = None
    context_id: str | None = None
    flush: bool | None = None
    close_context: bool | None = None
    close_socket: bool | None = None
    voice_settings: VoiceSettings | None = None


class Alignment(msgspec.Struct, rename="camel"):
    """Characters with times in milliseconds, which count from the end of the alignment before."""

    chars: list[str]
    char_start_times_ms: list[int]
    char_durations_ms: list[int]


class Output(msgspec.Struct, rename="camel", omit_defaults=True):
    """Audio in base64, or the characters of a part of the text once it is spoken."""

    audio: str | None
    alignment: Alignment | None
    normalized_alignment: Alignment | None
    context_id: str | None = None


class Final(msgspec.Struct, rename="camel", omit_defaults=True):
    """The last message of a context."""

    is_final: bool
    audio: str | None
    context_id: str | None = None


class Failed(msgspec.Struct, rename="camel", omit_defaults=True):
    """error and message are the same: clients read one of them."""

    error: str
    message: str
    code: str | None
    context_id: str | None = None


class Context(InnerSession):
    """One context, which is a session. config: its session.config."""

    def __init__(self, connection: Connection, id: str | None, config: dict[str, Any]):
        super().__init__(connection.server, connection.id, connection.path, MAX_WAITING)
        self.connection, self.id = connection, id
        self.characters = Characters("")
        self.aligned_ms = 0  # the end of the last alignment
        self.has_text = False
        self.is_flushed = False  # whether no text has come after the last flush
        self.messages.put_nowait(told("session.config", **config))
        self.speaking = asyncio.create_task(self.session.run())

    async def say(self, text: str, is_flushed: bool) -> None:
        """Add text. Blanks before the first word are left out, as a client opens a context with one. An empty
        text keeps the context open."""
        if self.speaking.done() or not (self.has_text or text.strip()):
            return
        if is_flushed and text and not text[-1].isspace():
            text += " "
        await self.messages.put(told("input.text", text=text))
        if text:
            self.has_text, self.is_flushed = True, False
            self.characters.text += text
        if is_flushed and not self.is_flushed:
            self.is_flushed = True
            await self.messages.put(told("input.text", text=FLUSH))

    async def end(self, must_be_flushed: bool) -> None:
        """Speak the text to its end. Cancel it if it must be flushed and is not, and if there is none."""
        if self.has_text and (self.is_flushed or not must_be_flushed):
            await self.messages.put(told("input.done"))
        else:
            self.speaking.cancel()

    async def take_audio(self, audio: bytes) -> None:
        await self.connection.tell(Output(base64.b64encode(audio).decode(), None, None, self.id))

    async def take_event(self, event: dict[str, Any]) -> None:
        match event:
            case {"type": "session.configured"}:
                self.connection.is_configured = True
            case {"type": "audio.words", "words": words}:
                await self.align(msgspec.convert(words, list[Word]))
            case {"type": "audio.segment", "text": text, "start_s": start_s, "end_s": end_s}:
                await self.align([Word(text, start_s, end_s, aligned=False, score=0.0)])
            case {"type": "audio.done"}:
                if (rest := self.characters.rest()) is not None:
                    await self.tell_times(rest)
                raise Left
            case {"type": "error", "error": error}:
                await self.connection.fail(msgspec.convert(error, Error), self)
                raise Left

    async def align(self, words: list[Word]) -> None:
        await self.tell_times(self.characters.take(words))

    async def tell_times(self, found: Alignments) -> None:
        sent, spoken = found.alignment, found.normalized_alignment
        begin_ms, self.aligned_ms = self.aligned_ms, end_ms(spoken)
        as_sent = None if sent is None else since(begin_ms, sent)
        await self.connection.tell(Output("", as_sent, since(begin_ms, spoken), self.id))


class Connection:
    """A WebSocket that is already accepted. is_multi: whether contexts have names. id: the request ID."""

    def __init__(self, server: Server, receive: Receive, send: Send, *, is_multi: bool, id: str | None):
        self.server, self.is_multi, self.id = server, is_multi, id
        self.path = MANY_INPUTS if is_multi else ONE_INPUT
        self.config: dict[str, Any] = {}
        self.is_auto = False
        idle_s = server.limits.session_idle_s
        self.socket = Socket(receive, send, idle_s, lambda: bool(self.running), self._stop)
        self.open: dict[str | None, Context] = {}  # those that take text
        self.running: dict[Context, asyncio.Task[None]] = {}
        self.is_configured = False  # whether a context was
        self.closed: Closed | None = None  # how the connection closes once no context runs
        self.changed = asyncio.Event()  # `closed` or a task

    async def run(self, config: dict[str, Any], is_auto: bool) -> None:
        """Speak until the connection ends. config: the session.config of all contexts. is_auto: whether each text
        is spoken at once."""
        self.config, self.is_auto = config, is_auto
        try:
            await self.socket.run(self._listen(), self._close())
        finally:
            await ended(*self.running.values())
            self.running.clear()
            self.open.clear()

    # Messages from the client.

    async def _listen(self) -> None:
        while True:
            text = await self.socket.next()
            try:
                await self._take(decoded(text))
                self.socket.note(is_wrong=False)
            except HTTPException as error:
                await self.fail(error_of(error), None)
                self.socket.note(is_wrong=True)

    async def _take(self, message: Input) -> None:
        """Handle a message. Raises the refusal."""
        id, text = message.context_id if self.is_multi else None, message.text or ""
        if message.close_context:
            if (context := self.open.pop(id, None)) is not None:
                await context.end(must_be_flushed=True)
            else:  # closed twice
                for context in self.running:
                    if context.id == id:
                        context.speaking.cancel()
        elif message.close_socket or (message.text == "" and not self.is_multi):
            for context in self.open.values():
                await context.end(must_be_flushed=self.is_multi)
            self.open.clear()
            self._close_with(ENDED)
        else:
            context = self.open.get(id)
            if context is None and text:
                context = self._begin(id, message.voice_settings)
            if context is not None:
                await context.say(text, is_flushed=bool(message.flush) or self.is_auto)

    def _begin(self, id: str | None, settings: VoiceSettings | None) -> Context:
        """Begin a context. Raises the refusal."""
        if self.closed is not None:
            raise refusal(400, "the connection is closing; it takes no more text", "text")
        if len(self.running.keys() | self.open.values()) >= MAX_CONTEXTS:
            message = f"{MAX_CONTEXTS} contexts are open, the maximum; close one with close_context"
            raise refusal(400, message, "context_id", "too_many_contexts")
        speed = {} if settings is None or settings.speed is None else {"speed": settings.speed}
        context = self.open[id] = Context(self, id, self.config | speed)
        self.running[context] = asyncio.create_task(self._speak(context))
        self.running[context].add_done_callback(lambda _: self.changed.set())
        return context

    # Messages to the client.

    async def tell(self, message: Output | Final | Failed) -> None:
        await self.socket.send_text(msgspec.json.encode(message).decode())

    async def fail(self, error: Error, context: Context | None) -> None:
        """Send an error. If the first context cannot begin, no other one can: the connection closes."""
        id = None if context is None else context.id
        await self.tell(Failed(error.message, error.message, error.code, id))
        if context is not None and not (self.is_multi and self.is_configured):
            self._close_with(POLICY, error.message)

    async def refuse(self, error: Error) -> None:
        """Send an error, and close the connection."""
        await self.tell(Failed(error.message, error.message, error.code))
        await self.socket.close(POLICY, error.message)

    async def _speak(self, context: Context) -> None:
        try:
            await asyncio.wait((context.speaking,))
        finally:
            await ended(context.speaking)
        if not context.speaking.cancelled():
            context.speaking.result()
        await self.tell(Final(True, None, context.id))
        if not self.is_multi:
            self._close_with(ENDED)

    async def _close(self) -> None:
        """Wait until the connection is over. Raises Closed."""
        while self.closed is None or self.running:
            await self.changed.wait()
            self.changed.clear()
            for context in [each for each, task in self.running.items() if task.done()]:
                self.running.pop(context).result()
        raise self.closed

    def _close_with(self, code: int, why: str = "") -> None:
        """Close the connection once no context runs."""
        if self.closed is None:
            self.closed = Closed(code, why)
        self.changed.set()

    def _stop(self) -> None:
        """The server stops. Contexts with text may end."""
        for context in self.running:
            context.session.socket.stop()
        self._close_with(STOPS, STOPPING)


def decoded(text: str) -> Input:
    """Decode a client's message. Raises the refusal."""
    try:
        return msgspec.json.decode(text, type=Input)
    except msgspec.ValidationError as error:
        message = f"a message is an object with text, flush or close_context: {uncapitalized(str(error))}"
        raise refusal(400, cut(message, 300), code="invalid_event") from None
    except (msgspec.DecodeError, RecursionError) as error:
        why = json_fault(text, error)
        raise refusal(400, f"the message is not valid JSON: {why}", code="invalid_json") from None


def since(begin_ms: int, times: CharacterAlignment) -> Alignment:
    """Return an alignment whose times count from `begin_ms`."""
    starts = [round(1000 * start_s) - begin_ms for start_s in times.character_start_times_seconds]
    stops = [round(1000 * end_s) - begin_ms for end_s in times.character_end_times_seconds]
    durations = [stop - start for start, stop in zip(starts, stops, strict=True)]
    return Alignment(times.characters, starts, durations)


def end_ms(times: CharacterAlignment) -> int:
    return round(1000 * times.character_end_times_seconds[-1])
