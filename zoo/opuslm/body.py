"""OLMo-2's decoder over pages: the norms come behind attention and MLP, and queries and keys are normalized
over all heads at once.

    x ─┬─ q k v ─ norm q, k ─ rotate ─ attend ─ out ─ norm ─┬─ + ─┬─ gated MLP ─ norm ─ + ─>
       └────────────────────────────────────────────────────┘     └──────────────────────┘

Source: transformers 5.23, models/olmo2/modeling_olmo2.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.contract import Batch
from zoo.nn.attention import Paged, Turn, attend
from zoo.nn.linear import FusedLinear
from zoo.nn.llama import LlamaConfig, frequencies
from zoo.nn.swiglu import FusedSwiGLU


class WideRMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, rounded to the input's dtype only at the end."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * wide).to(x.dtype)


class Block(nn.Module):
    """Grouped-query attention over pages, then a gated MLP, each before a norm and added to its input."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.qkv = FusedLinear(config.hidden, (queries, keys, keys))
        self.q_norm = WideRMSNorm(queries, config.eps)
        self.k_norm = WideRMSNorm(keys, config.eps)
        self.out = nn.Linear(queries, config.hidden, bias=False)
        self.norm = WideRMSNorm(config.hidden, config.eps)
        self.mlp = FusedSwiGLU(config.hidden, config.inner)
        self.mlp_norm = WideRMSNorm(config.hidden, config.eps)

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, paged: Paged) -> Tensor:
        """x [T, D] -> [T, D]; cos and sin [T, head_dim] float32."""
        q, k, v = self.qkv(x)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (self.q_norm(q), self.k_norm(k), v))
        mixed = attend(q, k, v, paged, self.head_dim**-0.5, Turn(cos, sin)).flatten(1)
        x = x + self.norm(self.out(mixed))
        return x + self.mlp_norm(self.mlp(x))


class Stack(nn.Module):
    """The blocks and the last norm."""

    angle: Tensor  # [head_dim / 2], after prepare()

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = WideRMSNorm(config.hidden, config.eps)

    def prepare(self) -> None:
        """Compute what follows from the config alone. Call once, with the weights in place."""
        angle = frequencies(self.config, self.norm.weight.device)
        self.register_buffer("angle", angle, persistent=False)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, D] -> [T, D]"""
        angle = batch.positions.float()[:, None] * self.angle
        angle = torch.cat((angle, angle), -1)  # [T, head_dim]
        cos, sin = angle.cos(), angle.sin()
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, Paged(batch, i))
        return self.norm(x)
