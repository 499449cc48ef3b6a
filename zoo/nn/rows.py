"""Rows of state: copied from the host without synchronizing, and zeros that take no memory before use."""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch.nn import functional as F

ALIGNMENT = 8  # bytes, the largest item of any dtype


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device without waiting, through pinned memory that is not reused before the
    copy is done."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def beginning(row: Tensor, values: Tensor, default: float) -> Tensor:
    """Return a host row like `row` [1, *shape] that begins with `values` and is filled up with `default`."""
    whole = torch.full(row.shape, default, dtype=row.dtype)
    if values.dim() == 0:
        return whole.fill_(values.item())
    whole[0, : len(values)] = values.to(row.dtype)
    return whole


def copy_rows(rows: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy host values to device rows of equal shapes and dtypes, with one transfer and one launch per
    dtype."""
    device = rows[0].device
    if device.type != "cpu":
        values = unpacked(to_device(packed(values), device), values)
    for dtype in {row.dtype for row in rows}:
        mine = [i for i, row in enumerate(rows) if row.dtype == dtype]
        torch._foreach_copy_([rows[i] for i in mine], [values[i] for i in mine])


def packed(values: Sequence[Tensor]) -> Tensor:
    """Return the bytes of all values [bytes]; each value begins at a multiple of ALIGNMENT."""
    return torch.cat([F.pad(flat, (0, -len(flat) % ALIGNMENT)) for flat in map(as_bytes, values)])


def unpacked(data: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of packed bytes with the shapes and dtypes of `like`."""
    made, start = [], 0
    for value in like:
        stop = start + value.numel() * value.itemsize
        made.append(data[start:stop].view(value.dtype).view(value.shape))
        start = stop + -stop % ALIGNMENT
    return made


def as_bytes(value: Tensor) -> Tensor:
    return value.contiguous().view(-1).view(torch.uint8)


def zeros(like: Tensor, *shape: int) -> Tensor:
    """Return like.new_zeros(*shape), on a CPU without using memory before it is written to.

    torch would write the zeros. Small pages are used, because a stream writes to places far apart and would
    use only a tenth of a huge page.
    """
    if like.device.type != "cpu":
        return like.new_zeros(*shape)
    memory = mmap.mmap(-1, max(1, math.prod(shape) * like.itemsize))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # kernels without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=like.dtype, count=math.prod(shape)).view(shape)
