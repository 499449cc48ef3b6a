"""The prefix that the model reads before the audio: one row of D values for each phoneme and for each
condition.

    phonemes ─ embedding ─┐
    speaker  ─ linear ────┤
    emotion, fmax, pitch_std, speaking_rate ─ Fourier features ─┼─ linear ─ layer norm ─> rows [T + 8, D]
    language ─ embedding ─┘

A row depends on its own value alone. So the rows of phonemes are a table, and both lanes of guidance and all
requests with the same beginning share them. The second lane knows the phonemes only: each condition is
replaced by a learned vector. Source: Zyphra/Zonos at bc40d98, conditioning.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zoo.zonos.config import ESPEAK, LANGUAGE, SPEAKER, Condition, Config
from zoo.zonos.phonemes import NUM_IDS

EPS = 1e-5  # of the prefix's norm; config.json has the backbone's


class Phonemes(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.table = nn.Embedding(NUM_IDS, width)


class Known(nn.Module):
    """A condition that the second lane does not know: values -> [D]. null [D]: the row that this lane reads
    instead."""

    def __init__(self, width: int):
        super().__init__()
        self.null = nn.Parameter(torch.empty(width))


class Speaker(Known):
    """A vector of a voice, projected."""

    def __init__(self, condition: Condition, width: int):
        super().__init__(width)
        self.project = nn.Linear(condition.num_values, width)

    def forward(self, values: Sequence[float] | Tensor) -> Tensor:
        """The voice is rounded to bf16 in every run, as in the reference."""
        bias = self.project.bias
        voice = torch.as_tensor(values, device=bias.device).bfloat16().to(bias.dtype)
        return self.project(voice[None])[0]


class Fourier(Known):
    """Numbers as cosines and sines of random multiples, in the dtype of the weight: in bf16 each step is
    rounded, as in training. The multiples are in the file."""

    def __init__(self, condition: Condition, width: int):
        super().__init__(width)
        self.low, self.range = condition.low, condition.high - condition.low
        self.weight = nn.Parameter(torch.empty(width // 2, condition.num_values))

    def forward(self, values: Sequence[float] | Tensor) -> Tensor:
        x = torch.as_tensor(values, dtype=torch.float32, device=self.weight.device)
        x = ((x - self.low) / self.range).to(self.weight.dtype)
        angle = 2 * math.pi * x[None] @ self.weight.T  # [1, D / 2]
        return torch.cat((angle.cos(), angle.sin()), -1)[0]


class Language(Known):
    """A row per language."""

    def __init__(self, condition: Condition, width: int):
        super().__init__(width)
        self.low = int(condition.low)
        self.table = nn.Embedding(int(condition.high) - self.low + 1, width)

    def forward(self, values: Sequence[float] | Tensor) -> Tensor:
        row: Tensor = self.table(torch.tensor(int(values[0]) - self.low, device=self.table.weight.device))
        return row


def module(condition: Condition, width: int) -> nn.Module:
    if condition.name == ESPEAK:
        return Phonemes(width)
    known = {SPEAKER: Speaker, LANGUAGE: Language}
    return known.get(condition.name, Fourier)(condition, width)


class Prefix(nn.Module):
    """All conditions of a request as rows. Call `prepare` once after loading the weights."""

    phonemes: Tensor  # [ids, D], after prepare()
    nulls: Tensor  # [conditions, D], after prepare(): what the second lane reads

    def __init__(self, config: Config):
        super().__init__()
        width = config.stack.hidden
        self.names = tuple(condition.name for condition in config.conditions[1:])
        self.conditions = nn.ModuleList(module(condition, width) for condition in config.conditions)
        self.project = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, EPS)

    @torch.no_grad()
    def prepare(self) -> None:
        """Compute the rows that depend only on the weights."""
        table: Tensor = self.conditions[0].table.weight  # type: ignore[union-attr,assignment]
        table = table.to(self.norm.weight.dtype)
        nulls = torch.stack([condition.null for condition in self.conditions[1:]])  # type: ignore[misc]
        self.register_buffer("phonemes", self.norm(self.project(table)), persistent=False)
        self.register_buffer("nulls", self.norm(self.project(nulls)), persistent=False)

    def row(self, name: str, values: Sequence[float] | Tensor | None) -> Tensor:
        """Return the row [D] of a condition; without values, the one that the second lane reads.

        Each row is computed alone, so that its bits depend on nothing else.
        """
        place = self.names.index(name)
        if values is None:
            return self.nulls[place]
        return self.norm(self.project(self.conditions[place + 1](values)[None]))[0]
