"""Causal layers that the codec's encoder and decoder share. They read and write a stream's past in a
`CodecState`. The encoder passes a whole recording as a stream of one call.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.fish_s2.block import rope_table, rotate, turns
from zoo.fish_s2.config import TransformerConfig
from zoo.nn.conv import CausalConv1d, CodecState, Stateful
from zoo.nn.linear import SwiGLU
from zoo.nn.norm import RMSNorm
from zoo.nn.residual import ResidualUnit
from zoo.nn.snake import Snake

DILATIONS = (1, 3, 9)  # one per residual unit of a block
KERNEL = 7  # for every convolution that is wider than 1 and not strided
EPS, ROPE_THETA = 1e-5, 10_000.0  # of the transformers


class Residual(ResidualUnit):
    """A residual unit: [B, C, N] -> [B, C, N]."""

    def __init__(self, channels: int, dilation: int):
        super().__init__(channels, KERNEL, dilation, Snake)


class ConvNeXt(nn.Module):
    """A causal ConvNeXt block (Liu et al. 2022, arXiv 2201.03545): [B, C, N] -> [B, C, N]."""

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


class Layer(Stateful):
    """A transformer layer with sliding-window attention. Its state is the window's keys and values."""

    def __init__(self, config: TransformerConfig):
        width = config.width
        super().__init__(2 * width, config.window - 1, dim=1)
        self.heads = width // config.head_dim
        self.attention_norm = RMSNorm(width, EPS)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.attention_scale = nn.Parameter(torch.empty(width))
        self.mlp_norm = RMSNorm(width, EPS)
        self.mlp = SwiGLU(width, config.inner)
        self.mlp_scale = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor, state: CodecState) -> Tensor:
        """x [B, N, D] -> [B, N, D]; cos and sin [B, N, 1, dim]; seen [B, 1, N, window - 1 + N] marks the
        keys that each position may attend to."""
        qkv = self.qkv(self.attention_norm(x))
        q, k, v = rearrange(qkv, "b n (three h d) -> three b n h d", three=3, h=self.heads)
        k = rotate(k, cos, sin)
        kv = state.extend(self, torch.cat((k, v), -2).flatten(2))  # [B, window - 1 + N, 2D]
        k, v = rearrange(kv, "b n (two h d) -> two b h n d", two=2, h=self.heads)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin).transpose(1, 2), k, v, attn_mask=seen)
        x = torch.addcmul(x, self.attention_scale, self.out(rearrange(y, "b h n d -> b n (h d)")))
        return torch.addcmul(x, self.mlp_scale, self.mlp(self.mlp_norm(x)))


class Transformer(nn.Module):
    """The sliding-window transformer, [B, D, N] -> [B, D, N]. Positions count from the start of the
    stream."""

    rope: Tensor  # [positions, 2, dim / 2] bf16, set by prepare()

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, EPS)

    def prepare(self) -> None:
        c, device = self.config, self.norm.weight.device
        self.register_buffer(
            "rope", rope_table(c.max_positions, c.head_dim, ROPE_THETA, device), persistent=False
        )

    def forward(self, x: Tensor, start: Tensor, state: CodecState) -> Tensor:
        """x [B, D, N] -> [B, D, N]; start [B] is the number of positions in earlier calls."""
        x = x.mT
        frame = torch.arange(x.shape[1], device=x.device)
        kept = self.config.window - 1
        cos, sin = turns(self.rope[start[:, None] + frame][:, :, None])  # [B, N, 1, dim]
        # Key j lies window - 1 - j positions before this call's first one. The zeros from before the start of
        # the stream are masked.
        key = torch.arange(kept + x.shape[1], device=x.device)
        window = (key >= frame[:, None]) & (key <= frame[:, None] + kept)  # [N, window - 1 + N]
        seen = window & (key >= kept - start[:, None])[:, None]  # [B, N, window - 1 + N]
        for layer in self.layers:
            x = layer(x, cos, sin, seen[:, None], state)
        return self.norm(x).mT


def transformers(module: nn.Module) -> Iterator[Transformer]:
    return (part for part in module.modules() if isinstance(part, Transformer))
