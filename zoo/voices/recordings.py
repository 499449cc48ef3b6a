"""Recordings in a model directory."""

from __future__ import annotations

from pathlib import Path

import soundfile

from zoo.request import AudioClip, recording_name


def read_clip(path: Path) -> AudioClip:
    """Return the clip of an audio file. It has a name, so that its samples are hashed once. Raises
    ValueError."""
    try:
        samples, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    except (OSError, soundfile.LibsndfileError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    channels = samples.T.copy()
    return AudioClip(channels, rate_hz, name=recording_name(channels, rate_hz))
