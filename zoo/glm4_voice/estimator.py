"""The flow's estimator: the velocity of each mel frame. Two levels, and nothing in it is causal.

    [x, mu, speaker, prompt] ─ stage ─┬─ conv /2 ─ stage ─┬─ conv ─ stages ... ─┬─ stage ─ conv x2 ─┬─ stage ─ conv ─ conv ─> velocity
                                      │                   └─────────────────────┘                   │
                                      └─────────────────────────────────────────────────────────────┘

A norm over groups of channels also runs over time, so padding would change every frame. Here the norms, the
convolutions and the attention leave padding out: a padded row gives what it gives alone.
Source: THUDM/GLM-4-Voice at eb00ce9, cosyvoice/flow/decoder.py; Matcha-TTS (arXiv 2309.03199), models/components.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.glm4_voice.config import FlowConfig
from zoo.nn.cfm import sinusoid
from zoo.nn.narrow import dtype_of
from zoo.nn.s3.estimator import TransformerBlock, mish
from zoo.nn.s3.sizes import MELS
from zoo.nn.s3.stretch import Whole, may_follow_values

KERNEL, GROUPS = 3, 8


class GroupNorm(nn.GroupNorm):
    """Normalise groups of channels over the frames that are there: x [B, C, T], mask [B, 1, T] of 0 and 1."""

    def masked(self, x: Tensor, mask: Tensor) -> Tensor:
        if may_follow_values(x) and mask.all():  # a CPU renders each row alone, so nothing is padded
            return self(x)
        groups = x.unflatten(1, (self.num_groups, -1))  # [B, G, C / G, T]
        there = mask[:, None]
        count = there.sum((2, 3), keepdim=True) * groups.shape[2]
        mean = (groups * there).sum((2, 3), keepdim=True) / count
        centred = (groups - mean) * there
        variance = centred.square().sum((2, 3), keepdim=True) / count
        y = (centred * torch.rsqrt(variance + self.eps)).flatten(1, 2)
        return (y * self.weight[:, None] + self.bias[:, None]) * mask


class ConvBlock(nn.Module):
    def __init__(self, channels: int, out_channels: int):
        super().__init__()
        self.conv = nn.Conv1d(channels, out_channels, KERNEL, padding=1)
        self.norm = GroupNorm(GROUPS, out_channels)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Apply convolution, norm and mish to x [B, C, T], which is zero in padding. Returns [B, Cout, T]."""
        return mish(self.norm.masked(self.conv(x), mask)) * mask


class Resnet(nn.Module):
    def __init__(self, channels: int, out_channels: int, time_width: int):
        super().__init__()
        self.block1 = ConvBlock(channels, out_channels)
        self.time = nn.Linear(time_width, out_channels)
        self.block2 = ConvBlock(out_channels, out_channels)
        self.shortcut = nn.Conv1d(channels, out_channels, 1)

    def forward(self, x: Tensor, mask: Tensor, shift: Tensor) -> Tensor:
        """Apply the block to x [B, C, T]. shift [Cout]: the embedding of the solver's time."""
        y = (self.block1(x, mask) + shift[:, None]) * mask
        return self.block2(y, mask) + self.shortcut(x) * mask


@dataclass
class Level:
    """Which frames of one level are there."""

    mask: Tensor  # [B, 1, T]: 1 for frames that are there
    seen: Whole
    scores: Tensor  # [B, 1, 1, T], for attention: -inf for the others
    cache: Tensor  # [B, 1, 1, 2 * inner], which nothing reads

    @classmethod
    def of(cls, mask: Tensor, inner: int) -> Level:
        """mask [B, 1, T]; inner: the width of an attention's keys"""
        seen = Whole(mask.sum((1, 2)).long(), mask.shape[2])
        scores = torch.zeros_like(mask).masked_fill(mask == 0, -torch.inf)[:, None]
        return cls(mask, seen, scores, seen.scratch(mask, 1, 1, 2 * inner)[0])


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
        rows = self.resnet(x, level.mask, shift).mT
        block: Any
        for block in self.blocks:
            rows = block.in_rows(rows, level.seen, level.scores, level.cache)
        return rows.mT * level.mask


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
        self.down_conv = nn.Conv1d(channels, channels, KERNEL, padding=1)
        self.middle = nn.ModuleList(Stage(config, channels) for _ in range(config.num_mid))
        self.ups = nn.ModuleList(Stage(config, 2 * channels) for _ in range(2))
        self.grow = nn.ConvTranspose1d(channels, channels, 4, stride=2, padding=1)
        self.up_conv = nn.Conv1d(channels, channels, KERNEL, padding=1)
        self.final = ConvBlock(channels, channels)
        self.out = nn.Conv1d(channels, MELS, 1)

    @torch.no_grad()
    def prepare(self, times: Tensor) -> None:
        """Embed the solver's times [steps]."""
        time = torch.stack([sinusoid(t, 4 * MELS) for t in times]).to(dtype_of(self.time1))
        time = F.mish(self.time2(F.silu(self.time1(time))))
        stages = (*self.downs, *self.middle, *self.ups)
        shifts = torch.stack([stage.resnet.time(time) for stage in stages], 1)
        self.register_buffer("shifts", shifts, persistent=False)

    def levels(self, mask: Tensor) -> tuple[Level, Level]:
        """Return both levels of frames, of which those are there whose mask [B, 1, T] is 1."""
        return Level.of(mask, self.inner), Level.of(mask[..., ::2], self.inner)

    def forward(self, x: Tensor, levels: tuple[Level, Level], shifts: Tensor) -> Tensor:
        """Return the velocity [B, MELS, T] of x [B, 4 * MELS, T].

        shifts [stages, channels]: of one step of the solver.
        """
        first_down, second_down, *middle, first_up, second_up = shifts.unbind(0)
        whole, half = levels
        x = kept = self.downs[0](x * whole.mask, whole, first_down)
        x = kept_half = self.downs[1](self.shrink(x) * half.mask, half, second_down)
        x = self.down_conv(x) * half.mask
        for stage, shift in zip(self.middle, middle, strict=True):
            x = stage(x, half, shift)
        x = self.ups[0](torch.cat((x, kept_half), 1), half, first_up)
        x = self.grow(x)[..., : whole.mask.shape[2]] * whole.mask
        x = self.ups[1](torch.cat((x, kept), 1), whole, second_up)
        return self.out(self.final(self.up_conv(x) * whole.mask, whole.mask)) * whole.mask
