"""The codebooks, which the codec's encoder and decoder share. Source: transformers 5.23,
models/higgs_audio_v2_tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.higgs_v3.config import CodecConfig


class Codebook(nn.Module):
    """One level: an input projection, the codebook's rows, and an output projection."""

    def __init__(self, config: CodecConfig):
        super().__init__()
        self.project_in = nn.Linear(config.width, config.codebook_width)
        self.rows = nn.Parameter(torch.empty(config.codebook_size, config.codebook_width))
        self.project_out = nn.Linear(config.codebook_width, config.width)

    def forward(self, code: Tensor) -> Tensor:
        """Return the vectors [B, F, W] of codes [B, F]."""
        return self.project_out(F.embedding(code, self.rows))

    def quantizer(self) -> nn.Module:
        """Return vector-quantize-pytorch's module around our tensors. The nearest row is the one with the
        smallest Euclidean distance; nothing is normalized. The package is imported here (see
        `zoo.nn.deferred`)."""
        from vector_quantize_pytorch import VectorQuantize

        size, dim = self.rows.shape
        quantizer = VectorQuantize(dim=self.project_in.in_features, codebook_dim=dim, codebook_size=size)
        quantizer.project_in, quantizer.project_out = self.project_in, self.project_out
        quantizer._codebook.embed = self.rows.detach()[None]
        return quantizer.eval()


class Quantizer(nn.Module):
    """Residual vector quantization: each level quantizes the remainder of the levels before it.

    vector-quantize-pytorch's ResidualVQ has no projections per level, so each level is a VectorQuantize.
    """

    def __init__(self, config: CodecConfig):
        super().__init__()
        self.books = nn.ModuleList(Codebook(config) for _ in range(config.codebooks))

    def __iter__(self) -> Iterator[Codebook]:
        return iter(self.books)  # type: ignore[arg-type]

    def encode(self, latent: Tensor) -> Tensor:
        """Quantize latent [B, F, W] to codes [B, F, K]."""
        if latent.is_meta:  # a memory plan, which imports nothing
            return latent.new_empty((*latent.shape[:2], len(self.books)), dtype=torch.int64)
        codes = []
        for book in self:
            quantized, code, _ = book.quantizer()(latent)
            codes.append(code)
            latent = latent - quantized
        return torch.stack(codes, -1)
