"""Matrices in the layout that the CPU's kernels read.

A plain product rearranges its weights on every call, or reads them inefficiently. Two layouts are arranged
once: oneDNN's (`PackedLinear`; source: inductor's prepacking when it freezes a model), and ours
(`BlockedLinear`). `zoo/nn/pack.py` chooses between them. In both, a row's result does not depend on the number
of rows.

A step is bound by the bytes of the weights it reads. Most checkpoints have weights in bf16, and a CPU without
bf16 arithmetic computes in fp32. `BlockedLinear` reads the 16 bits and computes in fp32. Its results equal
those of an fp32 copy, up to the order of sums. With 8 bits it reads half as much, but codes change; `zoo
parity` measures how many.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo import kernels
from zoo.kernels.operator import operator
from zoo.nn.linear import FusedLinear, Tables, stacked
from zoo.nn.narrow import dtype_of

GROUP = 64  # int8 weights that share a scale
COMPARED_NUMBERS = 1 << 20


def has_16_bits(weight: Tensor) -> bool:
    """Return whether a weight is bf16, or float32 whose values are all bf16 numbers."""
    if weight.dtype != torch.float32:
        return weight.dtype == torch.bfloat16
    # in parts: the first is usually enough, and none takes much memory
    return all(bool((part.bfloat16() == part).all()) for part in weight.flatten().split(COMPARED_NUMBERS))


def can_be_packed(weight: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return whether this build and machine have oneDNN's kernels for a weight, computed in a dtype (None:
    its own)."""
    dtype = dtype or weight.dtype
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (
        dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class PackedLinear(nn.Module):
    """A packed `nn.Linear` or `FusedLinear`: x [..., in] -> [..., out], or one result per part of a
    `FusedLinear`."""

    weight: Tensor  # [out, in], opaque

    def __init__(self, plain: nn.Linear | FusedLinear):
        super().__init__()
        self.parts = plain.parts if isinstance(plain, FusedLinear) else None
        weight = plain.weight.detach().to(dtype_of(plain))
        self.register_buffer(
            "weight", torch.ops.mkldnn._reorder_linear_weight(weight, None), persistent=False
        )
        self.register_buffer("bias", None if plain.bias is None else plain.bias.detach(), persistent=False)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        if torch.compiler.is_compiling():
            y = torch.ops.zoo.packed_linear.default(x, self.weight, self.bias)
        else:  # a custom operator would take as long as some of the products
            y = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y if self.parts is None else y.split(self.parts, -1)


class BlockedLinear(nn.Module):
    """An `nn.Linear` or `FusedLinear` in our own layout, whose weights have 32, 16 or 8 bits and are computed in
    fp32: x [..., in] -> [..., out], or one result per part of a `FusedLinear`, in x's dtype."""

    blocks: Tensor  # [blocks, in, words] int32 or float32, see kernels.in_blocks
    scales: Tensor | None  # of int8 weights, see kernels.scales_in_blocks
    bias: Tensor | None  # [out], in the layer's dtype

    def __init__(self, plain: nn.Linear | FusedLinear, is_int8: bool = False):
        super().__init__()
        self.parts = plain.parts if isinstance(plain, FusedLinear) else None
        self.num_columns, self.dtype = len(plain.weight), dtype_of(plain)
        weight, scales = plain.weight.detach(), None
        if has_16_bits(weight):
            weight = weight.bfloat16()
        if is_int8:
            weight, scales = rounded_to_int8(weight)
            scales = kernels.scales_in_blocks(scales)
        self.register_buffer("blocks", kernels.in_blocks(weight), persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        bias = None if plain.bias is None else plain.bias.detach().to(self.dtype)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        bias = None if self.bias is None else self.bias.float()
        y = torch.ops.zoo.blocked_linear.default(x, self.blocks, self.scales, bias, self.num_columns)
        return y if self.parts is None else y.split(self.parts, -1)


class TiedRows(nn.Module):
    """An `nn.Embedding` or `Tables` that shares its rows with a head, which keeps them in its layout: index [...]
    -> [..., in], in the plain layer's dtype."""

    def __init__(self, plain: nn.Embedding | Tables, head: BlockedLinear):
        super().__init__()
        self.head, self.dtype = head, dtype_of(plain)
        self.parts = plain.parts if isinstance(plain, Tables) else None

    def forward(self, index: Tensor) -> Tensor:
        where = index if self.parts is None else stacked(index, self.parts)
        head = self.head
        return torch.ops.zoo.blocked_rows.default(where, head.blocks, head.num_columns).to(self.dtype)

    def rows(self, which: int, index: Tensor) -> Tensor:
        """index [B], rows of one of several tables -> [B, in]"""
        assert self.parts is not None, "one table has no parts"
        head, where = self.head, index + which * self.parts[0]
        return torch.ops.zoo.blocked_rows.default(where, head.blocks, head.num_columns).to(self.dtype)


class BlockedSwiGLU(nn.Module):
    """A `SwiGLU` of two `BlockedLinear` without biases: x [..., in] -> [..., in]. It is one operator instead of
    three, because a call costs as much as a small product."""

    def __init__(self, gate_up: BlockedLinear, down: BlockedLinear):
        super().__init__()
        self.gate_up, self.down = gate_up, down

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate_up.blocks, self.gate_up.scales, self.down.blocks, self.down.scales
        return torch.ops.zoo.blocked_swiglu.default(x, *weights, self.down.num_columns)


def rounded_to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight [out, in] as int8 and its scales [out, groups] float32. The largest value of a group of
    GROUP inputs becomes 127 or -127; a row is one group if GROUP does not divide it."""
    groups = weight.float().unflatten(1, (-1, GROUP if weight.shape[1] % GROUP == 0 else weight.shape[1]))
    scales = (groups.abs().amax(-1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (groups / scales).round().to(torch.int8).flatten(1), scales[..., 0]


def linear_gelu(linear: nn.Module, x: Tensor) -> Tensor:
    """Return gelu(linear(x)); a packed layer outside of compiled code takes one pass."""
    if isinstance(linear, PackedLinear) and not torch.compiler.is_compiling():
        return torch.ops.mkldnn._linear_pointwise(x, linear.weight, linear.bias, "gelu", [], "none")
    return F.gelu(linear(x))


def linear_add(linear: nn.Module, x: Tensor, more: Tensor) -> Tensor:
    """Return linear(x) + more [..., out]; a packed layer outside of compiled code takes one pass and rounds
    once."""
    if isinstance(linear, PackedLinear) and not torch.compiler.is_compiling():
        return torch.ops.mkldnn._linear_pointwise.binary(x, more, linear.weight, linear.bias, "add")
    return more + linear(x)


def packed_convolution(weight: Tensor) -> Tensor:
    """Return a copy of a convolution's weight [out, C, taps], as `convolve` reads it."""
    image = weight.detach()[:, :, None].contiguous(memory_format=torch.channels_last)
    return torch.ops.mkldnn._reorder_convolution_weight(image, [0, 0], [1, 1], [1, 1], 1, None)


def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolve x [B, N, C] with a packed weight [out, C, taps] and a bias [out] -> [B, N - taps + 1, out]. A
    matrix product would first need a copy of the windows of x; this does not. In float32, the kernels of
    `zoo.nn.residual` are faster."""
    ones = [1, 1]
    y = torch.ops.mkldnn._convolution_pointwise(
        x.mT[:, :, None], weight, bias, [0, 0], ones, ones, 1, "none", [], ""
    )
    return y[:, :, 0].mT


def _empty_outputs(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@operator("packed_linear", gives=_empty_outputs)
def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in], a packed weight [out, in], a bias [out] -> [..., out]. A custom operator, because inductor
    cannot read a packed weight."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _empty_columns(x: Tensor, *others: Any) -> Tensor:
    """x [..., K] -> [..., num_columns], in x's dtype."""
    return x.new_empty((*x.shape[:-1], others[-1]))


def _empty_rows(index: Tensor, blocks: Tensor, num_rows: int) -> Tensor:
    return blocks.new_empty((*index.shape, blocks.shape[1]), dtype=torch.float32)


# Weights are `kernels.in_blocks`, with `kernels.scales_in_blocks` if they are int8. A bias is float32
# [num_columns]. Sums are float32.
kernels.cpp_operator(
    "blocked_linear",
    "(Tensor x, Tensor blocks, Tensor? scales, Tensor? bias, int num_columns) -> Tensor",
    _empty_columns,
)
# Rows [..., K], float32, of a matrix [num_rows, K] in blocks; index [...] int64.
kernels.cpp_operator("blocked_rows", "(Tensor index, Tensor blocks, int num_rows) -> Tensor", _empty_rows)
kernels.cpp_operator(
    "blocked_swiglu",
    "(Tensor x, Tensor gate_up, Tensor? gate_up_scales, Tensor down, Tensor? down_scales, int num_columns)"
    " -> Tensor",
    _empty_columns,
)
