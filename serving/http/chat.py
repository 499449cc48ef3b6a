"""The answer to a conversation, in the form of OpenAI's chat completions: one object, or chunks as
server-sent events. Text is the transcript of the audio, or the content if no audio was asked for."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from litestar.types import Send

from serving import protocol
from serving.http.answers import ANSWER_S, Answer
from serving.http.errors import cut, refusal
from serving.http.objects import Model
from serving.http.references import check_duration, unpack
from serving.http.schemas import (
    AudioPart,
    ChatMessage,
    ChatRequest,
    ResponseFormat,
    SpeechRequest,
    TextPart,
    Voice,
)
from serving.http.server import Server
from serving.http.speech import Speech, body
from serving.http.tool_calls import Calls, in_openais_form, schemas_of, takes_none, written
from serving.http.voice_choice import VoiceChoice

PCM_HZ = 24_000  # pcm16 does not carry its rate, and OpenAI's clients assume this one
NO_CHOICE = VoiceChoice(None, False, (), "audio", None, None)  # a model that answers has one voice
LEAST_S = 0.01  # of a clip
ROLES = {"developer": "system"}
FIELD = {
    "turns": "messages",
    "text": "messages",
    "references": "messages",
    "max_tokens": "max_completion_tokens",
}


def check(data: ChatRequest, model: Model) -> None:
    """Check a request as far as possible without the engine. Raises the refusal."""
    has_tools = data.tools or any(message.role == "tool" for message in data.messages)
    if has_tools and not model.takes_tools:
        raise refusal(400, takes_none(model.id), "tools")
    if data.max_tokens is not None and data.max_completion_tokens is not None:
        raise refusal(400, "max_tokens and max_completion_tokens are the same; give one", "max_tokens")
    wants_audio = "audio" in (data.modalities or ())
    if wants_audio and data.audio is None:
        raise refusal(400, 'audio is missing: with modalities ["text", "audio"] it says the format', "audio")
    if data.audio is not None and not wants_audio:
        raise refusal(
            400, 'audio needs modalities ["text", "audio"]; set them, or leave audio out', "modalities"
        )
    if data.audio is not None and data.stream and data.audio.format != "pcm16":
        raise refusal(400, f"a stream has audio in pcm16, not in {data.audio.format}", "audio")


def voice_of(data: ChatRequest) -> str | None:
    given = None if data.audio is None else data.audio.voice
    return given.id if isinstance(given, Voice) else given


def speaks_in(model: Model, voice: str, server: Server) -> bool:
    """Return whether a model that answers can speak in a voice: one of its own, or an uploaded one."""
    return voice in model.voices or (model.reference_s is not None and server.voices.has(voice))


def choice_named(voice: str | None, model: Model, server: Server) -> VoiceChoice:
    """Return a voice of the model, or an uploaded one. Raises the refusal."""
    return NO_CHOICE if voice is None else server.chosen_voice(SpeechRequest(input="", voice=voice), model)


def choice_of(data: ChatRequest, model: Model, server: Server) -> VoiceChoice:
    """Return the voice of the answer, with a warning for one that does not exist. OpenAI's clients must name one.
    Raises the refusal."""
    voice = voice_of(data)
    if voice is not None and not model.answers:
        return replace(NO_CHOICE, warning="audio.voice is not used: a clip goes on in its own voice")
    if voice is None or speaks_in(model, voice, server):
        return choice_named(voice, model, server)
    warning = f"model {model.id} has no voice {cut(voice)!a}; it speaks in its own"
    return replace(NO_CHOICE, warning=warning)


def stops_of(data: ChatRequest) -> tuple[str, ...]:
    return (data.stop,) if isinstance(data.stop, str) else tuple(data.stop or ())


def speech_request(data: ChatRequest) -> SpeechRequest:
    """Return the fields of a conversation that a speech request has, too."""
    audio = data.audio
    given: ResponseFormat = "pcm" if audio is None or audio.format == "pcm16" else audio.format
    return SpeechRequest(
        input="",
        response_format=given,
        sample_rate=PCM_HZ if given == "pcm" else None,
        stream=bool(data.stream),
        stream_format="sse" if data.stream else "audio",
        seed=data.seed,
        temperature=data.temperature,
        top_p=data.top_p,
    )


class Chat(Speech):
    """An ASGI application for one request, like `Speech`."""

    def __init__(
        self,
        server: Server,
        data: ChatRequest,
        model: Model,
        given_id: str | None,
        warnings: Sequence[str] = (),
    ):
        options = {} if data.most_tokens is None else {"max_tokens": data.most_tokens}
        choice = choice_of(data, model, server)
        super().__init__(server, speech_request(data), options, model, choice, given_id, warnings)
        self.fields.stop = stops_of(data)
        self.num_chars = len(text_of(data.messages[-1]))
        self.wants_audio = data.audio is not None
        self.tools = [] if data.tool_choice == "none" else data.tools or []
        self.calls = Calls() if self.tools else None
        self.has_usage = data.stream_options is not None and data.stream_options.include_usage
        self.messages: list[ChatMessage] | None = data.messages
        self.created = int(time.time())
        self.text = ""
        self.has_role = self.has_audio_id = False  # whether they were sent

    def client_field(self, param: str) -> str:
        return FIELD.get(param, param)

    @property
    def media_type(self) -> str:
        return super().media_type if self.is_sse else "application/json"

    # the request

    async def message(self) -> protocol.Speak:
        """Return the request for the engine. After this, no other object holds its recordings."""
        messages, self.messages = self.messages or [], None
        schemas = schemas_of(msgspec.to_builtins(self.tools), self.server.limits.text_chars)
        message = self.speak_message(await self.server.references.find(self.voice, self.request, self.model))
        if not self.wants_audio and "text" in self.model.outputs:
            message.request.output = "text"
        for i, one in enumerate(messages):
            message.turns.append(await self._turn(i, one))
        if self.tools:
            message.turns.insert(message.turns[0].role == "system", protocol.Turn("tools", schemas))
        check_clips(message, "messages")
        return message

    async def _turn(self, i: int, message: ChatMessage) -> protocol.Turn:
        """Return a turn. Raises the refusal."""
        if message.audio is not None:
            if message.role != "assistant":
                raise refusal(400, f"messages[{i}]: only an assistant's message names an audio", "messages")
            return self.server.answers.find(message.audio.id, self.model.id, f"messages[{i}]").turn()
        given, text = message.content, text_of(message)
        if message.tool_calls is not None:
            if message.role != "assistant":
                raise refusal(400, f"messages[{i}]: only an assistant's message calls tools", "messages")
            text += "".join(
                written(call.function.name, call.function.arguments) for call in message.tool_calls
            )
        parts = [] if isinstance(given, str) else list(given or ())
        audio = [part for part in parts if isinstance(part, AudioPart)]
        if len(audio) > 1:
            raise refusal(400, f"messages[{i}] has {len(audio)} clips; give one", "messages")
        if len(text) > self.server.limits.text_chars:
            most = f"this server takes up to {self.server.limits.text_chars}"
            raise refusal(400, f"messages[{i}] has {len(text)} characters; {most}", "messages")
        clip = await self._clip(i, audio[0]) if audio else None
        return protocol.Turn(ROLES.get(message.role, message.role), text or None, clip)

    async def _clip(self, i: int, part: AudioPart) -> protocol.AudioClip:
        limits, data = self.server.limits, part.input_audio.data
        try:
            clip = await self.server.references.recordings.decode(
                lambda: unpack(data, limits.reference_bytes), limits.reference_s
            )
            check_duration(clip, (LEAST_S, limits.reference_s))
        except ValueError as error:
            raise refusal(400, f"messages[{i}]: the audio cannot be used: {error}", "messages") from None
        return clip

    # the answer

    async def tell_loading(self, state: protocol.ModelState, send: Send) -> None:
        """OpenAI's chunks have no place for it."""

    async def take(self, message: protocol.Outcome, send: Send) -> bool:
        if not isinstance(message, protocol.Text):
            return await super().take(message, send)
        await self._take_text(message.text if self.calls is None else self.calls.take(message.text), send)
        return True

    async def _take_text(self, text: str, send: Send) -> None:
        """Take a text that the client sees."""
        self.text += text
        if self.is_sse and text:
            await self.send_delta(
                send, self._heard(transcript=text) if self.wants_audio else {"content": text}
            )

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        return in_openais_form(self.calls.found, self.id) if self.calls is not None else []

    def _reason(self, finished: protocol.Finished) -> str:
        return "tool_calls" if self.tool_calls else finished.reason

    async def take_audio(self, pcm: bytes, send: Send) -> None:
        if self.wants_audio:
            await super().take_audio(pcm, send)
        else:
            self.num_bytes += len(pcm)

    async def send_audio(self, send: Send, audio: bytes) -> None:
        if audio and self.wants_audio:
            await self.send_delta(send, self._heard(data=base64.b64encode(audio).decode()))

    async def send_delta(self, send: Send, delta: dict[str, Any], reason: str | None = None) -> None:
        """Send a chunk. The first one says the role."""
        if not self.has_role:
            self.has_role = True
            delta = {"role": "assistant", **delta}
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        await self._send_chunk(send, {"choices": [choice]})

    async def _send_chunk(self, send: Send, content: dict[str, Any]) -> None:
        if not self.is_started:
            await self.start(send)
        await self.send_body(send, b"data: " + msgspec.json.encode(self._head(".chunk") | content) + b"\n\n")

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.id}",
            "object": f"chat.completion{kind}",
            "created": self.created,
            "model": self.model.id,
        }

    def _heard(self, **content: str) -> dict[str, Any]:
        """Return the audio of a delta. The first one has the audio's ID."""
        named = {} if self.has_audio_id else {"id": self.audio_id}
        self.has_audio_id = True
        return {"audio": named | content}

    @property
    def audio_id(self) -> str:
        return f"audio_{self.id}"

    @property
    def expires_at(self) -> int:
        return self.created + int(ANSWER_S)

    async def finish(self, finished: protocol.Finished, send: Send) -> None:
        if self.wants_audio and finished.answer.tokens:
            self.server.answers.keep(self.audio_id, self.model.id, Answer.of(finished.answer))
        if self.calls is not None:
            await self._take_text(self.calls.rest(), send)
        await super().finish(finished, send)

    async def finish_stream(self, finished: protocol.Finished, send: Send) -> None:
        if self.wants_audio:
            await self.send_audio(send, await self.encode(self.encoder.finish))
            await self.send_delta(send, {"audio": {"expires_at": self.expires_at}})
        if calls := self.tool_calls:
            await self.send_delta(send, {"tool_calls": [{"index": i} | call for i, call in enumerate(calls)]})
        await self.send_delta(send, {}, self._reason(finished))
        if self.has_usage:
            await self._send_chunk(send, {"choices": [], "usage": usage_of(finished)})
        await body(send, b"data: [DONE]\n\n", more=False)

    def whole(self, finished: protocol.Finished) -> bytes:
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": None}
        if self.wants_audio:
            data = base64.b64encode(self.file()).decode()
            spoken = {
                "id": self.audio_id,
                "data": data,
                "transcript": self.text,
                "expires_at": self.expires_at,
            }
            message |= {"content": None, "audio": spoken}
        if calls := self.tool_calls:
            message |= {"tool_calls": calls, "content": message["content"] or None}
        choice = {"index": 0, "message": message, "finish_reason": self._reason(finished), "logprobs": None}
        return msgspec.json.encode(self._head("") | {"choices": [choice], "usage": usage_of(finished)})


def check_clips(message: protocol.Speak, field: str) -> None:
    """Raise the refusal for clips that are too large for a message to the engine."""
    if sum(clip.num_bytes for clip in message.recordings) > protocol.MAX_CLIP_BYTES:
        limit = f"{protocol.MAX_CLIP_BYTES >> 20} MiB of float32 samples"
        raise refusal(400, f"all clips together exceed {limit}", field)


def text_of(message: ChatMessage) -> str:
    """Return the text of a message, of all its parts."""
    given = message.content
    parts = [TextPart(given)] if isinstance(given, str) else list(given or ())
    return "".join(part.text for part in parts if isinstance(part, TextPart))


def usage_of(finished: protocol.Finished) -> dict[str, Any]:
    """Return the tokens of the prompt and of the answer, in OpenAI's form."""
    prompt, heard = finished.usage.get("input_tokens", 0), finished.usage.get("input_audio_tokens", 0)
    written, spoken = finished.usage.get("text_tokens", 0), finished.frames
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written + spoken,
        "total_tokens": prompt + written + spoken,
        "prompt_tokens_details": {
            "text_tokens": prompt - heard,
            "audio_tokens": heard,
            "cached_tokens": finished.usage.get("cached_tokens", 0),
        },
        "completion_tokens_details": {"text_tokens": written, "audio_tokens": spoken},
    }
