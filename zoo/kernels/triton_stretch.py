"""`zoo.nn.s3.stretch.stretch_attention` on a GPU, in Triton. One program has a tile of a stretch's
queries, in one head of one row. It passes over the keys in its stream's cache, then over the new keys that
are visible. Their number is read on the device: a young stream is cheap, a recorded launch stays valid while
streams grow, and unwritten positions are not loaded. One comparison of positions decides whether a query sees
a key.

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

from zoo.kernels.triton_attention import _seen

EVERYWHERE = tl.constexpr(1 << 30)  # the position of keys that are never too far back
KEPT_VALUES = 4096  # numbers that a program writes at once, of keys and of values each
# These change from launch to launch and must not cause a new kernel.
LENGTHS = ["block", "num", "num_slots", "num_places", "chunk"]


@triton.jit(do_not_specialize=LENGTHS, do_not_specialize_on_alignment=["layers"])
def _attend_stretch(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    caches: tl.tensor,
    layers: tl.tensor,
    slots: tl.tensor,
    start: tl.tensor,
    count: tl.tensor,
    num_kept: tl.tensor,
    out: tl.tensor,
    block: tl.tensor,
    num: tl.tensor,
    num_slots: tl.tensor,
    num_places: tl.tensor,
    chunk: tl.tensor,
    token_stride: tl.tensor,
    scale: tl.tensor,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one tile. num: positions of a stretch. num_places: positions of a slot in the cache; the last
    one is a spare that is never read. token_stride: from one position to the next in q, k and v. scale: in
    base 2."""
    begin, head, row = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2)
    b, lane = row // LANES, row % LANES
    first = tl.load(start + b).to(tl.int32)  # the stretch's position in its stream
    there = tl.load(count + b).to(tl.int32)
    kept = tl.load(num_kept + b).to(tl.int32)
    slot = tl.load(slots + b)
    ring = num_places - 1 - kept

    n, d, column = tl.arange(0, ROWS), tl.arange(0, PADDED_DIM), tl.arange(0, BLOCK)
    own = begin + n
    is_value = (d < DIM)[None, :]
    whole = (own < num)[:, None] & is_value
    place = (row * num + own) * token_stride + head * DIM
    query = tl.load(q + place[:, None] + d[None, :], mask=whole, other=0.0)
    chunk_start = (first + own) // chunk * chunk
    lowest = chunk_start - ring  # the first position that a query sees, apart from the permanently kept ones
    limit = tl.minimum(chunk_start + chunk - first, there)  # the end of the new positions that a query sees
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED_DIM], tl.float32)

    # a tile of padding reads nothing
    is_heard = begin < there
    held = tl.where(is_heard, tl.minimum(first, num_places - 1), 0)
    latest = kept + (first - kept - 1) % ring  # the place of the last position in the ring, if it has any
    # int64: caches have more values than 2^31
    base = ((tl.load(layers + block) * num_slots + slot) * num_places * LANES + lane) * (
        2 * HEADS * DIM
    ) + head * DIM
    for at in range(0, held, BLOCK):
        m = at + column
        is_held = m < held
        old = caches + base + (m * (LANES * 2 * HEADS * DIM))[:, None] + d[None, :]
        old_k = tl.load(old, mask=is_held[:, None] & is_value, other=0.0)
        old_v = tl.load(old + HEADS * DIM, mask=is_held[:, None] & is_value, other=0.0)
        position = first - 1 - latest + m - tl.where(m > latest, ring, 0)
        position = tl.where(m < kept, EVERYWHERE, position)
        is_seen = is_held[None, :] & (position[None, :] >= lowest[:, None])
        top, total, mixed = _seen(query, old_k, old_v, is_seen, top, total, mixed, scale)

    # the end of the positions that the tile's last query sees
    end = (first + tl.minimum(begin + ROWS, num) - 1) // chunk * chunk + chunk - first
    end = tl.where(is_heard, tl.minimum(end, there), 0)
    for at in range(0, end, BLOCK):
        m = at + column
        is_there = (m < end)[:, None] & is_value
        new = ((row * num + m) * token_stride + head * DIM)[:, None] + d[None, :]
        new_k = tl.load(k + new, mask=is_there, other=0.0)
        new_v = tl.load(v + new, mask=is_there, other=0.0)
        position = tl.where(first + m < kept, EVERYWHERE, first + m)
        is_seen = (m[None, :] < limit[:, None]) & (position[None, :] >= lowest[:, None])
        top, total, mixed = _seen(query, new_k, new_v, is_seen, top, total, mixed, scale)

    result = mixed / tl.where(total > 0, total, 1.0)[:, None]  # padding may see nothing
    place = (row * num + own) * (HEADS * DIM) + head * DIM
    tl.store(out + place[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=whole)


@triton.jit(do_not_specialize=LENGTHS, do_not_specialize_on_alignment=["layers"])
def _keep_stretch(
    k: tl.tensor,
    v: tl.tensor,
    caches: tl.tensor,
    layers: tl.tensor,
    slots: tl.tensor,
    index: tl.tensor,
    block: tl.tensor,
    num: tl.tensor,
    num_slots: tl.tensor,
    num_places: tl.tensor,
    token_stride: tl.tensor,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write keys and values of all heads at ROWS positions of one row to the places in `index`."""
    n, d, row = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED_WIDTH), tl.program_id(1)
    b, lane = row // LANES, row % LANES
    at = tl.load(index + b * num + n, mask=n < num, other=num_places - 1)
    whole = (at < num_places - 1)[:, None] & (d < WIDTH)[None, :]
    place = ((row * num + n) * token_stride)[:, None] + d[None, :]
    first = (tl.load(layers + block) * num_slots + tl.load(slots + b)) * num_places
    kept = (((first + at) * LANES + lane) * (2 * WIDTH))[:, None] + d[None, :]
    tl.store(caches + kept, tl.load(k + place, mask=whole, other=0.0), mask=whole)
    tl.store(caches + kept + WIDTH, tl.load(v + place, mask=whole, other=0.0), mask=whole)


def constants(lanes: int, heads: int, dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the compile-time constants of `_attend_stretch`: sizes at which its registers do not spill (the
    build test checks that). fp32 is multiplied without tensor cores, in smaller tiles."""
    padded_dim, is_wide = max(16, triton.next_power_of_2(dim)), dtype == torch.float32
    return {
        "LANES": lanes,
        "HEADS": heads,
        "DIM": dim,
        "PADDED_DIM": padded_dim,
        "ROWS": 32 if is_wide else 64,
        "BLOCK": 16 if is_wide else 64 if padded_dim <= 64 else 32,
        "num_warps": 8 if is_wide and padded_dim > 64 else 4,
        "num_stages": 3,
    }


def keeping_constants(lanes: int, width: int) -> dict[str, int]:
    """Return the compile-time constants of `_keep_stretch`."""
    padded_width = triton.next_power_of_2(width)
    rows = max(1, KEPT_VALUES // padded_width)
    return {"LANES": lanes, "WIDTH": width, "PADDED_WIDTH": padded_width, "ROWS": rows, "num_warps": 4}


def stretch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    caches: Tensor,
    layers: Tensor,
    block: int,
    slots: Tensor,
    index: Tensor,
    start: Tensor,
    count: Tensor,
    num_kept: Tensor,
    chunk: int,
    heads: int,
) -> Tensor:
    """Do the same as `zoo.nn.s3.stretch.stretch_attention`. q, k and v may be slices of one tensor."""
    (rows, num, width), (_, num_slots, num_places, lanes, kept_width) = q.shape, caches.shape
    assert caches.is_contiguous() and kept_width == 2 * width and q.dtype == caches.dtype, (
        f"{q.dtype} of {width} over {caches.dtype} of {kept_width}, {caches.stride()}"
    )
    # offsets within a slot, and among the new keys, have 32 bits
    stride = _token_stride(q, k, v)
    assert max(rows * num * stride, num_places * lanes * kept_width) < 1 << 31, f"{rows} rows of {num}"
    slots, index, start, count, num_kept = (x.contiguous() for x in (slots, index, start, count, num_kept))
    out, sizes = q.new_empty(q.shape), constants(lanes, heads, width // heads, q.dtype)
    where, lengths = (slots, start, count, num_kept), (block, num, num_slots, num_places)
    scale = (width // heads) ** -0.5 * math.log2(math.e)
    tiles = triton.cdiv(num, sizes["ROWS"])
    _attend_stretch[tiles, heads, rows](
        q, k, v, caches, layers, *where, out, *lengths, chunk, stride, scale, **sizes
    )
    sizes = keeping_constants(lanes, width)
    tiles = triton.cdiv(num, sizes["ROWS"])
    _keep_stretch[tiles, rows](k, v, caches, layers, slots, index, *lengths, stride, **sizes)
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
