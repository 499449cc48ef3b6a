"""MiniCPM4: the block that all four stacks are made of, and the two kinds of stacks.

Source: OpenBMB/VoxCPM, modules/minicpm4/model.py; MiniCPM4 (arXiv 2506.07900).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.contract import Batch
from zoo.nn.attention import Paged, attend
from zoo.nn.frame_attention import attend_within
from zoo.nn.linear import FusedLinear, SwiGLU
from zoo.nn.norm import RMSNorm
from zoo.nn.rope import rotate
from zoo.voxcpm2.config import Rope, StackConfig


class Block(nn.Module):
    """Grouped-query attention, then a gated MLP, each behind a norm and added to its input. heads * head_dim
    may differ from the width."""

    def __init__(self, config: StackConfig):
        super().__init__()
        self.kv_heads, self.head_dim = config.kv_heads, config.head_dim
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.norm = RMSNorm(config.hidden, config.eps)
        self.qkv = FusedLinear(config.hidden, (queries, keys, keys))
        self.out = nn.Linear(queries, config.hidden, bias=False)
        self.mlp_norm = RMSNorm(config.hidden, config.eps)
        self.mlp = SwiGLU(config.hidden, config.inner)

    def project_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., D] -> queries [..., H, dim], keys and values [..., Hkv, dim], not rotated."""
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv(self.norm(x)))
        return q, k, v

    def project_output(self, x: Tensor, mixed: Tensor) -> Tensor:
        """x [..., D] and what its heads made of it [..., H * dim] -> the block's output [..., D]."""
        x = x + self.out(mixed)
        return x + self.mlp(self.mlp_norm(x))


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotated in fp32 by a table that was rounded to the model's dtype."""
    return rotate(x.float(), cos, sin).to(x.dtype)


class PagedBlock(Block):
    """A block of the two language models, over pages."""

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, paged: Paged) -> Tensor:
        """x [T, D], cos and sin [T, 1, dim]"""
        q, k, v = self.project_qkv(x)
        return self.project_output(
            x, attend(rope(q, cos, sin), rope(k, cos, sin), v, paged, self.head_dim**-0.5).flatten(1)
        )


class UnplacedBlock(Block):
    """The same without positions."""

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor, paged: Paged) -> Tensor:
        """x [T, D]"""
        q, k, v = self.project_qkv(x)
        return self.project_output(x, attend(q, k, v, paged, self.head_dim**-0.5).flatten(1))


class LocalBlock(Block):
    """A block over the few tokens of a patch: each sees all of them."""

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [..., L, D], cos and sin [L, 1, dim]"""
        q, k, v = (part.flatten(0, -4) for part in self.project_qkv(x))  # [B, L, H or Hkv, dim]
        if x.device.type == "cuda":
            mixed = attend_within(q, k, v, cos[:, 0], sin[:, 0], self.head_dim**-0.5)
            return self.project_output(x, mixed.flatten(2).unflatten(0, x.shape[:-2]))
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        q = q.unflatten(2, (self.kv_heads, -1)).permute(0, 2, 3, 1, 4)  # [B, Hkv, G, L, dim]
        k, v = k.transpose(1, 2), v.transpose(1, 2)  # [B, Hkv, L, dim]
        # nothing is masked, so a group's queries may stand where the positions of a plain attention would
        mixed = F.scaled_dot_product_attention(q.flatten(2, 3), k, v).unflatten(2, q.shape[2:4])
        return self.project_output(x, mixed.permute(0, 3, 1, 2, 4).flatten(2).unflatten(0, x.shape[:-2]))


class LongRope(nn.Module):
    """Tables of cosines and sines. Angles in fp32; the table is rounded to the model's dtype, as the
    reference's is."""

    stretch: Tensor  # [dim / 2], after prepare()
    frequency: Tensor  # [dim / 2]

    def __init__(self, config: Rope):
        super().__init__()
        self.config = config

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Call once, with the weights in place."""
        self.dtype = dtype
        pairs = torch.arange(0, 2 * len(self.config.factors), 2).float()
        frequency = 1.0 / self.config.theta ** (pairs / (2 * len(self.config.factors)))
        self.register_buffer(
            "stretch", (1.0 / torch.tensor(self.config.factors)).to(device), persistent=False
        )
        self.register_buffer("frequency", frequency.to(device), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] -> cos, sin [T, 1, dim] for `rope`."""
        angle = positions.float()[:, None, None] * self.stretch * self.frequency
        angle = torch.cat((angle, angle), -1)
        cos, sin = angle.cos() * self.config.amplitude, angle.sin() * self.config.amplitude
        return cos.to(self.dtype), sin.to(self.dtype)


class LanguageModel(nn.Module):
    """A causal stack. Its layers' pages are those from `first_layer` on of the family's."""

    def __init__(self, config: StackConfig, first_layer: int):
        super().__init__()
        self.first_layer = first_layer
        self.rope = LongRope(config.rope) if config.rope else None
        self.layers = nn.ModuleList(
            (PagedBlock if config.rope else UnplacedBlock)(config) for _ in range(config.layers)
        )
        self.norm = RMSNorm(config.hidden, config.eps)

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Call once, with the weights in place."""
        if self.rope:
            self.rope.prepare(device, dtype)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, D] -> hidden states after the final norm [T, D]."""
        table = self.rope(batch.positions) if self.rope else ()
        for i, layer in enumerate(self.layers, self.first_layer):
            x = layer(x, *table, Paged(batch, i))
        return self.norm(x)


class LocalStack(nn.Module):
    """A stack over `tokens` tokens that see each other."""

    cos: Tensor  # [tokens, 1, dim], after prepare()
    sin: Tensor  # likewise

    def __init__(self, config: StackConfig, tokens: int):
        super().__init__()
        assert config.rope is not None, "the small stacks have positions"
        self.tokens = tokens
        self.rope = LongRope(config.rope)
        self.layers = nn.ModuleList(LocalBlock(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Call once, with the weights in place."""
        self.rope.prepare(device, dtype)
        for name, table in zip(
            ("cos", "sin"), self.rope(torch.arange(self.tokens, device=device)), strict=True
        ):
            self.register_buffer(name, table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., tokens, D] -> [..., tokens, D]."""
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.norm(x)
