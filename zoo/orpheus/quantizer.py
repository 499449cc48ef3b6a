"""SNAC's codebooks: three levels of residual vector quantisation.

Source: snac 1.2.1, snac/vq.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.orpheus.config import LEVELS, SnacConfig
from zoo.orpheus.tokens import CODES


class Codebook(nn.Module):
    """One level of residual vector quantisation: a way in, rows to choose from, and a way out.

    vector-quantize-pytorch's VectorQuantize finds rows by direction, too, but needs rows of length one.
    """

    def __init__(self, config: SnacConfig):
        super().__init__()
        self.project_in = nn.Conv1d(config.latent, config.codebook_width, 1)
        self.rows = nn.Parameter(torch.empty(CODES, config.codebook_width))
        self.project_out = nn.Conv1d(config.codebook_width, config.latent, 1)

    def forward(self, code: Tensor) -> Tensor:
        """code [B, N] -> [B, C, N]"""
        return self.project_out(F.embedding(code, self.rows).mT)

    def nearest(self, x: Tensor) -> Tensor:
        """x [B, C, N] -> [B, N], the row that points most in the same direction. Lengths do not count."""
        direction = F.normalize(self.project_in(x).mT, dim=-1)  # eps 1e-12, as in the reference
        return (direction @ F.normalize(self.rows, dim=-1).T).argmax(-1)


class Quantizer(nn.Module):
    """The three levels. Each quantises what the ones before left over, at its own rate."""

    def __init__(self, config: SnacConfig):
        super().__init__()
        self.books = nn.ModuleList(Codebook(config) for _ in LEVELS)

    def __iter__(self) -> Iterator[Codebook]:
        return iter(self.books)  # type: ignore[arg-type]

    def encode(self, latent: Tensor) -> list[Tensor]:
        """latent [B, C, N] -> the codes of each level; a code of a level stands for `LEVELS` columns."""
        codes = []
        for book, stride in zip(self, LEVELS, strict=True):
            codes.append(book.nearest(F.avg_pool1d(latent, stride)))
            latent = latent - book(codes[-1]).repeat_interleave(stride, -1)
        return codes
