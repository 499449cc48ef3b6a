"""Launches of an iteration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Chunk:
    """Positions start .. stop of one lane's prompt, to be prefilled in one launch. is_last: the prompt ends
    there."""

    slot: int
    start: int
    stop: int
    is_last: bool
    lane: int = 0


def num_tokens(chunks: Iterable[Chunk]) -> int:
    return sum(chunk.stop - chunk.start for chunk in chunks)


@dataclass(frozen=True, eq=False)
class Render:
    """One launch of the renderer: frames start .. start + count of each slot's tape, in a window of `frames`
    frames.

    handed_s: when it was launched. length: of the window's length buckets, 0 without them. is_reproducible:
    no row's result depends on the others.
    """

    slots: np.ndarray  # [B], ascending
    start: np.ndarray  # [B]
    count: np.ndarray  # [B], at most `frames`; 0 where only held samples are left
    is_last: np.ndarray  # [B], whether the speech ends with it
    frames: int
    handed_s: float
    length: int = 0
    is_reproducible: bool = False
