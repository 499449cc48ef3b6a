"""A toy that writes text before and while it speaks. It has everything that families with a delay pattern
have:

    step        0    1   ...   t     t+1    t+2   t+3   t+4  ...  e     e+1   e+2     e: the step that draws code 0's end, or is the cap
    phase       text            \\    transition  audio ...............  drain ......
    text        w0   w1  ...  "that's all"  .  w     w     w   ...   w     w     w      . no token
    codebook 0                               c00   c10   c20  ...    END
    codebook 1                               B     c01   c11  ...          .            a code is stored at its frame: step - delay
    codebook 2                               B     B     c02  ...          .     .      . drawn and dropped

Text is drawn from the first lane only. A codebook is guided only while it has frames to speak. A text token
is a few bytes, and some characters take several tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from toy import CODES, END, WIDTH, Guided, ToyState

from zoo.contract import Prompt, Spec
from zoo.nn.guidance import merge
from zoo.nn.sampling import draw, gumbel
from zoo.request import Request

BOOKS = 3
BEGIN = CODES  # the input of a codebook before its first frame
MAX_TEXT = 9  # steps of the text phase
# the first one means no token
PIECES = (b"", b"a", b"e ", b"hm", b"!", *(bytes((byte,)) for byte in sorted(set("é天😀".encode()))))
LATER = 1 << 40  # an unknown step in the future


class TextAndAudioState(ToyState):
    """Adds begins [S+1], the first step of the audio phase, or LATER; end [S+1], the final length of the tape
    (the cap until codebook 0 ends); row [S+1, K], the codes of the last step; word [S+1], its text token."""

    begins: Tensor
    end: Tensor
    row: Tensor
    word: Tensor

    def __init__(self, spec: Spec, slots: int, max_frames: int, dtype: torch.dtype):
        super().__init__(spec, slots, max_frames, dtype)
        self.add("begins", dtype=torch.int64, default=LATER)
        self.add("end", dtype=torch.int64)
        self.add("row", BOOKS, dtype=torch.int64, default=BEGIN)
        self.add("word", dtype=torch.int64)


class TextAndAudioToy(Guided):
    def __init__(self) -> None:
        super().__init__()
        self.spec = replace(self.spec, variant="scribe", frame_shape=(BOOKS,))
        self.spec = replace(self.spec, max_positions=self.spec.max_positions + MAX_TEXT + BOOKS)
        self.words = nn.Embedding(len(PIECES) + 1, WIDTH)  # the last one is the transition
        self.books = nn.Embedding(BOOKS * (CODES + 1), WIDTH)
        self.word_head = nn.Linear(WIDTH, len(PIECES), bias=False)
        self.book_heads = nn.Linear(WIDTH, BOOKS * CODES, bias=False)
        random = torch.Generator().manual_seed(11)
        for module in (self.words, self.books, self.word_head, self.book_heads):
            module.weight.data = torch.randn(module.weight.shape, generator=random) / WIDTH**0.25
        self.eval().requires_grad_(False)

    def prompt(self, request: Request) -> Prompt:
        prompt = super().prompt(request)
        prompt.max_steps = prompt.max_frames + MAX_TEXT + BOOKS
        prompt.slot["end"] = prompt.max_frames
        return prompt

    def state(self, slots: int, max_frames: int | None = None) -> TextAndAudioState:
        return TextAndAudioState(self.spec, slots, max_frames or self.spec.max_frames, self.dtype)

    def embed(self, state: TextAndAudioState, slots: Tensor) -> Tensor:
        is_transition = state.steps[slots] == state.begins[slots] - 1
        word = torch.where(is_transition, len(PIECES), state.word[slots])
        rows = self.books(state.row[slots] + torch.arange(BOOKS) * (CODES + 1)).sum(1)
        return (self.words(word) + rows).repeat(2, 1)

    def emit(self, state: TextAndAudioState, slots: Tensor, h: Tensor) -> None:
        how = state.temperature[slots], state.top_k[slots], state.top_p[slots]
        steps, begins, end, alive = (
            state.steps[slots],
            state.begins[slots],
            state.end[slots],
            ~state.done[slots],
        )
        book, at = torch.arange(BOOKS), steps - begins  # at: the step of the audio phase, below 0 before it
        frame = at[:, None] - book  # [B, K], the frame of each codebook's code
        is_speaking = (frame >= 0) & (frame < end[:, None])

        noise = gumbel(state.seed[slots], steps, range(BOOKS + 1), CODES)  # [B, K + 1, V]
        # [B]
        word = draw(self.word_head(h).float().unflatten(0, (2, -1))[0], *how, noise[:, BOOKS, : len(PIECES)])
        weight = torch.where(is_speaking, state.cfg_scale[slots, None], 1.0)  # [B, K]
        logits = merge(self.book_heads(h).float().unflatten(-1, (BOOKS, CODES)), weight)  # [B, K, V]
        row = torch.stack([draw(logits[:, k], *how, noise[:, k]) for k in range(BOOKS)], 1)
        row = torch.where(frame >= 0, row, BEGIN)

        is_text = begins == LATER
        # in the audio phase, 0 is a pause
        word = torch.where(is_text & (steps + 1 >= MAX_TEXT) | (at == -1), 0, word)
        begins = torch.where(is_text & (word == 0), steps + 2, begins)
        end = torch.where((at >= 0) & (at < end) & (row[:, 0] == END), at, end)
        is_kept = alive[:, None] & (frame >= 0) & (frame < end[:, None])
        place = (slots[:, None], frame.clamp(min=0, max=state.tape.shape[1] - 1), book)
        state.tape[place] = torch.where(is_kept, row, state.tape[place])

        state.write(slots, torch.where(word > 0, word, -1))
        for name, value in (
            ("begins", begins),
            ("end", end),
            ("word", word),
            ("row", row),
            ("steps", steps + 1),
        ):
            rows = getattr(state, name)
            rows[slots] = torch.where(alive[:, None] if value.dim() > 1 else alive, value, rows[slots])
        whole = (at + 2 - BOOKS).clamp(min=0)  # complete frames
        state.ready[slots] = torch.where(alive, torch.minimum(whole, end), state.ready[slots])
        state.done[slots] = ~alive | (end == 0) | (at + 1 >= end + BOOKS - 1)

    def detokenize(self, token: int) -> bytes:
        return PIECES[token]


TOYS = {"toy_delay": TextAndAudioToy}
