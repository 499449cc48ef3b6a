"""SNAC's encoder: 24 kHz samples to frames of seven codes. It runs once per reference, in fp32.

    samples ─ conv ─ /2 ─ /4 ─ /8 ─ /8 ─ conv ─ latent columns (46.9 Hz) ─ level 1 (mean of 4) ─ 2 (of 2) ─ 3

Source: snac 1.2.1, snac/layers.py (Encoder) and vq.py (ResidualVectorQuantize).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.nn.snake import Snake
from zoo.orpheus.config import SnacConfig
from zoo.orpheus.quantizer import Quantizer

KERNEL = 7
DILATIONS = (1, 3, 9)


class Residual(nn.Module):
    """x [B, C, N] -> [B, C, N]"""

    def __init__(self, channels: int, dilation: int):
        super().__init__()
        self.snake1 = Snake(channels)
        padding = KERNEL // 2 * dilation
        self.conv1 = nn.Conv1d(
            channels, channels, KERNEL, dilation=dilation, padding=padding, groups=channels
        )
        self.snake2 = Snake(channels)
        self.conv2 = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.snake2(self.conv1(self.snake1(x))))


class Block(nn.Module):
    """[B, C, N] -> [B, 2 C, N / rate]"""

    def __init__(self, channels: int, rate: int):
        super().__init__()
        self.residuals = nn.ModuleList(Residual(channels, dilation) for dilation in DILATIONS)
        self.snake = Snake(channels)
        self.down = nn.Conv1d(channels, 2 * channels, 2 * rate, rate, padding=-(-rate // 2))

    def forward(self, x: Tensor) -> Tensor:
        for residual in self.residuals:
            x = residual(x)
        return self.down(self.snake(x))


class Encoder(nn.Module):
    def __init__(self, config: SnacConfig):
        super().__init__()
        width = config.encoder_width
        self.stem = nn.Conv1d(1, width, KERNEL, padding=KERNEL // 2)
        self.blocks = nn.ModuleList(Block(width << i, rate) for i, rate in enumerate(config.encoder_rates))
        self.tail = nn.Conv1d(config.latent, config.latent, KERNEL, padding=KERNEL // 2, groups=config.latent)

    def forward(self, samples: Tensor, quantizer: Quantizer) -> Tensor:
        """samples [B, N], N a multiple of a frame -> codes [B, F, 7]"""
        x = self.stem(samples[:, None])
        for block in self.blocks:
            x = block(x)
        first, second, third = quantizer.encode(self.tail(x))  # [B, F], [B, 2 F], [B, 4 F]
        second = second.unflatten(1, (-1, 2))
        third = third.unflatten(1, (-1, 4))
        places = (
            first,
            second[..., 0],
            third[..., 0],
            third[..., 1],
            second[..., 1],
            third[..., 2],
            third[..., 3],
        )
        return torch.stack(places, -1)
