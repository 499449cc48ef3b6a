"""`zoo.nn.swiglu` on a GPU, in Triton: the gated half of an MLP as one kernel, and the part after the product
for devices on which cuBLAS multiplies faster. Imported only when a GPU is used.

cuBLAS writes gate and up, and a second kernel reads them again; in a solver they are the largest tensor of a
step. Here a program sums up gate and up in one pass over its rows of x and writes only their product.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

GATED_BLOCK = 1024  # values per program of `_gate`
# A program's rows, columns, values of both that are multiplied at once, warps, and pipeline stages. FEW is
# keyed by the largest number of rows. A program keeps its sums in registers and its stages in shared memory.
# LARGE needs 192 KB of that, which an H100 has and an RTX 4090 does not.
Tiles = tuple[int, int, int, int, int]
FEW: dict[int, Tiles] = {16: (16, 32, 128, 4, 4), 32: (32, 32, 128, 4, 4), 64: (64, 32, 128, 4, 3)}
MANY, LARGE = (128, 64, 64, 8, 3), (128, 128, 64, 8, 4)
LARGE_ROWS = 512  # with fewer rows, tiles as large as LARGE are too few for a GPU's processors
# tiles of rows that are processed together, column by column, so that their inputs stay in the L2 cache
GROUP = 8


@triton.jit
def _gated(gate: tl.tensor, up: tl.tensor, KIND: tl.constexpr):
    """Return silu(gate) * up; the sums are first rounded to KIND, as a matrix product would."""
    gate = gate.to(KIND).to(tl.float32)
    return gate * tl.sigmoid(gate) * up.to(KIND).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _swiglu_linear(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    row_stride: tl.tensor,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute one tile [ROWS, COLUMNS] of out [rows, INNER]; x [rows, WIDTH], weight [2 INNER, WIDTH] (gate,
    then up)."""
    # programs go down GROUP tiles of rows, then to the next columns
    program, num_down, num_across = tl.program_id(0), tl.cdiv(rows, ROWS), tl.cdiv(INNER, COLUMNS)
    first = program // (GROUP * num_across) * GROUP
    height = tl.minimum(num_down - first, GROUP)
    within = program % (GROUP * num_across)
    row = (first + within % height) * ROWS + tl.arange(0, ROWS)[:, None]
    column = within // height * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    d = tl.arange(0, STEP)
    # Indices beyond an edge wrap around, so loads need no mask; the results are not stored.
    x_at = x + (row % rows).to(tl.int64) * row_stride + d[None, :]
    gate_at = weight + (column % INNER) * WIDTH + d[:, None]
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, WIDTH, STEP):
        if WIDTH % STEP == 0:
            a = tl.load(x_at + start)
            b = tl.load(gate_at + start)
            c = tl.load(gate_at + start + INNER * WIDTH)
        else:
            a = tl.load(x_at + start, mask=start + d[None, :] < WIDTH, other=0.0)
            b = tl.load(gate_at + start, mask=start + d[:, None] < WIDTH, other=0.0)
            c = tl.load(gate_at + start + INNER * WIDTH, mask=start + d[:, None] < WIDTH, other=0.0)
        gate = tl.dot(a, b, gate)
        up = tl.dot(a, c, up)
    y = _gated(gate, up, out.dtype.element_ty).to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64) * INNER + column, y, mask=(row < rows) & (column < INNER))


@triton.jit
def _gate(gate_up: tl.tensor, out: tl.tensor, INNER: tl.constexpr, BLOCK: tl.constexpr):
    """Compute a part of a row: gate_up [rows, 2 INNER] -> out [rows, INNER]."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * 2 * INNER + i, mask=i < INNER, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * INNER + INNER + i, mask=i < INNER, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    tl.store(out + row * INNER + i, _gated(gate, up, kind).to(kind), mask=i < INNER)


def constants(rows: int, inner: int, width: int, shared_bytes: int) -> dict[str, Any]:
    """Return the compile-time constants of `_swiglu_linear`. shared_bytes: the shared memory that a program
    of the device can have."""
    tiles = next((tiles for most, tiles in FEW.items() if rows <= most), MANY)
    if rows >= LARGE_ROWS and _shared_bytes(LARGE) <= shared_bytes:
        tiles = LARGE
    num_rows, columns, step, num_warps, num_stages = tiles
    sizes = {
        "INNER": inner,
        "WIDTH": width,
        "ROWS": num_rows,
        "COLUMNS": columns,
        "STEP": step,
        "GROUP": GROUP,
    }
    return sizes | {"num_warps": num_warps, "num_stages": num_stages}


def _shared_bytes(tiles: Tiles) -> int:
    rows, columns, step, _, num_stages = tiles
    return num_stages * (rows + 2 * columns) * step * 2  # two bytes per value


def swiglu_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Do the same as `zoo.nn.swiglu.swiglu_linear`, in one launch. x and weight have the same half-precision
    dtype and contiguous last axes; x has evenly spaced rows."""
    inner, width = weight.shape[0] // 2, weight.shape[1]
    flat = x.flatten(0, -2)
    out = x.new_empty(*x.shape[:-1], inner)
    assert flat.stride(1) == 1 and weight.is_contiguous(), f"{x.stride()} and {weight.stride()}"
    card: Any = torch.cuda.get_device_properties(x.device)  # has more than its stubs
    sizes = constants(len(flat), inner, width, card.shared_memory_per_block_optin)
    num_tiles = triton.cdiv(len(flat), sizes["ROWS"]) * triton.cdiv(inner, sizes["COLUMNS"])
    _swiglu_linear[(num_tiles,)](flat, weight, out, len(flat), flat.stride(0), **sizes)
    return out


def gate(gate_up: Tensor) -> Tensor:
    """gate_up [..., 2 N], gate first -> silu(gate) * up [..., N]."""
    inner = gate_up.shape[-1] // 2
    flat, out = gate_up.flatten(0, -2), gate_up.new_empty(*gate_up.shape[:-1], inner)
    _gate[len(flat), triton.cdiv(inner, GATED_BLOCK)](flat.contiguous(), out, INNER=inner, BLOCK=GATED_BLOCK)
    return out
