"""The blocks of a `frame_stack` as one launch of a GPU. Layer by layer, a pass of a code predictor is 32 or 40
launches of a few microseconds each, in which the memory is idle most of the time.

No GPU has run this yet, so it is off unless the user asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo import kernels
from zoo.kernels.operator import operator
from zoo.nn.block import PreNormBlock
from zoo.nn.frame_attention import grow_frame_attention
from zoo.nn.linear import FusedLinear
from zoo.nn.norm import rms_norm

DTYPES = (torch.bfloat16, torch.float16)
PARTS = 8  # tensors of a block: see `tensors_of`


# Without the tag, the compiler copies cos and sin for each pass, to be sure of their strides.
@operator("whole_stack", writes=("cache", "arrived"), tags=(torch.Tag.flexible_layout,))
def whole_stack(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    first: int,
    cache: Tensor,
    arrived: Tensor,
    table: Tensor,
    weights: Sequence[Tensor],
    heads: int,
    scale: float,
    eps: float,
    is_paired: bool,
    is_rounded: bool,
) -> Tensor:
    """Run all blocks of a frame's next tokens: x [B, L, D], of which the first has position `first` -> like x.

    cache [layers, B, 2, Hkv, K, dim] fp32 gets the new keys and values. arrived [1] int32 is 0 before a frame.
    weights: the `tensors_of` all blocks, whose addresses are in table [layers, PARTS]. The others are as in
    `attend_and_grow`.
    """
    if kernels.use_gpu(x):
        inner = weights[PARTS - 1].shape[1]
        where = cos, sin, first, cache, arrived, table
        how = inner, heads, scale, eps, weights[2].numel() > 0, is_paired, is_rounded
        return kernels.on_gpu("triton_whole_stack", "run_stack", x, *where, *how)
    kv_heads, dim = cache.shape[3], cache.shape[5]
    position = torch.tensor([first], device=x.device)
    for layer in range(len(cache)):
        norm, mlp_norm, q_norm, k_norm, qkv, out, gate_up, down = weights[layer * PARTS :][:PARTS]
        parts = (
            F.linear(rms_norm(x, norm, eps), qkv)
            .unflatten(-1, (-1, dim))
            .split((heads, kv_heads, kv_heads), 2)
        )
        norms = (q_norm, k_norm) if q_norm.numel() else (None, None)
        how = cos, sin, scale, position, cache[layer], *norms, eps, is_paired, is_rounded
        mixed, grown = grow_frame_attention(*parts, *how)
        cache[layer].copy_(grown)
        x = x + F.linear(mixed.flatten(2), out)
        gate, up = F.linear(rms_norm(x, mlp_norm, eps), gate_up).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, down)
    return x


def tensors_of(block: PreNormBlock) -> list[Tensor]:
    """Return the weights of a block: both norms, the norms of queries and keys (empty if it has none), and its
    four matrices."""
    none = block.norm.weight.new_empty(0)
    head_norms = [none if norm is None else norm for norm in block.head_norms()]
    matrices = block.qkv.weight, block.out.weight, block.mlp.gate_up.weight, block.mlp.down.weight
    return [block.norm.weight, block.mlp_norm.weight, *head_norms, *matrices]


def addresses_of(blocks: Sequence[PreNormBlock]) -> Tensor:
    """Return the table [blocks, PARTS] int64 of the addresses of their tensors, on their device."""
    assert all(tensor.is_contiguous() for block in blocks for tensor in tensors_of(block))
    rows = [[tensor.data_ptr() for tensor in tensors_of(block)] for block in blocks]
    return torch.tensor(rows, device=blocks[0].norm.weight.device)


def why_not(blocks: Sequence[PreNormBlock]) -> str:
    """Return why a GPU cannot run these blocks in one launch; empty if it can."""
    matrices = [(block.qkv, block.mlp.gate_up, block.out, block.mlp.down) for block in blocks]
    plain = FusedLinear, FusedLinear, nn.Linear, nn.Linear
    assert all(matrix.bias is None for four in matrices for matrix in four)
    if any(tuple(map(type, four)) != plain for four in matrices):
        return "a whole code predictor reads published weights: use weights published or depth layers"
    if (dtype := blocks[0].norm.weight.dtype) not in DTYPES:
        kind = str(dtype).removeprefix("torch.")
        return (
            f"a whole code predictor computes in bfloat16, not in {kind}: use dtype bfloat16 or depth layers"
        )
    return ""
