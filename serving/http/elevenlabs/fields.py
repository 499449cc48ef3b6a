"""ElevenLabs' names of fields, models, voices and formats, as fields of a speech request.

Names of theirs stand for the server's own as OpenAI's names do (names.py): if one model of the server speaks texts,
with a warning, unless the server is strict. A field that has no meaning here is ignored, with a warning, or
refused by a strict server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from litestar.exceptions import HTTPException

from serving.http.elevenlabs.bodies import MEANINGLESS, ElevenLabsRequest
from serving.http.errors import SPEECH, cut, error_of, refusal
from serving.http.objects import Model
from serving.http.schemas import FIELDS, SpeechRequest
from serving.http.server import Server, can

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


def drop_language(request: SpeechRequest, model: Model, server: Server) -> list[str]:
    """Drop the language if the model has no choice of one, and return a warning, unless the server is strict."""
    if request.language is None or model.languages or server.names.is_strict:
        return []
    request.language = None
    return [f"model {model.id!a} has no choice of a language; language_code is ignored"]


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
