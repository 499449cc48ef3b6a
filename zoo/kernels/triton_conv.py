"""`zoo.nn.row_convolution` on a GPU, in Triton: a convolution over rows as one matrix product, whose operand is
never stored. Imported only when a GPU is used.

    out [B N, Cout] = reach [B N, kernel C] @ weight [Cout, kernel C]^T
    row (b, n) of `reach` is x[b, n], x[b, n + dilation], x[b, n + 2 dilation], ... one after the other

A program takes ROWS rows and COLUMNS channels of the result, and reads STEP channels of one tap of both operands
at a time. Streams follow each other without a gap, so short signals fill tiles too.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# A program's rows, warps and pipeline stages. A processor of an H100 and of an RTX 4090 has room for one or two
# programs of FEW or MANY. LARGE reads the least from the L2 cache, and needs 144 KB of shared memory.
Tiles = tuple[int, int, int]
FEW, MANY, LARGE = (64, 4, 4), (128, 8, 3), (256, 8, 3)
WIDE_STEP, STEP = 64, 32  # channels; the wide one where it divides their number
# tiles of rows that are processed together, column by column, so that their inputs stay in the L2 cache
GROUP = 8


@triton.jit(do_not_specialize=["rows", "length", "dilation"])
def _convolve_rows(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    length: tl.tensor,
    dilation: tl.tensor,
    CHANNELS: tl.constexpr,
    OUT_CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute one tile [ROWS, COLUMNS] of out [rows, OUT_CHANNELS]. Each stream has `length` of the rows; in x it
    has (KERNEL - 1) * dilation more."""
    # programs go down GROUP tiles of rows, then to the next columns
    program, num_down, num_across = tl.program_id(0), tl.cdiv(rows, ROWS), tl.cdiv(OUT_CHANNELS, COLUMNS)
    first = program // (GROUP * num_across) * GROUP
    height = tl.minimum(num_down - first, GROUP)
    within = program % (GROUP * num_across)
    row = (first + within % height) * ROWS + tl.arange(0, ROWS)[:, None]
    column = within // height * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    c = tl.arange(0, STEP)
    # Rows beyond the last one wrap around, so loads need no mask for them; the results are not stored.
    at = row % rows
    at += at // length * ((KERNEL - 1) * dilation)
    x_at = x + at.to(tl.int64) * CHANNELS + c[None, :]
    weight_at = weight + column * (KERNEL * CHANNELS) + c[:, None]
    y = tl.zeros((ROWS, COLUMNS), tl.float32)
    STEPS: tl.constexpr = (CHANNELS + STEP - 1) // STEP  # of a tap
    for step in range(0, KERNEL * STEPS):
        tap, start = step // STEPS, step % STEPS * STEP
        x_here, weight_here = x_at + (tap * dilation * CHANNELS + start), weight_at + (tap * CHANNELS + start)
        if CHANNELS % STEP == 0:
            a = tl.load(x_here)
        else:
            a = tl.load(x_here, mask=start + c[None, :] < CHANNELS, other=0.0)
        if CHANNELS % STEP == 0 and OUT_CHANNELS % COLUMNS == 0:
            b = tl.load(weight_here)
        else:
            is_weight = (column < OUT_CHANNELS) & (start + c[:, None] < CHANNELS)
            b = tl.load(weight_here, mask=is_weight, other=0.0)
        y = tl.dot(a, b, y)
    is_result = (row < rows) & (column < OUT_CHANNELS)
    tl.store(out + row.to(tl.int64) * OUT_CHANNELS + column, y.to(out.dtype.element_ty), mask=is_result)


def constants(
    rows: int, channels: int, out_channels: int, kernel: int, size: str, card: Any
) -> dict[str, Any]:
    """Return the compile-time constants of `_convolve_rows`. size: one of `sizes`. card: the device's properties."""
    # the columns with the fewest beyond the last channel
    columns = min((128, 64), key=lambda n: triton.cdiv(out_channels, n) * n) if out_channels > 32 else 32
    num_across = triton.cdiv(out_channels, columns)
    # with fewer programs than processors, smaller tiles are faster
    is_few = triton.cdiv(rows, MANY[0]) * num_across < card.multi_processor_count
    num_rows, num_warps, num_stages = FEW if is_few else LARGE if size == "large" else MANY
    step = STEP if channels % WIDE_STEP else WIDE_STEP
    facts = {
        "CHANNELS": channels,
        "OUT_CHANNELS": out_channels,
        "KERNEL": kernel,
        "ROWS": num_rows,
        "COLUMNS": columns,
        "STEP": step,
        "GROUP": GROUP,
    }
    return facts | {"num_warps": num_warps, "num_stages": num_stages * WIDE_STEP // step}


def has_large_tiles(device: torch.device) -> bool:
    """Return whether the device has room for LARGE."""
    card: Any = torch.cuda.get_device_properties(device)  # has more than its stubs
    rows, _, num_stages = LARGE
    return num_stages * (rows + 128) * WIDE_STEP * 2 <= card.shared_memory_per_block_optin


def convolve_rows(x: Tensor, weight: Tensor, dilation: int, size: str) -> Tensor:
    """Do the same as `zoo.nn.row_convolution.convolve_rows` in one launch, in tiles of one of two sizes."""
    (batch, _, channels), (out_channels, kernel, _) = x.shape, weight.shape
    length = x.shape[1] - (kernel - 1) * dilation
    out = x.new_empty(batch, length, out_channels)
    assert x.is_contiguous() and weight.is_contiguous(), f"{x.stride()} and {weight.stride()}"
    card, rows = torch.cuda.get_device_properties(x.device), batch * length
    facts = constants(rows, channels, out_channels, kernel, size, card)
    num_tiles = triton.cdiv(rows, facts["ROWS"]) * triton.cdiv(out_channels, facts["COLUMNS"])
    _convolve_rows[(num_tiles,)](x, weight, out, rows, length, dilation, **facts)
    return out
