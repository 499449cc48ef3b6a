"""Layers that keep several matrices of a checkpoint as one."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Parted(nn.Module):
    """A module whose tensors are several of the checkpoint's, stacked along the rows: `parts` rows of
    each."""

    def __init__(self, parts: tuple[int, ...]):
        super().__init__()
        self.parts = parts


class FusedLinear(Parted):
    """y_0, y_1, ... = x W_0^T (+ b_0), x W_1^T (+ b_1), ...: one read of x, one kernel."""

    def __init__(self, width: int, parts: tuple[int, ...], bias: bool = False):
        super().__init__(parts)
        self.weight = nn.Parameter(torch.empty(sum(parts), width))
        self.bias = nn.Parameter(torch.empty(sum(parts))) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, self.weight, self.bias).split(self.parts, -1)


class Tables(Parted):
    """Several embedding tables of equal size, stacked."""

    def __init__(self, count: int, rows: int, width: int):
        super().__init__((rows,) * count)
        self.weight = nn.Parameter(torch.empty(count * rows, width))

    def forward(self, index: Tensor) -> Tensor:
        """index [B, count], one row of each table -> [B, count, D]"""
        return F.embedding(stacked(index, self.parts), self.weight)

    def rows(self, which: int, index: Tensor) -> Tensor:
        """index [B], rows of one table -> [B, D]"""
        return F.embedding(index, self.table(which))

    def table(self, which: int) -> Tensor:
        """-> [rows, D]"""
        return self.weight.narrow(0, which * self.parts[0], self.parts[0])


def stacked(index: Tensor, parts: tuple[int, ...]) -> Tensor:
    """Return the rows of stacked tables of equal size for index [..., count], one row of each table."""
    return index + torch.arange(len(parts), device=index.device) * parts[0]


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_up = FusedLinear(width, (inner, inner))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x)
        return self.down(F.silu(gate) * up)
