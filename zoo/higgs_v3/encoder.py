"""The codec's encoder. It turns a whole reference recording into the latent that the codebooks quantize, in
two branches.

    samples [B, N] ─┬─ conv ─ (residual x3, strided conv) x5 ─ conv ──────────────────────────> acoustic [B, 256, F] ┐
                    │              24 kHz to 25 Hz                                                                   ├ linear ─ [B, F, 1024]
                    └─ 16 kHz ─ HuBERT, 50 Hz ─ every second frame ─ conv ─ (residual x2, conv) x2 ─> semantic [B, 768, F] ┘

Run it in fp32: with less precision, near ties between codebook rows resolve differently.
Source: transformers 5.23, models/higgs_audio_v2_tokenizer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.higgs_v3.config import SAMPLE_RATE_HZ, SEMANTIC_RATE_HZ, CodecConfig
from zoo.higgs_v3.semantic import Hubert
from zoo.nn import dac
from zoo.nn.resample import Resample

SEMANTIC_PAD = 160  # zeros on both sides, at 16 kHz: half a HuBERT frame


class SemanticUnit(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv1d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv1d(channels, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.elu(self.conv1(F.elu(x))))


class SemanticBlock(nn.Sequential):
    def __init__(self, channels: int):
        super().__init__(
            SemanticUnit(channels), SemanticUnit(channels), nn.Conv1d(channels, channels, 3, padding=1)
        )


class Encoder(nn.Module):
    """The two branches, joined. Call `prepare` once after loading the weights."""

    def __init__(self, config: CodecConfig):
        super().__init__()
        hidden = config.semantic.hidden
        self.pad = config.frame_samples // 2
        self.acoustic = dac.Encoder(config.latent, config.encoder_channels, config.ratios)
        self.hubert = Hubert(config.semantic)
        self.semantic = nn.Sequential(
            nn.Conv1d(hidden, hidden, 3, padding=1, bias=False), SemanticBlock(hidden), SemanticBlock(hidden)
        )
        self.join = nn.Linear(config.width, config.width)

    def prepare(self) -> None:
        """Make the resampler's filters."""
        self.resample = Resample(SAMPLE_RATE_HZ, SEMANTIC_RATE_HZ).to(self.join.weight.device)

    def forward(self, samples: Tensor) -> Tensor:
        """Encode samples [B, N] at 24 kHz to latents [B, F, W].

        The semantic branch determines F. If N mod 960 is in 119 .. 631, the acoustic branch would give
        another number of frames. In that case its samples get half a frame of zeros on both sides.
        """
        heard = self.hubert(F.pad(self.resample(samples), (SEMANTIC_PAD, SEMANTIC_PAD)))[:, ::2]  # [B, F, D]
        semantic = self.semantic(heard.mT)  # [B, D, F]
        if self.acoustic.frames(samples.shape[1]) != semantic.shape[2]:
            samples = F.pad(samples, (self.pad, self.pad))
        acoustic = self.acoustic(samples[:, None])  # [B, C, F]
        return self.join(torch.cat((acoustic, semantic), 1).mT)
