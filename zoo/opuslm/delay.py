"""The delay pattern: stream s runs s steps behind stream 0, so that each id is drawn after the coarser ids of
its frame are known.

    step      0    1    2   ...  8   ...  e    e+1  e+2 ... e+7    e is the first step whose id 0 is E: speech has e frames
    stream 0  c00  c10  c20      c80      E    .    0       0
    stream 1  0    c01  c11      c71      .    .    0       0      0 pad, E end, . drawn, fed back, and dropped
    ...                                                            c of frame f, stream s: step f + s
    stream 8  0    0    0        c08      .    .    .    c(e-1)8   frame f is whole after step f + 8

Each id is written to its frame on the tape: the delay is only a write address. The reference notices an end
one step late, so the step behind it still draws. At the limit of a request, F frames, it puts the end into
step F + 1. A continued recording has its own ids in the place of the first pads.

An answer first writes words, with the same loop: only stream 0 draws, and after the end come the same rows. Then the
model reads who speaks, and the marker of audio, and its speech begins.

    step      0   1  ...  n-1  n  n+1  n+2 ... n+9  n+10  n+11  n+12
    stream 0  w0  w1      wn   E  .    0       0    role  audio c00 ...     after n words at the limit, E is put a step
                                                                            later, and one row of pads is missing

Source: ESPnet's SpeechLM at 5f0a39a, core_lm/ar_delay.py and bin/speechlm_inference_chat.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from zoo.contract import NEVER, Prompt, Spec, State
from zoo.opuslm.ids import PAD, STREAMS

DELAY = STREAMS - 1  # steps from a frame's first id to its last
MIN_FRAMES, MIN_WORDS = 3, 1  # no end is drawn before
TEXT_ROWS = DELAY + 2  # behind an answer's words: the end, the step behind it, and pads
OPENING = 2  # rows between an answer's words and its speech


class Words(NamedTuple):
    """The ids that an answer's words are made with."""

    end: int
    role: int
    audio: int


class DelayState(State):
    """The state of a slot, with tensors added. row [S+1, 9]: the ids of the last step. end [S+1]: the final
    number of frames, the cap until the model ends the speech earlier. ended_at [S+1]: the step in which it
    did, counted from the step `begin` [S+1] with the first frame; NEVER while it writes. before [S+1, 8, 9]: the
    ids of a continued recording in the first steps. max_words, words_ended_at [S+1]: the same for words. speaks
    [S+1]: whether speech follows the words."""

    row: Tensor
    end: Tensor
    ended_at: Tensor
    begin: Tensor
    before: Tensor
    max_words: Tensor
    words_ended_at: Tensor
    speaks: Tensor

    def __init__(self, spec: Spec, slots: int, max_frames: int, dtype: torch.dtype, device: torch.device):
        super().__init__(spec, slots, max_frames, dtype, device)
        self.add("row", STREAMS, dtype=torch.int64)
        self.add("end", dtype=torch.int64)
        self.add("ended_at", dtype=torch.int64, default=NEVER)
        self.add("begin", dtype=torch.int64)
        self.add("before", DELAY, STREAMS, dtype=torch.int64, default=PAD)
        self.add("max_words", dtype=torch.int64)
        self.add("words_ended_at", dtype=torch.int64, default=NEVER)
        self.add("speaks", dtype=torch.int64, default=1)

    def open(self, slot: int, prompt: Prompt) -> None:
        super().open(slot, prompt)
        self.end[slot] = prompt.max_frames

    def step(self, slots: Tensor, drawn: Tensor, codes: Tensor, word: Tensor, words: Words) -> None:
        """Take one step's drawn ids [B, 9] and write their codes [B, 9] to their frames on the tape; or, in slots
        that write, take the word's id [B]. Slots that are done do not change."""
        alive, begin = ~self.done[slots], self.begin[slots]
        is_word = self.steps[slots] < begin
        text_row, is_over = self._take_word(slots, word, alive & is_word, words)
        row, is_said = self._take_ids(slots, drawn, codes, alive & ~is_word, words.end)
        row = torch.where(is_word[:, None], text_row, row)
        self.row[slots] = torch.where(alive[:, None], row, self.row[slots])
        self.steps[slots] = self.steps[slots] + alive
        self.done[slots] = ~alive | is_over | is_said

    def _take_ids(
        self, slots: Tensor, drawn: Tensor, codes: Tensor, speaks: Tensor, end_id: int
    ) -> tuple[Tensor, Tensor]:
        """Return the row [B, 9] that the next step reads, and whether the speech is whole. speaks [B]: the slots
        that this is for."""
        steps, old_end = self.steps[slots] - self.begin[slots], self.end[slots]
        limit, ended_at = self.limit[slots], self.ended_at[slots]
        ends_now = speaks & (steps < ended_at) & (steps <= limit) & (drawn[:, 0] == end_id)
        ended_at = torch.where(ends_now, steps, ended_at)
        before = self.before[slots, steps.clamp(0, DELAY - 1)]
        row = self.delayed(drawn, steps, torch.minimum(ended_at, limit), before)
        is_forced = (steps == limit + 1) & (ended_at == NEVER)
        stream = torch.arange(STREAMS, device=slots.device)
        row = torch.where(is_forced[:, None] & (stream == 0), end_id, row)
        end = torch.where(speaks, torch.minimum(old_end, ended_at), old_end)

        frame = steps[:, None] - stream  # [B, 9], the frame of each id
        kept = speaks[:, None] & (frame >= 0) & (frame < end[:, None])
        at = (slots[:, None], frame.clamp(min=0, max=self.tape.shape[1] - 1), stream)
        self.tape[at] = torch.where(kept, codes, self.tape[at])

        taken = steps + 1
        ready = torch.minimum((taken - DELAY).clamp(min=0), end)
        self.end[slots] = end
        self.ended_at[slots] = ended_at
        self.ready[slots] = torch.where(speaks, ready, self.ready[slots])
        return row, speaks & (taken >= end + DELAY)

    def _take_word(self, slots: Tensor, word: Tensor, writes: Tensor, words: Words) -> tuple[Tensor, Tensor]:
        """Return the row [B, 9] that the next step reads, and whether an answer without speech is over. writes [B]:
        the slots that this is for."""
        steps, limit = self.steps[slots], self.max_words[slots]
        ended_at, speaks = self.words_ended_at[slots], self.speaks[slots] > 0
        ends_now = writes & (steps < ended_at) & (steps <= limit) & (word == words.end)
        ended_at = torch.where(ends_now, steps, ended_at)
        last = torch.minimum(ended_at, limit)
        first = torch.where(steps >= last + 2, PAD, word)
        first = torch.where((steps == limit + 1) & (ended_at == NEVER), words.end, first)
        rows = torch.minimum(ended_at, limit - 1) + TEXT_ROWS  # the reference's steps end at the limit
        first = torch.where(steps == rows, words.role, first)
        is_open = steps == rows + 1
        first = torch.where(is_open, words.audio, first)
        begin = self.begin[slots]
        self.write(slots, torch.where(writes & (steps < last), word, -1))
        self.begin[slots] = torch.where(writes & speaks & is_open, rows + OPENING, begin)
        self.words_ended_at[slots] = ended_at
        row = torch.nn.functional.pad(first[:, None], (0, DELAY), value=PAD)
        return row, writes & ~speaks & (ends_now | (steps + 1 >= limit))

    @staticmethod
    def delayed(drawn: Tensor, steps: Tensor, last: Tensor, before: Tensor) -> Tensor:
        """Return the drawn ids [B, 9] with those of `before` [B, 9] in front of the first frame, and with pads
        behind the end in step `last` [B], from the second step on."""
        stream = torch.arange(STREAMS, device=drawn.device)
        late = (steps - last)[:, None]
        row = torch.where(stream > steps[:, None], before, drawn)
        return torch.where((late >= 2) & (stream < late), PAD, row)


def delayed(rows: Tensor) -> Tensor:
    """Return rows of ids [T, 9] with stream s moved s rows down. Ids that leave the end are dropped."""
    moved = torch.full_like(rows, PAD)
    for s in range(min(STREAMS, len(rows))):
        moved[s:, s] = rows[: len(rows) - s, s]
    return moved


def left_over(rows: Tensor) -> Tensor:
    """Return what `delayed` dropped of rows of ids [T, 9], in the steps [8, 9] in which it is due."""
    due = torch.full((DELAY, STREAMS), PAD)
    for s in range(1, STREAMS):
        num = min(s, len(rows))
        due[s - num : s, s] = rows[len(rows) - num :, s]
    return due
