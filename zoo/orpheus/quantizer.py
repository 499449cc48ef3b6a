"""SNAC's codebooks: three levels of residual vector quantisation.

Source: snac 1.2.1, snac/vq.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional as F

from zoo.nn.vq import DirectionVQ
from zoo.orpheus.config import LEVELS, SnacConfig
from zoo.orpheus.tokens import CODES


class Quantizer(nn.Module):
    """The three levels. Each quantises what the ones before left over, at its own rate."""

    def __init__(self, config: SnacConfig):
        super().__init__()
        self.books = nn.ModuleList(DirectionVQ(CODES, config.codebook_width, config.latent) for _ in LEVELS)

    def __iter__(self) -> Iterator[DirectionVQ]:
        return iter(self.books)  # type: ignore[arg-type]

    def encode(self, latent: Tensor) -> list[Tensor]:
        """latent [B, C, N] -> the codes of each level; a code of a level stands for `LEVELS` columns."""
        codes = []
        for book, stride in zip(self, LEVELS, strict=True):
            codes.append(book.nearest(F.avg_pool1d(latent, stride)))
            latent = latent - book(codes[-1]).repeat_interleave(stride, -1)
        return codes
