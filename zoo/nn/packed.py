"""Matrices laid out as the CPU's kernels read them.

A plain product rearranges its weights, or reads them badly, every time; a packed one was rearranged once, by
oneDNN. With few rows, which is what a step has, that is twice as fast and more (benchmarks/LOG.md), and a
row's result does not depend on how many rows there are.
Source: oneDNN's weight prepacking, as PyTorch's own inductor uses it when it freezes a model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.nn.linear import FusedLinear
from zoo.nn.operator import operator

LEAST_BYTES = 512 << 10  # below, the call costs more than the layout saves


def pack(model: nn.Module, least_bytes: int = LEAST_BYTES) -> None:
    """Replace the larger of a model's `nn.Linear` and `FusedLinear` by packed ones, and all of a module that says
    `reads_many_rows`, in place; the plain weights are let go. Where the model is not on a CPU, and where this build or
    machine has no such kernels, nothing is done."""
    for module in tuple(model.modules()):
        for name, child in module.named_children():
            if (
                isinstance(child, nn.Linear | FusedLinear)
                and (child.weight.nbytes >= least_bytes or getattr(module, "reads_many_rows", False))
                and can_be_packed(child.weight)
            ):
                setattr(module, name, PackedLinear(child))


def can_be_packed(weight: Tensor) -> bool:
    """Whether this build and machine have such kernels for it."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class PackedLinear(nn.Module):
    """What the plain module gives, for the same input: x [..., in] -> [..., out], or one such for each part
    of a `FusedLinear`."""

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
        else:  # an operator of our own takes as long as some products
            y = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y if self.parts is None else y.split(self.parts, -1)


def linear_gelu(linear: nn.Module, x: Tensor) -> Tensor:
    """gelu of a linear layer; in plain calls of a packed one in one pass."""
    if isinstance(linear, PackedLinear) and not torch.compiler.is_compiling():
        return torch.ops.mkldnn._linear_pointwise(x, linear.weight, linear.bias, "gelu", [], "none")
    return F.gelu(linear(x))


def linear_add(linear: nn.Module, x: Tensor, more: Tensor) -> Tensor:
    """A linear layer [..., out] and more [..., out]; in plain calls of a packed one in one pass, and rounded once."""
    if isinstance(linear, PackedLinear) and not torch.compiler.is_compiling():
        return torch.ops.mkldnn._linear_pointwise.binary(x, more, linear.weight, linear.bias, "add")
    return more + linear(x)


def packed_convolution(weight: Tensor) -> Tensor:
    """A convolution's weight [out, C, taps] as `convolve` reads it, opaque; a copy."""
    image = weight.detach()[:, :, None].contiguous(memory_format=torch.channels_last)
    return torch.ops.mkldnn._reorder_convolution_weight(image, [0, 0], [1, 1], [1, 1], 1, None)


def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [B, N, C], a packed weight [out, C, taps], a bias [out] -> [B, N - taps + 1, out]. What the convolution reads is not
    copied side by side first, as it is for a product."""
    ones = [1, 1]
    y = torch.ops.mkldnn._convolution_pointwise(
        x.mT[:, :, None], weight, bias, [0, 0], ones, ones, 1, "none", [], ""
    )
    return y[:, :, 0].mT


def _empty_outputs(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@operator("packed_linear", gives=_empty_outputs)
def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in], a packed weight [out, in], a bias [out] -> [..., out]. An operator, since inductor cannot
    look into a packed weight."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
