"""T3: text and a voice to codes. A Llama, or in Turbo a GPT-2, around tables of text and codes.

    speaker, 32 rows of the voice's codes, emotion   text + positions   BEGIN BEGIN   codes drawn + positions
    └────────── made once per voice ──────────────┘

Source: chatterbox-tts 0.1.7, models/t3 (t3.py, modules/cond_enc.py, modules/perceiver.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.chatterbox.config import BEGIN, EPS, HEAD_DIM, SPEAKER, T3Config
from zoo.contract import Batch
from zoo.nn.attention import Paged, attend
from zoo.nn.linear import FusedLinear
from zoo.nn.llama import Stack

PERCEIVER_HEADS = 4


class Perceiver(nn.Module):
    """Rows of a voice's codes [T, D] -> as many rows as there are queries. One attention block runs twice:
    queries over the codes, then the result over itself."""

    def __init__(self, num: int, width: int):
        super().__init__()
        self.queries = nn.Parameter(torch.empty(1, num, width))
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, codes: Tensor) -> Tensor:
        x = self._attend(self.queries[0], codes)
        return self._attend(x, x)

    def _attend(self, x: Tensor, y: Tensor) -> Tensor:
        """x [Q, D] sees y [T, D] -> [Q, D]"""
        normed, seen = self.norm(x), self.norm(y)
        parts = self.q(normed), self.k(seen), self.v(seen)
        q, k, v = (part.unflatten(-1, (PERCEIVER_HEADS, -1)).transpose(0, 1)[None] for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v)[0]  # [H, Q, dim]
        return x + self.out(mixed.transpose(0, 1).flatten(1))


class Gpt2Block(nn.Module):
    """A block of GPT-2 over pages. Source: transformers 5.23, models/gpt2/modeling_gpt2.py."""

    def __init__(self, config: T3Config):
        super().__init__()
        width = config.hidden
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.qkv = FusedLinear(width, (width,) * 3, bias=True)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width, eps=EPS)
        self.widen = nn.Linear(width, config.inner)
        self.narrow = nn.Linear(config.inner, width)

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor, paged: Paged) -> Tensor:
        """x [T, D] -> [T, D]"""
        q, k, v = (part.unflatten(-1, (-1, HEAD_DIM)) for part in self.qkv(self.norm(x)))  # [T, H, dim]
        x = x + self.out(attend(q, k, v, paged, HEAD_DIM**-0.5).flatten(1))
        return x + self.narrow(F.gelu(self.widen(self.mlp_norm(x)), approximate="tanh"))


class Gpt2(nn.Module):
    """The blocks, with learned positions before them and a norm after them."""

    def __init__(self, config: T3Config):
        super().__init__()
        self.positions = nn.Embedding(config.positions, config.hidden)
        self.layers = nn.ModuleList(Gpt2Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden, eps=EPS)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, D] -> [T, D]"""
        x = x + self.positions(batch.positions)
        for i, layer in enumerate(self.layers):
            x = layer(x, Paged(batch, i))
        return self.norm(x)


class T3(nn.Module):
    """The language model's tensors, without those that are never read (the text head, the stack's own
    table)."""

    def __init__(self, config: T3Config):
        super().__init__()
        self.config, hidden = config, config.hidden
        self.stack = Gpt2(config) if config.is_gpt2 else Stack(config.llama)
        self.text = nn.Embedding(config.text_vocab, hidden)
        self.codes = nn.Embedding(config.num_outputs, hidden)
        self.head = nn.Linear(hidden, config.num_outputs, bias=config.is_gpt2)
        self.speaker = nn.Linear(SPEAKER, hidden)
        if not config.is_gpt2:
            self.text_positions = nn.Embedding(config.text_positions, hidden)
            self.speech_positions = nn.Embedding(config.speech_positions, hidden)
            self.emotion = nn.Linear(1, hidden, bias=False)
            self.perceiver = Perceiver(config.queries, hidden)

    def prepare(self) -> None:
        """Compute what follows from the config alone. Call once, with the weights in place."""
        if isinstance(self.stack, Stack):
            self.stack.prepare()

    def voice_rows(self, speaker: Tensor, codes: Tensor) -> Tensor:
        """Return the rows [P, D] of a voice: speaker [SPEAKER] fp32, codes [T]."""
        first = self.speaker(speaker.to(self.speaker.bias.dtype))[None]
        rows = self.codes(codes)
        if self.config.is_gpt2:
            return torch.cat((first, rows))
        rows = rows + self.speech_positions.weight[: len(rows)]
        return torch.cat((first, self.perceiver(rows)))

    def emotion_row(self, exaggeration: float) -> Tensor:
        """Return the row of the emotion [1, D]."""
        return exaggeration * self.emotion.weight.T

    def text_rows(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows [T, D] of text ids [T], and those of the lane without text: its positions alone."""
        rows = self.text(ids)
        if self.config.is_gpt2:
            return rows, rows[:0]
        positions = self.text_positions.weight[: len(ids)].to(rows.dtype)
        return rows + positions, positions

    def begin_rows(self) -> Tensor:
        """Return the rows that begin the speech: one in Turbo, else two equal ones at position 0. [1 or 2,
        D]"""
        row = self.codes(torch.tensor([BEGIN], device=self.codes.weight.device))
        return row if self.config.is_gpt2 else (row + self.speech_positions.weight[:1]).expand(2, -1)

    def code_rows(self, codes: Tensor, steps: Tensor) -> Tensor:
        """Return the rows [B, D] of drawn ids [B], each the last of `steps` [B] drawn."""
        rows = self.codes(codes)
        return rows if self.config.is_gpt2 else rows + self.speech_positions(steps)
