"""A codec's ConvNeXt block, causal, and the upsampling that it follows. Source: Liu et al. 2022 (arXiv 2201.03545)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.nn.conv import CausalConv1d, CodecState
from zoo.nn.residual import Identity, SnakeConvTranspose1d, upsample_snake

KERNEL = 7


class ConvNeXt(nn.Module):
    """[B, C, N] -> [B, C, N]"""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = CausalConv1d(channels, channels, KERNEL, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.widen = nn.Linear(channels, 4 * channels)
        self.narrow = nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        y = self.norm(self.conv(x, state).mT)
        y = self.narrow(F.gelu(self.widen(y)))
        return x + (y * self.scale).mT


class Upsample(nn.Module):
    """A transposed convolution and a ConvNeXt block: [B, C, N] -> [B, C, ratio N]."""

    def __init__(self, channels: int, ratio: int):
        super().__init__()
        self.up = SnakeConvTranspose1d(channels, channels, ratio, ratio)
        self.block = ConvNeXt(channels)

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        return self.block(upsample_snake(x, Identity(), self.up, state), state)


def convnext_names(theirs: str, ours: str) -> dict[str, str]:
    """Return a table from the published names of a ConvNeXt block to ours."""
    parts = {"dwconv.conv": "conv", "norm": "norm", "pwconv1": "widen", "pwconv2": "narrow"}
    leaves = ((part, own, leaf) for part, own in parts.items() for leaf in ("weight", "bias"))
    table = {f"{theirs}.{part}.{leaf}": f"{ours}.{own}.{leaf}" for part, own, leaf in leaves}
    return table | {f"{theirs}.gamma": f"{ours}.scale"}
