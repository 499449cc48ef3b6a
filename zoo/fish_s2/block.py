"""What the blocks of both stacks have in common, and the rotation that all of this model's attention shares.

The rotary table is rounded to bf16 and is as much a part of the model as its weights: with an exact one,
which is what every other model here has, published implementations report garbled and endless speech.
Sources: facts of fishaudio/fish-speech, by way of fish-speech 0.1.0, models/text2semantic/llama.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.fish_s2.config import StackConfig
from zoo.nn.linear import SwiGLU
from zoo.nn.norm import RMSNorm


def rope_table(num_positions: int, dim: int, theta: float, device: torch.device | None = None) -> Tensor:
    """-> [num_positions, 2, dim / 2] bf16: cosines, then sines. Made on the CPU, so that all devices round
    the same numbers."""
    frequency = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)  # [dim / 2]
    angle = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequency)
    return torch.stack((angle.cos(), angle.sin()), 1).bfloat16().to(device)


def rotate_pairs(x: Tensor, table: Tensor) -> Tensor:
    """Value 2i turns with value 2i + 1. x [..., H, dim], table [..., 2, dim / 2] of its positions; in fp32 or
    wider."""
    wide = x.float() if x.dtype == torch.bfloat16 else x
    cos, sin = table.to(wide.dtype)[..., None, :, :].unbind(-2)  # [..., 1, dim / 2] each
    even, odd = wide.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)


class DualARBlock(nn.Module):
    """Grouped-query attention, then a gated MLP, each behind a norm and added to its input. The slow stack
    has a norm per head."""

    def __init__(self, config: StackConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.parts = (queries, keys, keys)
        self.norm = RMSNorm(config.hidden, config.eps)
        self.qkv = nn.Linear(config.hidden, sum(self.parts), bias=False)
        if config.has_qk_norm:
            # torch's own norm multiplies by its weight before it rounds, which RMSNorm does after.
            self.q_norm: nn.Module = nn.RMSNorm(config.head_dim, config.eps)
            self.k_norm: nn.Module = nn.RMSNorm(config.head_dim, config.eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()
        self.out = nn.Linear(queries, config.hidden, bias=False)
        self.mlp_norm = RMSNorm(config.hidden, config.eps)
        self.mlp = SwiGLU(config.hidden, config.inner)

    def project_qkv(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., D], table [..., 2, dim / 2] of its positions -> turned queries [..., H, dim] and keys, and
        values, [..., Hkv, dim]."""
        q, k, v = self.project_plain_qkv(x)
        return rotate_pairs(self.q_norm(q), table), rotate_pairs(self.k_norm(k), table), v

    def project_plain_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `project_qkv`, before the norms of heads, and not turned."""
        parts = self.qkv(self.norm(x)).split(self.parts, -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        return q, k, v

    def project_output(self, x: Tensor, mixed: Tensor) -> Tensor:
        """x [..., D] and what its heads made of it [..., H * dim] -> the block's output [..., D]."""
        x = x + self.out(mixed)
        return x + self.mlp(self.mlp_norm(x))
