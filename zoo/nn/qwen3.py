"""Qwen3's decoder over pages: Llama's with a norm per head of queries and keys.

Source: transformers 5.23, models/qwen3/modeling_qwen3.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.checkpoint.names import decoder_block
from zoo.checkpoint.stack import StackConfig
from zoo.contract import Batch
from zoo.nn.attention import Paged, attend
from zoo.nn.linear import FusedLinear, SwiGLU
from zoo.nn.norm import RMSNorm
from zoo.nn.rope import rope_table, rotate


class Block(nn.Module):
    """Grouped-query attention over pages with a norm per head, then a gated MLP. Both are pre-norm and
    residual."""

    def __init__(self, config: StackConfig):
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.norm = RMSNorm(config.hidden, config.eps)
        self.qkv = FusedLinear(config.hidden, (queries, keys, keys))
        self.q_norm = RMSNorm(config.head_dim, config.eps)
        self.k_norm = RMSNorm(config.head_dim, config.eps)
        self.out = nn.Linear(queries, config.hidden, bias=False)
        self.mlp_norm = RMSNorm(config.hidden, config.eps)
        self.mlp = SwiGLU(config.hidden, config.inner)

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, paged: Paged) -> Tensor:
        """x [T, D] -> [T, D]; cos and sin [T, 1, dim]."""
        # [T, H or Hkv, dim]
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv(self.norm(x)))
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        x = x + self.out(attend(q, k, v, paged, self.head_dim**-0.5).flatten(1))
        return x + self.mlp(self.mlp_norm(x))


class Stack(nn.Module):
    """The blocks and the last norm. The RoPE table is rounded to the inputs' dtype."""

    def __init__(self, config: StackConfig):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, D] -> [T, D]"""
        config = self.config
        cos, sin = rope_table(batch.positions, config.head_dim, config.rope_theta, x.dtype)
        cos, sin = cos[:, None], sin[:, None]  # [T, 1, dim]
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, Paged(batch, i))
        return self.norm(x)


def names(config: StackConfig, theirs: str, ours: str) -> dict[str, str]:
    """Return the published names of a stack's tensors -> ours, by prefix (see `zoo.checkpoint.loading`)."""
    table = {f"{theirs}.norm.weight": f"{ours}.norm.weight"}
    for i in range(config.layers):
        table |= decoder_block(f"{theirs}.layers.{i}", f"{ours}.layers.{i}", has_qk_norm=True)
    return table
