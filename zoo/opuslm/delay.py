"""The delay pattern: stream s runs s steps behind stream 0, so that each id is drawn after the coarser ids of
its frame are known.

    step      0    1    2   ...  8   ...  e    e+1  e+2 ... e+7    e is the first step whose id 0 is E: speech has e frames
    stream 0  c00  c10  c20      c80      E    .    0       0
    stream 1  0    c01  c11      c71      .    .    0       0      0 pad, E end, . drawn, fed back, and dropped
    ...                                                            c of frame f, stream s: step f + s
    stream 8  0    0    0        c08      .    .    .    c(e-1)8   frame f is whole after step f + 8

Each id is written to its frame on the tape: the delay is only a write address. The reference notices an end
one step late, so the step behind it still draws. At the limit of a request, F frames, it puts the end into
step F + 1. Source: ESPnet's SpeechLM at 5f0a39a, core_lm/ar_delay.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.contract import Prompt, Spec, State
from zoo.opuslm.config import DELAY, PAD, STREAMS

NEVER = 1 << 40  # a step that no speech reaches
MIN_FRAMES = 3  # no end is drawn before


class DelayState(State):
    """The state of a slot, with tensors added. row [S+1, 9]: the ids of the last step. end [S+1]: the final
    number of frames, the cap until the model ends the speech earlier. ended_at [S+1]: the step in which it
    did."""

    row: Tensor
    end: Tensor
    ended_at: Tensor

    def __init__(self, spec: Spec, slots: int, max_frames: int, dtype: torch.dtype, device: torch.device):
        super().__init__(spec, slots, max_frames, dtype, device)
        self.add("row", STREAMS, dtype=torch.int64)
        self.add("end", dtype=torch.int64)
        self.add("ended_at", dtype=torch.int64, default=NEVER)

    def open(self, slot: int, prompt: Prompt) -> None:
        super().open(slot, prompt)
        self.end[slot] = prompt.max_frames

    def step(self, slots: Tensor, drawn: Tensor, codes: Tensor, end_id: int) -> None:
        """Take one step's drawn ids [B, 9] and write their codes [B, 9] to their frames on the tape. Slots
        that are done do not change."""
        steps, alive = self.steps[slots], ~self.done[slots]
        limit, ended_at = self.limit[slots], self.ended_at[slots]
        ends_now = alive & (steps < ended_at) & (steps <= limit) & (drawn[:, 0] == end_id)
        ended_at = torch.where(ends_now, steps, ended_at)
        row = self.delayed(drawn, steps, torch.minimum(ended_at, limit))
        is_forced = (steps == limit + 1) & (ended_at == NEVER)
        stream = torch.arange(STREAMS, device=slots.device)
        row = torch.where(is_forced[:, None] & (stream == 0), end_id, row)
        end = torch.minimum(self.end[slots], ended_at)

        frame = steps[:, None] - stream  # [B, 9], the frame of each id
        kept = alive[:, None] & (frame >= 0) & (frame < end[:, None])
        at = (slots[:, None], frame.clamp(min=0, max=self.tape.shape[1] - 1), stream)
        self.tape[at] = torch.where(kept, codes, self.tape[at])

        taken = steps + alive
        self.row[slots] = torch.where(alive[:, None], row, self.row[slots])
        self.end[slots] = end
        self.ended_at[slots] = ended_at
        self.steps[slots] = taken
        self.ready[slots] = torch.minimum((taken - DELAY).clamp(min=0), end)
        self.done[slots] = ~alive | (taken >= end + DELAY)

    @staticmethod
    def delayed(drawn: Tensor, steps: Tensor, last: Tensor) -> Tensor:
        """Return the drawn ids [B, 9] with pads before the first frame, and behind the end in step `last`
        [B], from the second step on."""
        stream = torch.arange(STREAMS, device=drawn.device)
        late = (steps - last)[:, None]
        is_pad = (stream > steps[:, None]) | ((late >= 2) & (stream < late))
        return torch.where(is_pad, PAD, drawn)


def delayed(rows: Tensor) -> Tensor:
    """Return rows of ids [T, 9] with stream s moved s rows down; what leaves the end is dropped."""
    moved = torch.full_like(rows, PAD)
    for s in range(min(STREAMS, len(rows))):
        moved[s:, s] = rows[: len(rows) - s, s]
    return moved
