"""The 25 Hz codec. Its decoder turns frames of 8 codes (40 ms) into 24 kHz samples. The samples do not depend
on how the frames are split into windows.

    codes [B, 10 + F + 10, K] ─ tables ─ conv ─ x8 ─ x5 ─ x4 ─ x2 ─ x3 ─ conv ─ samples [B, 960 F]
                                 256     1024   512  256  128   64   32     1    channels
                                         25 Hz  0.2    1    4    8   24   kHz

A frame affects the samples of ten frames before it and ten after it, so a window comes with ten extra frames
on both sides (zoo/nn/dac.py).
Source: transformers 5.23, models/higgs_audio_v2_tokenizer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.higgs_v3.config import CodecConfig
from zoo.higgs_v3.encoder import Encoder
from zoo.higgs_v3.layers import Quantizer
from zoo.nn import dac


class Decoder(dac.Decoder):
    """DAC's decoder behind a projection of the codebooks' latents. Call `prepare` once after loading the
    weights."""

    def __init__(self, config: CodecConfig):
        super().__init__(config.latent, config.decoder_channels, config.ratios, is_bounded=False)
        self.project = nn.Linear(config.width, config.latent)

    @torch.no_grad()
    def prepare(self, quantizer: Quantizer) -> None:
        """Fold each codebook, its project_out and the final projection into one row per code, in fp64."""
        project = self.project.weight.double()
        # [V, C] each
        tables = [(project @ book.project_out.weight.double() @ book.rows.double().T).T for book in quantizer]
        biases = torch.stack([book.project_out.bias.double() for book in quantizer]).sum(0)
        self.keep(tables, project @ biases + self.project.bias.double())


class Codec(nn.Module):
    """Decoder and encoder, which share the codebooks."""

    def __init__(self, config: CodecConfig):
        super().__init__()
        self.quantizer = Quantizer(config)
        self.decoder = Decoder(config)
        self.encoder = Encoder(config)

    def prepare(self) -> None:
        """Precompute the tensors that depend only on the weights."""
        self.decoder.prepare(self.quantizer)
        self.encoder.prepare()

    def encode(self, samples: Tensor) -> Tensor:
        """Encode samples [B, N] to codes [B, F, K]."""
        return self.quantizer.encode(self.encoder(samples))
