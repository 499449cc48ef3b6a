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
from zoo.nn.vq import DirectionVQ
from zoo.zonos.config import BOOKS, CODES, CodecConfig


class Codec(nn.Module):
    """Decoder and encoder over the same codebooks, in the dtype of the weights. Call `prepare` once after
    loading them."""

    def __init__(self, config: CodecConfig):
        super().__init__()
        self.frame_samples = config.frame_samples
        self.books = nn.ModuleList(
            DirectionVQ(CODES, config.codebook_width, config.latent) for _ in range(BOOKS)
        )
        self.decoder = dac.Decoder(config.latent, config.decoder_channels, config.decoder_rates, True)
        self.encoder = dac.Encoder(config.latent, config.encoder_channels, config.encoder_rates)

    @torch.no_grad()
    def prepare(self) -> None:
        """Fold each codebook and its projection into one row per code, in fp64."""
        folded = [book.folded() for book in self.codebooks()]
        self.decoder.keep([table for table, _ in folded], torch.stack([bias for _, bias in folded]).sum(0))

    def codebooks(self) -> Iterator[DirectionVQ]:
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
