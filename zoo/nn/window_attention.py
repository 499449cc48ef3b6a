"""A transformer over a sliding window whose past is carried from call to call (see `conv`), as codecs have
it.

    keys     window - 1 of the past | the N positions of this call          seen [B, N, window - 1 + N]
             zeros before the stream began are masked

Families choose the norm and the MLP. Source: transformers, models/mimi/modeling_mimi.py,
MimiTransformerLayer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.nn.conv import CodecState, Stateful
from zoo.nn.linear import FusedLinear
from zoo.nn.rope import rotate


class WindowLayer(Stateful):
    """A pre-norm layer with layer scale on both branches. Its state is the window's keys and values.

    norm: makes one of its two norms.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        head_dim: int,
        window: int,
        norm: Callable[[], nn.Module],
        mlp: nn.Module,
    ):
        width = heads * head_dim
        super().__init__(2 * width, window - 1, dim=1)
        self.heads = heads
        self.attention_norm = norm()
        self.qkv = FusedLinear(hidden, (width, width, width))
        self.out = nn.Linear(width, hidden, bias=False)
        self.attention_scale = nn.Parameter(torch.empty(hidden))
        self.mlp_norm = norm()
        self.mlp = mlp
        self.mlp_scale = nn.Parameter(torch.empty(hidden))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor, state: CodecState) -> Tensor:
        """x [B, N, D] -> [B, N, D]; cos and sin [B, N, 1, head_dim]; seen [B, 1, N, window - 1 + N] marks the
        keys that each position may attend to."""
        # [B, N, H, head_dim]
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(self.attention_norm(x)))
        k = rotate(k, cos, sin)
        kv = state.extend(self, torch.cat((k, v), -2).flatten(2))  # [B, window - 1 + N, 2D]
        k, v = rearrange(kv, "b n (two h d) -> two b h n d", two=2, h=self.heads)  # [B, H, window - 1 + N, D]
        y = F.scaled_dot_product_attention(rotate(q, cos, sin).transpose(1, 2), k, v, attn_mask=seen)
        x = torch.addcmul(x, self.attention_scale, self.out(rearrange(y, "b h n d -> b n (h d)")))
        return torch.addcmul(x, self.mlp_scale, self.mlp(self.mlp_norm(x)))


class GeluMLP(nn.Module):
    """narrow(gelu(widen x)), without biases."""

    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.widen = nn.Linear(hidden, inner, bias=False)
        self.narrow = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(F.gelu(self.widen(x)))


def window_mask(start: Tensor, num: int, window: int) -> Tensor:
    """Return the keys that each of `num` positions may attend to [B, num, window - 1 + num]. start [B]:
    positions of the stream before this call."""
    # Key j lies window - 1 - j positions before this call's first one.
    kept = window - 1
    position = torch.arange(num, device=start.device)
    key = torch.arange(kept + num, device=start.device)
    inside = (key >= position[:, None]) & (key <= position[:, None] + kept)  # [N, window - 1 + N]
    return inside & (key >= kept - start[:, None])[:, None]
