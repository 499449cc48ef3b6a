"""The operators of `zoo.nn.transformer` on a GPU, in Triton: the parts of a transformer block before and after its
attention. Imported only when a GPU is used.

A block of few channels has small products, and launches of norm, product, GELU and sum one by one take
longer than the work. Here a program normalizes its rows itself, because a row is short, and adds bias and
input while its sums are in registers. Results are rounded where the plain operators round them.

    _norm_linear      norm, product, and for an MLP bias and GELU
    _linear_add       product, bias, input
    _norm_mlp         all after attention: GELU's results stay on the chip
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PROCESSORS = 132  # of an H100
LARGE_BYTES = 180 << 10  # of shared memory per program; an H100 has more, an RTX 4090 less
LARGE_TILE, SMALL_TILE = 128 * 256, 64 * 256  # numbers of x that a program of `_norm_linear` has at most
# Tables of tiles are keyed by the largest number of rows of a launch; the last entry is for more. A launch of
# few rows has small tiles, because it has too few of large ones for a GPU's processors.
Tile = tuple[int, ...]
MORE = 1 << 62
# rows and columns of `_norm_linear`, warps, pipeline stages, and how many programs a processor runs at once
NORM_TILES: dict[int, Tile] = {192: (32, 64, 4, 3, 2), 4096: (64, 64, 4, 2, 2), MORE: (128, 64, 8, 3, 1)}
# rows and columns of `_linear_add`, values of both that are multiplied at once, warps, stages
ADD_TILES: dict[int, Tile] = {
    192: (16, 32, 128, 4, 4),
    768: (32, 32, 128, 4, 4),
    4096: (64, 64, 64, 4, 4),
    MORE: (128, 64, 64, 8, 4),
}
# rows of `_norm_mlp`, hidden numbers that are computed at once, warps, stages
MLP_TILES: dict[int, Tile] = {1024: (16, 64, 8, 3), 4096: (32, 64, 8, 3), MORE: (64, 64, 8, 2)}


@triton.jit
def _normed(x: tl.tensor, weight: tl.tensor, bias: tl.tensor, eps: tl.tensor, WIDTH: tl.constexpr):
    """Normalize rows x [ROWS, WIDTH] in fp32."""
    d = tl.arange(0, WIDTH)
    x = x - (tl.sum(x, 1) / WIDTH)[:, None]
    x = x * tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
    return x * tl.load(weight + d).to(tl.float32)[None, :] + tl.load(bias + d).to(tl.float32)[None, :]


@triton.jit
def _gelu(x: tl.tensor, bias: tl.tensor, KIND: tl.constexpr):
    """Return gelu(x + bias); the sum is first rounded to KIND, as a matrix product would."""
    x = (x + bias.to(tl.float32)[None, :]).to(KIND).to(tl.float32)
    return (x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))).to(KIND)


@triton.jit(do_not_specialize=["rows", "share"])
def _norm_linear(
    x: tl.tensor,
    norm_weight: tl.tensor,
    norm_bias: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    share: tl.tensor,
    eps: tl.tensor,
    OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_GELU: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute `share` columns, a multiple of COLUMNS, of ROWS rows of out [rows, OUT]; x [rows, WIDTH], weight
    [OUT, WIDTH]. IS_GELU: add bias [OUT] and apply GELU."""
    kind = out.dtype.element_ty
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    d, n = tl.arange(0, WIDTH), tl.arange(0, COLUMNS)
    # Indices beyond an edge wrap around, so loads need no mask; the results are not stored.
    given = tl.load(x + (row % rows)[:, None] * WIDTH + d[None, :]).to(tl.float32)
    normed = _normed(given, norm_weight, norm_bias, eps, WIDTH).to(kind)
    first = tl.program_id(1) * share
    for start in tl.range(first, tl.minimum(first + share, OUT), COLUMNS, num_stages=STAGES):
        column = start + n
        factor = tl.load(weight + (column % OUT)[None, :] * WIDTH + d[:, None])
        y = tl.dot(normed, factor)
        if IS_GELU:
            y = _gelu(y, tl.load(bias + column % OUT), kind)
        is_there = (row < rows)[:, None] & (column < OUT)[None, :]
        tl.store(out + row[:, None] * OUT + column[None, :], y.to(kind), mask=is_there)


@triton.jit
def _product(
    x: tl.tensor,
    weight: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Return x[row] weight[column]^T in fp32; x [_, WIDTH], weight [_, WIDTH]."""
    d = tl.arange(0, STEP)
    x_at = x + row[:, None] * WIDTH + d[None, :]
    weight_at = weight + column[None, :] * WIDTH + d[:, None]
    y = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, WIDTH, STEP):
        if WIDTH % STEP == 0:
            a = tl.load(x_at + start)
            b = tl.load(weight_at + start)
        else:
            a = tl.load(x_at + start, mask=start + d[None, :] < WIDTH, other=0.0)
            b = tl.load(weight_at + start, mask=start + d[:, None] < WIDTH, other=0.0)
        y = tl.dot(a, b, y)
    return y


@triton.jit(do_not_specialize=["rows"])
def _linear_add(
    y: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    x: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Compute one tile [ROWS, COLUMNS] of out [rows, OUT] = x + y weight^T + bias; y [rows, WIDTH]."""
    kind = out.dtype.element_ty
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    z = _product(y, weight, row % rows, column % OUT, WIDTH, ROWS, COLUMNS, STEP)
    z = (z + tl.load(bias + column % OUT).to(tl.float32)[None, :]).to(kind).to(tl.float32)
    is_there = (row < rows)[:, None] & (column < OUT)[None, :]
    at = row[:, None] * OUT + column[None, :]
    tl.store(out + at, (tl.load(x + at, mask=is_there, other=0.0) + z).to(kind), mask=is_there)


@triton.jit(do_not_specialize=["rows"])
def _norm_mlp(
    y: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    x: tl.tensor,
    norm_weight: tl.tensor,
    norm_bias: tl.tensor,
    wide_weight: tl.tensor,
    wide_bias: tl.tensor,
    narrow_weight: tl.tensor,
    narrow_bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    eps: tl.tensor,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute ROWS rows of out [rows, WIDTH]: those of `_linear_add`, then the MLP, in blocks of its HIDDEN
    numbers."""
    kind = out.dtype.element_ty
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    d, n = tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    at, is_there = (row % rows)[:, None] * WIDTH + d[None, :], (row < rows)[:, None]
    z = _product(y, weight, row % rows, d, INNER, ROWS, WIDTH, STEP)
    z = (z + tl.load(bias + d).to(tl.float32)[None, :]).to(kind).to(tl.float32)
    middle = (tl.load(x + at) + z).to(kind)
    tl.store(out + at, middle, mask=is_there)  # until the end; it would take too many registers
    normed = _normed(middle.to(tl.float32), norm_weight, norm_bias, eps, WIDTH).to(kind)
    z = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in tl.range(0, HIDDEN, BLOCK, num_stages=STAGES):
        factor = tl.load(wide_weight + (start + n)[None, :] * WIDTH + d[:, None])
        wide = _gelu(tl.dot(normed, factor), tl.load(wide_bias + start + n), kind)
        factor = tl.load(narrow_weight + d[None, :] * HIDDEN + (start + n)[:, None])
        z = tl.dot(wide, factor, z)
    z = (z + tl.load(narrow_bias + d).to(tl.float32)[None, :]).to(kind).to(tl.float32)
    tl.debug_barrier()
    middle = tl.load(out + at)
    tl.store(out + at, (middle + z).to(kind), mask=is_there)


def _for_rows(num: int, tiles: dict[int, Tile]) -> Tile:
    return next(tile for most, tile in tiles.items() if num <= most)


def norm_constants(num: int, out: int, width: int, is_gelu: bool, shared_bytes: int) -> dict[str, Any]:
    """Return the compile-time constants of `_norm_linear` for `num` rows. shared_bytes: the shared memory that
    a program of the device can have."""
    most = LARGE_TILE if shared_bytes >= LARGE_BYTES else SMALL_TILE
    rows, columns, num_warps, num_stages, _ = _for_rows(num, NORM_TILES)
    columns = min(columns, triton.next_power_of_2(out), most // 2 // width)
    sizes = {"OUT": out, "WIDTH": width, "ROWS": min(rows, most // width), "COLUMNS": columns}
    return sizes | {"IS_GELU": is_gelu, "STAGES": num_stages, "num_warps": num_warps}


def share(num: int, sizes: dict[str, Any]) -> int:
    """Return how many columns a program of `_norm_linear` computes: so many that all programs run at once, if
    their rows allow it."""
    tiles, blocks = triton.cdiv(num, sizes["ROWS"]), triton.cdiv(sizes["OUT"], sizes["COLUMNS"])
    parts = max(1, PROCESSORS * _for_rows(num, NORM_TILES)[-1] // tiles)
    return triton.cdiv(blocks, min(blocks, parts)) * sizes["COLUMNS"]


def add_constants(num: int, out: int, width: int) -> dict[str, Any]:
    """Return the compile-time constants of `_linear_add` for `num` rows."""
    rows, columns, step, num_warps, num_stages = _for_rows(num, ADD_TILES)
    columns, step = min(columns, triton.next_power_of_2(out)), min(step, triton.next_power_of_2(width))
    sizes = {"OUT": out, "WIDTH": width, "ROWS": rows, "COLUMNS": columns, "STEP": step}
    return sizes | {"num_warps": num_warps, "num_stages": num_stages}


def mlp_constants(num: int, inner: int, width: int, hidden: int, shared_bytes: int) -> dict[str, Any]:
    """Return the compile-time constants of `_norm_mlp` for `num` rows: sizes at which its registers do not
    spill (the build test checks that). shared_bytes: as for `norm_constants`."""
    rows, block, num_warps, num_stages = _for_rows(num, MLP_TILES)
    if shared_bytes < LARGE_BYTES:
        block = 32
    step = min(block, triton.next_power_of_2(inner))
    sizes = {"INNER": inner, "WIDTH": width, "HIDDEN": hidden, "ROWS": rows, "STEP": step}
    sizes |= {"BLOCK": min(block, hidden), "STAGES": num_stages}
    return sizes | {"num_warps": num_warps, "num_stages": num_stages}


def norm_linear(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor, eps: float, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Do the same as `zoo.nn.transformer.norm_linear`, and apply GELU if there is a bias."""
    flat, out = _flat(x), x.new_empty(*x.shape[:-1], len(weight))
    columns, width = weight.shape
    sizes = norm_constants(len(flat), columns, width, bias is not None, _shared_bytes(x))
    part = share(len(flat), sizes)
    grid = triton.cdiv(len(flat), sizes["ROWS"]), triton.cdiv(columns, part)
    given = flat, norm_weight, norm_bias, weight, weight if bias is None else bias
    _norm_linear[grid](*given, out, len(flat), part, eps, **sizes)
    return out


def linear_add(y: Tensor, weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """Return x [..., D] + y [..., N] weight^T + bias."""
    flat, more = _flat(y), _flat(x)
    out, sizes = torch.empty_like(more), add_constants(len(flat), *weight.shape)
    grid = triton.cdiv(len(flat), sizes["ROWS"]), triton.cdiv(len(weight), sizes["COLUMNS"])
    _linear_add[grid](flat, weight, bias, more, out, len(flat), **sizes)
    return out.view(x.shape)


def mlp_in_three(
    y: Tensor,
    weight: Tensor,
    bias: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    wide_weight: Tensor,
    wide_bias: Tensor,
    narrow_weight: Tensor,
    narrow_bias: Tensor,
) -> Tensor:
    """Do the same as `zoo.nn.transformer.after_attention`, in three launches."""
    x = linear_add(y, weight, bias, x)
    wide = norm_linear(x, norm_weight, norm_bias, eps, wide_weight, wide_bias)
    return linear_add(wide, narrow_weight, narrow_bias, x)


def mlp_in_one(
    y: Tensor,
    weight: Tensor,
    bias: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    wide_weight: Tensor,
    wide_bias: Tensor,
    narrow_weight: Tensor,
    narrow_bias: Tensor,
) -> Tensor:
    """Do the same as `zoo.nn.transformer.after_attention`, in one launch."""
    flat, more = _flat(y), _flat(x)
    widths = y.shape[-1], x.shape[-1], len(wide_weight)
    out, sizes = torch.empty_like(more), mlp_constants(len(flat), *widths, _shared_bytes(x))
    before, after = (weight, bias, more), (wide_weight, wide_bias, narrow_weight, narrow_bias)
    grid = (triton.cdiv(len(flat), sizes["ROWS"]),)
    _norm_mlp[grid](flat, *before, norm_weight, norm_bias, *after, out, len(flat), eps, **sizes)
    return out.view(x.shape)


def _shared_bytes(x: Tensor) -> int:
    card: Any = torch.cuda.get_device_properties(x.device)  # has more than its stubs
    return card.shared_memory_per_block_optin


def _flat(x: Tensor) -> Tensor:
    return x.flatten(0, -2).contiguous()
