"""One window at a time, where windows are made one after the other and steps wait meanwhile: the earliest
deadline first.

A listener needs its next window before its audio ends, and a launched window is not interrupted. So each
listener has slack: its remaining audio, less the windows of those with earlier deadlines, its own, and the
steps that its frames still need. A listener that waits for first audio goes before all whose slack allows
it; while there is one, no other window is made before it must. Otherwise windows are as large as the
others' slack allows, since a large one takes less time than two.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from serving.engine.schedule.numbers import MAX_WINDOWS_AHEAD, TAIL_PART
from serving.engine.schedule.snapshot import Snapshot
from serving.engine.schedule.window_cost import WindowCost
from serving.engine.schedule.windows import WindowPlan, to_grid


@dataclass(frozen=True, eq=False)
class Deadlines:
    """By slot, all [S]. left_s: the audio that each listener has. pending: frames that may be rendered;
    missing: steps until there are any. plays: the listener has audio and more is to come in time. is_first:
    it has none, and its first window is due; num_skipped: windows of others since then. is_due: it may have a
    window, but nothing depends on it. is_ending: no more frames come. has_newcomers: a listener has heard
    nothing yet, with or without a window that is due."""

    left_s: np.ndarray
    pending: np.ndarray
    missing: np.ndarray
    plays: np.ndarray
    is_first: np.ndarray
    num_skipped: np.ndarray
    is_due: np.ndarray
    is_ending: np.ndarray
    has_newcomers: bool

    @classmethod
    def of(cls, now: Snapshot, is_due: np.ndarray) -> Deadlines:
        """Return those of slots whose windows do not follow from frame numbers alone."""
        tape, listener = now.slots.tape, now.slots.listener
        is_asked = ~now.is_resting & ~listener.is_reproducible & ~listener.is_flexible
        is_whole = tape.is_done & (tape.num_rendered == tape.num_ready)
        # The next point of the grid; the first one is where the prompt's codes put it, or a whole stretch
        # away.
        window = now.shapes.window
        known = tape.num_ready - window.lookahead - tape.grid_offset
        stretches = np.maximum(known // window.grid + 1, tape.grid_offset == 0)
        next_point = tape.grid_offset + stretches * window.grid
        missing = next_point + window.lookahead - tape.num_ready
        return cls(
            left_s=np.where(listener.is_flexible, np.inf, now.remaining_s),
            pending=now.pending,
            missing=np.where(now.pending > 0, 0, missing),
            plays=is_asked & now.is_heard & ~is_whole,
            is_first=is_asked & ~now.is_heard & is_due,
            num_skipped=listener.num_skipped,
            is_due=is_due & ~listener.is_reproducible,
            is_ending=now.is_ending,
            has_newcomers=bool((is_asked & ~now.is_heard).any()),
        )

    def slack_s(self, each_s: float, step_s: float) -> np.ndarray:
        """each_s: what an iteration with one window takes, and step_s: one without. Another window may have
        begun just before. inf for a listener without a deadline. [S]"""
        order = np.argsort(self.left_s, kind="stable")
        windows = np.empty(len(order))
        windows[order] = np.cumsum(self.plays[order]) + 1
        return np.where(self.plays, self.left_s - windows * each_s - self.missing * step_s, np.inf)


def next_window(
    deadlines: Deadlines, cost: WindowCost, least: int, most: int, step_s: float
) -> tuple[int, int] | None:
    """Return a slot, and how many of its frames to render at most; None: steps first. least, most: frames of
    a window, but for a speech's last. step_s: of an iteration without windows."""
    left_s, pending, plays = deadlines.left_s, deadlines.pending, deadlines.plays
    order = np.argsort(left_s, kind="stable")
    each_s = cost(least) + step_s
    slack_s = deadlines.slack_s(each_s, step_s)  # [S]

    def sized(slot: int, spare_s: float) -> tuple[int, int]:
        there = int(min(pending[slot], most))
        others_s = max(np.delete(slack_s, slot).min(initial=np.inf) - spare_s, 0.0)
        more = others_s / cost.frame_s if cost.frame_s else np.inf
        frames = int(min(least + more, there))
        is_tail = deadlines.is_ending[slot] and there - frames <= TAIL_PART * least
        return slot, there if is_tail else frames

    first = np.flatnonzero(deadlines.is_first)
    first = first[np.argsort(-deadlines.num_skipped[first], kind="stable")]
    first_s = cost(pending[first[0]]) + step_s if first.size else 0.0
    if first.size and deadlines.num_skipped[first[0]] >= MAX_WINDOWS_AHEAD:
        return int(first[0]), most
    is_late = slack_s <= first_s  # behind a first window
    # A listener whose frames are still to be made has time for steps alone; one that has run dry has nothing
    # to lose.
    steps_by_s = left_s[is_late & (pending <= 0) & (left_s > 0)].min(initial=np.inf)
    must = plays & (left_s <= left_s[is_late].max(initial=-np.inf)) & (pending > 0)
    if must.any():
        slot = int(order[must[order]][0])
        return sized(slot, first_s) if left_s[slot] <= steps_by_s else None
    if first.size:
        return (int(first[0]), most) if steps_by_s == np.inf else None
    if deadlines.has_newcomers:
        return None
    for slot in order[deadlines.is_due[order]].tolist():
        if each_s <= slack_s[plays & (left_s < left_s[slot])].min(initial=np.inf):
            return sized(slot, 0.0)
    return None


def one_window(now: Snapshot, is_due: np.ndarray, others: WindowPlan) -> WindowPlan:
    """Return the next window along with others that follow from frame numbers alone or have no frames."""
    cost = now.timing.window_cost
    assert cost is not None, "one window at a time, but nothing is known of what windows take"
    deadlines = Deadlines.of(now, is_due)
    shapes = now.shapes
    least = max(shapes.smallest, shapes.window.grid)
    found = next_window(deadlines, cost, least, shapes.largest, now.timing.step_s)
    if found is None:
        return others
    slot = np.array([found[0]])
    is_skipped = deadlines.is_first & (np.arange(now.slots.num_slots) != slot)
    count = to_grid(now, slot, np.minimum(now.pending[slot], found[1]))
    at = np.searchsorted(others.slots, slot)
    return WindowPlan(np.insert(others.slots, at, slot), np.insert(others.count, at, count), is_skipped)
