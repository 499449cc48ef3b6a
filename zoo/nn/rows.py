"""From the host to the device, without waiting for it."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

ALIGNMENT = 8  # bytes, the largest item of any dtype


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device. The device takes it when it gets there; nobody writes over it before
    that."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def beginning(row: Tensor, values: Tensor, default: float) -> Tensor:
    """A row like `row` [1, *shape], on the host, that begins with the values and goes on with the default."""
    whole = torch.full(row.shape, default, dtype=row.dtype)
    if values.dim() == 0:
        return whole.fill_(values.item())
    whole[0, : len(values)] = values.to(row.dtype)
    return whole


def copy_rows(rows: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Values of the host into rows of the device, of equal shapes and dtypes: in one copy, and a launch for each
    dtype."""
    device = rows[0].device
    if device.type != "cpu":
        values = unpacked(to_device(packed(values), device), values)
    for dtype in {row.dtype for row in rows}:
        mine = [i for i, row in enumerate(rows) if row.dtype == dtype]
        torch._foreach_copy_([rows[i] for i in mine], [values[i] for i in mine])


def packed(values: Sequence[Tensor]) -> Tensor:
    """[bytes], each value at a multiple of ALIGNMENT."""
    return torch.cat([F.pad(flat, (0, -len(flat) % ALIGNMENT)) for flat in map(as_bytes, values)])


def unpacked(data: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """What was packed, as tensors of such shapes and dtypes in the same memory."""
    made, start = [], 0
    for value in like:
        stop = start + value.numel() * value.itemsize
        made.append(data[start:stop].view(value.dtype).view(value.shape))
        start = stop + -stop % ALIGNMENT
    return made


def as_bytes(value: Tensor) -> Tensor:
    return value.contiguous().view(-1).view(torch.uint8)
