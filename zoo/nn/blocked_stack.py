"""A stack of decoder blocks as one operator, where a CPU reads all its weights in our layout. The stacks of
`window_attention` are packed here, too.

A step has hundreds of blocks, and between two operators the interpreter takes as long as a small product,
because the weights that stream through the caches displace its data. The operator gives what the blocks give,
up to the order of sums.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from zoo import kernels
from zoo.contract import Batch
from zoo.kernels.operator import like_first
from zoo.nn.attention import Paged
from zoo.nn.block import PreNormBlock
from zoo.nn.norm import RMSNorm
from zoo.nn.packed import BlockedLinear, BlockedSwiGLU
from zoo.nn.window_attention import GeluMLP, WindowLayer

Rotary = tuple[Tensor, Tensor] | tuple[()]


def run_blocks(
    layers: nn.ModuleList,
    norm: RMSNorm | None,
    x: Tensor,
    rotary: Rotary,
    batch: Batch,
    first_layer: int = 0,
) -> Tensor:
    """Run paged blocks and the norm behind them, if there is one: x [T, D] -> [T, D]. Block i uses the
    family's paged layer first_layer + i.

    rotary: cos and sin [T, head_dim], or nothing if positions turn nothing.
    """
    if is_whole(layers, x) and batch.kv.dtype == torch.float32:
        first = block_of(layers[0])
        cos, sin = rotary or (None, None)
        where = batch.kv, batch.kv_write_index, batch.page_table, batch.kv_lens, batch.cu_seqlens
        how = first.heads, first.head_dim**-0.5, first.norm.eps, first.is_paired
        given = None if norm is None else norm.weight, layers.addresses
        return torch.ops.zoo.blocked_stack.default(
            x, cos, sin, *where, batch.page_tokens, first_layer, *how, *given
        )
    for i, layer in enumerate(layers, first_layer):
        x = layer(x, Paged(batch, i), *rotary)
    return x if norm is None else norm(x)


def is_whole(layers: nn.ModuleList, x: Tensor) -> bool:
    """Return whether the blocks are one operator for rows like x."""
    is_packed = getattr(layers, "addresses", None) is not None
    return is_packed and x.dtype == torch.float32 and kernels.has_operators(x)


def pack_stacks(model: nn.Module) -> None:
    """Give each list of blocks whose weights are all in our layout `addresses`, the table that the operators
    read. With lists of tensors instead, a step of Qwen3-TTS takes 2 to 4 % longer."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) and all(map(has_our_layout, module)):
            rows = [addresses_of(layer) for layer in module if has_our_layout(layer)]
            module.register_buffer("addresses", torch.tensor(rows), persistent=False)


def has_our_layout(layer: nn.Module) -> TypeGuard[PreNormBlock | WindowLayer]:
    return (
        isinstance(layer, PreNormBlock | WindowLayer)
        and layer.is_stacked
        and all(isinstance(part, BlockedLinear) for part in (layer.qkv, layer.out, *mlp_of(layer)))
        and layer.norm.weight.dtype == torch.float32
    )


def mlp_of(layer: PreNormBlock | WindowLayer) -> tuple[Any, Any]:
    """Return the first and the last matrix of a block's MLP."""
    mlp: Any = layer.mlp
    if isinstance(mlp, GeluMLP):
        return mlp.widen, mlp.narrow
    return (mlp.gate_up, mlp.down) if isinstance(mlp, BlockedSwiGLU) else (None, None)


def addresses_of(layer: PreNormBlock | WindowLayer) -> list[int]:
    """Return a row of `addresses`: of the vectors, and then for each matrix those of its blocks and scales, the
    inputs that share a scale, and its bits. The address of a missing tensor is 0."""
    block: Any = layer
    first, last = mlp_of(layer)
    width, inner = block.norm.weight.numel(), last.blocks.shape[1]
    is_gated = not isinstance(block.mlp, GeluMLP)
    if isinstance(layer, PreNormBlock):
        queries, keys = block.heads * block.head_dim, block.kv_heads * block.head_dim
        more: tuple[Tensor | None, ...] = (*layer.head_norms(), block.qkv.bias, None, None, None, None)
    else:
        queries = keys = block.heads * block.head_dim
        offsets = (getattr(norm, "bias", None) for norm in (block.norm, block.mlp_norm))
        more = None, None, block.qkv.bias, *offsets, block.attention_scale, block.mlp_scale
    assert block.out.bias is first.bias is last.bias is None and block.qkv.num_columns == queries + 2 * keys
    assert first.num_columns == inner * (1 + is_gated)
    row = [address(vector) for vector in (block.norm.weight, block.mlp_norm.weight, *more)]
    for linear, inputs in ((block.qkv, width), (block.out, queries), (first, width), (last, inner)):
        assert linear.blocks.shape[1] == inputs
        bits = 32 if linear.blocks.dtype == torch.float32 else 16 if linear.scales is None else 8
        group = inputs if linear.scales is None else inputs // linear.scales.shape[1]
        row += [address(linear.blocks), address(linear.scales), group, bits]
    return [*row, inner, is_gated]


def address(tensor: Tensor | None) -> int:
    assert tensor is None or tensor.is_contiguous()
    return 0 if tensor is None else tensor.data_ptr()


def block_of(layer: nn.Module) -> PreNormBlock:
    assert isinstance(layer, PreNormBlock), type(layer)
    return layer


# blocks: `addresses` [layers, ...]. New keys and values are written to kv or the cache.
kernels.cpp_operator(
    "blocked_stack",
    "(Tensor x, Tensor? cos, Tensor? sin, Tensor(a!) kv, Tensor kv_write_index, Tensor page_table,"
    " Tensor kv_lens, Tensor cu_seqlens, SymInt page_tokens, int first_layer, int heads, float scale, float eps,"
    " bool is_paired, Tensor? norm, Tensor blocks) -> Tensor",
    like_first,
)
kernels.cpp_operator(
    "blocked_frame_stack",
    "(Tensor x, Tensor cos, Tensor sin, Tensor position, Tensor(a!) cache, int heads, float scale, float eps,"
    " bool is_paired, bool is_rounded, Tensor norm, Tensor blocks) -> Tensor",
    like_first,
)
