"""The flow's estimator, a diffusion transformer: the velocity of each mel frame.

    [x, mu, speaker, prompt] ─ linear ─ blocks: attention, convolutions, MLP ─ norm ─ linear ─> velocity

Attention knows no positions: a frame sees a set of earlier frames, in any order. Each part of a block is shifted, scaled
and gated by vectors that follow from the solver's time alone, so they are a table. Rows come in pairs, with the
condition and without it.
Source: stepfun-ai/Step-Audio2 at 7c58630, cosyvoice2/flow/decoder_dit.py; DiT (arXiv 2212.09748).
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.nn.conv import CodecState, StateLayout
from zoo.nn.linear import FusedLinear
from zoo.nn.s3.estimator import Conv, mish
from zoo.nn.s3.sizes import MELS
from zoo.step_audio2.config import FlowConfig

EPS = 1e-6  # of the norms without weights
TIME_WIDTH = 256
BLOCK_PARTS, LAST_PARTS = 9, 2  # vectors of a block, and of the last norm


class Frames(Protocol):
    """Which frames attention sees. mask [B, 1, Q, K] bool; None: all."""

    mask: Tensor | None

    def joined(self, cache: Tensor, new: Tensor) -> Tensor:
        """Return the cached and the new frames [R, K, V] of new [R, Q, V]."""


class Attention(nn.Module):
    reads_many_rows = True  # all rows of a stretch

    def __init__(self, config: FlowConfig):
        super().__init__()
        inner = config.estimator_heads * config.head_dim
        self.heads = config.estimator_heads
        self.qkv = FusedLinear(config.hidden, (inner, inner, inner), bias=True)
        self.q_norm, self.k_norm = nn.LayerNorm(config.head_dim), nn.LayerNorm(config.head_dim)
        self.out = nn.Linear(inner, config.hidden)

    def forward(self, x: Tensor, frames: Frames, mask: Tensor | None, cache: Tensor) -> tuple[Tensor, Tensor]:
        """x [R, Q, D] -> [R, Q, D], and the new keys and values [R, Q, V]. mask [R, 1, Q, K]"""
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(x))  # [R, Q, H, dim]
        new = torch.cat((self.k_norm(k), v), -1).flatten(2)
        kv = frames.joined(cache, new)
        k, v = kv.unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(2, -1)  # [R, H, K, dim]
        mixed = F.scaled_dot_product_attention(self.q_norm(q).transpose(1, 2), k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2)), new


class ConvBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.first, self.norm, self.second = Conv(width, width), nn.LayerNorm(width), Conv(width, width)

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        return self.second(mish(self.norm(self.first(x, state))), state)


def normed(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Normalise x [R, Q, D], and shift and scale it by vectors [D]."""
    return F.layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scale) + shift


class Block(nn.Module):
    reads_many_rows = True

    def __init__(self, config: FlowConfig):
        super().__init__()
        self.attention, self.conv = Attention(config), ConvBlock(config.hidden)
        self.widen = nn.Linear(config.hidden, config.estimator_inner)
        self.narrow = nn.Linear(config.estimator_inner, config.hidden)
        self.modulation = nn.Linear(config.hidden, BLOCK_PARTS * config.hidden)

    def forward(
        self,
        x: Tensor,
        parts: Tensor,
        state: CodecState,
        frames: Frames,
        mask: Tensor | None,
        cache: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """x [R, Q, D], parts [9, D] -> [R, Q, D], and attention's new keys and values [R, Q, V]"""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate, conv_shift, conv_scale, conv_gate = parts.unbind()
        mixed, new = self.attention(normed(x, shift, scale), frames, mask, cache)
        x = x + gate * mixed
        x = x + conv_gate * self.conv(normed(x, conv_shift, conv_scale), state)
        y = F.gelu(self.widen(normed(x, mlp_shift, mlp_scale)), approximate="tanh")
        return x + mlp_gate * self.narrow(y), new


class Estimator(nn.Module):
    parts: Tensor  # [steps, depth, 9, D], after prepare()
    last_parts: Tensor  # [steps, 2, D]

    def __init__(self, config: FlowConfig):
        super().__init__()
        width = config.hidden
        self.time1, self.time2 = nn.Linear(TIME_WIDTH, width), nn.Linear(width, width)
        self.input = nn.Linear(4 * MELS, width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.modulation = nn.Linear(width, LAST_PARTS * width)
        self.output = nn.Linear(width, MELS)
        self.layout = StateLayout(self)

    @torch.no_grad()
    def prepare(self, times: Tensor) -> None:
        """Compute the vectors of each step from its time [steps], and lay out the weights."""
        for module in self.modules():
            if isinstance(module, Conv):
                module.prepare()
        half = TIME_WIDTH // 2
        rate = torch.exp(-math.log(10000) * torch.arange(half, device=times.device) / half)
        angle = 1000 * times[:, None] * rate
        embedded = self.time2(F.silu(self.time1(torch.cat((angle.cos(), angle.sin()), -1))))
        c = F.silu(embedded)  # [steps, D]
        modulations = [block.modulation for block in self.blocks if isinstance(block, Block)]
        parts = torch.stack([modulate(c).unflatten(-1, (BLOCK_PARTS, -1)) for modulate in modulations], 1)
        self.register_buffer("parts", parts, persistent=False)
        last = self.modulation(c).unflatten(-1, (LAST_PARTS, -1))
        self.register_buffer("last_parts", last, persistent=False)

    def forward(
        self,
        x: Tensor,
        parts: Tensor,
        last_parts: Tensor,
        state: CodecState,
        frames: Frames,
        mask: Tensor | None,
        caches: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """x [R, Q, 4 MELS] -> [R, Q, MELS], and the new keys and values [depth, R, Q, V]. parts [depth, 9, D] and
        last_parts [2, D]: of the solver's step; caches [depth, ...]: one per block."""
        x, news = self.input(x), []
        for i, block in enumerate(self.blocks):
            x, new = block(x, parts[i], state, frames, mask, caches[i])
            news.append(new)
        shift, scale = last_parts.unbind()
        return self.output(normed(x, shift, scale)), torch.stack(news)
