"""The voices in answers to clients, and the checks of uploads and their names."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from litestar.exceptions import HTTPException

from serving.audio import encode
from serving.audio.pcm import pcm16
from serving.http.errors import refusal
from serving.http.objects import Entry, Model, VoiceList, VoiceObject
from serving.http.server import Server
from serving.http.voice_choice import is_own, possible_voices
from serving.http.voices import Taken, TooMany, new_name
from serving.protocol import AudioClip
from serving.voice_file import Damaged, StoredVoice


@contextmanager
def refusals() -> Iterator[None]:
    """Turn errors of the store into refusals for the client."""
    try:
        yield
    except Taken as error:
        raise refusal(409, str(error), "name", "voice_exists") from None
    except TooMany as error:
        raise refusal(400, str(error), code="too_many_voices") from None
    except Damaged as error:
        raise refusal(400, str(error), "voice", "voice_damaged") from None


async def voice_list(models: list[Model], server: Server) -> VoiceList:
    """Return the voices of the models, then the uploaded ones, then the damaged ones, each with its
    aliases."""
    presets = dict.fromkeys(name for model in models for name in model.voices)
    whole, damaged = await asyncio.to_thread(server.voices.survey)
    voices = [
        *(preset(name, models, server.created) for name in presets),
        *(described(voice, models) for voice in whole),
        *(VoiceObject(name, name, 0, "audio_sample", [], damaged=True) for name in damaged),
    ]
    for voice in voices:
        voice.aliases = [alias for alias, name in server.names.voices.items() if name == voice.id]
    names = [name for voice in voices if not voice.damaged for name in (voice.id, *voice.aliases)]
    return VoiceList(voices, [Entry(name, name) for name in dict.fromkeys(names)])


def as_wav(clip: AudioClip) -> bytes:
    """Return a recording as a 16-bit WAV file."""
    return encode.file("wav", pcm16(np.frombuffer(clip.samples, "<f4")), clip.sample_rate_hz)


def preset(name: str, models: list[Model], created: int) -> VoiceObject:
    return VoiceObject(name, name, created, "preset", [model.id for model in models if name in model.voices])


def described(voice: StoredVoice, models: list[Model]) -> VoiceObject:
    speakers = [model.id for model in models if can_speak_in(voice, model)]
    return VoiceObject(
        voice.name, voice.name, voice.created_at, "audio_sample", speakers, voice.duration_s, voice.ref_text
    )


def can_speak_in(voice: StoredVoice, model: Model) -> bool:
    """Whether a model can use an uploaded voice."""
    if model.reference_s is None or (model.needs_transcript and voice.ref_text is None):
        return False
    shortest_s, longest_s = model.reference_s
    return shortest_s <= voice.duration_s <= longest_s


def no_voice(voice_id: str) -> HTTPException:
    message = f"there is no uploaded voice {voice_id!r}; GET /v1/audio/voices lists them"
    return refusal(404, message, "voice", "voice_not_found")


def check_is_uploaded(voice_id: str, server: Server) -> None:
    """Check that a voice is an uploaded one. Raises the refusal."""
    if any(is_own(model.voices, voice_id) for model in server.engine.models):
        raise refusal(400, f"{voice_id!r} is a voice of the model, not an uploaded one", "voice")
    if not server.voices.has(voice_id):
        raise no_voice(voice_id)


def check_name(name: str, models: list[Model]) -> None:
    """Check the name for an uploaded voice. Raises the refusal."""
    if any(is_own(model.voices, name) for model in models):
        raise refusal(409, f"{name!r} is a voice of the model; choose another name", "name", "voice_exists")
    try:
        new_name(name)
    except ValueError as error:
        raise refusal(400, str(error), "name") from None


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


def check_words(ref_text: str | None, models: list[Model]) -> None:
    """Check that a served model takes a recording without its words, if none are given. Raises the refusal."""
    cloners = [model for model in models if model.reference_s is not None]
    if not (ref_text or "").strip() and all(model.needs_transcript for model in cloners):
        names = ", ".join(repr(model.id) for model in cloners)
        message = f"ref_text is missing: {names} cannot clone a recording without its words"
        raise refusal(400, message, "ref_text", "missing_field")


async def decoded(sample: bytes, possible_s: tuple[float, float], server: Server) -> AudioClip:
    """Decode an uploaded sample. Raises the refusal."""
    check_size(sample, "audio_sample", server)
    try:
        return await server.references.decoded(lambda: sample, possible_s)
    except ValueError as error:
        raise unusable(error) from None


def check_size(recording: bytes, field: str, server: Server) -> None:
    """Check the size of a recording in a form. Raises the refusal."""
    max_bytes = server.limits.reference_bytes
    if len(recording) > max_bytes:
        message = f"{field} has {len(recording)} bytes; this server takes up to {max_bytes}"
        raise refusal(413, message, field, "body_too_large")


def unusable(error: ValueError) -> HTTPException:
    return refusal(400, f"audio_sample cannot be used: {error}", "audio_sample")
