"""The requests of `zoo parity` and `zoo bench`: what a model can do, derived from its `Spec` alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zoo.check import OF_CLIP
from zoo.contract import Family, Prompt
from zoo.request import AudioClip, Option, Reference, Request, RequestError, Turn

TEXT = "Good morning. The train to the north leaves at a quarter to eight."
TRANSCRIPT = "It hums and hums."
MANNER = "An old sailor, slow and hoarse."


def first_request(family: Family[Any], **fields: Any) -> Request:
    """Return a request with the first of `ways` that the model accepts. Raises RequestError if none is.

    Some models refuse a way: for them, instructions alone do not choose a voice.
    """
    asked = [Request(**way | {"text": TEXT} | fields) for way in ways(family).values()]
    refused: list[RequestError] = []
    for request in asked:
        try:
            family.prompt(request)
            return request
        except RequestError as error:
            refused.append(error)
    raise refused[0]


def every_request(family: Family[Any], frames: int) -> tuple[dict[str, Request], dict[str, str]]:
    """Return a greedy request for each capability of the model, and the error of each refused one, by name.

    Of several requests with equal prompts only the first is kept, so options that change nothing are skipped.
    """
    taken: dict[str, Request] = {}
    refused: dict[str, str] = {}
    known = set()
    for name, request in _candidates(family, frames):
        try:
            said = _signature(family.prompt(request))
        except RequestError as error:
            refused[name] = str(error)
            continue
        if said not in known:
            taken[name] = request
        known.add(said)
    return taken, refused


def ways(family: Family[Any]) -> dict[str, dict[str, Any]]:
    """Return the ways to choose a voice, by name, as fields of a request."""
    spec = family.spec
    found: dict[str, dict[str, Any]] = {}
    voice = next(iter(spec.voices), None)
    if "voice" in spec.modes or not spec.modes:
        found["voice"] = {"voice": voice}
        found |= {f"voice {other}": {"voice": other} for other in _other_voices(family)}
    if "instruct" in spec.modes:
        found["instruct"] = {"voice": voice, "instructions": MANNER}
    if "design" in spec.modes:
        found["design"] = {"instructions": MANNER}
    if spec.reference_s is not None:
        clip, other = (buzz(max(1.0, spec.reference_s[0]), pitch_hz) for pitch_hz in (110, 170))
        found["clone"] = {"references": (Reference(clip, TRANSCRIPT),)}
        found["clone without transcript"] = {"references": (Reference(clip),)}
        if spec.max_references > 1:
            first = Reference(other, TRANSCRIPT if spec.needs_transcript else None)
            found["clone of two"] = {"references": (first, Reference(clip, TRANSCRIPT))}
    if spec.reference_s is not None and {"instruct", "design"} & set(spec.modes):
        found["clone with instructions"] = found["clone without transcript"] | {"instructions": MANNER}
    found |= _other_outputs(family)
    for language in spec.languages[1:2]:  # the first language is "auto"
        found[f"language {language}"] = next(iter(found.values())) | {"language": language}
    return found


def _other_outputs(family: Family[Any]) -> dict[str, dict[str, Any]]:
    """Return the ways to ask for something else than the text's speech, by name."""
    spec, spoken = family.spec, Turn("user", clip=buzz(2.0, 140))
    voice = {"voice": spec.voices[0]} if spec.voices else {}
    found: dict[str, dict[str, Any]] = {}
    if spec.listens:
        found["spoken turn"] = voice | {"text": "", "turns": (spoken,)}
        found["later turn"] = voice | {"turns": (spoken, Turn("assistant", TRANSCRIPT))}
        if "text" in spec.outputs:
            found["spoken turn in text"] = {"turns": (spoken,), "output": "text"}
    if "text" in spec.outputs:
        found["text"] = {"output": "text"}
    for output in OF_CLIP:
        if output in spec.outputs:
            found[output] = {"text": "", "turns": (spoken,), "output": output}
    return found


def _other_voices(family: Family[Any]) -> list[str]:
    """Return one voice for each prompt length other than the first voice's. A dialect's voice, for example,
    may need more positions."""
    forms: dict[int, str] = {}
    for voice in family.spec.voices:
        forms.setdefault(len(family.prompt(Request(text=TEXT, voice=voice)).inputs), voice)
    return list(forms.values())[1:]


def _candidates(family: Family[Any], frames: int) -> Iterator[tuple[str, Request]]:
    """Yield every way with the model's defaults, then with each other choice of each option."""
    options = family.spec.options
    samples = any(option.name == "temperature" for option in options)
    usual: dict[str, Any] = {"text": TEXT, "max_frames": frames, "temperature": 0.0 if samples else None}
    if any(option.name == "max_tokens" for option in options):
        usual["options"] = {"max_tokens": frames}
    plain = {name: Request(**usual | way) for name, way in ways(family).items()}
    yield from plain.items()
    for name, request in plain.items():
        for option in options:
            for value in _other_choices(option):
                said = f"{name} {option.name}={str(value).lower()}"
                yield said, replace(request, options=request.options | {option.name: value})


def _other_choices(option: Option) -> list[bool | str]:
    choices: tuple[bool | str, ...] = (False, True) if option.type is bool else option.choices
    return [choice for choice in choices if choice != option.default]


def _signature(prompt: Prompt) -> tuple[Any, ...]:
    """Return the values of a prompt that the model reads. Equal prompts have equal signatures."""
    # Other values belong to a reference, which the prefix keys already identify.
    plain = {
        name: value for name, value in prompt.slot.items() if isinstance(value, bool | int | float | Tensor)
    }
    rows = ((name, torch.as_tensor(value).flatten().tolist()) for name, value in sorted(plain.items()))
    return tuple(lane.prefix_keys for lane in prompt.lanes), tuple((name, *row) for name, row in rows)


def buzz(duration_s: float, pitch_hz: float) -> AudioClip:
    """Return a synthetic sound with a moving pitch."""
    at = np.arange(round(duration_s * 24000)) / 24000
    phase = 2 * np.pi * pitch_hz * (at + 0.02 * np.sin(9 * at))
    sound = sum(np.sin(k * phase) / k for k in range(1, 12))
    return AudioClip((0.1 * sound * (1.2 + np.sin(20 * at))).astype(np.float32), 24000)
