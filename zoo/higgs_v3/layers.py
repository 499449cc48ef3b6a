"""The codebooks, which the codec's encoder and decoder share. Source: transformers 5.23,
models/higgs_audio_v2_tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.higgs_v3.config import CodecConfig


class Codebook(nn.Module):
    """One level: an input projection, the codebook's rows, and an output projection. The nearest row is the
    one with the smallest Euclidean distance; nothing is normalized."""

    def __init__(self, config: CodecConfig):
        super().__init__()
        self.project_in = nn.Linear(config.width, config.codebook_width)
        self.rows = nn.Parameter(torch.empty(config.codebook_size, config.codebook_width))
        self.project_out = nn.Linear(config.codebook_width, config.width)

    def nearest(self, x: Tensor) -> Tensor:
        """Return the nearest codes [B, F] of x [B, F, W]: |x - c|^2 is least where x c - |c|^2 / 2 is
        greatest."""
        return F.linear(self.project_in(x), self.rows, -self.rows.square().sum(-1) / 2).argmax(-1)

    def forward(self, code: Tensor) -> Tensor:
        """Return the vectors [B, F, W] of codes [B, F]."""
        return self.project_out(F.embedding(code, self.rows))


class Quantizer(nn.Module):
    """Residual vector quantization: each level quantizes the remainder of the levels before it.

    vector-quantize-pytorch's ResidualVQ does not fit, because it has no projections per level
    (tests/zoo/nn/test_vq.py compares the levels).
    """

    def __init__(self, config: CodecConfig):
        super().__init__()
        self.books = nn.ModuleList(Codebook(config) for _ in range(config.codebooks))

    def __iter__(self) -> Iterator[Codebook]:
        return iter(self.books)  # type: ignore[arg-type]

    def encode(self, latent: Tensor) -> Tensor:
        """Quantize latent [B, F, W] to codes [B, F, K]."""
        codes = []
        for book in self:
            codes.append(book.nearest(latent))
            latent = latent - book(codes[-1])
        return torch.stack(codes, -1)
