"""X-Codec's decoder: frames of eight codes to 16 kHz samples, exactly, for any cut into windows.

    codes [B, 10 + F + 10, 8] ─ sum ─ linear ─ conv ─ x8 ─ x5 ─ x4 ─ x2 ─ conv ─ samples [B, 320 F]
                                1024   256     1024   512  256  128  64   1         channels
                                50 Hz                 0.4  2    8    16             kHz

A frame affects the samples of ten frames before it and ten after it, so a window comes with ten extra frames
on both sides (zoo/nn/dac.py). Source: transformers 5.23, models/xcodec.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.bagpiper.config import STREAMS, CodecConfig
from zoo.nn import dac


class Decoder(nn.Module):
    """Codebooks, their projection, and DAC's decoder. Call `prepare` once after loading the weights."""

    def __init__(self, config: CodecConfig):
        super().__init__()
        self.books = nn.ModuleList(nn.Embedding(config.num_codes, config.width) for _ in range(STREAMS))
        self.project = nn.Linear(config.width, config.latent)
        self.decoder = dac.Decoder(config.latent, config.channels, config.rates, is_bounded=False)

    @property
    def context(self) -> int:
        """Frames that are read on both sides of a window."""
        return self.decoder.context

    @torch.no_grad()
    def prepare(self) -> None:
        """Multiply codebooks and projection in fp64, and keep one row per code."""
        project = self.project.weight.double()
        books: list[nn.Embedding] = [*self.books]
        tables = [book.weight.double() @ project.T for book in books]
        self.decoder.keep(tables, self.project.bias.double())

    def forward(self, codes: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """Return the samples of a window, as `dac.Decoder.forward`."""
        return self.decoder(codes, start, end)
