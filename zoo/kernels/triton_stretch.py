"""`zoo.nn.s3.stretch.stretch_attention` on a GPU, in Triton. One program has a tile of a stretch's
queries, in one head of one row. It passes over the keys in its stream's pages, then over the new keys that
are visible. Their number is read on the device: a young stream is cheap, a recorded launch stays valid while
streams grow, and unwritten positions are not loaded. A query may add a score by distance to each key that it
sees, for relative positions (Transformer-XL, arXiv 1901.02860, section 3.3).

A second launch writes the new keys and values to the cache. It must come after the first, because new entries
overwrite places of the ring that some programs may not have read yet.

Source: FlashAttention-2 (arXiv 2307.08691), section 3.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.kernels.triton_attention import _weighed

EVERYWHERE = tl.constexpr(1 << 30)  # the position of keys that are never too far back
LOG2_E = tl.constexpr(math.log2(math.e))
KEPT_VALUES = 2048  # numbers that a program writes at once, of keys and of values each
# These change from launch to launch and must not cause a new kernel.
LENGTHS = ["block", "num", "first", "page_values", "num_columns", "per_chunk", "capacity", "chunk"]


@triton.jit
def _scores_by_distance(
    by_distance: tl.tensor,
    nearest: tl.tensor,
    position: tl.tensor,
    is_kept: tl.tensor,
    dropped: tl.tensor,
    is_seen: tl.tensor,
):
    """Load what the distance adds to a score, in base 2: [ROWS, n] of queries, whose scores for a key at position
    0 are at `nearest` [ROWS], and keys at `position` [n]."""
    place = nearest[:, None] - position[None, :] - tl.where(is_kept[None, :], dropped[:, None], 0)
    return tl.load(by_distance + place, mask=is_seen, other=0.0).to(tl.float32) * LOG2_E


@triton.jit(do_not_specialize=[*LENGTHS, "num_distances"], do_not_specialize_on_alignment=["layers"])
def _attend_stretch(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    by_distance: tl.tensor,
    arena: tl.tensor,
    pages: tl.tensor,
    layers: tl.tensor,
    start: tl.tensor,
    count: tl.tensor,
    num_kept: tl.tensor,
    out: tl.tensor,
    block: tl.tensor,
    num: tl.tensor,
    first: tl.tensor,
    page_values: tl.tensor,
    num_columns: tl.tensor,
    per_chunk: tl.tensor,
    capacity: tl.tensor,
    chunk: tl.tensor,
    token_stride: tl.tensor,
    num_distances: tl.tensor,
    scale: tl.tensor,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    IS_RELATIVE: tl.constexpr,
):
    """Compute one tile. num: positions of a stretch. first: values of a chunk before layer 0. num_columns: of
    `pages`; per_chunk: of them, those of a chunk. capacity: positions of a past. token_stride: from one
    position to the next in q, k and v. scale: in base 2. IS_RELATIVE: scores by distance are added."""
    begin, head, row = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2)
    b, lane = row // LANES, row % LANES
    began = tl.load(start + b).to(tl.int32)  # the stretch's position in its stream
    there = tl.load(count + b).to(tl.int32)
    kept = tl.load(num_kept + b).to(tl.int32)
    ring = capacity - kept

    n, d, column = tl.arange(0, ROWS), tl.arange(0, PADDED_DIM), tl.arange(0, BLOCK)
    own = begin + n
    is_value = (d < DIM)[None, :]
    whole = (own < num)[:, None] & is_value
    place = (row * num + own) * token_stride + head * DIM
    query = tl.load(q + place[:, None] + d[None, :], mask=whole, other=0.0)
    chunk_start = (began + own) // chunk * chunk
    lowest = chunk_start - ring  # the first position that a query sees, apart from the permanently kept ones
    limit = tl.minimum(chunk_start + chunk - began, there)  # the end of the new positions that a query sees
    # a query's scores by distance begin `chunk - 1` positions ahead of it; dropped positions do not count
    nearest = ((row * HEADS + head) * num + own) * num_distances + began + own + chunk - 1
    dropped = tl.maximum(lowest - kept, 0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED_DIM], tl.float32)

    # a tile of padding reads nothing
    is_heard = begin < there
    held = tl.where(is_heard, tl.minimum(began, capacity), 0)
    latest = kept + (began - kept - 1) % ring  # the place of the last position in the ring, if it has any
    before = first + tl.load(layers + block).to(tl.int32) * chunk * (LANES * 2 * HEADS * DIM)
    for at in range(0, held, BLOCK):
        m = at + column
        is_held = m < held
        value = before + m % chunk * (LANES * 2 * HEADS * DIM)
        number = m // chunk * per_chunk + value // page_values
        page = tl.load(pages + b * num_columns + number, mask=is_held, other=0)  # int64, as offsets need
        offset = page * page_values + value % page_values + lane * (2 * HEADS * DIM) + head * DIM
        offset = tl.multiple_of(offset, ALIGNED)
        old = arena + offset[:, None] + d[None, :]
        old_k = tl.load(old, mask=is_held[:, None] & is_value, other=0.0)
        old_v = tl.load(old + HEADS * DIM, mask=is_held[:, None] & is_value, other=0.0)
        position = began - 1 - latest + m - tl.where(m > latest, ring, 0)
        is_kept = m < kept
        is_seen = is_held[None, :] & (tl.where(is_kept, EVERYWHERE, position)[None, :] >= lowest[:, None])
        scores = tl.dot(query, tl.trans(old_k), input_precision="ieee") * scale
        if IS_RELATIVE:
            position = tl.where(is_kept, m, position)
            scores += _scores_by_distance(by_distance, nearest, position, is_kept, dropped, is_seen)
        top, total, mixed = _weighed(scores, old_v, is_seen, top, total, mixed)

    # the end of the positions that the tile's last query sees
    end = (began + tl.minimum(begin + ROWS, num) - 1) // chunk * chunk + chunk - began
    end = tl.where(is_heard, tl.minimum(end, there), 0)
    for at in range(0, end, BLOCK):
        m = at + column
        is_there = (m < end)[:, None] & is_value
        new = ((row * num + m) * token_stride + head * DIM)[:, None] + d[None, :]
        new_k = tl.load(k + new, mask=is_there, other=0.0)
        new_v = tl.load(v + new, mask=is_there, other=0.0)
        position = began + m
        is_kept = position < kept
        is_near = tl.where(is_kept, EVERYWHERE, position)[None, :] >= lowest[:, None]
        is_seen = (m[None, :] < limit[:, None]) & is_near
        scores = tl.dot(query, tl.trans(new_k), input_precision="ieee") * scale
        if IS_RELATIVE:
            scores += _scores_by_distance(by_distance, nearest, position, is_kept, dropped, is_seen)
        top, total, mixed = _weighed(scores, new_v, is_seen, top, total, mixed)

    result = mixed / tl.where(total > 0, total, 1.0)[:, None]  # padding may see nothing
    place = (row * num + own) * (HEADS * DIM) + head * DIM
    tl.store(out + place[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=whole)


@triton.jit(do_not_specialize=LENGTHS, do_not_specialize_on_alignment=["layers"])
def _keep_stretch(
    k: tl.tensor,
    v: tl.tensor,
    arena: tl.tensor,
    pages: tl.tensor,
    layers: tl.tensor,
    index: tl.tensor,
    block: tl.tensor,
    num: tl.tensor,
    first: tl.tensor,
    page_values: tl.tensor,
    num_columns: tl.tensor,
    per_chunk: tl.tensor,
    capacity: tl.tensor,
    chunk: tl.tensor,
    token_stride: tl.tensor,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Write keys and values of all heads at ROWS positions of one row to the places in `index`."""
    n, d, row = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED_WIDTH), tl.program_id(1)
    b, lane = row // LANES, row % LANES
    at = tl.load(index + b * num + n, mask=n < num, other=capacity).to(tl.int32)
    is_kept = at < capacity
    whole = is_kept[:, None] & (d < WIDTH)[None, :]
    place = ((row * num + n) * token_stride)[:, None] + d[None, :]
    value = first + tl.load(layers + block).to(tl.int32) * chunk * (LANES * 2 * WIDTH)
    value += at % chunk * (LANES * 2 * WIDTH)
    column = at // chunk * per_chunk + value // page_values
    page = tl.load(pages + b * num_columns + column, mask=is_kept, other=0)
    offset = tl.multiple_of(page * page_values + value % page_values + lane * (2 * WIDTH), ALIGNED)
    kept = arena + offset[:, None] + d[None, :]
    tl.store(kept, tl.load(k + place, mask=whole, other=0.0), mask=whole)
    tl.store(kept + WIDTH, tl.load(v + place, mask=whole, other=0.0), mask=whole)


def constants(lanes: int, heads: int, dim: int, dtype: torch.dtype, is_relative: bool) -> dict[str, int]:
    """Return the compile-time constants of `_attend_stretch`: sizes at which its registers do not spill (the
    build test checks that). fp32 is multiplied without tensor cores, in smaller tiles."""
    padded_dim, is_wide = max(16, triton.next_power_of_2(dim)), dtype == torch.float32
    has_8_warps = padded_dim > 64 if is_wide else is_relative
    return {
        "LANES": lanes,
        "HEADS": heads,
        "DIM": dim,
        "PADDED_DIM": padded_dim,
        "ROWS": 64 if not is_wide else 16 if is_relative else 32,
        "BLOCK": 16 if is_wide else 64 if padded_dim <= 64 else 32,
        "ALIGNED": aligned(dim),
        "IS_RELATIVE": is_relative,
        "num_warps": 8 if has_8_warps else 4,
        "num_stages": 3,
    }


def keeping_constants(lanes: int, width: int) -> dict[str, int]:
    """Return the compile-time constants of `_keep_stretch`."""
    padded_width = triton.next_power_of_2(width)
    rows = max(1, KEPT_VALUES // padded_width)
    sizes = {"LANES": lanes, "WIDTH": width, "PADDED_WIDTH": padded_width, "ROWS": rows}
    return sizes | {"ALIGNED": aligned(width), "num_warps": 4}


def aligned(width: int) -> int:
    """Return a power of two that divides every offset of a row of `width` values in the pages, 16 at most. The
    compiler does not see it: offsets come from numbers that change from launch to launch. Without it, each
    value would be loaded alone, and loads would not be overlapped with products."""
    return min(16, width & -width)


def stretch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    by_distance: Tensor | None,
    arena: Tensor,
    pages: Tensor,
    layers: Tensor,
    block: int,
    first: int,
    index: Tensor,
    start: Tensor,
    count: Tensor,
    num_kept: Tensor,
    chunk: int,
    capacity: int,
    heads: int,
) -> Tensor:
    """Do the same as `zoo.nn.s3.stretch.stretch_attention`. q, k and v may be slices of one tensor."""
    (rows, num, width), page_values, lanes = q.shape, arena.shape[1], len(q) // len(start)
    assert arena.is_contiguous() and page_values % (2 * lanes * width) == 0 and q.dtype == arena.dtype, (
        f"{q.dtype} of {width} over {arena.dtype} in pages of {page_values}, {arena.stride()}"
    )
    assert first % aligned(width) == 0, f"a layer begins after {first} values of {width} in a row"
    # offsets within a chunk, and among the new keys, have 32 bits
    stride, per_chunk = _token_stride(q, k, v), (pages.shape[1] - 1) // (capacity // chunk)
    distances = 0
    if by_distance is not None:
        distances = by_distance.shape[-1]
        assert by_distance.shape[:3] == (rows, heads, num) and by_distance.is_contiguous(), by_distance.shape
    largest = max(rows * num * max(stride, heads * distances), per_chunk * page_values)
    assert largest < 1 << 31, f"{rows} rows of {num}"
    pages, index, start, count, num_kept = (x.contiguous() for x in (pages, index, start, count, num_kept))
    sizes = constants(lanes, heads, width // heads, q.dtype, by_distance is not None)
    out = q.new_empty(q.shape)
    lengths = block, num, first, page_values, pages.shape[1], per_chunk, capacity, chunk, stride
    scale = (width // heads) ** -0.5 * math.log2(math.e)
    tiles = triton.cdiv(num, sizes["ROWS"])
    where = arena, pages, layers, start, count, num_kept
    scores = q if by_distance is None else by_distance  # in the first case nothing reads them
    _attend_stretch[tiles, heads, rows](q, k, v, scores, *where, out, *lengths, distances, scale, **sizes)
    sizes = keeping_constants(lanes, width)
    tiles = triton.cdiv(num, sizes["ROWS"])
    _keep_stretch[tiles, rows](k, v, arena, pages, layers, index, *lengths, **sizes)
    return out


def _token_stride(*parts: Tensor) -> int:
    """Return the stride between positions, which must be the same in all parts."""
    stride = parts[0].stride(1)
    for x in parts:
        expected = (x.shape[1] * stride, stride, 1)
        assert all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), expected, strict=True)), (
            f"positions lie {x.stride()} apart, expected {expected}"
        )
    return stride
