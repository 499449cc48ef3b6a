"""The routes for ElevenLabs' clients: /v1/text-to-speech/{voice_id}, its /stream, both /with-timestamps, and their
lists of voices.

    their request ─ elevenlabs/fields.py ─ SpeechRequest ─ the path of POST /v1/audio/speech
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec
from litestar import get, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.types import ASGIApp, Send

from serving.http.elevenlabs.bodies import (
    DEFAULT_FORMAT,
    ElevenLabsRequest,
    ElevenLabsVoice,
    ElevenLabsVoices,
    TimedAudio,
)
from serving.http.elevenlabs.characters import Alignments, Characters, joined
from serving.http.elevenlabs.fields import (
    THEIR_NAME,
    drop_language,
    drop_meaningless,
    fields_of_speech,
    their_names,
)
from serving.http.errors import refusal
from serving.http.prepare import RESPONSES, prepared
from serving.http.requests import ForgetfulRequest, request_of
from serving.http.server import REFUSALS, Server
from serving.http.speech import Speech
from serving.http.uploads import voice_list
from serving.http.word_times import AudioWords
from serving.protocol import Finished

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
        warnings += more + drop_language(asked, model, server)
        return prepared(kind, asked, body, model, warnings, request, server)


def check_aligner(server: Server) -> None:
    """Raise the refusal if this server cannot give timestamps."""
    if server.aligner is None:
        raise refusal(400, NO_ALIGNER, code="no_aligner")
    if server.aligner.fault:
        raise refusal(503, server.aligner.fault, code="aligner_failed")
