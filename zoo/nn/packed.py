"""Matrices in the layout that the CPU's kernels read.

A plain product rearranges its weights on every call, or reads them inefficiently. oneDNN rearranges packed
weights once. For the few rows of a step, that is at least twice as fast (benchmarks/LOG.md), and a row's
result does not depend on the number of rows. Source: oneDNN's weight prepacking, which inductor uses when it
freezes a model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.kernels.operator import operator
from zoo.nn.linear import FusedLinear

LEAST_BYTES = 512 << 10  # below, the call costs more than the layout saves


def pack(model: nn.Module, least_bytes: int = LEAST_BYTES) -> None:
    """Replace the large `nn.Linear` and `FusedLinear` layers of a model by packed ones, in place, and free
    the plain weights. In a module with `reads_many_rows`, all of them are replaced. Does nothing if the model
    is not on a CPU, or if this build or machine lacks the kernels."""
    for module in tuple(model.modules()):
        for name, child in module.named_children():
            if (
                isinstance(child, nn.Linear | FusedLinear)
                and (child.weight.nbytes >= least_bytes or getattr(module, "reads_many_rows", False))
                and can_be_packed(child.weight)
            ):
                setattr(module, name, PackedLinear(child))


def can_be_packed(weight: Tensor) -> bool:
    """Return whether this build and machine have the kernels for a weight."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class PackedLinear(nn.Module):
    """A packed `nn.Linear` or `FusedLinear`: x [..., in] -> [..., out], or one result per part of a
    `FusedLinear`."""

    weight: Tensor  # [out, in], opaque

    def __init__(self, plain: nn.Linear | FusedLinear):
        super().__init__()
        self.parts = plain.parts if isinstance(plain, FusedLinear) else None
        self.register_buffer(
            "weight", torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach(), None), persistent=False
        )
        self.register_buffer("bias", None if plain.bias is None else plain.bias.detach(), persistent=False)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        if torch.compiler.is_compiling():
            y = torch.ops.zoo.packed_linear.default(x, self.weight, self.bias)
        else:  # a custom operator would take as long as some of the products
            y = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y if self.parts is None else y.split(self.parts, -1)


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
    """Return an opaque copy of a convolution's weight [out, C, taps], as `convolve` reads it."""
    image = weight.detach()[:, :, None].contiguous(memory_format=torch.channels_last)
    return torch.ops.mkldnn._reorder_convolution_weight(image, [0, 0], [1, 1], [1, 1], 1, None)


def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolve x [B, N, C] with a packed weight [out, C, taps] and a bias [out] -> [B, N - taps + 1, out]. A
    matrix product would first need a copy of the windows of x; this does not."""
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
