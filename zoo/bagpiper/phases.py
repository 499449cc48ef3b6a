"""The phases of an answer, on the device: text, the turn to audio, audio, and the drain of the delay pattern.

    phase      TEXT               TURN    ROLE    AUDIO
    reads      [text] w0 w1 ...   end     [asst]  [audio] r0  r1 ...              r: rows of eight ids
    draws      w0 w1 ...      end  .       .       r0      r1  r2 ...  r(F+6) end  end: 2 or 3, in stream 0
    forced                        [asst]  [audio]                                 . drawn, and dropped

    row        0    1    2   ...  7    ...       stream s runs s rows behind stream 0, so that each code is drawn
    stream 0   c00  c10  c20      c70            after the coarser codes of its frame are known
    stream 1   P    c01  c11      c61            c of frame f, stream s: row f + s
    stream 7   P    P    P        c07            frame f is whole after row f + 7; P is drawn, and dropped

Each code is written to its frame on the tape: the delay is only a write address. To drain the streams, the
model draws seven more rows, and then the end. Rows that begin no whole frame are dropped. Source: espnet
202611, espnet2/speechlm/model/speechlm/lm/parallel.py and multimodal_io/audio.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.bagpiper.config import ASSISTANT, AUDIO, DELAY, EOS, FIRST_WORD, PAD, STREAMS, Config
from zoo.contract import Spec, State

IN_TEXT, IN_TURN, IN_ROLE, IN_AUDIO = range(4)


class PhaseState(State):
    """The state of a slot, with tensors added. row [S+1, 8]: the ids that the next step reads. phase [S+1]; count
    [S+1]: steps taken in it. most_words [S+1]: tokens of the text, at most. is_text [S+1]: whether the answer
    ends with its text. guidance [S+1]: the weight of guidance, whose lane opens with the audio; 1 is off."""

    row: Tensor
    phase: Tensor
    count: Tensor
    most_words: Tensor
    is_text: Tensor
    guidance: Tensor

    def __init__(
        self,
        config: Config,
        spec: Spec,
        slots: int,
        max_frames: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__(spec, slots, max_frames, dtype, device)
        self.num_words, self.first_pad = config.num_words, config.first_pad
        self.size = config.codec.num_codes + 1  # ids of a stream: its pad, then its codes
        self.add("row", STREAMS, dtype=torch.int64)
        self.add("phase", dtype=torch.int64)
        self.add("count", dtype=torch.int64)
        self.add("most_words", dtype=torch.int64)
        self.add("is_text", dtype=torch.bool)
        self.add("guidance", default=1)

    def step(self, slots: Tensor, word: Tensor, drawn: Tensor) -> None:
        """Take one step. word [B]: the index of the drawn word, and behind the words the two ends. drawn [B, 8]:
        of each stream the index of its id, 0 for its pad; in the first stream the two ends follow. Slots that
        are done do not change."""
        phase, count, alive = self.phase[slots], self.count[slots], ~self.done[slots]
        in_text, in_audio = phase == IN_TEXT, phase == IN_AUDIO
        is_word, is_end = word < self.num_words, drawn[:, 0] >= self.size
        is_last_word = ~is_word | (count + 1 >= self.most_words[slots])
        leaves = in_text & is_last_word
        self.write(slots, torch.where(in_text & is_word, word, -1))

        taken = count + (in_audio & ~is_end)  # rows of audio
        stream = torch.arange(STREAMS, device=slots.device)
        frame = count[:, None] - stream  # [B, 8], the frame of each code
        limit = self.limit[slots]
        kept = (alive & in_audio & ~is_end)[:, None] & (frame >= 0) & (frame < limit[:, None])
        at = (slots[:, None], frame.clamp(min=0, max=self.tape.shape[1] - 1), stream)
        self.tape[at] = torch.where(kept, (drawn - 1).clamp(min=0), self.tape[at])
        ready = torch.where(in_audio, (taken - DELAY).clamp(min=0).minimum(limit), 0)
        is_over = (leaves & self.is_text[slots]) | (in_audio & (is_end | (ready >= limit)))

        self.open_lane(slots, alive & leaves & ~self.is_text[slots] & (self.guidance[slots] > 1))
        row = self._next_row(phase, word, drawn)
        self.row[slots] = torch.where(alive[:, None], row, self.row[slots])
        later = torch.where(in_text & ~leaves, IN_TEXT, (phase + 1).clamp(max=IN_AUDIO))
        self.phase[slots] = torch.where(alive, later, phase)
        self.count[slots] = torch.where(alive, torch.where(later == phase, count + 1, 0), count)
        self.ready[slots] = torch.where(alive, ready, self.ready[slots])
        self.steps[slots] = self.steps[slots] + alive
        self.done[slots] = ~alive | is_over

    def _next_row(self, phase: Tensor, word: Tensor, drawn: Tensor) -> Tensor:
        """Return the ids [B, 8] that the next step reads."""
        is_word = word < self.num_words
        text = torch.where(is_word, FIRST_WORD + word, EOS + word - self.num_words)
        single = torch.where(phase == IN_TURN, ASSISTANT, torch.where(phase == IN_ROLE, AUDIO, text))
        stream = torch.arange(STREAMS, device=word.device)
        single = torch.where(stream == 0, single[:, None], PAD)
        codes = self.first_pad + self.size * stream + drawn
        return torch.where((phase == IN_AUDIO)[:, None], codes, single)
