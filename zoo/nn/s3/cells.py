"""Render a stretch of a tape cell by cell, where a cell is what the flow computes at once.

    stretch   | cell 0    | cell 1    | ... | last cell |
    samples   | of cell 0 | of cell 1 | ... | of the last cell, and what the vocoder held back |

A stretch begins and ends with a cell, or ends with the speech. So the samples do not depend on how the tape is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from zoo.contract import View
from zoo.nn.eager import may_follow_values
from zoo.nn.s3.sizes import GRID


def rendered(
    view: View, cells: int, size: int, most: int, render: Callable[[View], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return samples [B, most] of a stretch, and how many of them are valid [B].

    cells: the most that a slot's stretch has; size: codes of each cell but the first, which has GRID. render: renders a
    view of at most one cell per slot -> samples [B, _] and how many are valid [B]. On a CPU each slot is rendered with
    its own lengths, so nothing is padded.
    """
    out = torch.zeros(len(view.slots), most + 1, device=view.slots.device)
    given = torch.zeros_like(view.count)
    start, stop = view.start, view.start + view.count
    for cell in range(cells):
        end = torch.minimum(GRID + ((start - GRID).div(size, rounding_mode="floor") + 1) * size, stop)
        count, is_end = end - start, view.is_last & (end == stop)
        # held samples are given out with the last codes, or alone if none are left
        is_used = (count > 0) | (is_end & (view.count == 0) & (cell == 0))
        part = View(view.slots, start, count, is_end & is_used, size, view.length)
        start = end
        for rows in _together(part, is_used):
            samples, valid = render(_rows_of(part, rows))
            at = torch.arange(samples.shape[1], device=samples.device)
            place = torch.where(at < valid[:, None], given[rows, None] + at, most)
            out[rows] = out[rows].scatter(1, place, samples)
            given[rows] = given[rows] + valid
    return out[:, :most], given


def _together(part: View, is_used: Tensor) -> list[Tensor]:
    """Return the rows that are computed together: all of them, or one by one where shapes may follow values."""
    if not may_follow_values(part.slots):
        return [torch.arange(len(part.slots), device=part.slots.device)]
    return list(is_used.nonzero())


def _rows_of(view: View, rows: Tensor) -> View:
    """Return some rows of a view."""
    slots, start, count, is_last = (part[rows] for part in (view.slots, view.start, view.count, view.is_last))
    return replace(view, slots=slots, start=start, count=count, is_last=is_last)
