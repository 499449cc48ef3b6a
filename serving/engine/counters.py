"""Counters since the start."""

from __future__ import annotations

from dataclasses import dataclass, field

from serving.histogram import Histogram


@dataclass
class ModelCounters:
    """Of one model. num_left_early: before their prompt was made. num_short, num_long: passes whose speech is
    too short or too long for its text. num_not_finite: requests that ended because of NaN or infinity.
    first_audio_s: of the last request that was first heard."""

    num_refused: int = 0
    num_left_early: int = 0
    num_short: int = 0
    num_long: int = 0
    num_not_finite: int = 0
    audio_s: float = 0.0
    first_audio_s: float | None = None
    queue_times: Histogram = field(default_factory=Histogram)  # of admitted requests
