"""Windows: how many frames are cut, and which windows share a launch. Pure functions of a snapshot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from serving.engine.device.launches import Render
from serving.engine.schedule.snapshot import Shapes, Snapshot


@dataclass(frozen=True, eq=False)
class WindowPlan:
    """The windows of one iteration, one per slot at most."""

    slots: np.ndarray  # [B], ascending
    count: np.ndarray  # [B], frames of each
    is_skipped: np.ndarray | None = None  # [S], first windows that are due and wait for this one


def cut(
    snapshot: Snapshot, slots: np.ndarray, takes_all: np.ndarray, largest: np.ndarray | int
) -> np.ndarray:
    """Return how many frames of each slot go into its window. [B]

    takes_all [S]: a window of these takes all frames there are, padded up to a shape. If that is more
    than twice the work of several smaller windows, it takes the first of those, and the next follows
    soon. The other windows fill a shape exactly, and what is left over waits, so the renderer computes
    nothing in vain. The work of a shape is its frames, and those around it that are read as well.
    """
    shapes, window = snapshot.shapes, snapshot.shapes.window
    pending = snapshot.pending[slots]
    context = window.left + window.lookahead
    there = np.minimum(pending, largest)
    padded = shapes.fitting(there)
    full = shapes.filled(there)
    num_full = -(-there // full)
    is_worth = (padded + context <= 2 * num_full * (full + context)) | (there < shapes.smallest)
    count = np.where(takes_all[slots] & is_worth, there, full)
    return to_grid(snapshot, slots, np.minimum(count, pending))


def to_grid(snapshot: Snapshot, slots: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return the frames of each window down to the grid's last point, unless the speech ends with them.
    [B]
    """
    grid = snapshot.shapes.window.grid
    if grid == 1:
        return count
    tape = snapshot.slots.tape
    start = tape.num_rendered[slots]
    stop = start + count
    offset = tape.grid_offset[slots]
    is_end = tape.is_done[slots] & (stop == tape.num_ready[slots])
    return np.where(is_end, count, offset + (stop - offset) // grid * grid - start)


def grouped(
    shapes: Shapes,
    plan: WindowPlan,
    start: np.ndarray,
    is_last: np.ndarray,
    is_reproducible: np.ndarray,
    now_s: float,
) -> list[Render]:
    """Return one launch for each shape. All [B]."""
    frames = shapes.fitting(plan.count)
    lengths = np.array(shapes.window.lengths or (0,))
    length = lengths[np.searchsorted(lengths, np.minimum(start + plan.count, lengths[-1]))]
    # One number for each shape, since unique rows take five times as long.
    keys = 2 * (frames * (lengths[-1] + 1) + length) + is_reproducible  # [B]
    renders = []
    for key in np.unique(keys):
        rows = np.flatnonzero(keys == key)
        first = rows[0]
        renders.append(
            Render(
                plan.slots[rows],
                start[rows],
                plan.count[rows],
                is_last[rows],
                frames=int(frames[first]),
                handed_s=now_s,
                length=int(length[first]),
                is_reproducible=bool(is_reproducible[first]),
            )
        )
    return renders
