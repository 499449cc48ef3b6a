"""The routes of voices: /v1/audio/voices, with the models' own and the uploaded ones."""

from __future__ import annotations

import asyncio
from typing import Annotated

import numpy as np
from litestar import Response, delete, get, patch, post, route
from litestar.enums import RequestEncodingType
from litestar.exceptions import HTTPException
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import Body

from serving import protocol
from serving.audio import pcm16
from serving.http import encode
from serving.http.errors import refusal
from serving.http.references import is_own, possible_voices
from serving.http.schemas import (
    Entry,
    ErrorBody,
    Model,
    VoiceDeleted,
    VoiceList,
    VoiceName,
    VoiceObject,
    VoiceUpload,
)
from serving.http.server import REFUSALS, TOO_LARGE, UNKNOWN, WRONG, Server
from serving.http.voices import Damaged, StoredVoice, Taken, TooMany, clean_name

NO_ROOM = ResponseSpec(ErrorBody, description="the server's disk is full")
TAKEN = ResponseSpec(ErrorBody, description="a voice of that name already exists")


@get("/v1/audio/voices", responses=REFUSALS)
async def list_voices(server: Server) -> VoiceList:
    """List the voices of the served models and the uploaded ones. `models` says which models can use each
    voice."""
    models = server.models
    presets = [
        preset(name, models, server.created)
        for name in dict.fromkeys(n for model in models for n in model.voices)
    ]
    whole, damaged = await asyncio.to_thread(server.voices.survey)
    broken = [VoiceObject(name, name, 0, "audio_sample", [], damaged=True) for name in damaged]
    voices = [*presets, *(described(voice, models) for voice in whole), *broken]
    for voice in voices:
        voice.aliases = [alias for alias, name in server.names.voices.items() if name == voice.id]
    names = [name for voice in voices if not voice.damaged for name in (voice.id, *voice.aliases)]
    return VoiceList(voices, [Entry(name, name) for name in dict.fromkeys(names)])


@post(
    "/v1/audio/voices",
    status_code=200,
    responses={400: WRONG, 409: TAKEN, 413: TOO_LARGE, 507: NO_ROOM, **REFUSALS},
)
async def add_voice(
    data: Annotated[VoiceUpload, Body(media_type=RequestEncodingType.MULTI_PART)], server: Server
) -> VoiceObject:
    """Store a recording as a voice that requests can name."""
    models = server.models
    possible_s = reference_s(models)
    check_name(data.name, models)
    clip = await decoded(await data.audio_sample.read(), possible_s, server)
    try:
        voice = await asyncio.to_thread(server.voices.add, data.name, clip, data.ref_text, data.consent)
    except Taken as error:
        raise refusal(409, str(error), "name", "voice_exists") from None
    except TooMany as error:
        raise refusal(400, str(error), code="too_many_voices") from None
    except ValueError as error:
        raise unusable(error) from None
    return described(voice, models)


@route("/v1/audio/voices", http_method="OPTIONS", status_code=204, include_in_schema=False)
async def voices_options() -> Response[None]:
    """Answer OPTIONS with all methods. Litestar's own answer names only the first."""
    return Response(None, headers={"allow": "GET, OPTIONS, POST"})


@delete("/v1/audio/voices/{voice_id:str}", status_code=200, responses={400: WRONG, 404: UNKNOWN, **REFUSALS})
async def remove_voice(voice_id: str, server: Server) -> VoiceDeleted:
    """Delete an uploaded voice. Running requests with it continue."""
    check_is_uploaded(voice_id, server)
    if not await asyncio.to_thread(server.voices.remove, voice_id):
        raise no_voice(voice_id)
    return VoiceDeleted(clean_name(voice_id))


@patch(
    "/v1/audio/voices/{voice_id:str}",
    responses={400: WRONG, 404: UNKNOWN, 409: TAKEN, 507: NO_ROOM, **REFUSALS},
)
async def rename_voice(voice_id: str, data: VoiceName, server: Server) -> VoiceObject:
    """Rename an uploaded voice. Running requests with it continue."""
    models = server.models
    check_is_uploaded(voice_id, server)
    check_name(data.name, models)
    try:
        voice = await asyncio.to_thread(server.voices.rename, voice_id, data.name)
    except Taken as error:
        raise refusal(409, str(error), "name", "voice_exists") from None
    except Damaged as error:
        raise refusal(400, str(error), "voice", "voice_damaged") from None
    if voice is None:
        raise no_voice(voice_id)
    return described(voice, models)


@get(
    "/v1/audio/voices/{voice_id:str}/preview",
    responses={400: WRONG, 404: UNKNOWN, **REFUSALS},
    media_type="audio/wav",
)
async def preview_voice(voice_id: str, server: Server) -> Response[bytes]:
    """Return the recording of an uploaded voice as a 16-bit WAV file."""
    _ = server.models  # raises Away
    check_is_uploaded(voice_id, server)
    try:
        found = await asyncio.to_thread(server.voices.load, voice_id)
    except Damaged as error:
        raise refusal(400, str(error), "voice", "voice_damaged") from None
    if found is None:
        raise no_voice(voice_id)
    clip = found[1]
    pcm = pcm16(np.frombuffer(clip.samples, "<f4"))
    wav = await asyncio.to_thread(encode.file, "wav", pcm, clip.sample_rate_hz)
    return Response(wav, media_type="audio/wav")


def check_is_uploaded(voice_id: str, server: Server) -> None:
    """Check that a voice is an uploaded one. Raises the refusal."""
    if any(is_own(model.voices, voice_id) for model in server.engine.models):
        raise refusal(400, f"{voice_id!r} is a voice of the model, not an uploaded one", "voice")
    if not server.voices.has(voice_id):
        raise no_voice(voice_id)


def no_voice(voice_id: str) -> HTTPException:
    message = f"there is no uploaded voice {voice_id!r}; GET /v1/audio/voices lists them"
    return refusal(404, message, "voice", "voice_not_found")


def preset(name: str, models: list[Model], created: int) -> VoiceObject:
    return VoiceObject(name, name, created, "preset", [model.id for model in models if name in model.voices])


def described(voice: StoredVoice, models: list[Model]) -> VoiceObject:
    speakers = [model.id for model in models if model.reference_s is not None]
    return VoiceObject(
        voice.name, voice.name, voice.created_at, "audio_sample", speakers, voice.duration_s, voice.ref_text
    )


def reference_s(models: list[Model]) -> tuple[float, float]:
    """Return the shortest and the longest reference that any served model takes. Raises the refusal if none
    takes any."""
    possible_s = [model.reference_s for model in models if model.reference_s is not None]
    if not possible_s:
        each = [f"{model.id} ({possible_voices(model)})" for model in models]
        instead = possible_voices(models[0]) if len(models) == 1 else "; ".join(each)
        message = "no served model takes reference audio, so an uploaded voice could not be used"
        raise refusal(400, f"{message}; {instead}")
    return min(possible_s)[0], max(longest_s for _, longest_s in possible_s)


def check_name(name: str, models: list[Model]) -> None:
    """Check the name for an uploaded voice. Raises the refusal."""
    if any(is_own(model.voices, name) for model in models):
        raise refusal(409, f"{name!r} is a voice of the model; choose another name", "name", "voice_exists")
    try:
        clean_name(name)
    except ValueError as error:
        raise refusal(400, str(error), "name") from None


async def decoded(sample: bytes, possible_s: tuple[float, float], server: Server) -> protocol.AudioClip:
    """Decode an uploaded sample. Raises the refusal."""
    max_bytes = server.limits.reference_bytes
    if len(sample) > max_bytes:
        message = f"audio_sample has {len(sample)} bytes; this server takes up to {max_bytes}"
        raise refusal(413, message, "audio_sample", "body_too_large")
    try:
        return await server.references.decoded(lambda: sample, possible_s)
    except ValueError as error:
        raise unusable(error) from None


def unusable(error: ValueError) -> HTTPException:
    return refusal(400, f"audio_sample cannot be used: {error}", "audio_sample")
