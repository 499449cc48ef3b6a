"""The flow's estimator: the velocity of each mel frame. Two levels, and nothing in it is causal.

    [x, mu, speaker, prompt] ─ stage ─┬─ conv /2 ─ stage ─┬─ conv ─ stages ... ─┬─ stage ─ conv x2 ─┬─ stage ─ conv ─ conv ─> velocity
                                      │                   └─────────────────────┘                   │
                                      └─────────────────────────────────────────────────────────────┘

A norm over groups of channels also runs over time, so padding would change every frame. Here the norms, the
convolutions and the attention leave padding out: a padded row gives what it gives alone.
Source: THUDM/GLM-4-Voice at eb00ce9, cosyvoice/flow/decoder.py; Matcha-TTS (arXiv 2309.03199), models/components.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.glm4_voice.config import FlowConfig
from zoo.nn.cfm import sinusoid
from zoo.nn.linear import FusedLinear
from zoo.nn.narrow import dtype_of
from zoo.nn.s3.sizes import MELS

KERNEL, GROUPS = 3, 8


class GroupNorm(nn.GroupNorm):
    """Normalise groups of channels over the frames that are there: x [B, C, T], mask [B, 1, T] of 0 and 1."""

    def masked(self, x: Tensor, mask: Tensor) -> Tensor:
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
        return F.mish(self.norm.masked(self.conv(x), mask)) * mask


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


class TransformerBlock(nn.Module):
    reads_many_rows = True

    def __init__(self, channels: int, heads: int, head_dim: int):
        super().__init__()
        self.heads = heads
        inner = heads * head_dim
        self.attention_norm = nn.LayerNorm(channels)
        self.qkv = FusedLinear(channels, (inner,) * 3)
        self.out = nn.Linear(inner, channels)
        self.mlp_norm = nn.LayerNorm(channels)
        self.widen = nn.Linear(channels, 4 * channels)
        self.narrow = nn.Linear(4 * channels, channels)

    def forward(self, x: Tensor, sees: Tensor) -> Tensor:
        """Apply the block to x [B, T, C]. sees [B, 1, 1, T] bool: the positions that are there."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.attention_norm(x))
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=sees)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.mlp_norm(x))))


class Stage(nn.Module):
    """A resnet block, then transformer blocks."""

    def __init__(self, config: FlowConfig, channels: int):
        super().__init__()
        out_channels = config.channels
        self.resnet = Resnet(channels, out_channels, 4 * out_channels)
        sizes = out_channels, config.estimator_heads, config.head_dim
        self.blocks = nn.ModuleList(TransformerBlock(*sizes) for _ in range(config.num_blocks))

    def forward(self, x: Tensor, mask: Tensor, shift: Tensor) -> Tensor:
        """x [B, C, T] -> [B, Cout, T], zero in padding"""
        rows = self.resnet(x, mask, shift).mT
        sees = mask[:, None] > 0
        for block in self.blocks:
            rows = block(rows, sees)
        return rows.mT * mask


class Estimator(nn.Module):
    shifts: Tensor  # [steps, stages, channels], after prepare(): the embeddings of the solver's times

    def __init__(self, config: FlowConfig):
        super().__init__()
        channels = config.channels
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

    def forward(self, x: Tensor, mask: Tensor, shifts: Tensor) -> Tensor:
        """Return the velocity [B, MELS, T] of x [B, 4 * MELS, T].

        mask [B, 1, T]: 1 for frames that are there; shifts [stages, channels]: of one step of the solver.
        """
        first_down, second_down, *middle, first_up, second_up = shifts.unbind(0)
        half = mask[..., ::2]
        x = kept = self.downs[0](x * mask, mask, first_down)
        x = kept_half = self.downs[1](self.shrink(x) * half, half, second_down)
        x = self.down_conv(x) * half
        for stage, shift in zip(self.middle, middle, strict=True):
            x = stage(x, half, shift)
        x = self.ups[0](torch.cat((x, kept_half), 1), half, first_up)
        x = self.grow(x)[..., : mask.shape[2]] * mask
        x = self.ups[1](torch.cat((x, kept), 1), mask, second_up)
        return self.out(self.final(self.up_conv(x) * mask, mask)) * mask
