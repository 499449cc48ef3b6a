"""Fields of other servers' clients that mean the same as ours under another name.

    speaker            vLLM-Omni       the voice
    voice_aliases      Kokoro-FastAPI  names of the request for voices, each with a rate
    allow_voice_tags   Kokoro-FastAPI  whether `[rate:0.8]` in front of the input is a rate

Rates multiply `speed`. A strict server leaves these fields alone, so that they are refused.
"""

from __future__ import annotations

import re
from typing import Any

from serving.http.errors import cut, refusal

RATE_TAG = re.compile(r"\s*\[rate:(\d+(?:\.\d+)?)\]\s*")
TAG = re.compile(r"\[(?:rate|voice):[^\]]*\]")


def translated(fields: dict[str, Any], *, is_strict: bool) -> dict[str, Any]:
    """Return the fields of a request under our names. Raises the refusal."""
    if is_strict or not fields.keys() & {"speaker", "voice_aliases", "allow_voice_tags"}:
        return fields
    fields = dict(fields)
    if isinstance(fields.get("speaker"), str):  # a number is an option of a model
        speaker = fields.pop("speaker")
        fields.setdefault("voice", speaker)
    aliases = fields.pop("voice_aliases", None)
    if aliases is not None:
        _resolve(fields, aliases)
    if fields.pop("allow_voice_tags", None):
        _take_rate(fields)
    return fields


def _resolve(fields: dict[str, Any], aliases: object) -> None:
    """Replace the voice by the one that it stands for, and apply the alias's rate."""
    if not isinstance(aliases, dict):
        raise refusal(400, "voice_aliases takes an object of names and voices", "voice_aliases")
    asked = fields.get("voice")
    alias = aliases.get(asked) if isinstance(asked, str) else None
    match alias:
        case None:
            return
        case str(voice):
            fields["voice"] = voice
        case {"voice": str(voice)}:
            fields["voice"] = voice
            _multiply(fields, alias.get("rate"), "voice_aliases")
        case _:
            message = f'the alias {cut(str(asked))!r} must be a voice or {{"voice": ..., "rate": ...}}'
            raise refusal(400, message, "voice_aliases")


def _take_rate(fields: dict[str, Any]) -> None:
    """Take a rate tag from the front of the input."""
    text = fields.get("input")
    if not isinstance(text, str):
        return
    if (tag := RATE_TAG.match(text)) is not None:
        _multiply(fields, float(tag[1]), "input")
        text = fields["input"] = text[tag.end() :]
    if (other := TAG.search(text)) is not None:
        message = f"{cut(other[0])} within the text is not supported; one [rate:...] may stand in front of it"
        raise refusal(400, message, "input")


def _multiply(fields: dict[str, Any], rate: object, param: str) -> None:
    if rate is None:
        return
    if not isinstance(rate, int | float) or isinstance(rate, bool):
        raise refusal(400, f"the rate must be a number, not {cut(str(rate))!r}", param)
    speed = fields.get("speed")
    if speed is None:
        speed = 1.0
    if isinstance(speed, int | float):
        try:
            fields["speed"] = speed * rate
        except OverflowError:  # an integer that no float can hold
            raise refusal(400, "the rate times the speed is too large", param) from None
