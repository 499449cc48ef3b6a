"""The delay pattern: codebook k runs k steps behind codebook 0, so that each code is drawn after the coarser
codes of its frame are known.

    step        0    1    2   ...  7    8   ...  r    r+1  ...  r+6      r is the first step whose code 0 is E: speech has r frames
    codebook 0  c00  c10  c20      c70  c80      E    .         .
    codebook 1  B    c01  c11      c61  c71      .    .         .        c of frame f, codebook k: step f + k
    ...                                                                  B "begin", E "end", . drawn, fed back, and dropped
    codebook 7  B    B    B        c07  c17      .    .         c(r-1)7  frame f is whole after step f + 7

Each code is written to its frame on the tape. The delay is only a write address, and readers of the tape do
not see it.
Source: MusicGen (arXiv 2306.05284), section 2.2; sgl-project/sglang-omni 0.1.9, models/higgs_tts/sampler.py
and utils.py. The idea of the write address comes from kyutai-labs/moshi, models/lm.py, LMGen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.contract import Prompt, Spec, State


class DelayState(State):
    """The state of a slot, with two tensors added. row [S+1, K] holds the codes of the last step, including
    special ids. end [S+1] is the final number of frames: the cap, until codebook 0 ends the speech."""

    row: Tensor
    end: Tensor

    def __init__(self, spec: Spec, slots: int, max_frames: int, dtype: torch.dtype, device: torch.device):
        super().__init__(spec, slots, max_frames, dtype, device)
        self.add("row", *spec.frame_shape, dtype=torch.int64)
        self.add("end", dtype=torch.int64)

    def open(self, slot: int, prompt: Prompt) -> None:
        super().open(slot, prompt)
        self.end[slot] = prompt.max_frames

    def step(self, slots: Tensor, drawn: Tensor, begin: int, end: int) -> None:
        """Write one step's drawn codes [B, K] to their frames on the tape. Slots that are done do not change.

        An "end" in codebook 0 ends the speech at any step. Special ids inside a kept frame become code 0.
        Clamping them to the last code, which is a real code, would be audible.
        """
        steps, alive, books = self.steps[slots], ~self.done[slots], drawn.shape[1]
        book = torch.arange(books, device=slots.device)
        row = torch.where(book > steps[:, None], begin, drawn)  # [B, K]
        # [B]
        ends = torch.where(alive & (row[:, 0] == end), torch.minimum(self.end[slots], steps), self.end[slots])

        frame = steps[:, None] - book  # [B, K], the frame of each code
        kept = alive[:, None] & (frame >= 0) & (frame < ends[:, None])
        at = (slots[:, None], frame.clamp(min=0, max=self.tape.shape[1] - 1), book)
        self.tape[at] = torch.where(kept, torch.where(row < begin, row, 0), self.tape[at])

        taken = steps + alive
        self.row[slots] = torch.where(alive[:, None], row, self.row[slots])
        self.end[slots] = ends
        self.steps[slots] = taken
        self.ready[slots] = torch.minimum((taken - books + 1).clamp(min=0), ends)
        self.done[slots] = ~alive | (ends == 0) | (taken >= ends + books - 1)


def stagger(codes: Tensor, begin: int, end: int) -> Tensor:
    """Return a reference's codes [F, K] as the rows that the LM reads, [F + K - 1, K]: codebook k moves down
    k rows."""
    frames, books = codes.shape
    rows = torch.full((frames + books - 1, books), end, dtype=codes.dtype, device=codes.device)
    for k in range(books):
        rows[:k, k] = begin
        rows[k : k + frames, k] = codes[:, k]
    return rows
