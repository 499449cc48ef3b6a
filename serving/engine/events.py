"""Events that a request's client receives."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from serving.protocol import Answer

# Codes of failures. CANNOT_CONTINUE: the client's text has no room, which shows only once the request runs.
NOT_FINITE, OUT_OF_MEMORY, CANNOT_CONTINUE = "not_finite", "out_of_memory", "cannot_continue"


@dataclass(frozen=True)
class Audio:
    """samples [N] float32; `frames` frames of the tape."""

    samples: np.ndarray
    frames: int


@dataclass(frozen=True)
class Text:
    """Whole characters that the model wrote, from where the last such event ended."""

    text: str


@dataclass(frozen=True)
class Spoken:
    """A piece of the text, all of whose audio was delivered: the answer's samples start .. stop."""

    text: str
    start: int
    stop: int


@dataclass(frozen=True)
class Finished:
    """reason: "stop" (the model ended), "length" (a pass reached its cap) or "cancelled". usage: the
    prompt's, and `text_tokens` that the model wrote, if any. No event follows."""

    reason: str
    frames: int
    usage: dict[str, int]
    answer: Answer = field(default_factory=Answer)


@dataclass(frozen=True)
class Failed:
    """The engine cannot continue this request. No event follows. retry_after_s: when another try may
    succeed."""

    message: str
    code: str = "engine_failed"
    retry_after_s: float | None = None


Event = Audio | Text | Spoken | Finished | Failed
