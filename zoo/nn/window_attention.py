"""A transformer over a sliding window whose past is carried from call to call (see `conv`), as codecs have
it.

    keys     window - 1 of the past, in a ring | the N positions of this call     seen [B, N, window - 1 + N]
             position p lies at place p % (window - 1), so a call writes only what is new

On a CPU whose kernels read all weights in our layout, the layers are one operator. Families choose the norm,
the MLP and the rotation. Source: transformers, models/mimi/modeling_mimi.py, MimiTransformerLayer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from zoo import kernels
from zoo.kernels.operator import like_first
from zoo.nn.conv import CodecState, SlotsState, Stateful
from zoo.nn.linear import FusedLinear
from zoo.nn.norm import RMSNorm
from zoo.nn.rope import rotate


class WindowLayer(Stateful):
    """A pre-norm layer with layer scale on both branches. Its state is the ring of keys and values.

    norm: makes one of its two norms.
    """

    is_stacked = True  # run by `run_window` over the rows of slots
    is_paired = False  # value 2i rotates with 2i + 1; otherwise i rotates with i + head_dim / 2
    rotate = staticmethod(rotate)

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
        self.heads, self.head_dim = heads, head_dim
        self.norm = norm()
        self.qkv = FusedLinear(hidden, (width, width, width))
        self.out = nn.Linear(width, hidden, bias=False)
        self.attention_scale = nn.Parameter(torch.empty(hidden))
        self.mlp_norm = norm()
        self.mlp = mlp
        self.mlp_scale = nn.Parameter(torch.empty(hidden))

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor, kept: Tensor, state: CodecState
    ) -> Tensor:
        """x [B, N, D] -> [B, N, D]; cos and sin [B, N, 1, head_dim]; seen [B, 1, N, window - 1 + N] and kept
        [B, window - 1] as of `ring`."""
        # [B, N, H, head_dim]
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(self.norm(x)))
        k = self.rotate(k, cos, sin)
        kv = state.extend(self, torch.cat((k, v), -2).flatten(2), kept)  # [B, window - 1 + N, 2D]
        k, v = rearrange(kv, "b n (two h d) -> two b h n d", two=2, h=self.heads)  # [B, H, window - 1 + N, D]
        y = F.scaled_dot_product_attention(self.rotate(q, cos, sin).transpose(1, 2), k, v, attn_mask=seen)
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


def run_window(
    layers: nn.ModuleList,
    norm: RMSNorm | None,
    x: Tensor,
    rotary: tuple[Tensor, Tensor],
    start: Tensor,
    state: CodecState,
) -> Tensor:
    """Run the layers and the norm behind them, if there is one: x [B, N, D] -> [B, N, D].

    rotary: cos and sin [B, N, head_dim]. start [B]: positions of the stream before this call.
    """
    first = layers[0]
    assert isinstance(first, WindowLayer), type(first)
    cos, sin = rotary
    valid = state.count * (x.shape[1] // state.frames)
    seen, kept = ring(start, valid, x.shape[1], first.state_length)
    addresses = getattr(layers, "addresses", None)
    is_whole = addresses is not None and x.dtype == torch.float32 and kernels.has_operators(x)
    if is_whole and isinstance(state, SlotsState):
        places = [state.changed_in_place(layer) for layer in layers if isinstance(layer, WindowLayer)]
        where = state.rows, state.slots, torch.tensor(places)
        how = first.heads, first.head_dim**-0.5, first.norm.eps, first.is_paired
        weights = None if norm is None else norm.weight, addresses
        return torch.ops.zoo.window_stack.default(x, cos, sin, *where, seen, kept, *how, *weights)
    for layer in layers:
        x = layer(x, cos[:, :, None], sin[:, :, None], seen[:, None], kept, state)
    return x if norm is None else norm(x)


def ring(start: Tensor, valid: Tensor, num: int, size: int) -> tuple[Tensor, Tensor]:
    """Return which keys each of `num` positions may attend to, `seen` [B, num, size + num], and where the ring
    of `size` places takes its keys from after this call, `kept` [B, size]. Both count the ring's places first,
    and then the new positions.

    start [B]: positions of the stream before this call. valid [B]: how many of the new ones are not padding.
    """
    place, new = torch.arange(size, device=start.device), torch.arange(num, device=start.device)

    def last_at(end: Tensor) -> Tensor:
        """Return the last position before `end` [B] at each place, or a negative number: [B, size]"""
        return (end[:, None] - 1) - (end[:, None] - 1 - place) % max(size, 1)

    oldest = (start[:, None] + new - size).clamp(min=0)  # [B, N]
    in_ring = last_at(start)[:, None] >= oldest[..., None]  # [B, N, size]
    among_new = (new <= new[:, None]) & (new >= new[:, None] - size)
    last = last_at(start + valid)
    kept = torch.where(last >= start[:, None], size + last - start[:, None], place)
    return torch.cat((in_ring, among_new.expand(len(start), -1, -1)), 2), kept


# rows [slots, V] has a ring [R, 2, H, D] for each layer at `places` [layers], which is written to. cos and sin
# [B, N, D]; slots [B]; seen and kept as of `ring`; blocks as of `blocked_stack.pack_stacks`.
kernels.cpp_operator(
    "window_stack",
    "(Tensor x, Tensor cos, Tensor sin, Tensor(a!) rows, Tensor slots, Tensor places, Tensor seen, Tensor kept,"
    " int heads, float scale, float eps, bool is_paired, Tensor? norm, Tensor blocks) -> Tensor",
    like_first,
)
