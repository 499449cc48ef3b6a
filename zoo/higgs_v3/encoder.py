"""The codec's encoder: reference audio to what the codebooks quantise, all of it at once, in two branches.

    samples [B, N] ─┬─ conv ─ (residual x3, strided conv) x5 ─ conv ──────────────────────────> acoustic [B, 256, F] ┐
                    │              24 kHz to 25 Hz                                                                   ├ linear ─ [B, F, 1024]
                    └─ 16 kHz ─ HuBERT, 50 Hz ─ every second frame ─ conv ─ (residual x2, conv) x2 ─> semantic [B, 768, F] ┘

Run it in fp32: in less, near ties between the codebooks' rows fall the other way.
Source: transformers 5.23, models/higgs_audio_v2_tokenizer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.higgs_v3.config import SAMPLE_RATE_HZ, SEMANTIC_RATE_HZ, CodecConfig
from zoo.higgs_v3.layers import DILATIONS, EDGES, KERNEL, Residual
from zoo.higgs_v3.semantic import Hubert, Position
from zoo.nn.resample import Resample
from zoo.nn.snake import Snake

SEMANTIC_PAD = 160  # zeros on both sides, at 16 kHz: half a frame of HuBERT's


class AcousticBlock(nn.Module):
    """[B, C, N] -> [B, 2C, about N / rate]"""

    def __init__(self, channels: int, rate: int):
        super().__init__()
        self.residuals = nn.ModuleList(Residual(channels, dilation) for dilation in DILATIONS)
        self.snake = Snake(channels)
        self.down = nn.Conv1d(channels, 2 * channels, 2 * rate, rate, padding=-(-rate // 2))

    def forward(self, x: Tensor) -> Tensor:
        for residual, edge in zip(self.residuals, EDGES, strict=True):
            x = residual(F.pad(x, (edge, edge)))
        return self.down(self.snake(x))


class Acoustic(nn.Module):
    """What a recording sounds like: samples [B, 1, N] -> [B, C, F]."""

    def __init__(self, config: CodecConfig):
        super().__init__()
        channels, self.ratios = config.encoder_channels, config.ratios
        self.stem = nn.Conv1d(1, channels, KERNEL, padding=KERNEL // 2)
        self.blocks = nn.ModuleList(
            AcousticBlock(channels << i, rate) for i, rate in enumerate(config.ratios)
        )
        self.snake = Snake(channels << len(config.ratios))
        self.tail = nn.Conv1d(channels << len(config.ratios), config.latent, 3, padding=1)

    def frames(self, samples: int) -> int:
        """How many frames `samples` samples give."""
        for rate in self.ratios:
            samples = (samples + 2 * -(-rate // 2) - 2 * rate) // rate + 1
        return samples

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.tail(self.snake(x))


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
    """Call `prepare` once the weights are in place."""

    def __init__(self, config: CodecConfig):
        super().__init__()
        hidden = config.semantic.hidden
        self.pad = config.frame_samples // 2
        self.acoustic = Acoustic(config)
        self.hubert = Hubert(config.semantic)
        self.semantic = nn.Sequential(
            nn.Conv1d(hidden, hidden, 3, padding=1, bias=False), SemanticBlock(hidden), SemanticBlock(hidden)
        )
        self.join = nn.Linear(config.width, config.width)

    def prepare(self) -> None:
        """Compute once what follows from the weights alone."""
        for module in self.modules():
            if isinstance(module, Position):
                module.prepare()
        self.resample = Resample(SAMPLE_RATE_HZ, SEMANTIC_RATE_HZ).to(self.join.weight.device)

    def forward(self, samples: Tensor) -> Tensor:
        """samples [B, N] at 24 kHz -> [B, F, W].

        The semantic branch says how many frames there are. Where the acoustic one would give another number,
        which is where N mod 960 lies in 119 .. 631, its samples get half a frame of zeros on both sides.
        """
        heard = self.hubert(F.pad(self.resample(samples), (SEMANTIC_PAD, SEMANTIC_PAD)))[:, ::2]  # [B, F, D]
        semantic = self.semantic(heard.mT)  # [B, D, F]
        if self.acoustic.frames(samples.shape[1]) != semantic.shape[2]:
            samples = F.pad(samples, (self.pad, self.pad))
        acoustic = self.acoustic(samples[:, None])  # [B, C, F]
        return self.join(torch.cat((acoustic, semantic), 1).mT)
