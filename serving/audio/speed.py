"""Change the speed of speech without changing its pitch, chunk by chunk.

PyAV runs FFmpeg's atempo filter. atempo is WSOLA: it overlaps short pieces of sound where they fit best. The
output does not depend on how the speech was cut into chunks. One filter covers half to double tempo: it
cannot go slower, and would drop pieces if it went faster. Speeds outside that range use two filters in
series.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

MIN_SPEED, MAX_SPEED = 0.25, 4.0  # OpenAI's
MIN_TEMPO, MAX_TEMPO = 0.5, 2.0  # range of one filter
TAIL_S = 0.25  # more than two filters hold back
BLOCK_S = 0.01  # atempo's output depends on the size of its input blocks, so all have this size


def tempos(speed: float) -> tuple[float, ...]:
    """Return the tempo of each filter in the series. Raises ValueError for a speed out of range."""
    if not MIN_SPEED <= speed <= MAX_SPEED:  # also rejects NaN
        raise ValueError(f"speed is {speed:g}; from {MIN_SPEED:g} to {MAX_SPEED:g} is possible")
    return (speed,) if MIN_TEMPO <= speed <= MAX_TEMPO else (speed**0.5, speed**0.5)


class Stretch:
    """One stream of int16 little-endian mono samples. `feed` returns the output that is ready, perhaps none,
    and `finish` returns the rest. N samples become exactly round(N / speed).

    Not for speed 1. Raises ValueError for a speed out of range.
    """

    def __init__(self, sample_rate_hz: int, speed: float):
        from av.filter import Graph  # FFmpeg's libraries take 40 ms, and most speech needs none of them

        self._rate_hz = sample_rate_hz
        self._speed = speed
        self._num_taken = self._num_pushed = self._num_given = 0  # samples
        self._block_bytes = 2 * round(BLOCK_S * sample_rate_hz)
        self._held = bytearray()
        self._ready = bytearray()
        self._graph = Graph()
        source = self._graph.add_abuffer(
            format="s16", sample_rate=sample_rate_hz, layout="mono", time_base=Fraction(1, sample_rate_hz)
        )
        filters = [self._graph.add("atempo", f"{tempo:.8f}") for tempo in tempos(speed)]
        self._graph.link_nodes(source, *filters, self._graph.add("abuffersink"))
        self._graph.configure()

    def feed(self, pcm: bytes) -> bytes:
        self._num_taken += len(pcm) // 2
        self._take(pcm)
        return self._give()

    def finish(self) -> bytes:
        """Return the rest. Silence pushes out the samples that atempo holds back."""
        if not self._num_taken:
            return b""
        self._take(bytes(2 * round(TAIL_S * self._rate_hz)))
        self._graph.push(None)
        self._pull()
        rest = self._give()
        return rest + bytes(2 * (self._num_due - self._num_given))

    @property
    def _num_due(self) -> int:
        """Samples to return for the input so far."""
        return round(self._num_taken / self._speed)

    def _give(self) -> bytes:
        count = min(len(self._ready) // 2, self._num_due - self._num_given)
        self._num_given += count
        given = bytes(self._ready[: 2 * count])
        del self._ready[: 2 * count]
        return given

    def _take(self, pcm: bytes) -> None:
        self._held += pcm
        size = self._block_bytes
        for at in range(0, len(self._held) - size + 1, size):
            self._push(np.frombuffer(bytes(self._held[at : at + size]), "<i2"))
        del self._held[: len(self._held) // size * size]

    def _push(self, samples: np.ndarray) -> None:
        import av

        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate = self._rate_hz
        frame.time_base = Fraction(1, self._rate_hz)
        frame.pts = self._num_pushed
        self._num_pushed += samples.size
        self._graph.push(frame)
        self._pull()

    def _pull(self) -> None:
        import av

        while True:
            try:
                frame = self._graph.pull()
            except (av.error.BlockingIOError, av.error.EOFError):
                return
            assert isinstance(frame, av.AudioFrame), f"atempo returned a {type(frame).__name__}"
            self._ready += frame.to_ndarray().astype("<i2", copy=False).tobytes()


def stretched(pcm: bytes, sample_rate_hz: int, speed: float) -> bytes:
    """Return complete speech at the given speed. Raises ValueError for a speed out of range."""
    if speed == 1:
        return pcm
    stretch = Stretch(sample_rate_hz, speed)
    return stretch.feed(pcm) + stretch.finish()
