"""The routes for ElevenLabs' clients: /v1/text-to-speech/{voice_id}, its /stream, both /with-timestamps, and their
lists of voices.

    their request ─ fields_of_speech ─ SpeechRequest ─ the path of POST /v1/audio/speech

Names of theirs stand for the server's own as OpenAI's names do (names.py): if one model of the server speaks texts,
with a warning, unless the server is strict. A field that has no meaning here is ignored, with a warning, or refused by a strict server.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from litestar import get, post
from litestar.exceptions import HTTPException
from litestar.openapi.datastructures import ResponseSpec
from litestar.types import ASGIApp, Send

from serving.http.characters import Alignments, Characters, joined
from serving.http.elevenlabs import (
    DEFAULT_FORMAT,
    MEANINGLESS,
    ElevenLabsRequest,
    ElevenLabsVoice,
    ElevenLabsVoices,
    TimedAudio,
)
from serving.http.errors import SPEECH, cut, error_of, refusal
from serving.http.prepare import RESPONSES, prepared
from serving.http.requests import ForgetfulRequest, request_of
from serving.http.schemas import FIELDS
from serving.http.server import REFUSALS, Server, can
from serving.http.speech import Speech
from serving.http.uploads import voice_list
from serving.http.word_times import AudioWords
from serving.protocol import Finished

FORMAT = re.compile(r"(mp3|opus|pcm|wav|ulaw|alaw)_(\d{4,5})(?:_(\d{2,3}))?", re.ASCII)
FORMATS = (
    "mp3_44100_128 (default), opus_48000_64, pcm_24000, wav_24000, ulaw_8000 or alaw_8000, with other rates"
)
VOICE_ID = re.compile(r"[A-Za-z0-9]{20}", re.ASCII)
MODEL_PREFIX = "eleven_"
# Their names of a speech request's fields.
THEIR_NAME = {"input": "text", "model": "model_id", "voice": "voice_id", "language": "language_code"}
# Fields of a speech request that others decide here, and what decides them.
DECIDED_BY = {
    **THEIR_NAME,
    **dict.fromkeys(("response_format", "sample_rate", "bit_rate"), "output_format"),
    **dict.fromkeys(("stream", "stream_format", "timestamp_granularities"), f"POST {SPEECH}"),
    "normalize": "apply_text_normalization",
}
TIMES = "audio in base64 with the times of its characters: one object, or one for each line of a stream"
WITH_TIMES = {**RESPONSES, 200: ResponseSpec(TimedAudio, description=TIMES, generate_examples=False)}
AUDIO = {**RESPONSES, 200: ResponseSpec(bytes, description="the audio", media_type="audio/*")}


# All answers with timestamps are streams of events up to here: only these have word times.
TIMED = {"stream": True, "stream_format": "sse", "timestamp_granularities": ["word"]}
NO_ALIGNER = "this server has no aligner, so it has no timestamps; an operator chooses one with --aligner DIR"


class ElevenLabsSpeech(Speech):
    """The answer to a request in ElevenLabs' form. Errors have their names of the fields."""

    def client_field(self, param: str) -> str:
        field = super().client_field(param)
        return THEIR_NAME.get(field, field)


class TimedStream(ElevenLabsSpeech):
    """Lines of JSON with audio as it is generated, and with the characters of each piece once they are known."""

    def __init__(self, *given: Any, **more: Any):
        super().__init__(*given, **more)
        self.is_sse = False
        self.characters = Characters(self.request.input)

    @property
    def media_type(self) -> str:
        return "application/x-ndjson"

    async def send_audio(self, send: Send, audio: bytes) -> None:
        if audio:
            await self.send_line(send, TimedAudio(base64.b64encode(audio).decode(), None, None))

    async def send_event(self, send: Send, message: msgspec.Struct) -> None:
        if isinstance(message, AudioWords):
            await self.send_characters(send, self.characters.take(message.words))

    async def send_last_words(self, send: Send) -> None:
        await super().send_last_words(send)
        if (rest := self.characters.rest()) is not None:
            await self.send_characters(send, rest)

    async def send_characters(self, send: Send, found: Alignments) -> None:
        await self.send_line(send, TimedAudio("", found.alignment, found.normalized_alignment))

    async def send_line(self, send: Send, line: TimedAudio) -> None:
        if not self.is_started:
            await self.start(send)
        await self.send_body(send, msgspec.json.encode(line) + b"\n")


class TimedFile(TimedStream):
    """One object of JSON with the whole audio and all characters."""

    def __init__(self, *given: Any, **more: Any):
        super().__init__(*given, **more)
        self.request.stream = False
        self.found: list[Alignments] = []

    @property
    def media_type(self) -> str:
        return "application/json"

    def whole_bytes(self, pcm_bytes: int) -> int:
        """The file is also there in base64 and in JSON."""
        rate = self.encoder.sample_rate_hz / self.model.sample_rate_hz
        return super().whole_bytes(pcm_bytes) + int(3 * pcm_bytes * max(rate, 1) / self.request.speed)

    async def send_characters(self, send: Send, found: Alignments) -> None:
        self.found.append(found)

    async def finish(self, finished: Finished, send: Send) -> None:
        await self.send_last_words(send)
        await super().finish(finished, send)

    def whole(self, finished: Finished) -> bytes:
        found = joined(self.found)
        audio = base64.b64encode(self.file()).decode()
        return msgspec.json.encode(TimedAudio(audio, found.alignment, found.normalized_alignment))


@post("/v1/text-to-speech/{voice_id:str}", status_code=200, responses=AUDIO, request_class=ForgetfulRequest)
async def speak_whole(
    voice_id: str,
    data: ElevenLabsRequest,
    request: ForgetfulRequest,
    server: Server,
    output_format: str = DEFAULT_FORMAT,
) -> ASGIApp:
    """Speak a text into a file, for ElevenLabs' clients."""
    return await answer(voice_id, data, request, server, output_format, ElevenLabsSpeech, {"stream": False})


@post(
    "/v1/text-to-speech/{voice_id:str}/stream",
    status_code=200,
    responses=AUDIO,
    request_class=ForgetfulRequest,
)
async def speak_stream(
    voice_id: str,
    data: ElevenLabsRequest,
    request: ForgetfulRequest,
    server: Server,
    output_format: str = DEFAULT_FORMAT,
) -> ASGIApp:
    """Speak a text, and send the audio as it is generated, for ElevenLabs' clients."""
    return await answer(voice_id, data, request, server, output_format, ElevenLabsSpeech, {"stream": True})


@post(
    "/v1/text-to-speech/{voice_id:str}/with-timestamps",
    status_code=200,
    responses=WITH_TIMES,
    request_class=ForgetfulRequest,
)
async def speak_whole_with_times(
    voice_id: str,
    data: ElevenLabsRequest,
    request: ForgetfulRequest,
    server: Server,
    output_format: str = DEFAULT_FORMAT,
) -> ASGIApp:
    """Speak a text into a file with the times of its characters, for ElevenLabs' clients."""
    check_aligner(server)
    return await answer(voice_id, data, request, server, output_format, TimedFile, TIMED)


@post(
    "/v1/text-to-speech/{voice_id:str}/stream/with-timestamps",
    status_code=200,
    responses=WITH_TIMES,
    request_class=ForgetfulRequest,
)
async def speak_stream_with_times(
    voice_id: str,
    data: ElevenLabsRequest,
    request: ForgetfulRequest,
    server: Server,
    output_format: str = DEFAULT_FORMAT,
) -> ASGIApp:
    """Speak a text, and send the audio as it is generated and the times of its characters, for ElevenLabs'
    clients."""
    check_aligner(server)
    return await answer(voice_id, data, request, server, output_format, TimedStream, TIMED)


@get(["/v1/voices", "/v2/voices"], responses=REFUSALS)
async def list_voices_in_their_form(server: Server) -> ElevenLabsVoices:
    """List all voices on one page, for ElevenLabs' clients."""
    listed = await voice_list(server.models, server)
    voices = [
        ElevenLabsVoice(voice.id, voice.name, "premade" if voice.type == "preset" else "cloned")
        for voice in listed.data
        if not voice.damaged
    ]
    return ElevenLabsVoices(voices, len(voices))


async def answer(
    voice_id: str,
    data: ElevenLabsRequest,
    request: ForgetfulRequest,
    server: Server,
    output_format: str,
    kind: type[ElevenLabsSpeech],
    fixed: dict[str, Any],
) -> ElevenLabsSpeech:
    """Return the answer to a request. fixed: fields of the speech request that the route decides. Raises the
    refusal, Away."""
    body = {name: value for name, value in (await request.take_json()).items() if value is not None}
    with their_names():
        warnings = drop_meaningless(body, server)
        own = {name: body.pop(name) for name in ElevenLabsRequest.__struct_fields__ if name in body}
        speech = fields_of_speech(voice_id, data, own, body, output_format, server, warnings)
        asked = request_of(speech, fixed)
        model, more = server.chosen_model(asked)
        warnings += more
        if asked.language is not None and not model.languages and not server.names.is_strict:
            warnings.append(f"model {model.id!a} has no choice of a language; language_code is ignored")
            asked.language = None
        return prepared(kind, asked, body, model, warnings, request, server)


def check_aligner(server: Server) -> None:
    """Raise the refusal if this server cannot give timestamps."""
    if server.aligner is None:
        raise refusal(400, NO_ALIGNER, code="no_aligner")
    if server.aligner.fault:
        raise refusal(503, server.aligner.fault, code="aligner_failed")


def drop_meaningless(body: dict[str, Any], server: Server) -> list[str]:
    """Remove the fields that have no meaning here, and return a warning for each. Raises the refusal of a strict
    server."""
    settings = body.get("voice_settings") or {}
    given = [name for name in MEANINGLESS if name in body]
    given += [
        f"voice_settings.{name}" for name, value in settings.items() if name != "speed" and value is not None
    ]
    given = [cut(name) for name in given]
    if given and server.names.is_strict:
        raise refusal(400, f"{given[0]} has no meaning here; leave it out", given[0], "unknown_field")
    for name in MEANINGLESS:
        body.pop(name, None)
    return [f"field {name!a} has no meaning here; it is ignored" for name in given]


def fields_of_speech(
    voice_id: str,
    data: ElevenLabsRequest,
    own: dict[str, Any],
    others: dict[str, Any],
    output_format: str,
    server: Server,
    warnings: list[str],
) -> dict[str, Any]:
    """Return the fields of the speech request, and add warnings for names that stand for others. own: ElevenLabs'
    fields; others: those of a speech request, and options. Raises the refusal."""
    for name in sorted(DECIDED_BY.keys() & others):
        message = f"{name} is not a field of this route; use {DECIDED_BY[name]}"
        raise refusal(400, message, name, "unknown_field")
    fields = {name: value for name, value in others.items() if name in FIELDS[SPEECH]}
    fields |= audio_fields(output_format) | {"input": data.text}
    if (voice := chosen_voice(voice_id, server, warnings)) is not None:
        fields["voice"] = voice
    if (model := chosen_model(data.model_id, server, warnings)) is not None:
        fields["model"] = model
    if data.language_code:
        fields["language"] = data.language_code
    if data.voice_settings is not None and data.voice_settings.speed is not None:
        fields["speed"] = data.voice_settings.speed
    if data.apply_text_normalization == "on":
        fields["normalize"] = True
    return fields | {name: own[name] for name in ("seed",) if name in own}


def audio_fields(output_format: str) -> dict[str, Any]:
    """Return the fields for a format such as mp3_44100_128. Raises the refusal."""
    match = FORMAT.fullmatch(output_format)
    if match is None:
        message = f"output_format {cut(output_format)!r} is not possible; it takes {FORMATS}"
        raise refusal(400, message, "output_format")
    name, rate_hz, kilobits = match.groups()
    rate = {} if kilobits is None else {"bit_rate": 1000 * int(kilobits)}
    return {"response_format": name, "sample_rate": int(rate_hz), **rate}


def chosen_voice(voice_id: str, server: Server, warnings: list[str]) -> str | None:
    """Return the voice; None for the default one, which stands in for an ID of ElevenLabs'."""
    models = server.models
    known = voice_id in server.names.voices or server.voices.has(voice_id)
    known = known or any(voice_id in model.voices for model in models)
    is_one = sum(can(model, "speak") for model in models) == 1
    if known or server.names.is_strict or not is_one or not VOICE_ID.fullmatch(voice_id):
        return voice_id
    warnings.append(f"voice {voice_id!a} does not exist; the default voice is used instead")
    return None


def chosen_model(model_id: str | None, server: Server, warnings: list[str]) -> str | None:
    """Return the name of the model; None for the only one that speaks, which stands in for ElevenLabs'."""
    models = server.models
    speaking = [model.id for model in models if can(model, "speak")]
    if model_id is None or model_id in server.names.models or any(model_id == model.id for model in models):
        return model_id
    if server.names.is_strict or len(speaking) != 1 or not model_id.startswith(MODEL_PREFIX):
        return model_id
    warnings.append(f"model {model_id!a} is not served; {speaking[0]!a} is used instead")
    return None


@contextmanager
def their_names() -> Iterator[None]:
    """Put ElevenLabs' names of fields into refusals."""
    try:
        yield
    except HTTPException as error:
        found = error_of(error)
        name = {**THEIR_NAME, "sample_rate": "output_format"}.get(found.param or "")
        if name is None or found.code == "unknown_field" or not isinstance(error.extra, dict):
            raise
        error.extra["param"] = name
        error.detail = re.sub(rf"^{found.param}\b(?! ')", name, error.detail)
        raise
