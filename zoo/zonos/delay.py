"""The delay pattern: codebook k runs k steps behind codebook 0, so that each code is drawn after the coarser
codes of its frame are known.

    step        0    1    2   ...  8    9   ...  r    r+1  ...  r+7      r is the first step whose code 0 is E: speech has r frames
    codebook 0  c00  c10  c20      c80  c90      E    M         M
    codebook 1  M    c01  c11      c71  c81      .    E         M        c of frame f, codebook k: step f + k
    ...                                                                  M mask, E end, . drawn, fed back, and dropped
    codebook 8  M    M    M        c08  c18      .    .         c(r-1)8  frame f is whole after step f + 8

Behind a recording that the speech continues, the recording's last codes stand in the place of the masks. Each
code is written to its frame on the tape: the delay is only a write address. At the limit of a request the
model runs on until the last frame is whole, so that F frames of a long speech are the first F frames of it.
Source: Zyphra/Zonos at bc40d98, model.py and codebook_pattern.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.contract import NEVER, Prompt, Spec, State
from zoo.zonos.config import BOOKS, CODES, DELAY, END, MASK


class DelayState(State):
    """The state of a slot, with tensors added. row and previous [S+1, K]: the codes of the last two steps,
    with END and MASK. ramp [S+1, K-1, K]: codes of the first steps that are known before, of codebook k in
    steps below k. end [S+1]: the final number of frames, the cap until codebook 0 ends the speech earlier.
    ended_at [S+1]: the step in which it did."""

    row: Tensor
    previous: Tensor
    ramp: Tensor
    end: Tensor
    ended_at: Tensor

    def __init__(self, spec: Spec, slots: int, max_frames: int, dtype: torch.dtype, device: torch.device):
        super().__init__(spec, slots, max_frames, dtype, device)
        self.add("row", BOOKS, dtype=torch.int64, default=MASK)
        self.add("previous", BOOKS, dtype=torch.int64, default=MASK)
        self.add("ramp", DELAY, BOOKS, dtype=torch.int64, default=MASK)
        self.add("end", dtype=torch.int64)
        self.add("ended_at", dtype=torch.int64, default=NEVER)

    def open(self, slot: int, prompt: Prompt) -> None:
        super().open(slot, prompt)
        self.end[slot] = prompt.max_frames

    def step(self, slots: Tensor, drawn: Tensor) -> None:
        """Write one step's drawn codes [B, K] to their frames on the tape. Slots that are done do not change.

        An end in the first step does not end the speech. Ends and masks in a kept frame become code 0.
        """
        steps, alive = self.steps[slots], ~self.done[slots]
        book = torch.arange(BOOKS, device=slots.device)
        known = self.ramp[slots, steps.clamp(max=DELAY - 1)]  # [B, K]
        row = torch.where(book > steps[:, None], known, drawn)  # [B, K]
        ended_at = self.ended_at[slots]
        ends_now = alive & (steps > 0) & (steps < ended_at) & (row[:, 0] == END)
        ended_at = torch.where(ends_now, steps, ended_at)
        end = torch.minimum(self.end[slots], ended_at)
        late = (steps - ended_at)[:, None]
        row = torch.where(book == late, END, torch.where(book < late, MASK, row))

        frame = steps[:, None] - book  # [B, K], the frame of each code
        kept = alive[:, None] & (frame >= 0) & (frame < end[:, None])
        at = (slots[:, None], frame.clamp(min=0, max=self.tape.shape[1] - 1), book)
        self.tape[at] = torch.where(kept, torch.where(row < CODES, row, 0), self.tape[at])

        taken = steps + alive
        self.previous[slots] = torch.where(alive[:, None], self.row[slots], self.previous[slots])
        self.row[slots] = torch.where(alive[:, None], row, self.row[slots])
        self.end[slots] = end
        self.ended_at[slots] = ended_at
        self.steps[slots] = taken
        self.ready[slots] = torch.minimum((taken - DELAY).clamp(min=0), end)
        self.done[slots] = ~alive | (taken >= end + DELAY)


def columns(codes: Tensor) -> Tensor:
    """Return the codes [F, K] of a recording as the columns that the model reads [F + 1, K]: codebook k moves
    down k + 1 rows."""
    frames = len(codes)
    rows = torch.full((frames + 1, BOOKS), MASK, dtype=codes.dtype, device=codes.device)
    for k in range(BOOKS):
        rows[k + 1 :, k] = codes[: max(0, frames - k), k]
    return rows


def ramp(codes: Tensor) -> Tensor:
    """Return the codes of a recording [F, K] that the first steps behind it do not draw, [K-1, K]."""
    frames = len(codes)
    rows = torch.full((DELAY, BOOKS), MASK, dtype=codes.dtype, device=codes.device)
    for step in range(DELAY):
        for k in range(step + 1, BOOKS):
            frame = frames + step - k
            if frame >= 0:
                rows[step, k] = codes[frame, k]
    return rows
