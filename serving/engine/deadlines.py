"""Whose window is next, where windows are made one after the other and steps wait meanwhile: the earliest deadline first.

A listener needs its next window before it has played what it has, and a window that began is not interrupted. So each listener
has slack: what it has left, less the windows of those whose deadlines come before, its own, and the steps that its frames still
need. Whoever waits for first audio goes before all whose slack allows it, and while somebody does, nobody else has a window
before it must. When nobody waits, windows are as large as the others' slack allows, since a large one takes less time than two.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MEMORY = 0.98  # of what windows took, from one to the next
MARGIN = 1.3  # times what a window is expected to take
TAIL = 0.6  # of the smallest window: so many last frames go along, whoever waits, since a window of their own takes longer
MOST_PASSED = 8  # windows of others that who waits for first audio is passed by


class WindowCost:
    """Seconds of a window of so many frames, with a margin: what any takes, and what each frame adds; least squares over the
    windows of late."""

    def __init__(self) -> None:
        self.fixed_s = self.frame_s = 0.0
        self._sums = np.zeros(5)  # of 1, frames, frames squared, seconds, frames times seconds

    def record(self, frames: float, took_s: float) -> None:
        self._sums = MEMORY * self._sums + np.array((1, frames, frames * frames, took_s, frames * took_s))
        num, x, xx, y, xy = self._sums.tolist()
        spread = xx - x * x / num
        slope = (xy - x * y / num) / spread if spread > 1 else np.inf
        frame_s = min(max(slope, 0.0), y / x)
        self.frame_s, self.fixed_s = MARGIN * frame_s, MARGIN * (y - frame_s * x) / num

    def __call__(self, frames: float) -> float:
        return self.fixed_s + self.frame_s * frames


@dataclass(frozen=True, eq=False)
class Listeners:
    """By slot, all [S]. left_s: the audio that each has. pending: frames that may be rendered; missing: steps until there are
    any. plays: it hears, and more is to come in time. is_first: it has heard nothing yet, and its first window is due; passed:
    windows of others since then. is_due: it may have a window, but nothing depends on that. is_done: no more frames come.
    has_newcomers: whether anybody has heard nothing yet, also without a window that is due."""

    left_s: np.ndarray
    pending: np.ndarray
    missing: np.ndarray
    plays: np.ndarray
    is_first: np.ndarray
    passed: np.ndarray
    is_due: np.ndarray
    is_done: np.ndarray
    has_newcomers: bool

    def slack_s(self, each_s: float, step_s: float) -> np.ndarray:
        """each_s: what a turn with one window takes, and step_s: one without. Somebody else's window may have begun just before.
        inf of who has no deadline. [S]"""
        order = np.argsort(self.left_s, kind="stable")
        windows = np.empty(len(order))
        windows[order] = np.cumsum(self.plays[order]) + 1
        return np.where(self.plays, self.left_s - windows * each_s - self.missing * step_s, np.inf)


def next_window(
    listeners: Listeners, cost: WindowCost, least: int, most: int, step_s: float
) -> tuple[int, int] | None:
    """least, most: frames of a window, but for a speech's last. step_s: a turn without windows. -> a slot, and how many of its
    frames at most; None: steps first."""
    left_s, pending, plays = listeners.left_s, listeners.pending, listeners.plays
    order = np.argsort(left_s, kind="stable")
    each_s = cost(least) + step_s
    slack_s = listeners.slack_s(each_s, step_s)  # [S]

    def sized(slot: int, spare_s: float) -> tuple[int, int]:
        there = int(min(pending[slot], most))
        others_s = max(np.delete(slack_s, slot).min(initial=np.inf) - spare_s, 0.0)
        more = others_s / cost.frame_s if cost.frame_s else np.inf
        frames = int(min(least + more, there))
        is_tail = listeners.is_done[slot] and there - frames <= TAIL * least
        return slot, there if is_tail else frames

    first = np.flatnonzero(listeners.is_first)
    first = first[np.argsort(-listeners.passed[first], kind="stable")]
    first_s = cost(pending[first[0]]) + step_s if first.size else 0.0
    if first.size and listeners.passed[first[0]] >= MOST_PASSED:
        return int(first[0]), most
    is_late = slack_s <= first_s  # behind a first window
    # Whose frames are still to be made has time for steps alone; who has run dry has nothing to lose.
    steps_by_s = left_s[is_late & (pending <= 0) & (left_s > 0)].min(initial=np.inf)
    must = plays & (left_s <= left_s[is_late].max(initial=-np.inf)) & (pending > 0)
    if must.any():
        slot = int(order[must[order]][0])
        return sized(slot, first_s) if left_s[slot] <= steps_by_s else None
    if first.size:
        return (int(first[0]), most) if steps_by_s == np.inf else None
    if listeners.has_newcomers:
        return None
    for slot in order[listeners.is_due[order]].tolist():
        if each_s <= slack_s[plays & (left_s < left_s[slot])].min(initial=np.inf):
            return sized(slot, 0.0)
    return None
