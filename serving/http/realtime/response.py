"""An answer in a realtime session: from `response.created` to `response.done`, with text and audio as they are made.

An interruption reaches the engine at once. The slot is free within a step, and the engine's last message has the
tokens that were made, of which the conversation keeps those whose audio was sent.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from litestar.exceptions import HTTPException
from litestar.types import Message, Send

from serving import protocol
from serving.engine_client import Away
from serving.http.answers import Answer
from serving.http.chat import check_clips, choice_named, usage_of
from serving.http.errors import log_refused, outcome_of
from serving.http.objects import Error, Model
from serving.http.realtime.conversation import Call, Conversation, Item, Speech, new_id
from serving.http.realtime.events import Format, Pcm, Pcma, Settings
from serving.http.schemas import ResponseFormat, SpeechRequest
from serving.http.server import Server
from serving.http.socket import away
from serving.http.speech import PartOfSession
from serving.http.tool_calls import Calls

Tell = Callable[..., Awaitable[None]]
Reason = Literal["client_cancelled", "turn_detected"]
STATUS = {"stop": "completed", "length": "incomplete", "cancelled": "cancelled"}
FIELD = {"turns": "conversation", "text": "conversation", "max_tokens": "max_output_tokens"}


async def nothing(message: Message) -> None:
    """Stands for the `send` of an HTTP answer, of which a session has none."""


def name_of(form: Format) -> ResponseFormat:
    return "pcm" if isinstance(form, Pcm) else "alaw" if isinstance(form, Pcma) else "ulaw"


class Response(PartOfSession):
    """tell: sends an event, by its type and fields. conversation: the one that its items join, or None. item: the
    message; called: calls of tools, which come behind it. cue: the words that it follows in the place of the user's."""

    def __init__(
        self,
        server: Server,
        model: Model,
        settings: Settings,
        turns: list[protocol.Turn],
        tell: Tell,
        conversation: Conversation | None,
        metadata: dict[str, str] | None = None,
        cue: str | None = None,
    ):
        form = settings.output_format
        request = SpeechRequest(
            input="",
            response_format=name_of(form),
            sample_rate=form.rate if isinstance(form, Pcm) else None,
            speed=settings.speed,
            stream=True,
            temperature=settings.temperature,
        )
        options = {} if settings.max_tokens is None else {"max_tokens": settings.max_tokens}
        voice = choice_named(settings.voice if settings.has_audio else None, model, server)
        super().__init__(server, request, options, model, voice)
        self.settings, self.turns, self.tell = settings, turns, tell
        self.conversation, self.metadata, self.cue = conversation, metadata, cue
        self.response_id = new_id("resp")
        self.item: Item | None = None
        self.called: list[Item] = []
        self.calls = Calls() if settings.may_call else None
        self.cancelled: Reason | None = None
        self.error: Error | None = None

    # the request

    def client_field(self, param: str) -> str:
        return FIELD.get(param, param)

    async def prepare_text(self) -> None:
        """A conversation has no text to prepare."""

    async def message(self) -> protocol.Speak:
        turns, self.turns = self.turns, []
        message = self.speak_message(await self.server.references.find(self.voice, self.request, self.model))
        message.turns = turns
        if not self.settings.has_audio and "text" in self.model.outputs:
            message.request.output = "text"
        check_clips(message, "conversation")
        return message

    def begin(self) -> None:
        if self.cancelled is not None:  # before the engine knew of it
            self.server.engine.interrupt(self.id)

    def interrupt(self, reason: Reason) -> None:
        """End the answer now. `run` returns soon after."""
        if self.cancelled is None:
            self.cancelled = reason
            self.server.engine.interrupt(self.id)

    # the answer

    async def run(self) -> None:
        """Answer, and send all events."""
        await self.tell("response.created", response=self._json("in_progress"))
        try:
            await self.speak(nothing)
        except HTTPException as error:
            facts = {"id": self.id, "model": self.model.id, "reason": outcome_of(error)}
            self.error = log_refused(error, **facts)
        except Away as error:
            self.error = log_refused(away(error), id=self.id, model=self.model.id, reason="unavailable")
        status = "failed" if self.finished is None else STATUS[self.finished.reason]
        await self._close_item("completed" if status == "completed" else "incomplete")
        await self._tell_calls()
        await self.tell("response.done", response=self._json(status))

    async def take(self, message: protocol.Outcome, send: Send) -> bool:
        if self.cancelled is not None and isinstance(message, protocol.Audio | protocol.Text):
            return True  # it was on its way
        if isinstance(message, protocol.Text):
            await self._write(message.text if self.calls is None else self.calls.take(message.text))
            return True
        is_on = await super().take(message, send)
        if isinstance(message, protocol.Audio) and self.settings.has_audio:
            item = await self._open_item()
            assert item.speech is not None, "an answer with audio has an item without"
            item.speech.frames += message.frames
        return is_on

    async def take_audio(self, pcm: bytes, send: Send) -> None:
        if self.settings.has_audio:
            await super().take_audio(pcm, send)
        else:
            self.num_bytes += len(pcm)

    async def send_audio(self, send: Send, audio: bytes) -> None:
        if audio:
            await self._open_item()
            began_s = time.perf_counter()
            await self._tell_part("output_audio.delta", delta=base64.b64encode(audio).decode())
            self.held_s += time.perf_counter() - began_s

    async def _write(self, text: str) -> None:
        if not text:
            return
        item = await self._open_item()
        item.text += text
        if item.speech is not None:
            item.speech.marks.append((item.speech.frames, text))
        await self._tell_part(
            "output_audio_transcript.delta" if item.speech else "output_text.delta", delta=text
        )

    async def finish(self, finished: protocol.Finished, send: Send) -> None:
        self.finished, self.num_frames = finished, finished.frames
        if self.calls is not None and self.cancelled is None:
            await self._write(self.calls.rest())
            self.called = [Item("assistant", call=Call(*call)) for call in self.calls.found]
            if self.item is None and self.called:
                self.called[0].cue = self.cue
        if self.settings.has_audio and self.cancelled is None:
            await self.send_audio(send, await self.encode(self.encoder.finish))
        if self.settings.has_audio and finished.answer.tokens:
            self._keep_tokens(Answer.of(finished.answer), finished.reason != "cancelled")
        self.ended(finished.reason, 200)

    def _keep_tokens(self, answer: Answer, is_whole: bool) -> None:
        """Give the first item the tokens that the next turn goes on from."""
        if not self._items:
            return
        first, *others = self._items
        for item in others:
            item.first = first
        if first.speech is None:
            first.speech = self._speech()
        if is_whole:
            first.speech.answer = answer
        elif self.calls is None or not (self.calls.found or self.calls.held):
            first.speech.answer = answer.up_to(first.speech.frames)  # without a call that was cut off

    # its item

    async def _open_item(self) -> Item:
        """Return the item, which begins with the first text or audio."""
        if self.item is not None:
            return self.item
        item = Item("assistant", status="in_progress", cue=self.cue)
        if self.settings.has_audio:
            item.speech = self._speech()
        if self.conversation is not None:
            self.conversation.add(item)
        self.item = item
        await self._tell_added(item, 0)
        await self._tell_part("content_part.added", part=self._part(""))
        return item

    async def _close_item(self, status: Literal["completed", "incomplete"]) -> None:
        item = self.item
        if item is None:
            return
        item.status = status
        if item.speech is not None:
            await self._tell_part("output_audio.done")
            await self._tell_part("output_audio_transcript.done", transcript=item.text)
        else:
            await self._tell_part("output_text.done", text=item.text)
        await self._tell_part("content_part.done", part=self._part(item.text))
        await self._tell_done(item, 0)

    @property
    def _items(self) -> list[Item]:
        return [*([] if self.item is None else [self.item]), *self.called]

    async def _tell_calls(self) -> None:
        before = self.item
        for item in self.called:
            call = item.call
            assert call is not None, "an item has no call"
            index = self._items.index(item)
            item.status = "in_progress"
            if self.conversation is not None:
                self.conversation.join(item, before)
            await self._tell_added(item, index)
            where = {"response_id": self.response_id, "item_id": item.id, "output_index": index}
            where["call_id"] = call.id
            arguments = "response.function_call_arguments"
            await self.tell(f"{arguments}.delta", **where, delta=call.arguments)
            await self.tell(f"{arguments}.done", **where, name=call.name, arguments=call.arguments)
            item.status = "completed"
            await self._tell_done(item, index)
            before = item

    async def _tell_added(self, item: Item, index: int) -> None:
        where = {"response_id": self.response_id, "output_index": index}
        previous = None if self.conversation is None else self.conversation.previous(item)
        await self.tell("response.output_item.added", **where, item=item.json())
        if self.conversation is not None:
            await self.tell("conversation.item.added", previous_item_id=previous, item=item.json())
            await self.tell("conversation.item.created", previous_item_id=previous, item=item.json())

    async def _tell_done(self, item: Item, index: int) -> None:
        where = {"response_id": self.response_id, "output_index": index}
        await self.tell("response.output_item.done", **where, item=item.json())
        if self.conversation is not None and item in self.conversation.items:
            previous = self.conversation.previous(item)
            await self.tell("conversation.item.done", previous_item_id=previous, item=item.json())

    def _speech(self) -> Speech:
        return Speech(self.model.frame_rate_hz * self.settings.speed / 1000)

    def _part(self, text: str) -> dict[str, Any]:
        if self.settings.has_audio:
            return {"type": "audio", "transcript": text}
        return {"type": "text", "text": text}

    async def _tell_part(self, type: str, **fields: Any) -> None:
        assert self.item is not None, "a part has no item"
        where = {
            "response_id": self.response_id,
            "item_id": self.item.id,
            "output_index": 0,
            "content_index": 0,
        }
        await self.tell(f"response.{type}", **where, **fields)

    def _json(self, status: str) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": "realtime.response",
            "status": status,
            "status_details": self._details(status),
            "output": [item.json() for item in self._items],
            "conversation_id": None if self.conversation is None else self.conversation.id,
            **self.settings.response_json(),
            "metadata": self.metadata,
            "usage": None if self.finished is None else realtime_usage(self.finished),
        }

    def _details(self, status: str) -> dict[str, Any] | None:
        match status:
            case "cancelled":
                return {"type": status, "reason": self.cancelled}
            case "incomplete":
                return {"type": status, "reason": "max_output_tokens"}
            case "failed":
                assert self.error is not None, "an answer failed without an error"
                error = {"type": self.error.type, "code": self.error.code, "message": self.error.message}
                return {"type": status, "error": error}
        return None


def realtime_usage(finished: protocol.Finished) -> dict[str, Any]:
    """Return the tokens of the prompt and of the answer, by the names of the Realtime API."""
    usage = usage_of(finished)
    return {
        "total_tokens": usage["total_tokens"],
        "input_tokens": usage["prompt_tokens"],
        "output_tokens": usage["completion_tokens"],
        "input_token_details": usage["prompt_tokens_details"],
        "output_token_details": usage["completion_tokens_details"],
    }
