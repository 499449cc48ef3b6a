"""Measure a stream as its listener hears it, from the arrival time and the samples of each chunk.

    chunk i has n_i samples and arrives at t_i; the listener plays from t_1 on, at the stream's rate r

    late      chunk i+1 arrived after t_1 + (n_1 + ... + n_i) / r, when all audio before it has been played
    underrun  the listener has played all received audio, waits, and continues from there

A stream is viable if no chunk is late. Source of viability: VoxServe (arXiv 2602.00269). Source of underruns,
and of C50's tolerance for the longest one: the continuity metrics of SGLang-Omni and vLLM-Omni.
"""

from __future__ import annotations

from collections.abc import Iterable


class Playback:
    """The playback of one listener. Its total wait equals the lateness of its latest chunk."""

    def __init__(self, sample_rate_hz: int):
        assert sample_rate_hz > 0, f"{sample_rate_hz} Hz"
        self.sample_rate_hz = sample_rate_hz
        self.first_s: float | None = None  # arrival of the first samples
        self.last_s: float | None = None
        self.num_samples = self.num_chunks = 0
        self.num_late = 0  # chunks that are late by the schedule that the first one sets
        self.num_underruns = 0
        self.underrun_s = 0.0  # total
        self.longest_underrun_s = 0.0

    @classmethod
    def of(cls, arrivals: Iterable[tuple[float, int]], sample_rate_hz: int) -> Playback:
        """Return the playback of chunks given as (arrival time, number of samples)."""
        playback = cls(sample_rate_hz)
        for at_s, num_samples in arrivals:
            playback.hear(at_s, num_samples)
        return playback

    def hear(self, at_s: float, num_samples: int) -> None:
        """Record the arrival of a chunk. A chunk without samples, such as a header, does not count."""
        if num_samples == 0:
            return
        if self.first_s is None:
            self.first_s = at_s
        late_s = at_s - (self.first_s + self.audio_s)
        self.num_late += late_s > 0
        if late_s > self.underrun_s:
            self.num_underruns += 1
            self.longest_underrun_s = max(self.longest_underrun_s, late_s - self.underrun_s)
            self.underrun_s = late_s
        self.num_chunks += 1
        self.num_samples += num_samples
        self.last_s = at_s

    @property
    def audio_s(self) -> float:
        return self.num_samples / self.sample_rate_hz

    @property
    def num_followers(self) -> int:
        """Chunks after the first one; only these can be late."""
        return max(self.num_chunks - 1, 0)

    @property
    def is_viable(self) -> bool:
        return self.num_late == 0
