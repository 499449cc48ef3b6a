"""Blocks over the few tokens of a frame: a code predictor. Its cache starts empty in each frame.

The blocks run one after the other, or all in one operator: on a CPU that reads weights in our layout
(`zoo.nn.blocked_stack`), and on a GPU if the user asks for it (`zoo.nn.whole_stack`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zoo.nn.block import PreNormBlock
from zoo.nn.blocked_stack import block_of, is_whole
from zoo.nn.frame_attention import attend_and_grow
from zoo.nn.norm import RMSNorm
from zoo.nn.whole_stack import addresses_of, tensors_of, why_not


class FrameBlock(PreNormBlock):
    """A block over the tokens of a frame, with a dense cache that starts empty in each frame. Its position in
    the frame is a tensor argument, so that all blocks and steps share one compiled region."""

    is_rounded = False  # rotated values, see `attend_and_grow`

    @torch.compiler.nested_compile_region
    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run the block on x [B, L, D], which starts at position [1]; cos and sin [K, dim]; cache [B, 2, Hkv,
        K, dim] fp32. L is 2 at the frame's start and 1 after that. Return x, and the cache with these
        positions added."""
        q, k, v = self.project(x)
        mixed, cache = attend_and_grow(
            *(q, k, v, cos, sin, self.head_dim**-0.5, position, cache),
            norms=(*self.head_norms(), self.norm.eps),
            is_paired=self.is_paired,
            is_rounded=self.is_rounded,
        )
        return self.combine(x, mixed.flatten(2)), cache


def frame_stack(
    layers: nn.ModuleList, norm: RMSNorm, cos: Tensor, sin: Tensor, hidden: Tensor
) -> Callable[[Tensor, slice], Tensor]:
    """Return a function that runs `FrameBlock`s and the norm behind them on a frame's next tokens: x [B, L, D]
    and their positions -> the last of them [B, D]. Its cache starts empty.

    cos and sin [K, dim] float32. hidden [B, ...]: any tensor of this many frames and the model's dtype.
    """
    first, num = block_of(layers[0]), len(cos)
    shape = hidden.shape[0], 2, first.kv_heads, num, first.head_dim
    positions = torch.arange(num, device=hidden.device)
    if is_whole(layers, hidden):
        whole = hidden.new_empty(len(layers), *shape)
        how = first.heads, first.head_dim**-0.5, norm.eps, first.is_paired, first.is_rounded

        def run_whole(x: Tensor, here: slice) -> Tensor:
            where = cos, sin, positions[here][:1], whole
            given = norm.weight, layers.addresses
            return torch.ops.zoo.blocked_frame_stack.default(x, *where, *how, *given)[:, -1]

        return run_whole
    if getattr(layers, "table", None) is not None:
        return joined(layers, norm, cos, sin, hidden.new_empty(len(layers), *shape, dtype=torch.float32))
    cache = [hidden.new_empty(shape, dtype=torch.float32)] * len(layers)

    def run(x: Tensor, here: slice) -> Tensor:
        for i, layer in enumerate(layers):
            x, cache[i] = layer(x, cos, sin, positions[here][:1], cache[i])
        return norm(x[:, -1])

    return run


def joined(
    layers: nn.ModuleList, norm: RMSNorm, cos: Tensor, sin: Tensor, cache: Tensor
) -> Callable[[Tensor, slice], Tensor]:
    """Return what `frame_stack` returns, for blocks that `join` gave a table. cache [layers, B, 2, Hkv, K, dim]."""
    first = block_of(layers[0])
    weights = [tensor for layer in layers for tensor in tensors_of(block_of(layer))]
    how = first.heads, first.head_dim**-0.5, norm.eps, first.is_paired, first.is_rounded
    arrived = torch.zeros(1, dtype=torch.int32, device=cos.device)

    def run_joined(x: Tensor, here: slice) -> Tensor:
        where = cos, sin, here.start, cache, arrived, layers.table
        return norm(torch.ops.zoo.whole_stack.default(x.contiguous(), *where, weights, *how)[:, -1])

    return run_joined


def join(model: nn.Module) -> bool:
    """Make each pass of a model's frame blocks one operator, whose weights must stay where they are. Return
    whether the model has such blocks. Raises ValueError if a GPU cannot run them so."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    stacks = [layers for layers in lists if layers and all(isinstance(layer, FrameBlock) for layer in layers)]
    for layers in stacks:
        blocks = [block_of(layer) for layer in layers]
        if why := why_not(blocks):
            raise ValueError(why)
        layers.register_buffer("table", addresses_of(blocks), persistent=False)
    return bool(stacks)
