"""The protocol's messages as the engine's own types, and back."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from serving import protocol
from zoo.contract import Spec
from zoo.request import AudioClip, Option, Reference, Request


def request_of(message: protocol.Speak) -> Request:
    """Raises RequestError."""
    fields = msgspec.structs.asdict(message.request)
    return Request(**fields, references=tuple(map(reference_of, message.references)))


def reference_of(reference: protocol.Reference) -> Reference:
    # Tensors ask for memory that can be written to, so this is a copy.
    samples = np.frombuffer(reference.clip.samples, "<f4").copy()
    kept_in = None if reference.kept_in is None else Path(reference.kept_in)
    clip = AudioClip(samples, reference.clip.sample_rate_hz, kept_in)
    return Reference(clip, reference.transcript, reference.speaker, reference.name)


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
    )
