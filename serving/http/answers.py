"""Earlier answers, found again by the ID of their audio: the next turn gives the model its own tokens, whose pages it
finds in the KV cache."""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from serving import protocol
from serving.http.errors import cut, refusal

ANSWER_S = 3600.0
MAX_BYTES = 64 << 20  # of all answers: 2,000 of four minutes each


@dataclass(frozen=True)
class Answer:
    """The answer of a model. tokens: in order; ends: how many tokens there are up to the end of each frame."""

    tokens: array[int]
    ends: array[int]

    @classmethod
    def of(cls, answer: protocol.Answer) -> Answer:
        return cls(array("i", answer.tokens), array("i", answer.ends))

    def up_to(self, frames: int) -> Answer:
        """Return the part of the answer that was heard, up to the end of `frames` frames. With no frame it is
        empty; with all of them it is whole."""
        if frames >= len(self.ends):
            return self
        num = self.ends[frames - 1] if frames else 0
        return Answer(self.tokens[:num], self.ends[:frames])

    def turn(self) -> protocol.Turn:
        return protocol.Turn("assistant", tokens=tuple(self.tokens))

    @property
    def num_bytes(self) -> int:
        return self.tokens.itemsize * (len(self.tokens) + len(self.ends))


@dataclass(frozen=True)
class _Kept:
    model: str
    answer: Answer
    until_s: float


class Answers:
    """The latest answers, each for ANSWER_S, of all clients together at most MAX_BYTES."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, max_bytes: int = MAX_BYTES):
        self.clock, self.max_bytes = clock, max_bytes
        self.num_bytes = 0
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # by audio ID, the oldest first

    def keep(self, id: str, model: str, answer: Answer) -> None:
        self._kept[id] = _Kept(model, answer, self.clock() + ANSWER_S)
        self.num_bytes += answer.num_bytes
        while self._kept and (self.num_bytes > self.max_bytes or self._oldest.until_s < self.clock()):
            self.num_bytes -= self._kept.popitem(last=False)[1].answer.num_bytes

    @property
    def _oldest(self) -> _Kept:
        return next(iter(self._kept.values()))

    def find(self, id: str, model: str, place: str) -> Answer:
        """Return an answer of a model. place: where the client names it. Raises the refusal."""
        kept = self._kept.get(id)
        if kept is None or kept.model != model or kept.until_s < self.clock():
            why = f"{place} names the audio {cut(id)!r}, which model {model!r} has not made in the last hour"
            raise refusal(
                400, f"{why}; send the answer's transcript as content", "messages", "audio_not_found"
            )
        return kept.answer
