"""The parts around the attention that most decoder blocks share."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zoo.nn.attention import Paged, Turn, attend
from zoo.nn.linear import FusedLinear, SwiGLU
from zoo.nn.norm import RMSNorm


class Sizes(Protocol):
    """The sizes of a block, as a config states them."""

    @property
    def hidden(self) -> int: ...
    @property
    def inner(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def eps(self) -> float: ...


class PreNormBlock(nn.Module):
    """Before the attention a norm and a projection to queries, keys and values; after it a projection back, a
    norm and a gated MLP. Attention and MLP are added to their inputs."""

    MLP: type[SwiGLU] = SwiGLU
    is_stacked = True  # run by `blocked_stack.run_blocks` or `frame_stack`
    is_paired = False  # see `Turn`

    def __init__(self, config: Sizes, has_bias: bool = False):
        """has_bias: of queries, keys and values."""
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.norm = RMSNorm(config.hidden, config.eps)
        self.qkv = FusedLinear(config.hidden, (queries, keys, keys), has_bias)
        self.out = nn.Linear(queries, config.hidden, bias=False)
        self.mlp_norm = RMSNorm(config.hidden, config.eps)
        self.mlp = self.MLP(config.hidden, config.inner)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., D] -> queries [..., H, head_dim], keys and values [..., Hkv, head_dim]."""
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv(self.norm(x)))
        return q, k, v

    def combine(self, x: Tensor, mixed: Tensor) -> Tensor:
        """x [..., D] and the attention's output [..., H * head_dim] -> the block's output [..., D]."""
        x = x + self.out(mixed)
        return x + self.mlp(self.mlp_norm(x))

    def head_norms(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the weights [head_dim] of the RMS norms of each head's queries and keys, `q_norm` and `k_norm`,
        if there are any. Their eps is that of the other norms."""
        norms: list[Any] = [getattr(self, name, None) for name in ("q_norm", "k_norm")]
        q_norm, k_norm = (None if norm is None else norm.weight for norm in norms)
        return q_norm, k_norm


class PagedBlock(PreNormBlock):
    """A block with grouped-query attention over pages."""

    is_wide_norm = False  # of heads, see `Turn`

    @torch.compiler.nested_compile_region
    def forward(
        self, x: Tensor, paged: Paged, cos: Tensor | None = None, sin: Tensor | None = None
    ) -> Tensor:
        """x [T, D] -> [T, D]; cos and sin [T, head_dim], or None if positions turn nothing."""
        turn = Turn(cos, sin, *self.head_norms(), self.norm.eps, self.is_wide_norm, self.is_paired)
        mixed = attend(*self.project(x), paged, self.head_dim**-0.5, turn)
        return self.combine(x, mixed.flatten(1))
