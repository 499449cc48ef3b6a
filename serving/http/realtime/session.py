"""A conversation over a WebSocket, with the events of OpenAI's Realtime API.

    client  input_audio_buffer.append ...            (commit, response.create)          append ...
    server      speech_started ... speech_stopped, committed   response.created ~~~ audio and text ~~~ response.done

The client sends audio, and either says itself where a turn ends or lets the server detect it. One answer is under way
at a time. A client that leaves, `response.cancel`, and speech during an answer end it: its slot is free within a step.
`conversation.item.truncate` says what was heard, and the conversation goes on from there. An event that is wrong gets
an error and has no other effect. socket.py lists the close codes.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import numpy as np
from litestar.exceptions import HTTPException
from litestar.types import Receive, Send

from serving import protocol
from serving.audio.voice_activity import RATE_HZ
from serving.engine_client import Away
from serving.http.bodies import read_beside
from serving.http.chat import LEAST_S, speaks_in
from serving.http.errors import AWAY_RETRY_S, REALTIME, cut, error_of, refusal
from serving.http.keys import admit
from serving.http.listener import STOPPING
from serving.http.objects import Model
from serving.http.realtime import events
from serving.http.realtime.conversation import Call, Conversation, Item, new_id
from serving.http.realtime.events import (
    NO_DETECTION,
    Abilities,
    AnyItem,
    FunctionCall,
    FunctionCallOutput,
    Message,
    Pcm,
    ResponseFields,
    Settings,
)
from serving.http.realtime.hearing import Hearing, Started, Stopped, clip_of, samples_of
from serving.http.realtime.response import Reason, Response
from serving.http.realtime.transcripts import Transcript, Transcripts
from serving.http.recordings import digest
from serving.http.references import check_duration, from_base64
from serving.http.server import Server
from serving.http.socket import STOPS, Closed, Socket, away, ended
from serving.http.tool_calls import takes_none
from serving.http.voices import SILENT

PATH = REALTIME


class Session:
    """A session on a WebSocket that is already accepted. `run` returns when it ends, and leaves nothing behind."""

    def __init__(self, server: Server, model: Model, receive: Receive, send: Send):
        self.server, self.model = server, model
        self.id = new_id("sess")
        self.settings = Settings.initial()
        self.hearing = Hearing(server.limits.reference_s, self.settings.input_format, self.settings.detection)
        self.memory = server.memory.take(0)  # of the input buffer; each clip counts itself
        self.conversation = Conversation()
        self.item_id = new_id("item")  # of the turn that the buffer becomes
        self.response: Response | None = None
        self.answering: asyncio.Task[None] | None = None
        self.stopping = asyncio.Event()
        self.transcripts = Transcripts()
        self.abilities = Abilities(
            model,
            server.limits.text_chars,
            is_voice=lambda name: speaks_in(model, name, server),
            transcriber=lambda name: transcriber_of(name, server),
        )
        self.chooses_detection = False  # whether the client has set turn_detection
        self.socket = Socket(
            receive, send, server.limits.session_idle_s, lambda: self.is_answering, self.stopping.set
        )

    async def run(self) -> None:
        try:
            await self.tell("session.created", session=self.settings.session_json(self.id, self.model))
            await self.socket.run(self._listen(), self._stop())
        finally:
            await ended(self.answering)
            await self.transcripts.close()
            self.memory.release()
            self.response = self.answering = None
            self.conversation.items.clear()
            del self.hearing  # its network takes 3 MB, and the garbage collector would find it late

    @property
    def is_answering(self) -> bool:
        return self.answering is not None and not self.answering.done()

    async def tell(self, type: str, **fields: Any) -> None:
        event = {"type": type, "event_id": new_id("event"), **fields}
        await self.socket.send_text(msgspec.json.encode(event).decode())

    async def _tell_error(self, refused: HTTPException, event_id: str | None = None) -> None:
        """event_id: of the client's event that is wrong, if one is."""
        await self.tell("error", error=msgspec.structs.asdict(error_of(refused)) | {"event_id": event_id})

    async def _stop(self) -> None:
        """When the server stops, or an answer has failed unexpectedly, wait for what is under way and end the session.
        Raises Closed, and that failure."""
        await self.stopping.wait()
        for task in (self.answering, self.transcripts.writing):
            if task is not None:
                await task
        raise Closed(STOPS, STOPPING)

    async def _listen(self) -> None:
        while True:
            text = await self.socket.next()
            try:
                await self._take(events.decoded(text))
                self.socket.note(is_wrong=False)
            except HTTPException as error:
                await self._tell_error(error, events.event_id_of(text))
                self.socket.note(is_wrong=True)
            except Away as error:
                await self._tell_error(away(error), events.event_id_of(text))

    async def _take(self, event: events.ClientEvent) -> None:
        """Handle an event. Raises the refusal, Away."""
        match event:
            case events.SessionUpdate(session=asked):
                await self._configure(asked)
            case events.Append(audio=audio):
                await self._hear(unpacked(audio))
            case events.Commit():
                await self._commit()
            case events.Clear():
                self.hearing.clear()
                self._settle_memory()
                await self.tell("input_audio_buffer.cleared")
            case events.Create(item=given, previous_item_id=previous):
                await self._add(await self._item(given), previous)
            case events.Retrieve(item_id=id):
                item = self.conversation.find(id, code="item_retrieve_invalid_item_id")
                await self.tell("conversation.item.retrieved", item=item.json())
            case events.Truncate():
                await self._truncate(event)
            case events.Delete(item_id=id):
                self.conversation.delete(id)
                await self.tell("conversation.item.deleted", item_id=id)
            case events.CreateResponse(response=asked):
                await self._answer(asked)
            case events.CancelResponse(response_id=response_id):
                await self._cancel(response_id)

    # settings

    async def _configure(self, asked: events.SessionFields) -> None:
        if asked.model is not None and not self._is_own_name(asked.model):
            message = f"the model of a session cannot change; it is {self.model.id!r}"
            raise refusal(400, message, "session.model")
        settings = self.settings.changed(asked, self.abilities)
        if asked.audio is not msgspec.UNSET and asked.audio.input is not msgspec.UNSET:
            self.chooses_detection |= asked.audio.input.turn_detection is not msgspec.UNSET
        await read_beside(self.hearing.configure, settings.input_format, settings.detection)
        self.settings = settings
        await self.tell("session.updated", session=settings.session_json(self.id, self.model))

    def _is_own_name(self, name: str) -> bool:
        """Return whether a name is the model's, or one of OpenAI's, which agent frameworks send."""
        names = self.server.names
        return names.models.get(name, name) == self.model.id or names.means(
            name, "answer", self.server.models
        )

    # what the user says

    async def _hear(self, data: bytes) -> None:
        """Take audio, and with voice detection also the turns that it begins and ends. Raises the refusal."""
        if not self.chooses_detection and self.settings.detection is None:
            self.chooses_detection = True  # so that the client is told once
            await self._tell_error(refusal(400, NO_DETECTION))
        self.memory.resize(self.hearing.num_bytes + self.hearing.num_added(len(data)))
        try:
            for edge in await read_beside(self.hearing.append, data):
                await self._take_edge(edge)
        finally:
            self._settle_memory()

    async def _take_edge(self, edge: Started | Stopped) -> None:
        """Begin or end a turn. Its refusal is told, so that later turns of the same audio are taken."""
        try:
            if isinstance(edge, Started):
                await self._begin_turn(edge.at_ms)
            else:
                await self._end_turn(edge)
        except HTTPException as error:
            await self._tell_error(error)
        except Away as error:
            await self._tell_error(away(error))

    async def _begin_turn(self, at_ms: int) -> None:
        where = {"audio_start_ms": at_ms, "item_id": self.item_id}
        await self.tell("input_audio_buffer.speech_started", **where)
        if self.settings.detection is not None and self.settings.detection.interrupt_response:
            await self._interrupt("turn_detected")

    async def _end_turn(self, stopped: Stopped) -> None:
        """Raises the refusal, Away."""
        id = self.item_id
        self.item_id = new_id("item")
        await self.tell("input_audio_buffer.speech_stopped", audio_end_ms=stopped.at_ms, item_id=id)
        item, previous = await self._turn(stopped.pcm, id)
        await self._tell_turn(item, previous)
        try:
            if self.settings.detection is not None and self.settings.detection.create_response:
                await self._answer(None)  # before the transcript, so that it has its slot first
        finally:
            self._transcribe(item)

    async def _commit(self) -> None:
        """Make the buffer an item. It stays as it is if that is refused. Raises the refusal."""
        item, previous = await self._turn(await read_beside(self.hearing.whole), self.item_id)
        self.item_id = new_id("item")
        self.hearing.clear()
        self._settle_memory()
        await self._tell_turn(item, previous)
        self._transcribe(item)

    def _transcribe(self, item: Item) -> None:
        """Begin to write the words of a turn, if the client wants them."""
        if self.settings.transcriber is None or self.socket.is_stopping:
            return
        model = self.server.model(self.settings.transcriber)
        transcript = Transcript(self.server, model, self.settings.transcript_language, item, self.tell)
        self.transcripts.add(transcript).add_done_callback(self._has_ended)

    async def _turn(self, pcm: bytes, id: str) -> tuple[Item, str | None]:
        """Make audio an item. Return it, and the ID of the one before it. Raises the refusal."""
        clip = await self._clip(pcm)
        check_is_heard(clip, None)
        item = Item("user", clip=clip, id=id)
        return item, self.conversation.add(item)

    async def _tell_turn(self, item: Item, previous: str | None) -> None:
        await self.tell("input_audio_buffer.committed", previous_item_id=previous, item_id=item.id)
        await self._tell_item(item, previous)

    async def _clip(self, pcm: bytes) -> protocol.AudioClip:
        """Return a clip, which counts its memory. Raises the refusal."""
        samples = samples_of(pcm, Pcm())
        clip = protocol.AudioClip(samples.tobytes(), RATE_HZ)
        return self.server.references.recordings.hold(clip, await read_beside(digest, clip))

    def _settle_memory(self) -> None:
        self.memory.resize(self.hearing.num_bytes)

    # the conversation

    async def _add(self, item: Item, after: str | None) -> None:
        await self._tell_item(item, self.conversation.add(item, after))

    async def _tell_item(self, item: Item, previous: str | None) -> None:
        for stage in ("added", "created", "done"):
            await self.tell(f"conversation.item.{stage}", previous_item_id=previous, item=item.json())

    async def _item(self, given: AnyItem) -> Item:
        """Raises the refusal."""
        if isinstance(given, Message):
            return await self._message(given)
        if not self.model.takes_tools:
            raise refusal(400, takes_none(self.model.id), "item.type")
        id = given.id or new_id("item")
        text = given.arguments if isinstance(given, FunctionCall) else given.output
        events.check_length(text, self.server.limits.text_chars, "item")
        if isinstance(given, FunctionCallOutput):
            return Item("tool", text, id=id, result_of=given.call_id)
        return Item("assistant", id=id, call=Call(given.name, text, given.call_id or new_id("call")))

    async def _message(self, message: Message) -> Item:
        """Raises the refusal."""
        item = Item(message.role, id=message.id or new_id("item"))
        audio = [part.audio for part in message.content if part.type == "input_audio"]
        texts = [part.text for part in message.content if part.type != "input_audio"]
        says_nothing = not audio and not any(texts) and message.role != "assistant"  # an answer may be empty
        if None in texts or None in audio or says_nothing:
            raise refusal(400, "a part of item.content has neither text nor audio", "item.content")
        if len(audio) > 1 or (audio and message.role != "user"):
            raise refusal(400, "an item has at most one input_audio, of the user", "item.content")
        item.text = "".join(text or "" for text in texts)
        events.check_length(item.text, self.server.limits.text_chars, "item.content")
        for data in audio:
            item.clip = await self._recording(unpacked(data or ""))
        return item

    async def _recording(self, data: bytes) -> protocol.AudioClip:
        """Return a recording in the format of the session's input. Raises the refusal."""
        longest_s = self.server.limits.reference_s
        if self.hearing.num_added(len(data)) > 2 * longest_s * RATE_HZ:
            message = f"the audio is longer than {longest_s:g} s, the limit of this server"
            raise refusal(400, message, "item.content")
        clip = await self._clip(await read_beside(clip_of, data, self.settings.input_format))
        try:
            check_duration(clip, (LEAST_S, longest_s))
        except ValueError as error:
            raise refusal(400, f"the audio cannot be used: {error}", "item.content") from None
        check_is_heard(clip, "item.content")
        return clip

    async def _truncate(self, event: events.Truncate) -> None:
        """Forget what the user did not hear of an answer. Raises the refusal."""
        item = self.conversation.find(event.item_id, code="item_truncate_invalid_item_id")
        if item.speech is None or item.call is not None:
            raise refusal(400, f"the item {cut(item.id)!r} is no answer with audio", "item_id")
        has_ms = int(item.speech.frames / item.speech.frames_per_ms)
        if event.audio_end_ms > has_ms:
            message = f"audio_end_ms is {event.audio_end_ms}; the item has {has_ms} ms of audio"
            raise refusal(400, message, "audio_end_ms")
        if item.status == "in_progress":
            await self._interrupt("client_cancelled")
        has_calls = self.conversation.has_calls(item)
        item.speech, item.is_cut = item.speech.up_to_ms(event.audio_end_ms, has_calls), True
        where = {"item_id": item.id, "content_index": 0, "audio_end_ms": event.audio_end_ms}
        await self.tell("conversation.item.truncated", **where)

    # answers

    async def _answer(self, asked: ResponseFields | None) -> None:
        """Begin an answer. Raises the refusal."""
        if self.socket.is_stopping:
            raise refusal(503, STOPPING, code="stopping", retry_after_s=AWAY_RETRY_S)
        if self.is_answering:
            message = "an answer is under way; cancel it, or wait until response.done"
            raise refusal(400, message, code="conversation_already_has_active_response")
        asked = asked or ResponseFields()
        settings = self.settings.changed(asked, self.abilities)
        given = self.conversation if asked.input is None else Conversation(await self._given(asked.input))
        joins = None if asked.conversation == "none" else self.conversation
        if joins is not None:
            joins.check_room()
        schemas = settings.schemas if settings.may_call else None
        own = None if asked.instructions is msgspec.UNSET else asked.instructions
        turns, cue = given.asked(self.settings.instructions, own, schemas)
        admit(0)
        self.response = Response(
            self.server, self.model, settings, turns, self.tell, joins, asked.metadata, cue
        )
        self.answering = asyncio.create_task(self._run(self.response))
        self.answering.add_done_callback(self._has_ended)

    async def _run(self, response: Response) -> None:
        await response.run()
        self.socket.active_s = time.monotonic()

    def _has_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.stopping.set()

    async def _given(self, input: list[dict[str, Any]]) -> list[Item]:
        """Return the items of `response.input`: messages, and references to items. Raises the refusal."""
        items: list[Item] = []
        for i, one in enumerate(input):
            if one.get("type") == "item_reference":
                items.append(self.conversation.find(str(one.get("id")), f"response.input[{i}].id"))
                continue
            try:
                given = msgspec.convert(one, AnyItem)
            except msgspec.ValidationError as error:
                raise refusal(400, f"response.input[{i}]: {error}", "response.input") from None
            items.append(await self._item(given))
        return items

    async def _cancel(self, response_id: str | None) -> None:
        response = self.response
        if not self.is_answering or response is None or response_id not in (None, response.response_id):
            which = "" if response_id is None else f" {cut(response_id)!r}"
            message = (
                f"Cancellation failed: no answer{which} is under way"  # LiveKit knows it by its first words
            )
            raise refusal(400, message, code="response_cancel_not_active")
        await self._interrupt("client_cancelled")

    async def _interrupt(self, reason: Reason) -> None:
        """End the answer under way, if any, and wait until its last event is sent."""
        if self.is_answering and self.response is not None and self.answering is not None:
            self.response.interrupt(reason)
            await asyncio.wait((self.answering,))


def transcriber_of(name: str | None, server: Server) -> str | None:
    """Return the ID of the model that writes the words of clips, or None: OpenAI's clients name one of its models.
    Raises Away."""
    try:
        return server.transcribing_model(name)[0].id
    except HTTPException:
        return None


def check_is_heard(clip: protocol.AudioClip, param: str | None) -> None:
    """Raise the refusal for silence. No model takes it, so every later answer of the conversation would fail."""
    peak = np.abs(np.frombuffer(clip.samples, "<f4")).max()
    if peak < SILENT:
        message = f"the audio is silent: its loudest sample is {peak:.2g} of full scale"
        raise refusal(400, message, param, "invalid_audio")


def unpacked(audio: str) -> bytes:
    """Raises the refusal."""
    try:
        return from_base64(audio)
    except ValueError:
        raise refusal(400, "the audio is not base64", "audio", "invalid_audio") from None
