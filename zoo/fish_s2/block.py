"""The transformer block that both stacks share, and the RoPE rotation of all attention in this model.

The RoPE table is rounded to bf16, even if the model runs in fp32. The model depends on this rounding as on
its weights: published implementations with an exact table report garbled and endless speech.
Source: facts of fishaudio/fish-speech, from fish-speech 0.1.0, models/text2semantic/llama.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.fish_s2.config import StackConfig
from zoo.nn.linear import SwiGLU
from zoo.nn.norm import RMSNorm


def rope_table(num_positions: int, dim: int, theta: float, device: torch.device | None = None) -> Tensor:
    """Return the RoPE table [num_positions, 2, dim / 2] bf16: cosines, then sines. It is computed on the CPU,
    so that it is the same on all devices."""
    frequency = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)  # [dim / 2]
    angle = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequency)
    return torch.stack((angle.cos(), angle.sin()), 1).bfloat16().to(device)


def rotate_pairs(x: Tensor, table: Tensor) -> Tensor:
    """Rotate x [..., H, dim] by table [..., 2, dim / 2] of its positions: value 2i pairs with value 2i + 1.
    The rotation is in fp32 or wider."""
    wide = x.float() if x.dtype == torch.bfloat16 else x
    cos, sin = table.to(wide.dtype)[..., None, :, :].unbind(-2)  # [..., 1, dim / 2] each
    even, odd = wide.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)


class DualARBlock(nn.Module):
    """Grouped-query attention, then a gated MLP. Both are pre-norm and residual. The slow stack also has a
    norm per head."""

    def __init__(self, config: StackConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.parts = (queries, keys, keys)
        self.norm = RMSNorm(config.hidden, config.eps)
        self.qkv = nn.Linear(config.hidden, sum(self.parts), bias=False)
        if config.has_qk_norm:
            # nn.RMSNorm multiplies by its weight before it rounds; our RMSNorm does so after rounding.
            self.q_norm: nn.Module = nn.RMSNorm(config.head_dim, config.eps)
            self.k_norm: nn.Module = nn.RMSNorm(config.head_dim, config.eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()
        self.out = nn.Linear(queries, config.hidden, bias=False)
        self.mlp_norm = RMSNorm(config.hidden, config.eps)
        self.mlp = SwiGLU(config.hidden, config.inner)

    def project_qkv(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., D] and table [..., 2, dim / 2] of its positions -> rotated queries [..., H, dim], rotated
        keys and values [..., Hkv, dim]."""
        q, k, v = self.project_plain_qkv(x)
        return rotate_pairs(self.q_norm(q), table), rotate_pairs(self.k_norm(k), table), v

    def project_plain_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same as `project_qkv`, but without the norm per head and without rotation."""
        parts = self.qkv(self.norm(x)).split(self.parts, -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        return q, k, v

    def project_output(self, x: Tensor, mixed: Tensor) -> Tensor:
        """x [..., D] and the attention output of its heads [..., H * dim] -> the block's output [..., D]."""
        x = x + self.out(mixed)
        return x + self.mlp(self.mlp_norm(x))
