"""DAC at 44.1 kHz: frames of nine codes to samples, exactly, for any cut into windows; and a recording to
frames.

    codes [B, 10 + F + 10, 9] ─ tables ─ conv ─ x8 ─ x8 ─ x4 ─ x2 ─ conv ─ tanh ─ samples [B, 512 F]
                                 1024    1536   768  384  192  96    1             channels
                                        86.13 Hz 0.7 5.5  22   44    44   kHz

A frame affects 4,757 samples on each side, so a window comes with ten extra frames on both sides
(zoo/nn/dac.py). Source: transformers 5.23, models/dac.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.nn import dac
from zoo.zonos.config import BOOKS, CODES, CodecConfig


class Codebook(nn.Module):
    """One level: projections in and out, and the rows. The nearest row is the one with the smallest angle.

    vector-quantize-pytorch's VectorQuantize finds rows by angle, too, but needs rows of length one. The
    published rows have other lengths, which the next level and the decoder need.
    """

    def __init__(self, config: CodecConfig):
        super().__init__()
        self.project_in = nn.Conv1d(config.latent, config.codebook_width, 1)
        self.rows = nn.Embedding(CODES, config.codebook_width)
        self.project_out = nn.Conv1d(config.codebook_width, config.latent, 1)

    def nearest(self, latent: Tensor) -> Tensor:
        """Return the nearest codes [B, F] of latents [B, C, F]."""
        narrow = F.normalize(self.project_in(latent).mT, dim=-1)
        return F.linear(narrow, F.normalize(self.rows.weight, dim=-1)).argmax(-1)

    def folded(self) -> tuple[Tensor, Tensor]:
        """Return the latent of each code [V, C], without the bias [C], and the bias, in fp64."""
        out = self.project_out
        assert out.bias is not None, "the codebooks of DAC have a bias"
        return self.rows.weight.double() @ out.weight[:, :, 0].double().T, out.bias.double()

    def forward(self, code: Tensor) -> Tensor:
        """Return the latents [B, C, F] of codes [B, F]."""
        return self.project_out(self.rows(code).mT)


class Codec(nn.Module):
    """Decoder and encoder over the same codebooks, in the dtype of the weights. Call `prepare` once after
    loading them."""

    def __init__(self, config: CodecConfig):
        super().__init__()
        self.frame_samples = config.frame_samples
        self.books = nn.ModuleList(Codebook(config) for _ in range(BOOKS))
        self.decoder = dac.Decoder(config.latent, config.decoder_channels, config.decoder_rates, True)
        self.encoder = dac.Encoder(config.latent, config.encoder_channels, config.encoder_rates)

    @torch.no_grad()
    def prepare(self) -> None:
        """Fold each codebook and its projection into one row per code, in fp64."""
        folded = [book.folded() for book in self.codebooks()]
        self.decoder.keep([table for table, _ in folded], torch.stack([bias for _, bias in folded]).sum(0))

    def codebooks(self) -> Iterator[Codebook]:
        return iter(self.books)  # type: ignore[arg-type]

    def encode(self, samples: Tensor) -> Tensor:
        """Encode samples [B, N], with zeros up to a whole frame, to codes [B, F, K]."""
        samples = F.pad(samples, (0, -samples.shape[1] % self.frame_samples))
        latent = self.encoder(samples[:, None])
        codes = []
        for book in self.codebooks():
            codes.append(book.nearest(latent))
            latent = latent - book(codes[-1])
        return torch.stack(codes, -1)
