"""The protocol's messages as the engine's own types, and back."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path

import msgspec
import numpy as np
import structlog

from serving import protocol, voice_file
from zoo.contract import Spec
from zoo.request import (
    AudioClip,
    Option,
    Reference,
    Request,
    RequestError,
    StoredClip,
    Turn,
    recording_name,
)

UNREADABLE = "the stored voice {!r} was removed or is damaged"
REPLACED = "the stored voice {!r} was replaced while this request waited; send it again"

log = structlog.get_logger()


def request_of(message: protocol.Speak) -> Request:
    """Raises RequestError."""
    fields = msgspec.structs.asdict(message.request)
    references = tuple(map(reference_of, message.references))
    return Request(**fields, references=references, turns=tuple(map(turn_of, message.turns)))


def turn_of(turn: protocol.Turn) -> Turn:
    clip = None if turn.clip is None else audio_clip(turn.clip)
    return Turn(turn.role, turn.text, clip, turn.tokens)


class NotEncoded(Exception):
    """An uploaded voice has no encoding yet, so its recording must be read and encoded."""


# Whether encoded voices alone may be used. Otherwise NotEncoded is raised.
is_quick: ContextVar[bool] = ContextVar("is_quick", default=False)


def reference_of(reference: protocol.Reference) -> Reference:
    clip = reference.clip
    made = stored_clip(clip) if isinstance(clip, protocol.StoredClip) else audio_clip(clip)
    return Reference(made, reference.transcript, reference.speaker, reference.name)


def audio_clip(clip: protocol.AudioClip) -> AudioClip:
    # Tensors ask for memory that can be written to, so this is a copy.
    return AudioClip(np.frombuffer(clip.samples, "<f4").copy(), clip.sample_rate_hz)


def stored_clip(clip: protocol.StoredClip) -> AudioClip:
    directory = Path(clip.directory)

    def read() -> np.ndarray:
        if is_quick.get():
            raise NotEncoded
        try:
            found = audio_clip(voice_file.read(directory)[1])
        except (voice_file.Damaged, OSError) as error:
            log.error("voice", directory=clip.directory, error=str(error))
            raise RequestError("references", UNREADABLE.format(directory.name)) from None
        if recording_name(found.samples, found.sample_rate_hz) != clip.name:
            raise RequestError("references", REPLACED.format(directory.name))
        return found.samples

    return StoredClip(read, clip.sample_rate_hz, directory, clip.name)


def option_info(option: Option) -> protocol.OptionInfo:
    return protocol.OptionInfo(
        option.name,
        option.type.__name__,
        option.help,
        option.possible,
        option.default,
        option.range,
        option.choices,
    )


def describe(name: str, spec: Spec) -> protocol.ModelInfo:
    return protocol.ModelInfo(
        id=name,
        family=spec.family,
        variant=spec.variant,
        sample_rate_hz=spec.sample_rate_hz,
        frame_rate_hz=spec.frame_rate_hz,
        max_audio_s=spec.max_frames / spec.frame_rate_hz,
        voices=list(spec.voices),
        languages=list(spec.languages),
        modes=list(spec.modes),
        reference_s=spec.reference_s,
        max_references=spec.max_references,
        options=[option_info(option) for option in spec.options],
        licence=spec.licence,
        piece_s=spec.piece_s,
        feeds=spec.feeds,
        keeps_voice=spec.keeps_voice,
        mixes=spec.mixes,
        shares_turns=spec.shares_turns,
        answers=spec.answers,
        performs=spec.performs,
        outputs=spec.outputs,
        takes_tools=spec.takes_tools,
        needs_transcript=spec.needs_transcript,
    )
