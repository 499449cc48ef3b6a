"""Codes with a fixed meaning instead of a learned one, so talker and decoder train at the same time and no
codebook collapses.

    code 0                   eight hops of the log mel spectrogram, by k-means
    codes 1 .. levels - 1    the residual of the codes before, by k-means
    the last code            the frame's cycles (16) and the course of its voicing (32 shapes, by k-means)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from train_a_voice.features import BANDS, HOPS
from train_a_voice.vocoder import MIN_CYCLES, NUM_CYCLES

SIZE = 512  # rows of every codebook
SHAPES = SIZE // NUM_CYCLES
ROUNDS = 12
SAMPLE = 60 * SIZE  # frames for k-means
BEAM = 8
RIDGE = 3.0  # weight of a row's old value in a fit, in frames


def k_means(points: Tensor, count: int, generator: torch.Generator, rounds: int = ROUNDS) -> Tensor:
    """Return centres [count, D] of points [N, D] (Lloyd's). An empty centre restarts at a random point."""
    centres = points[torch.randperm(max(len(points), count), generator=generator)[:count] % len(points)]
    for _ in range(rounds):
        index = nearest(points, centres)
        sizes = torch.bincount(index, minlength=count)
        sums = torch.zeros_like(centres).index_add_(0, index, points)
        centres = sums / sizes.clamp(min=1)[:, None]
        empty = (sizes == 0).nonzero()[:, 0]
        centres[empty] = points[torch.randint(len(points), (len(empty),), generator=generator)]
    return centres


def nearest(points: Tensor, centres: Tensor) -> Tensor:
    """Return the nearest centre [N] of points [N, D] among centres [K, D].

    |x - c|^2 is least where x c - |c|^2 / 2 is greatest."""
    half = centres.square().sum(1) / 2
    return torch.cat([(part @ centres.T - half).argmax(1) for part in points.split(16_384)])


@dataclass(frozen=True)
class Codebooks:
    mel: Tensor  # [levels, SIZE, HOPS * BANDS]; the mean is part of the first level
    shapes: Tensor  # [SHAPES, HOPS], voicing
    rest: Tensor  # [levels], squared length of what a frame lacks after each level, nat^2

    @property
    def count(self) -> int:
        return len(self.mel) + 1

    @classmethod
    def fit(cls, mel: np.ndarray, voicing: np.ndarray, levels: int, seed: int, rounds: int = 2) -> Codebooks:
        """Fit codebooks to mel [T, HOPS, BANDS] and voicing [T, HOPS].

        K-means fits one level after the other to a sample of frames. Then each round searches codes of all
        frames, and fits all rows of all levels to them by least squares. That leaves a smaller residual."""
        generator = torch.Generator().manual_seed(seed)
        points = torch.from_numpy(mel.reshape(len(mel), -1)).float()
        rest, tables = points[torch.randperm(len(points), generator=generator)[:SAMPLE]], []
        for _ in range(levels):
            tables.append(k_means(rest, SIZE, generator))
            rest = rest - tables[-1][nearest(rest, tables[-1])]
        shapes = k_means(torch.tensor(voicing[:SAMPLE]), SHAPES, generator)
        books = cls(torch.stack(tables), shapes, torch.zeros(levels))
        for _ in range(rounds):
            books = replace(books, mel=books._fitted(points, books.search(points)))
        codes = books.search(points)
        lengths = []
        for level in range(levels):
            points = points - books.mel[level, codes[:, level]]
            lengths.append(points.square().sum(1).mean())
        return replace(books, rest=torch.stack(lengths))

    def encode(self, mel: np.ndarray, cycles: np.ndarray, voicing: np.ndarray) -> np.ndarray:
        """Return codes [T, levels + 1], int16."""
        codes = self.search(torch.from_numpy(mel.reshape(len(mel), -1)).float())
        shape = nearest(torch.tensor(voicing), self.shapes)
        tone = torch.from_numpy(cycles.astype(np.int64) - MIN_CYCLES) * SHAPES + shape
        return torch.cat((codes, tone[:, None]), 1).to(torch.int16).numpy()

    def _fitted(self, points: Tensor, codes: Tensor) -> Tensor:
        levels = len(self.mel)
        rows = codes + SIZE * torch.arange(levels)  # [T, levels], rows of the concatenated tables
        rest = points.double()
        for level in range(levels):
            rest -= self.mel[level, codes[:, level]]
        pairs = (rows[:, :, None] * levels * SIZE + rows[:, None]).flatten()
        together = torch.bincount(pairs, minlength=(levels * SIZE) ** 2).double().view(levels * SIZE, -1)
        together.diagonal().add_(RIDGE)
        sums = torch.zeros(levels * SIZE, points.shape[1], dtype=torch.float64)
        for level in range(levels):
            sums.index_add_(0, rows[:, level], rest)
        change = torch.cholesky_solve(sums, torch.linalg.cholesky(together))
        return self.mel + change.float().view_as(self.mel)

    def search(self, points: Tensor) -> Tensor:
        """Return codes [N, levels] of points [N, D].

        The first code is the nearest centre. For the others a beam search keeps the BEAM best prefixes at
        every level. That leaves a smaller residual than the nearest row of each level."""
        return torch.cat([self._search(part) for part in points.split(2048)])

    def _search(self, points: Tensor) -> Tensor:
        """The squared distance |x - a - b|^2 of a prefix a and one more row b is |x - a|^2 - 2 x b + 2 a b + |b|^2.
        All 2 a b are known (`cross`), so x is multiplied with a table once, and not once for each prefix."""
        first = nearest(points, self.mel[0])
        points = points - self.mel[0][first]
        codes = first.new_zeros(len(points), 1, 0)  # [N, prefixes, levels so far], behind the first
        far = points.square().sum(1, keepdim=True)  # [N, prefixes]
        for level, table in enumerate(self.mel[1:]):
            both = points.new_zeros(len(points), 1, SIZE)
            if level:
                rows = (codes + SIZE * torch.arange(level)).flatten(0, 1)
                both = F.embedding_bag(rows, self.cross[level], mode="sum").view(len(points), -1, SIZE)
            both += (table.square().sum(1) - 2 * points @ table.T)[:, None]
            far, best = both.add_(far[:, :, None]).flatten(1).topk(BEAM, largest=False)
            start, code = best // SIZE, best % SIZE
            kept = codes.gather(1, start[..., None].expand(-1, -1, level))
            codes = torch.cat((kept, code[..., None]), 2)
        return torch.cat((first[:, None], codes[:, 0]), 1)

    @cached_property
    def cross(self) -> list[Tensor]:
        """Twice the products of the rows of each level but the first with all rows of the levels between:
        [levels between * SIZE, SIZE] each."""
        rest = self.mel[1:]
        return [2 * rest[:level].flatten(0, 1) @ table.T for level, table in enumerate(rest)]

    def decode(self, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return mel [T, HOPS, BANDS], cycles [T] and voicing [T, HOPS] of codes [T, K]."""
        index = torch.from_numpy(codes.astype(np.int64))
        mel = self.mel[torch.arange(len(self.mel)), index[:, :-1]].sum(1)
        tone = index[:, -1]
        cycles = (tone // SHAPES + MIN_CYCLES).numpy()
        return mel.view(-1, HOPS, BANDS).numpy(), cycles, self.shapes[tone % SHAPES].numpy()

    def meanings(self, width: int) -> Tensor:
        """Return rows [K, SIZE, width] whose sum over a frame's codes describes the frame.

        They hold principal components of the log mel spectrogram, then one-hot cycles and voicing as far as
        there is room."""
        levels = len(self.mel)
        tone = torch.cat(
            (torch.eye(NUM_CYCLES).repeat_interleave(SHAPES, 0), self.shapes.repeat(NUM_CYCLES, 1)), 1
        )
        room = min(tone.shape[1], width // 4)
        first = self.mel[0]
        _, spread, axes = torch.linalg.svd(first - first.mean(0), full_matrices=False)
        axes = axes[: width - room]
        scale = (spread[: len(axes)] / len(first) ** 0.5).clamp(min=0.1) ** -0.5  # halfway to whitening
        rows = torch.zeros(levels + 1, SIZE, width)
        rows[0, :, : len(axes)] = (first - first.mean(0)) @ axes.T * scale
        rows[1:levels, :, : len(axes)] = self.mel[1:] @ axes.T * scale
        mix = torch.randn(tone.shape[1], room, generator=torch.Generator().manual_seed(0)) * room**-0.5
        rows[levels, :, len(axes) :] = (tone if room == tone.shape[1] else tone @ mix) * 2
        return rows

    def save(self, path: Path) -> None:
        """Save with the rows in 16 bits. All encoding and decoding reads this file."""
        mel = self.mel.half().numpy()
        np.savez_compressed(path, mel=mel, shapes=self.shapes.numpy(), rest=self.rest.numpy())

    @classmethod
    def load(cls, path: Path) -> Codebooks:
        kept = np.load(path)
        return cls(*(torch.from_numpy(kept[name]).float() for name in ("mel", "shapes", "rest")))
