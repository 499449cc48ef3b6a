"""The flow's estimator: the velocity of each mel frame. Two levels, and nothing in it is causal.

    [x, mu, speaker, prompt] ─ stage ─┬─ conv /2 ─ stage ─┬─ conv ─ stages ... ─┬─ stage ─ conv x2 ─┬─ stage ─ conv ─ conv ─> velocity
                                      │                   └─────────────────────┘                   │
                                      └─────────────────────────────────────────────────────────────┘

A norm over groups of channels also runs over time, so padding would change every frame. Here the norms, the
convolutions and the attention leave padding out, so a padded row gives the same result as alone. The CPU's
kernels keep the channels of a frame together in memory, as attention reads them.
Source: THUDM/GLM-4-Voice at eb00ce9, cosyvoice/flow/decoder.py; Matcha-TTS (arXiv 2309.03199), models/components.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo import kernels
from zoo.glm4_voice.config import FlowConfig
from zoo.nn import row_convolution
from zoo.nn.cfm import sinusoid
from zoo.nn.conv import is_turned
from zoo.nn.eager import may_follow_values
from zoo.nn.narrow import dtype_of
from zoo.nn.residual import ConvFilters, has_kernel
from zoo.nn.s3.estimator import TransformerBlock, mish
from zoo.nn.s3.sizes import MELS
from zoo.nn.s3.stretch import Whole

KERNEL, GROUPS = 3, 8


class GroupNorm(nn.GroupNorm):
    """Normalise groups of channels over the frames that are there: x [B, C, T], mask [B, 1, T] of 0 and 1."""

    def masked(self, x: Tensor, mask: Tensor) -> Tensor:
        if may_follow_values(x) and mask.all():  # a CPU renders each row alone, so nothing is padded
            return self(x)
        groups = x.float().unflatten(1, (self.num_groups, -1))  # [B, G, C / G, T]
        there = mask[:, None].float()  # 16 bits could not count the frames
        count = there.sum((2, 3), keepdim=True) * groups.shape[2]
        mean = (groups * there).sum((2, 3), keepdim=True) / count
        centred = (groups - mean) * there
        variance = centred.square().sum((2, 3), keepdim=True) / count
        y = (centred * torch.rsqrt(variance + self.eps)).flatten(1, 2)
        return ((y * self.weight[:, None] + self.bias[:, None]) * mask).to(x.dtype)


class Conv(nn.Conv1d, ConvFilters):
    """A convolution of x [B, C, T] that keeps the length. Zeros stand before and behind x."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, channels: int, out_channels: int, kernel: int = KERNEL):
        super().__init__(channels, out_channels, kernel, padding=kernel // 2)

    def to_rows(self) -> None:
        """Lay the weight out in memory as `convolve_rows` reads it. Its shape does not change."""
        self.weight.data = self.weight.data.mT.contiguous().mT

    def plus(self, x: Tensor, more: Tensor | None) -> Tensor:
        """Return the convolution of x plus `more` [B, Cout, T]."""
        [taps] = self.kernel_size
        if not has_kernel(x, self):
            if x.dtype in row_convolution.DTYPES:
                rows = F.pad(x.mT, (0, 0, taps // 2, taps // 2)).contiguous()
                y = (row_convolution.convolve_rows(rows, self.weight.mT, 1) + self.bias).mT
            else:
                y = super().forward(x)
            return y if more is None else more + y
        return kernels.convolve_snake(
            x, None, self.filters, self.bias, taps, dilation=1, residual=more, padding=taps // 2
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.plus(x, None)


@dataclass
class Level:
    """Which frames of one level are there."""

    mask: Tensor  # [B, 1, T]: 1 for frames that are there
    is_full: bool  # a CPU renders each row alone, so nothing is padded
    seen: Whole
    scores: Tensor  # [B, 1, 1, T], for attention: -inf for the others
    cache: Tensor  # [B, 1, 1, 2 * inner], which nothing reads

    @classmethod
    def of(cls, mask: Tensor, inner: int, dtype: torch.dtype) -> Level:
        """mask [B, 1, T] fp32; inner: the width of an attention's keys; dtype: that of the frames"""
        seen = Whole(mask.sum((1, 2)).long(), mask.shape[2])
        mask = mask.to(dtype)
        scores = torch.zeros_like(mask).masked_fill(mask == 0, -torch.inf)[:, None]
        is_full = may_follow_values(mask) and bool(mask.all())
        return cls(mask, is_full, seen, scores, seen.scratch(mask, 1, 1, 2 * inner)[0])

    def of_frames(self, x: Tensor) -> Tensor:
        """Return x [B, C, T], with zeros in padding."""
        return x if self.is_full else x * self.mask


class ConvBlock(nn.Module):
    def __init__(self, channels: int, out_channels: int):
        super().__init__()
        self.conv = Conv(channels, out_channels)
        self.norm = GroupNorm(GROUPS, out_channels)

    def forward(self, x: Tensor, level: Level, shift: Tensor | None = None) -> Tensor:
        """Apply convolution, norm and mish to x [B, C, T], which is zero in padding, and add shift [Cout].
        Returns [B, Cout, T]."""
        x = self.conv(x)
        if level.is_full and kernels.know(x) and x.dtype == torch.float32:
            return kernels.group_norm_mish(x, self.norm, shift)
        x = level.of_frames(mish(self.norm.masked(x, level.mask)))
        return x if shift is None else level.of_frames(x + shift[:, None])


class Resnet(nn.Module):
    def __init__(self, channels: int, out_channels: int, time_width: int):
        super().__init__()
        self.block1 = ConvBlock(channels, out_channels)
        self.time = nn.Linear(time_width, out_channels)
        self.block2 = ConvBlock(out_channels, out_channels)
        self.shortcut = Conv(channels, out_channels, kernel=1)

    def forward(self, x: Tensor, level: Level, shift: Tensor) -> Tensor:
        """Apply the block to x [B, C, T]. shift [Cout]: the embedding of the solver's time."""
        y = self.block2(self.block1(x, level, shift), level)
        return level.of_frames(self.shortcut.plus(x, y))


class Stage(nn.Module):
    """A resnet block, then transformer blocks."""

    def __init__(self, config: FlowConfig, channels: int):
        super().__init__()
        out_channels = config.channels
        self.resnet = Resnet(channels, out_channels, 4 * out_channels)
        sizes = out_channels, config.estimator_heads, config.head_dim
        self.blocks = nn.ModuleList(TransformerBlock(*sizes) for _ in range(config.num_blocks))

    def forward(self, x: Tensor, level: Level, shift: Tensor) -> Tensor:
        """x [B, C, T] -> [B, Cout, T], zero in padding"""
        rows = self.resnet(x, level, shift).mT
        block: Any
        for block in self.blocks:
            rows = block.in_rows(rows, level.seen, level.scores, level.cache)
        return level.of_frames(rows.mT)


class Estimator(nn.Module):
    shifts: Tensor  # [steps, stages, channels], after prepare(): the embeddings of the solver's times

    def __init__(self, config: FlowConfig):
        super().__init__()
        channels = config.channels
        self.inner = config.estimator_heads * config.head_dim
        self.time1 = nn.Linear(4 * MELS, 4 * channels)
        self.time2 = nn.Linear(4 * channels, 4 * channels)
        self.downs = nn.ModuleList((Stage(config, 4 * MELS), Stage(config, channels)))
        self.shrink = nn.Conv1d(channels, channels, KERNEL, stride=2, padding=1)
        self.down_conv = Conv(channels, channels)
        self.middle = nn.ModuleList(Stage(config, channels) for _ in range(config.num_mid))
        self.ups = nn.ModuleList(Stage(config, 2 * channels) for _ in range(2))
        self.grow = nn.ConvTranspose1d(channels, channels, 4, stride=2, padding=1)
        self.up_conv = Conv(channels, channels)
        self.final = ConvBlock(channels, channels)
        self.out = Conv(channels, MELS, kernel=1)

    @torch.no_grad()
    def prepare(self, times: Tensor) -> None:
        """Embed the solver's times [steps]."""
        time = torch.stack([sinusoid(t, 4 * MELS) for t in times]).to(dtype_of(self.time1))
        time = F.mish(self.time2(F.silu(self.time1(time))))
        stages = (*self.downs, *self.middle, *self.ups)
        shifts = torch.stack([stage.resnet.time(time) for stage in stages], 1)
        self.register_buffer("shifts", shifts, persistent=False)

    def narrow(self, dtype: torch.dtype) -> None:
        """Compute in `dtype`, of 16 bits. `grow` stays in fp32, because cuDNN's in 16 bits can be many times
        slower."""
        self.to(dtype)
        self.grow.float()
        for module in self.modules():
            if isinstance(module, Conv):
                module.to_rows()

    def levels(self, mask: Tensor, dtype: torch.dtype) -> tuple[Level, Level]:
        """Return both levels of frames in `dtype`, of which those are there whose mask [B, 1, T] is 1."""
        return Level.of(mask, self.inner, dtype), Level.of(mask[..., ::2], self.inner, dtype)

    def _shrunk(self, x: Tensor) -> Tensor:
        """Return x [B, C, T] at half of the rate. In 16 bits it is one matrix product over rows."""
        if x.dtype not in row_convolution.DTYPES:
            return self.shrink(x)
        rows = F.pad(x.mT, (0, 0, KERNEL // 2, KERNEL // 2))
        reach = torch.cat([rows[:, i : i + x.shape[2] : 2] for i in range(KERNEL)], -1)
        return F.linear(reach, self.shrink.weight.mT.flatten(1), self.shrink.bias).mT

    def _grown(self, x: Tensor) -> Tensor:
        """Return x [B, C, T] at twice the rate."""
        return self.grow(x.to(self.grow.weight.dtype)).to(x.dtype)

    def forward(self, x: Tensor, levels: tuple[Level, Level], shifts: Tensor) -> Tensor:
        """Return the velocity [B, MELS, T] of x [B, 4 * MELS, T].

        shifts [stages, channels]: of one step of the solver.
        """
        first_down, second_down, *middle, first_up, second_up = shifts.unbind(0)
        whole, half = levels
        x = kept = self.downs[0](whole.of_frames(x), whole, first_down)
        x = kept_half = self.downs[1](half.of_frames(self._shrunk(x)), half, second_down)
        x = half.of_frames(self.down_conv(x))
        for stage, shift in zip(self.middle, middle, strict=True):
            x = stage(x, half, shift)
        x = self.ups[0](joined(x, kept_half), half, first_up)
        x = whole.of_frames(self._grown(x)[..., : whole.mask.shape[2]])
        x = self.ups[1](joined(x, kept), whole, second_up)
        return whole.of_frames(self.out(self.final(whole.of_frames(self.up_conv(x)), whole)))


def joined(x: Tensor, kept: Tensor) -> Tensor:
    """Return both [B, C, T] as [B, 2 C, T], in the layout of `kept`."""
    return torch.cat((x.mT, kept.mT), 2).mT if is_turned(kept) else torch.cat((x, kept), 1)
