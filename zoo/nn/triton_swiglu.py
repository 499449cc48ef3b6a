"""`zoo.nn.swiglu` on a GPU, in Triton: the gated half of an MLP as one product, and, for where cuBLAS multiplies faster
than this does, what is left to do behind its product. Imported where a GPU is asked for.

cuBLAS writes gate and up, and something else reads them again: at the size of a solver that is the largest tensor of its
step. Here a program has two sums, of gate and of up, over one pass through its rows of x, and writes their product.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

GATED_BLOCK = 1024  # values of a program of `_gate`
# Of a program: rows, columns and the values of both that are multiplied at once; warps, and how many such pieces are
# under way. By the rows that there are at most. The sums of a program lie in its registers, what is under way in its
# shared memory: of LARGE that is 192 KB, which an H100 has and an RTX 4090 has not.
Tiles = tuple[int, int, int, int, int]
FEW: dict[int, Tiles] = {16: (16, 32, 128, 4, 4), 32: (32, 32, 128, 4, 4), 64: (64, 32, 128, 4, 3)}
MANY, LARGE = (128, 64, 64, 8, 3), (128, 128, 64, 8, 4)
LARGE_ROWS = 512  # below, tiles as large as LARGE are too few for a GPU's processors
GROUP = (
    8  # tiles of rows that are gone through together, column by column: what they read stays in the L2 cache
)


@triton.jit
def _gated(gate: tl.tensor, up: tl.tensor, KIND: tl.constexpr):
    """silu(gate) * up, of sums that are rounded to KIND first, as a product of matrices gives them."""
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
    """One tile [ROWS, COLUMNS] of out [rows, INNER]; x [rows, WIDTH], weight [2 INNER, WIDTH]: gate above up."""
    # tile after tile down GROUP tiles of rows, then the next columns
    program, num_down, num_across = tl.program_id(0), tl.cdiv(rows, ROWS), tl.cdiv(INNER, COLUMNS)
    first = program // (GROUP * num_across) * GROUP
    height = tl.minimum(num_down - first, GROUP)
    within = program % (GROUP * num_across)
    row = (first + within % height) * ROWS + tl.arange(0, ROWS)[:, None]
    column = within // height * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    d = tl.arange(0, STEP)
    # What lies beyond an edge reads what lies within it: it is not stored, and no mask is needed.
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
    """A part of a row: gate_up [rows, 2 INNER] -> out [rows, INNER]."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * 2 * INNER + i, mask=i < INNER, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * INNER + INNER + i, mask=i < INNER, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    tl.store(out + row * INNER + i, _gated(gate, up, kind).to(kind), mask=i < INNER)


def constants(rows: int, inner: int, width: int, shared_bytes: int) -> dict[str, Any]:
    """What `_swiglu_linear` is compiled for. shared_bytes: that a program of the device can have."""
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
    return num_stages * (rows + 2 * columns) * step * 2  # of two bytes each


def swiglu_linear(x: Tensor, weight: Tensor) -> Tensor:
    """As `zoo.nn.swiglu.swiglu_linear`, in one launch. x and weight of one half dtype, their last axes without gaps, x's
    rows evenly apart."""
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
