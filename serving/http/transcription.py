"""The words of a recording, in the form of OpenAI's transcriptions: JSON, text, or events while they are written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from litestar.types import Send

from serving import protocol
from serving.http.chat import LEAST_S, NO_CHOICE, usage_of
from serving.http.errors import cut, refusal
from serving.http.objects import Model
from serving.http.references import LoadedVoice, check_duration
from serving.http.schemas import SpeechRequest, TranscriptionRequest
from serving.http.server import Server
from serving.http.speech import Speech, body

NO_TIMES = "no model gives times; response_format takes json, text and verbose_json"
MAX_NAMED = 10  # fields in warnings
FIELD = {"turns": "file", "references": "file", "text": "file"}


def check(data: TranscriptionRequest, form: Mapping[str, object]) -> None:
    """Check a request as far as possible without the engine. form: all of its fields; some clients name lists
    without brackets. Raises the refusal."""
    if data.response_format not in ("json", "text", "verbose_json"):
        raise refusal(400, NO_TIMES, "response_format")
    for name in ("timestamp_granularities[]", "timestamp_granularities"):
        if form.get(name):
            raise refusal(400, f"leave {name} out: {NO_TIMES}", name)
    for name in ("include[]", "include"):
        if form.get(name):
            raise refusal(400, f"leave {name} out: no model gives probabilities", name)


def drop_ignored(data: TranscriptionRequest, names: Iterable[str], model: Model, server: Server) -> list[str]:
    """Remove what the model cannot use, and return a warning for each. names: the fields of the form. Raises the
    refusal if the server is strict."""
    known = [field.encode_name for field in msgspec.structs.fields(TranscriptionRequest)]
    unknown = [name for name in names if name not in known]
    if unknown and server.names.is_strict:
        message = f"there is no field {cut(unknown[0])!r}; the fields are: {', '.join(known)}"
        raise refusal(400, message, unknown[0], "unknown_field")
    ignored = [*(["prompt"] if data.prompt else []), *unknown[:MAX_NAMED]]
    warnings = [f"field {cut(name)!a} has no meaning here; it is ignored" for name in ignored]
    if data.language and not model.languages and not server.names.is_strict:
        warnings.append(f"model {model.id!a} has no choice of a language; language is ignored")
        data.language = None
    return warnings


class Transcription(Speech):
    """An ASGI application for one request, like `Speech`. file: the recording, as it was sent."""

    def __init__(
        self,
        server: Server,
        data: TranscriptionRequest,
        file: bytes,
        model: Model,
        given_id: str | None = None,
        warnings: Sequence[str] = (),
    ):
        request = SpeechRequest(
            input="",
            response_format="pcm",
            stream=bool(data.stream),
            stream_format="sse" if data.stream else "audio",
            language=data.language,
            temperature=data.temperature,
        )
        super().__init__(server, request, {}, model, NO_CHOICE, given_id, warnings)
        self.fields.output = "transcript"
        self.form, self.language = data.response_format, data.language
        self.recording: bytes | None = file
        self.duration_s = 0.0
        self.text = ""

    def client_field(self, param: str) -> str:
        return FIELD.get(param, param)

    @property
    def media_type(self) -> str:
        if self.is_sse:
            return super().media_type
        return "text/plain; charset=utf-8" if self.form == "text" else "application/json"

    async def message(self) -> protocol.Speak:
        """Return the request for the engine. After this, no other object holds the recording."""
        file, self.recording = self.recording or b"", None
        longest_s = self.server.limits.reference_s
        try:
            clip = await self.server.references.recordings.decode(lambda: file, longest_s)
            check_duration(clip, (LEAST_S, longest_s))
        except ValueError as error:
            raise refusal(400, f"file cannot be used: {error}", "file") from None
        self.duration_s = clip.duration_s
        message = self.speak_message(LoadedVoice(None, []))
        message.turns.append(protocol.Turn("user", clip=clip))
        return message

    async def tell_loading(self, state: protocol.ModelState, send: Send) -> None:
        """OpenAI's events have no place for it."""

    async def take(self, message: protocol.Outcome, send: Send) -> bool:
        if not isinstance(message, protocol.Text):
            return await super().take(message, send)
        self.text += message.text
        if self.is_sse:
            await self._tell(send, {"type": "transcript.text.delta", "delta": message.text})
        return True

    async def _tell(self, send: Send, event: dict[str, Any]) -> None:
        if not self.is_started:
            await self.start(send)
        await self.send_body(send, b"data: " + msgspec.json.encode(event) + b"\n\n")

    async def finish_stream(self, finished: protocol.Finished, send: Send) -> None:
        done = {"type": "transcript.text.done", "text": self.text.strip(), "usage": tokens_of(finished)}
        await self._tell(send, done)
        await body(send, b"", more=False)

    def whole(self, finished: protocol.Finished) -> bytes:
        text = self.text.strip()
        if self.form == "text":
            return text.encode() + b"\n"
        if self.form == "json":
            return msgspec.json.encode({"text": text, "usage": tokens_of(finished)})
        seconds = round(self.duration_s, 3)
        verbose = {
            "task": "transcribe",
            "language": self.language or "unknown",  # models do not say which one they heard
            "duration": seconds,
            "text": text,
            "usage": {"type": "duration", "seconds": seconds},
        }
        return msgspec.json.encode(verbose)


def tokens_of(finished: protocol.Finished) -> dict[str, Any]:
    usage = usage_of(finished)
    details = usage["prompt_tokens_details"]
    return {
        "type": "tokens",
        "input_tokens": usage["prompt_tokens"],
        "output_tokens": usage["completion_tokens"],
        "total_tokens": usage["total_tokens"],
        "input_token_details": {name: details[name] for name in ("audio_tokens", "text_tokens")},
    }
