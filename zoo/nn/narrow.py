"""Layers that keep a checkpoint's bf16 weights in 16 bits while the model computes in another dtype.

They are the plain form: each call converts the weights that it reads. `pack.pack` replaces the linear ones by
layouts that a CPU reads fast, so an fp32 copy of the weights is never made.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.nn.linear import FusedLinear, Parted, Tables

Layer = nn.Linear | FusedLinear | nn.Embedding | Tables


class NarrowLayer(nn.Module):
    """Mixin: `weight` is bf16, and the layer computes in the plain layer's dtype."""

    dtype: torch.dtype


def bf16(plain: Layer) -> nn.Parameter:
    return nn.Parameter(plain.weight.detach().bfloat16(), requires_grad=False)


class BF16Linear(NarrowLayer, nn.Linear):
    """An `nn.Linear` whose weight stays in bf16."""

    def __init__(self, plain: nn.Linear):
        nn.Module.__init__(self)
        self.out_features, self.in_features = plain.weight.shape
        self.weight, self.dtype = bf16(plain), plain.weight.dtype
        self.bias = plain.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias)


class BF16FusedLinear(NarrowLayer, FusedLinear):
    """A `FusedLinear` whose weight stays in bf16."""

    def __init__(self, plain: FusedLinear):
        Parted.__init__(self, plain.parts)
        self.weight, self.dtype = bf16(plain), plain.weight.dtype
        self.bias = plain.bias

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, self.weight.to(x.dtype), self.bias).split(self.parts, -1)


class NarrowEmbedding(NarrowLayer, nn.Embedding):
    """An embedding that keeps its rows in bf16 and returns them in the plain dtype."""

    def __init__(self, plain: nn.Embedding):
        nn.Module.__init__(self)
        self.weight, self.dtype = bf16(plain), plain.weight.dtype

    def forward(self, index: Tensor) -> Tensor:
        return F.embedding(index, self.weight).to(self.dtype)


class NarrowTables(NarrowLayer, Tables):
    """`Tables` that keep their rows in bf16 and return them in the plain dtype."""

    def __init__(self, plain: Tables):
        Parted.__init__(self, plain.parts)
        self.weight, self.dtype = bf16(plain), plain.weight.dtype

    def forward(self, index: Tensor) -> Tensor:
        return super().forward(index).to(self.dtype)

    def rows(self, which: int, index: Tensor) -> Tensor:
        return super().rows(which, index).to(self.dtype)


def narrow(plain: Layer) -> nn.Module:
    """Return a layer whose weight is kept in bf16. It may be on `meta`."""
    match plain:
        case nn.Linear():
            return BF16Linear(plain)
        case FusedLinear():
            return BF16FusedLinear(plain)
        case Tables():
            return NarrowTables(plain)
        case _:
            return NarrowEmbedding(plain)


def widened(layer: nn.Linear | FusedLinear) -> nn.Linear | FusedLinear:
    """Return the plain form of a `BF16Linear` or `BF16FusedLinear`, or a plain layer itself."""
    if not isinstance(layer, BF16Linear | BF16FusedLinear):
        return layer
    columns, width = layer.weight.shape
    plain: nn.Linear | FusedLinear
    with torch.device("meta"):
        if isinstance(layer, BF16FusedLinear):
            plain = FusedLinear(width, layer.parts)
        else:
            plain = nn.Linear(width, columns)
    plain.weight = nn.Parameter(layer.weight.detach().to(layer.dtype), requires_grad=False)
    plain.bias = layer.bias
    return plain


def dtype_of(layer: Layer) -> torch.dtype:
    """Return the dtype in which a layer computes. Layers that keep their weights in another form have a
    `dtype`."""
    dtype: torch.dtype | None = getattr(layer, "dtype", None)
    return layer.weight.dtype if dtype is None else dtype


def tied_head(table: nn.Embedding | Tables) -> nn.Linear:
    """Return a head that scores with the rows of a table: x [..., D] -> [..., rows]."""
    rows, width = table.weight.shape
    head = nn.Linear(width, rows, bias=False, device="meta")
    head.weight = table.weight
    if not isinstance(table, NarrowLayer):
        return head
    narrow_head = BF16Linear(head)
    narrow_head.dtype = table.dtype
    return narrow_head
