"""The routes of voices: /v1/audio/voices, with the models' own and the uploaded ones."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from litestar import Request, Response, delete, get, patch, post
from litestar.enums import RequestEncodingType
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import Body

from serving.http.disconnect import run_while_connected
from serving.http.held_body import held_body
from serving.http.keys import admit
from serving.http.objects import ErrorBody, VoiceDeleted, VoiceList, VoiceObject
from serving.http.schemas import VoiceName, VoiceUpload
from serving.http.server import LIMITED, REFUSALS, TOO_LARGE, UNKNOWN, WRONG, Server
from serving.http.uploads import (
    as_wav,
    check_is_uploaded,
    check_name,
    check_words,
    decoded,
    described,
    no_voice,
    reference_s,
    refusals,
    unusable,
    voice_list,
)
from serving.http.voices import clean_name

NO_ROOM = ResponseSpec(ErrorBody, description="the server's disk is full")
TAKEN = ResponseSpec(ErrorBody, description="a voice of that name already exists")


@get("/v1/audio/voices", responses=REFUSALS)
async def list_voices(request: Request[Any, Any, Any], server: Server) -> VoiceList:
    """List the voices of the served models and the uploaded ones. `models` says which models can use each
    voice."""
    found = await voice_list(server.models, server)
    if (
        request.query_params.get("legacy") == "true"
    ):  # names alone, as older clients of Kokoro-FastAPI read them
        return Response({"voices": [voice.id for voice in found.data]})  # type: ignore[return-value]
    return found


@post(
    "/v1/audio/voices",
    status_code=200,
    responses={400: WRONG, 409: TAKEN, 413: TOO_LARGE, 507: NO_ROOM, **LIMITED, **REFUSALS},
)
async def add_voice(
    data: Annotated[VoiceUpload, Body(media_type=RequestEncodingType.MULTI_PART)],
    request: Request[Any, Any, Any],
    server: Server,
) -> VoiceObject:
    """Store a recording as a voice that requests can name."""
    models = server.models
    possible_s = reference_s(models)
    check_name(data.name, models)
    check_words(data.ref_text, models)
    admit(0)
    sample = await data.audio_sample.read()
    clip = await run_while_connected(decoded(sample, possible_s, server), request.receive)
    try:
        with refusals():
            voice = await asyncio.to_thread(server.voices.add, data.name, clip, data.ref_text, data.consent)
    except ValueError as error:
        raise unusable(error) from None
    return described(voice, models)


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
    with refusals():
        voice = await asyncio.to_thread(server.voices.rename, voice_id, data.name)
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
    with refusals():
        found = await asyncio.to_thread(server.voices.load, voice_id)
    if found is None:
        raise no_voice(voice_id)
    _, clip = found
    return held_body(await asyncio.to_thread(as_wav, clip), "audio/wav", server.memory)
