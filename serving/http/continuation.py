"""A text or a clip that goes on, in the form of OpenAI's chat completions, for models that do not answer. The only
message is the assistant's, and the model continues it: a text in text, a clip in audio."""

from __future__ import annotations

from typing import Any

from serving import protocol
from serving.http.chat import FIELD, Chat, check_clips, text_of
from serving.http.errors import refusal
from serving.http.objects import Model
from serving.http.references import LoadedVoice
from serving.http.schemas import AudioPart, ChatMessage, ChatRequest
from serving.http.server import Server

LIMIT = "max_tokens"  # the option that bounds a text; `max_frames` bounds a clip


def clip_in(message: ChatMessage) -> bool:
    parts = [] if isinstance(message.content, str) else message.content or []
    return any(isinstance(part, AudioPart) for part in parts)


def check(data: ChatRequest, model: Model) -> None:
    """Check a request as far as possible without the engine. Raises the refusal."""
    messages = data.messages
    if len(messages) != 1 or messages[0].role != "assistant":
        can = f"model {model.id!r} does not answer; it continues one message of the assistant"
        given = ", ".join(message.role for message in messages)
        raise refusal(400, f"{can}, and messages has: {given}", "messages")
    is_clip = clip_in(messages[0])
    if is_clip and text_of(messages[0]):
        raise refusal(400, "messages[0] has a text and a clip; give one of them to continue", "messages")
    output = "continuation" if is_clip else "text"
    if output not in model.outputs:
        possible = ", ".join(model.outputs)
        raise refusal(400, f"model {model.id!r} cannot give a {output}; it gives: {possible}", "messages")
    if is_clip and data.audio is None:
        why = 'a clip goes on in audio: set modalities ["text", "audio"], and audio with a format'
        raise refusal(400, why, "audio")
    if not is_clip and data.audio is not None:
        raise refusal(400, 'a text goes on in text: set modalities ["text"], and leave audio out', "audio")


class Continuation(Chat):
    """An ASGI application for one request, like `Speech`."""

    def __init__(self, server: Server, data: ChatRequest, model: Model, *rest: Any):
        check(data, model)
        super().__init__(server, data, model, *rest)
        self.fields.output = "continuation" if clip_in(data.messages[0]) else "text"
        if self.fields.output == "continuation":
            self.options.pop(LIMIT, None)
            self.fields.max_frames = data.most_tokens

    def client_field(self, param: str) -> str:
        return (FIELD | {"max_frames": "max_completion_tokens"}).get(param, param)

    async def message(self) -> protocol.Speak:
        """Return the request for the engine. After this, no other object holds its recording."""
        messages, self.messages = self.messages or [], None
        turn = await self._turn(0, messages[0])
        message = self.speak_message(LoadedVoice(None, []))
        if turn.clip is None:
            message.request.text = turn.text or ""
        else:
            message.turns.append(protocol.Turn("user", clip=turn.clip))
            check_clips(message, "messages")
        return message
