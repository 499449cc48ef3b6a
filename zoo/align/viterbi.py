"""The best path of a text through the emissions of a CTC model.

    targets   A B              states   - A - B -       (- is blank: 2 L + 1 states)
    frames    - A A - B        path     0 1 1 2 3

The scores are added in float32 and in the order of torchaudio's `forced_align`, so both find the same path.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

NEVER = -np.inf


def min_frames(targets: Sequence[int]) -> int:
    """Return the fewest frames that can hold the targets: equal neighbours need a blank between them."""
    return len(targets) + sum(a == b for a, b in pairwise(targets))


def forced_align(
    log_probs: np.ndarray, targets: Sequence[int], blank: int = 0, *, is_open: bool = False
) -> np.ndarray:
    """Return the state of each frame [T] int64 on the best path: 2 i + 1 is targets[i], an even state is blank.

    log_probs: [T, V]. is_open: the speech may have ended after any part of the targets; otherwise the path
    holds all of them. Raises ValueError if there are too few frames for the targets.
    """
    num_frames, num_states = len(log_probs), 2 * len(targets) + 1
    if num_frames < (1 if is_open else max(min_frames(targets), 1)):
        raise ValueError(f"{num_frames} frames cannot hold {len(targets)} targets")
    labels = np.full(num_states, blank)  # [S]
    labels[1::2] = targets
    emitted = log_probs.astype(np.float32, copy=False)[:, labels]  # [T, S]
    may_skip = np.zeros(num_states, bool)  # whether a state may follow the one two before it
    may_skip[3::2] = labels[3::2] != labels[1:-2:2]
    steps = np.zeros((num_frames, num_states), np.int8)  # how many states back the best path was
    scores = np.full(num_states, NEVER, np.float32)
    scores[:2] = emitted[0, :2]
    for t in range(1, num_frames):
        stay = scores
        step = np.full_like(scores, NEVER)
        step[1:] = scores[:-1]
        skip = np.full_like(scores, NEVER)
        skip[2:] = np.where(may_skip[2:], scores[:-2], NEVER)
        steps[t] = np.where((skip > step) & (skip > stay), 2, step > stay)
        scores = np.maximum(np.maximum(stay, step), skip) + emitted[t]
    path = np.empty(num_frames, np.int64)
    if is_open:
        state = int(scores.argmax())
    else:
        state = num_states - 1 if num_states == 1 or scores[-1] > scores[-2] else num_states - 2
    for t in range(num_frames - 1, -1, -1):
        path[t] = state
        state -= int(steps[t, state])
    return path
