"""Sampling on a GPU, in Triton: a draw is one launch, and so is the noise of all draws. Imported only when a
GPU is used.

Nothing is sorted. The kept entries of a row are those above an edge, which a bisection over the bits of the
float finds. For top-k, it counts the entries above the middle until there are k. For top-p, if used, it sums
their probabilities, 32 times. The row stays in registers.

A row that is too wide for registers, such as a whole vocabulary, is read again for each part of the search. It stays
in L2, and each pass cuts the range of top-p in four.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.nn import sampling

GREEDY = tl.constexpr(sampling.GREEDY)
LOWEST = tl.constexpr(-2139095041)  # `_ordered` of -inf
WIDE_SIZES = {"BLOCK": 8192, "num_warps": 32}  # of `_draw_wide`


@triton.jit
def _ordered(bits: tl.tensor):
    """Convert a float's bits to an integer with the same order as the float, and back."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(key: tl.tensor):
    return _ordered(key).to(tl.float32, bitcast=True)


@triton.jit
def _edge(x: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, width: tl.tensor):
    """Return the least value of a row of `width` that is kept; top_k is at least 1. See
    `sampling._keep_likely`."""
    largest = tl.max(x, 0)
    highest = _ordered(largest.to(tl.int32, bitcast=True))
    low, high = highest * 0 + LOWEST, highest + 1
    # the number of entries that are at least `low`; -1 is not counted yet, and top_k ends the search because
    # all are kept
    num_reaching = tl.where(top_k < width, -1, top_k)
    # Find a value that exactly top_k entries reach. If ties prevent that, find the largest one that at least
    # top_k reach.
    while (low + 1 < high) & (num_reaching != top_k):
        middle = (low & high) + ((low ^ high) >> 1)  # rounded down, without a sum that overflows
        num = tl.sum((x >= _value(middle)).to(tl.int32), 0)
        num_reaching = tl.where(num >= top_k, num, num_reaching)
        low, high = tl.where(num >= top_k, middle, low), tl.where(num >= top_k, high, middle)
    by_rank = _value(low)
    if top_p < 1:  # 1 keeps all entries, although the sum in fp32 can reach 1 too early
        mass = tl.where(x >= by_rank, tl.exp(x - largest), 0.0)
        mass = mass / tl.sum(mass, 0)
        low, high = highest * 0 + LOWEST - 1, highest
        # Find the smallest value with less than top_p above it; the largest value is always kept.
        for _ in range(32):
            middle = (low | high) - ((low ^ high) >> 1)  # rounded up
            has_room = tl.sum(tl.where(x > _value(middle), mass, 0.0), 0) < top_p
            low, high = tl.where(has_room, low, middle), tl.where(has_room, middle, high)
        by_rank = tl.maximum(by_rank, _value(high))
    return by_rank


@triton.jit
def _keep_likely(
    logits: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    WIDTH: tl.constexpr,
):
    b, i = tl.program_id(0), tl.arange(0, WIDTH)
    x = tl.load(logits + b * width + i, mask=i < width, other=float("-inf"))
    k = tl.load(top_k + b)
    edge = _edge(x, tl.where(k > 0, tl.minimum(k, width), width), tl.load(top_p + b), width)
    tl.store(out + b * width + i, tl.where(x < edge, float("-inf"), x), mask=i < width)


@triton.jit
def _draw(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    noise: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    logits_stride: tl.tensor,
    temperature_stride: tl.tensor,
    top_k_stride: tl.tensor,
    top_p_stride: tl.tensor,
    noise_stride: tl.tensor,
    WIDTH: tl.constexpr,
):
    b, i = tl.program_id(0), tl.arange(0, WIDTH)
    x = tl.load(logits + b * logits_stride + i, mask=i < width, other=float("-inf"))
    heat = tl.load(temperature + b * temperature_stride)
    scaled = tl.div_rn(x, tl.where(heat > GREEDY, heat, 1.0))
    k = tl.load(top_k + b * top_k_stride)
    edge = _edge(
        scaled, tl.where(k > 0, tl.minimum(k, width), width), tl.load(top_p + b * top_p_stride), width
    )
    kept = tl.where(scaled < edge, float("-inf"), scaled)
    noisy = kept + tl.load(noise + b * noise_stride + i, mask=i < width, other=0.0)
    tl.store(out + b, tl.argmax(tl.where(heat > GREEDY, noisy, x), 0).to(tl.int64))


@triton.jit
def _num_reaching(row: tl.tensor, value: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr):
    """Return how many entries of a row are at least `value`."""
    counts = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(row + i, mask=i < width, other=float("-inf"))
        counts += ((x >= value) & (i < width)).to(tl.int32)
    return tl.sum(counts, 0)


@triton.jit
def _mass(x: tl.tensor, is_counted: tl.tensor, largest: tl.tensor):
    return tl.where(is_counted, tl.exp(x - largest), 0.0)


@triton.jit
def _mass_above(
    row: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    least: tl.tensor,
    largest: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
):
    """Return the mass of the entries above each of three values, of those that are at least `least`."""
    a, b = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    c = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(row + i, mask=i < width, other=float("-inf"))
        mass = _mass(x, x >= least, largest)
        a += tl.where(x > first, mass, 0.0)
        b += tl.where(x > second, mass, 0.0)
        c += tl.where(x > third, mass, 0.0)
    return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0)


@triton.jit
def _total_mass(row: tl.tensor, least: tl.tensor, largest: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr):
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(row + i, mask=i < width, other=float("-inf"))
        sums += _mass(x, (x >= least) & (i < width), largest)
    return tl.sum(sums, 0)


@triton.jit
def _wide_edge(
    row: tl.tensor,
    largest: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
):
    """`_edge` of a row in memory."""
    highest = _ordered(largest.to(tl.int32, bitcast=True))
    low, high = highest * 0 + LOWEST, highest + 1
    num_reaching = tl.where(top_k < width, -1, top_k)
    while (low + 1 < high) & (num_reaching != top_k):
        middle = (low & high) + ((low ^ high) >> 1)
        num = _num_reaching(row, _value(middle), width, BLOCK)
        num_reaching = tl.where(num >= top_k, num, num_reaching)
        low, high = tl.where(num >= top_k, middle, low), tl.where(num >= top_k, high, middle)
    edge = _value(low)
    if top_p < 1:
        # the mass above a value that may be kept, before it is divided by the sum
        room = top_p * _total_mass(row, edge, largest, width, BLOCK)
        below, above = highest.to(tl.int64) * 0 + LOWEST - 1, highest.to(tl.int64)
        # Find the smallest value with less than `room` above it; the largest value always has.
        for _ in range(16):
            span = above - below
            first, second, third = (
                below + (span + 3) // 4,
                below + (span + 1) // 2,
                below + (3 * span + 3) // 4,
            )
            a, b, c = _mass_above(
                row,
                _value(first.to(tl.int32)),
                _value(second.to(tl.int32)),
                _value(third.to(tl.int32)),
                edge,
                largest,
                width,
                BLOCK,
            )
            below = tl.where(c >= room, third, tl.where(b >= room, second, tl.where(a >= room, first, below)))
            above = tl.where(a < room, first, tl.where(b < room, second, tl.where(c < room, third, above)))
        edge = tl.maximum(edge, _value(above.to(tl.int32)))
    return edge


@triton.jit
def _draw_wide(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    noise: tl.tensor,
    scaled: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    logits_stride: tl.tensor,
    temperature_stride: tl.tensor,
    top_k_stride: tl.tensor,
    top_p_stride: tl.tensor,
    noise_stride: tl.tensor,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + b * temperature_stride)
    divisor = tl.where(heat > GREEDY, heat, 1.0)
    row = scaled + b * width
    maxima = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(logits + b * logits_stride + i, mask=i < width, other=float("-inf"))
        x = tl.div_rn(x, divisor)
        tl.store(row + i, x, mask=i < width)
        maxima = tl.maximum(maxima, x)
    tl.debug_barrier()  # other threads read what this one wrote
    edge = tl.max(maxima, 0)
    if heat > GREEDY:
        k = tl.load(top_k + b * top_k_stride)
        k = tl.where(k > 0, tl.minimum(k, width), width)
        edge = _wide_edge(row, edge, k, tl.load(top_p + b * top_p_stride), width, BLOCK)
    best, token = tl.full((), float("-inf"), tl.float32), tl.full((), 0, tl.int32)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(row + i, mask=i < width, other=float("-inf"))
        kept = tl.where(x < edge, float("-inf"), x)
        noisy = kept + tl.load(noise + b * noise_stride + i, mask=i < width, other=0.0)
        noisy = tl.where(heat > GREEDY, noisy, x)
        largest, index = tl.max(noisy, 0), tl.argmax(noisy, 0)
        token = tl.where(largest > best, start + index, token)
        best = tl.maximum(best, largest)
    tl.store(out + b, token.to(tl.int64))


@triton.jit
def _mix(x: tl.tensor):
    """`sampling._mix` for uint32."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def _uniform(
    seed: tl.tensor,
    step: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    streams: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
):
    """Draw BLOCK values of one row and stream."""
    row, i = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own, stream = tl.load(seed + row // streams), first + row % streams
    key = _mix(own.to(tl.uint32) ^ 0x6A09E667)
    key = _mix(key ^ (own >> 32).to(tl.uint32))
    key = _mix(key ^ tl.load(step + row // streams).to(tl.uint32))
    key = _mix(key ^ stream.to(tl.uint32))
    bits = _mix(key ^ i.to(tl.uint32) * 0x9E3779B1)
    values = ((bits >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    tl.store(out + row.to(tl.int64) * width + i, values, mask=i < width)


def _sizes(width: int) -> dict[str, int]:
    """Return the compile-time constants of `_keep_likely` and `_draw`."""
    padded = triton.next_power_of_2(width)
    return {"WIDTH": padded, "num_warps": min(16, max(4, padded // 512))}


def keep_likely(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """logits [B, V] float32 -> [B, V]; `sampling.keep_likely`."""
    logits, top_k, top_p = logits.contiguous(), top_k.contiguous(), top_p.contiguous()
    out, (num_rows, width) = torch.empty_like(logits), logits.shape
    _keep_likely[(num_rows,)](logits, top_k, top_p, out, width, **_sizes(width))
    return out


def draw(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, noise: Tensor) -> Tensor:
    """logits and noise [B, V] float32 -> [B] int64; `sampling.draw`."""
    assert logits.stride(1) == noise.stride(1) == 1, f"{logits.stride()}, {noise.stride()}"
    out, (num_rows, width) = torch.empty_like(logits[:, 0], dtype=torch.int64), logits.shape
    settings = temperature, top_k, top_p  # these may be columns of a table
    strides = (rows.stride(0) for rows in (logits, *settings, noise))
    _draw[(num_rows,)](logits, *settings, noise, out, width, *strides, **_sizes(width))
    return out


def draw_wide(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, noise: Tensor) -> Tensor:
    """As `draw`, for rows of any width."""
    assert logits.stride(1) == noise.stride(1) == 1, f"{logits.stride()}, {noise.stride()}"
    out, (num_rows, width) = torch.empty_like(logits[:, 0], dtype=torch.int64), logits.shape
    scaled = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    settings = temperature, top_k, top_p
    strides = (rows.stride(0) for rows in (logits, *settings, noise))
    _draw_wide[(num_rows,)](logits, *settings, noise, scaled, out, width, *strides, **WIDE_SIZES)
    return out


def uniform(seed: Tensor, step: Tensor, first: int, streams: int, width: int) -> Tensor:
    """seed, step [B] int64 -> [B, streams, width] float32, bitwise equal to `sampling.uniform_noise`."""
    out = torch.empty(len(seed), streams, width, dtype=torch.float32, device=seed.device)
    block = min(1024, triton.next_power_of_2(width))
    grid = len(seed) * streams, triton.cdiv(width, block)
    _uniform[grid](seed.contiguous(), step.contiguous(), out, first, streams, width, block)
    return out
