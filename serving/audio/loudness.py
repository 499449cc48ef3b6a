"""Bring speech to a loudness in LUFS, as EBU R128 measures it, and keep its peaks below a ceiling.

FFmpeg's filters do the work, through PyAV: ebur128 measures (ITU-R BS.1770, gated), and alimiter limits.

    a file    measure all of it ─ one gain ─ limit
    a stream  the gain of each 100 ms follows from all audio up to 400 ms after its beginning:

        hop        0    1    2    3    4    5
        measured  ├────┴────┴────┤                  gain of hop 0: target - loudness so far
                       ├────┴────┴────┤             gain of hop 1, and so on

The measure's first block has 400 ms, so a stream is held back that long, and 5 ms in the limiter. Gains between two
hops change linearly in decibels. The result does not depend on how the speech was cut into chunks. A stream cannot
know its end, so it differs from the file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from serving.audio.pcm import pcm16

if TYPE_CHECKING:
    import av  # imported when it is used: see speed.py

MIN_LUFS, MAX_LUFS = -36.0, -8.0
MAX_GAIN_DB = 24.0  # more would make noise as loud as speech
CEILING_DBFS = -1.0  # of samples
HOP_S = 0.1  # between two measurements
BLOCK_HOPS = 4  # that a measurement needs
ATTACK_MS, RELEASE_MS = 5, 50  # of the limiter, which looks ahead for the attack
SILENT_LUFS = -70.0  # nothing was above the gate of the measure yet
FULL_SCALE = 32767
LUFS_KEY = "lavfi.r128.I"


class _Filter:
    """One of FFmpeg's filters on a stream of float64 samples."""

    def __init__(self, sample_rate_hz: int, name: str, options: str):
        from av.filter import Graph

        self._rate_hz, self._num_pushed = sample_rate_hz, 0
        self._graph = Graph()
        tick = Fraction(1, sample_rate_hz)
        source = self._graph.add_abuffer(
            format="dbl", sample_rate=sample_rate_hz, layout="mono", time_base=tick
        )
        self._graph.link_nodes(source, self._graph.add(name, options), self._graph.add("abuffersink"))
        self._graph.configure()

    def feed(self, samples: np.ndarray) -> Iterator[av.AudioFrame]:
        """Take samples [N], and yield the frames that are ready."""
        import av

        if samples.size:
            frame = av.AudioFrame.from_ndarray(
                np.ascontiguousarray(samples[None]), format="dbl", layout="mono"
            )
            frame.sample_rate = self._rate_hz
            frame.time_base = Fraction(1, self._rate_hz)
            frame.pts = self._num_pushed
            self._num_pushed += samples.size
            self._graph.push(frame)
        yield from self._pull()

    def finish(self) -> Iterator[av.AudioFrame]:
        if self._num_pushed:
            self._graph.push(None)
        yield from self._pull()

    def _pull(self) -> Iterator[av.AudioFrame]:
        import av

        while True:
            try:
                frame = self._graph.pull()
            except (av.error.BlockingIOError, av.error.EOFError):
                return
            assert isinstance(frame, av.AudioFrame), f"an audio filter returned a {type(frame).__name__}"
            yield frame


class Meter:
    """The integrated loudness of a stream so far. Every HOP_S counts once it is complete."""

    def __init__(self, sample_rate_hz: int):
        self.hop = round(HOP_S * sample_rate_hz)
        self._filter = _Filter(sample_rate_hz, "ebur128", "metadata=1:framelog=quiet")
        self._held = np.zeros(0)

    def feed(self, samples: np.ndarray) -> list[float]:
        """Return the loudness (LUFS) after each hop that became complete. SILENT_LUFS: nothing to measure."""
        self._held = np.concatenate([self._held, samples])
        count = len(self._held) // self.hop * self.hop
        ready, self._held = self._held[:count], self._held[count:]
        found: list[float] = []
        for at in range(0, count, self.hop):
            for frame in self._filter.feed(ready[at : at + self.hop]):
                found.append(float(frame.metadata[LUFS_KEY]))
        return found


class Limiter:
    """Holds back 5 ms, and lets no sample exceed the ceiling. Quieter audio is unchanged."""

    def __init__(self, sample_rate_hz: int):
        limit = 10 ** (CEILING_DBFS / 20)
        options = f"limit={limit:.6f}:attack={ATTACK_MS}:release={RELEASE_MS}:level=0:latency=1"
        self._filter = _Filter(sample_rate_hz, "alimiter", options)

    def feed(self, samples: np.ndarray) -> bytes:
        return _pcm(self._filter.feed(samples))

    def finish(self) -> bytes:
        return _pcm(self._filter.finish())


def _pcm(frames: Iterator[av.AudioFrame]) -> bytes:
    return b"".join(pcm16(frame.to_ndarray()[0]) for frame in frames)


class Leveler:
    """Levels one stream of int16 little-endian mono samples. `feed` returns what is ready, perhaps nothing, and
    `finish` the rest. As many samples come out as go in."""

    def __init__(self, sample_rate_hz: int, lufs: float):
        self._lufs = lufs
        self._meter, self._limiter = Meter(sample_rate_hz), Limiter(sample_rate_hz)
        self._pending: deque[np.ndarray] = deque()
        self._num_pending = 0
        self._num_hops = self._num_given = 0  # hops measured, samples that have left
        self._gain_db: float | None = None  # nothing was measured yet

    def feed(self, pcm: bytes) -> bytes:
        samples = np.frombuffer(pcm, "<i2") / FULL_SCALE  # [N]
        self._pending.append(samples)
        self._num_pending += len(samples)
        return b"".join(self._measured(lufs) for lufs in self._meter.feed(samples))

    def _measured(self, lufs: float) -> bytes:
        """Return the hop that began BLOCK_HOPS before, with its gain."""
        self._num_hops += 1
        gain_db = self._gain_db if lufs <= SILENT_LUFS else gain_for(lufs, self._lufs)
        num_known = (self._num_hops - BLOCK_HOPS + 1) * self._meter.hop
        return self._give(num_known - self._num_given, gain_db)

    def flush(self) -> bytes:
        """Return what is held back, with the gain so far, because more audio may not come for a while."""
        return self._give(self._num_pending, self._gain_db)

    def finish(self) -> bytes:
        return self.flush() + self._limiter.finish()

    def _give(self, count: int, gain_db: float | None) -> bytes:
        """Return samples whose gain goes from the last one to this one. The result is empty if a flush gave them."""
        if count <= 0:
            return b""
        if gain_db is None:
            return self._limiter.feed(self._take(count))
        before_db = gain_db if self._gain_db is None else self._gain_db
        gains_db = np.linspace(before_db, gain_db, count + 1)[1:]
        self._gain_db = gain_db
        return self._limiter.feed(self._take(count) * 10 ** (gains_db / 20))

    def _take(self, count: int) -> np.ndarray:
        assert count <= self._num_pending, f"{count} samples of {self._num_pending}"
        self._num_pending -= count
        self._num_given += count
        parts = []
        while count:
            part = self._pending.popleft()
            if len(part) > count:
                self._pending.appendleft(part[count:])
                part = part[:count]
            parts.append(part)
            count -= len(part)
        return np.concatenate(parts) if parts else np.zeros(0)


def gain_for(measured_lufs: float, lufs: float) -> float:
    return min(lufs - measured_lufs, MAX_GAIN_DB)


def loudness_of(pcm: bytes, sample_rate_hz: int) -> float | None:
    """Return the integrated loudness (LUFS) of int16 mono; None for silence, and for less than 400 ms."""
    meter, found = Meter(sample_rate_hz), [SILENT_LUFS]
    for part in _seconds(pcm, sample_rate_hz):
        found += meter.feed(part)
    return found[-1] if found[-1] > SILENT_LUFS else None


def leveled(pcm: bytes, sample_rate_hz: int, lufs: float | None) -> bytes:
    """Return complete speech (int16 mono) with one gain, so that it has this loudness."""
    measured = None if lufs is None else loudness_of(pcm, sample_rate_hz)
    if lufs is None or measured is None:
        return pcm
    limiter, gain = Limiter(sample_rate_hz), 10 ** (gain_for(measured, lufs) / 20)
    parts = [limiter.feed(part * gain) for part in _seconds(pcm, sample_rate_hz)]
    return b"".join([*parts, limiter.finish()])


def _seconds(pcm: bytes, sample_rate_hz: int) -> Iterator[np.ndarray]:
    """Yield the samples in parts, so that float64 copies stay small."""
    samples = np.frombuffer(pcm, "<i2")
    for at in range(0, len(samples), sample_rate_hz):
        yield samples[at : at + sample_rate_hz] / FULL_SCALE
