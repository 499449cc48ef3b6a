"""`zoo.nn.frame_attention` on a GPU, in Triton. One program has queries of one key head in one frame, and all
keys that they can see. The program that reads new keys computes them itself, so that no program waits for
another. If all tokens come at once, there are enough of them for matrix products. If a cache grows by a token
or two, rows are summed instead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# The most queries that fit into the registers of a program with several warps, and with one.
MAX_ROWS, MAX_WARP_ROWS = 32, 16
WARP_VALUES = 16 * 128  # numbers of keys that a warp can hold, and as many of values


@triton.jit
def _turned(
    x: tl.tensor,
    place: tl.tensor,
    is_row: tl.tensor,
    at: tl.tensor,
    norm: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    eps: tl.tensor,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    IS_NORMED: tl.constexpr,
    IS_PAIRED: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    IS_WIDE: tl.constexpr = False,
):
    """Load the rows of x that begin at `place` [R, 1], at positions `at` [R, 1], then normalize and rotate
    them -> [R, PADDED_DIM] fp32. With scalars for `place` and `at`: one row -> [PADDED_DIM]. IS_WIDE: see
    `zoo.nn.attention.Turn`."""
    d = tl.arange(0, PADDED_DIM)
    # the other value of each pair, and the direction of the rotation
    other = d ^ 1 if IS_PAIRED else (d + DIM // 2) % DIM
    sign = tl.where(other > d, -1.0, 1.0)
    whole = is_row & (d < DIM)
    a = tl.load(x + place + d, mask=whole, other=0.0)
    b = tl.load(x + place + other, mask=whole, other=0.0)
    kind = a.dtype
    if IS_NORMED:
        wide = a.to(tl.float32)
        size = tl.rsqrt(tl.sum(wide * wide, -1, keep_dims=True) / DIM + eps)
        weight = tl.load(norm + d, mask=d < DIM, other=0.0).to(tl.float32)
        other_weight = tl.load(norm + other, mask=d < DIM, other=0.0).to(tl.float32)
        wide, other_wide = wide * size, b.to(tl.float32) * size
        if not IS_WIDE:  # round before the product with the weight, too
            wide, other_wide = wide.to(kind).to(tl.float32), other_wide.to(kind).to(tl.float32)
        a, b = (wide * weight).to(kind), (other_wide * other_weight).to(kind)
    turn = tl.load(cos + at * DIM + d, mask=whole, other=0.0).to(tl.float32)
    lift = tl.load(sin + at * DIM + d, mask=whole, other=0.0).to(tl.float32)
    y = a.to(tl.float32) * turn + b.to(tl.float32) * sign * lift
    return y.to(kind).to(tl.float32) if IS_ROUNDED else y


@triton.jit
def _attend_frame(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    token_stride: tl.tensor,
    scale: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    FIRST: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Compute ROWS queries of one key head in one frame; each sees all TOKENS tokens. q has QUERIES tokens,
    from token FIRST on."""
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, PADDED_DIM)[None, :]
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)[:, None]
    token, member = row // PADDED_GROUP, row % PADDED_GROUP
    is_row = (token < QUERIES) & (member < GROUP)
    place = (b * TOKENS + token) * token_stride + (head * GROUP + member) * DIM
    query = _turned(q, place, is_row, FIRST + token, q, cos, sin, 0.0, DIM, PADDED_DIM, False, False, True)
    n = tl.arange(0, KEYS)[:, None]
    place = (b * TOKENS + n) * token_stride + head * DIM
    key = _turned(k, place, n < TOKENS, n, k, cos, sin, 0.0, DIM, PADDED_DIM, False, False, True)
    # rotated values are already rounded, so tensor cores can multiply them as they are
    kind = q.dtype.element_ty
    scores = tl.dot(query.to(kind), tl.trans(key.to(kind)), input_precision="ieee") * scale  # [ROWS, KEYS]
    scores = tl.where(tl.arange(0, KEYS)[None, :] < TOKENS, scores, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, 1)[:, None])
    weights = weights / tl.sum(weights, 1)[:, None]
    value = tl.load(v + place + d, mask=(n < TOKENS) & (d < DIM), other=0.0)
    coarse = weights.to(kind)
    mixed = tl.dot(coarse, value, input_precision="ieee")
    if kind != tl.float32:  # add the rounding error of the weights, so that sixteen of their bits count
        mixed += tl.dot((weights - coarse.to(tl.float32)).to(kind), value, input_precision="ieee")
    place = ((b * QUERIES + token) * KV_HEADS + head) * GROUP + member
    tl.store(out + place * DIM + d, mixed.to(out.dtype.element_ty), mask=is_row & (d < DIM))


@triton.jit
def _attend_and_grow(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    position: tl.tensor,
    cache: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    out: tl.tensor,
    grown: tl.tensor,
    token_stride: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    CACHED: tl.constexpr,
    KEYS: tl.constexpr,
    IS_NORMED: tl.constexpr,
    IS_PAIRED: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
):
    """Compute all queries of one key head in one frame, one after the other. They are so few that a matrix
    product would be mostly padding. A row of a head is spread over a warp, so its sums need no shared memory
    and no barrier."""
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tl.load(position).to(tl.int32)
    n, d = tl.arange(0, KEYS), tl.arange(0, PADDED_DIM)
    is_value = d < DIM
    is_old = (n < first)[:, None] & is_value[None, :]
    at = ((b * 2 * KV_HEADS + head) * CACHED + n[:, None]) * DIM + d[None, :]  # offset of a key in the cache
    further = KV_HEADS * CACHED * DIM  # offset from a key to its value
    key = tl.load(cache + at, mask=is_old, other=0.0)  # [KEYS, PADDED_DIM]
    value = tl.load(cache + at + further, mask=is_old, other=0.0)
    for token in tl.static_range(TOKENS):
        place = (b * TOKENS + token) * token_stride + head * DIM
        new_key = _turned(
            k, place, True, first + token, k_norm, cos, sin, eps,
            DIM, PADDED_DIM, IS_NORMED, IS_PAIRED, IS_ROUNDED,
        )  # fmt: skip
        new_value = tl.load(v + place + d, mask=is_value, other=0.0).to(tl.float32)
        is_new = (n == first + token)[:, None]
        key = tl.where(is_new, new_key[None, :], key)
        value = tl.where(is_new, new_value[None, :], value)
    is_grown = (n < first + TOKENS)[:, None] & is_value[None, :]
    tl.store(grown + at, key, mask=is_grown)
    tl.store(grown + at + further, value, mask=is_grown)
    for token in tl.static_range(TOKENS):
        for member in tl.static_range(GROUP):
            place = (b * TOKENS + token) * token_stride + (head * GROUP + member) * DIM
            query = _turned(
                q, place, True, first + token, q_norm, cos, sin, eps,
                DIM, PADDED_DIM, IS_NORMED, IS_PAIRED, IS_ROUNDED,
            )  # fmt: skip
            scores = tl.sum(key * query[None, :], 1) * scale  # [KEYS]
            scores = tl.where(n <= first + token, scores, float("-inf"))
            weights = tl.exp(scores - tl.max(scores, 0))
            mixed = tl.sum(value * weights[:, None], 0) / tl.sum(weights, 0)  # [PADDED_DIM]
            place = (((b * TOKENS + token) * KV_HEADS + head) * GROUP + member) * DIM
            tl.store(out + place + d, mixed.to(out.dtype.element_ty), mask=is_value)


def constants(
    heads: int, kv_heads: int, dim: int, tokens: int, dtype: torch.dtype, kept: range | None = None
) -> dict[str, int]:
    """Return the compile-time constants of `_attend_frame`. kept: the tokens with queries; None: all of them.
    fp32 is multiplied without tensor cores, which takes many warps."""
    kept = range(tokens) if kept is None else kept
    group, keys = triton.next_power_of_2(heads // kv_heads), max(16, triton.next_power_of_2(tokens))
    padded_dim = max(16, triton.next_power_of_2(dim))
    num_warps, max_rows = max(1, keys * padded_dim // WARP_VALUES), MAX_WARP_ROWS
    if dtype == torch.float32:
        num_warps, max_rows = 8 if dim > 64 else 4, MAX_ROWS
    return {
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "PADDED_GROUP": group,
        "DIM": dim,
        "PADDED_DIM": padded_dim,
        "TOKENS": tokens,
        "FIRST": kept.start,
        "QUERIES": len(kept),
        "ROWS": min(max(16, group * triton.next_power_of_2(len(kept))), max_rows),
        "KEYS": keys,
        "num_warps": num_warps,
    }


def growing_constants(heads: int, kv_heads: int, dim: int, tokens: int, cached: int) -> dict[str, int]:
    """Return the compile-time constants of `_attend_and_grow`, except the treatment of queries and keys.
    cached: positions of the cache."""
    keys, padded_dim = triton.next_power_of_2(cached), triton.next_power_of_2(dim)
    return {
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "DIM": dim,
        "PADDED_DIM": padded_dim,
        "TOKENS": tokens,
        "CACHED": cached,
        "KEYS": keys,
        "num_warps": max(1, keys * padded_dim // WARP_VALUES),
    }


def frame_attention(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, scale: float, first: int
) -> Tensor:
    """Do the same as `zoo.nn.frame_attention.frame_attention`. q, k and v may be slices of one tensor."""
    batch, queries, heads, dim = q.shape
    kept, out = range(first, first + queries), q.new_empty(q.shape)
    sizes = constants(heads, k.shape[2], dim, k.shape[1], q.dtype, kept)
    num_tiles = triton.cdiv(queries * sizes["PADDED_GROUP"], sizes["ROWS"])
    grid = batch, k.shape[2], num_tiles
    _attend_frame[grid](q, k, v, cos, sin, out, _stride(q, k, v, cos, sin), scale, **sizes)
    return out


def grow_frame_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    position: Tensor,
    cache: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    is_paired: bool,
    is_rounded: bool,
) -> tuple[Tensor, Tensor]:
    """Do the same as `zoo.nn.frame_attention.grow_frame_attention`."""
    batch, tokens, heads, dim = q.shape
    out, grown = q.new_empty(q.shape), torch.empty_like(cache)
    _attend_and_grow[batch, k.shape[2]](
        q,
        k,
        v,
        cos,
        sin,
        position,
        cache,
        q if q_norm is None else q_norm,  # a placeholder that is not read
        k if k_norm is None else k_norm,
        out,
        grown,
        _stride(q, k, v, cos, sin),
        scale,
        eps,
        **growing_constants(heads, k.shape[2], dim, tokens, cache.shape[3]),
        IS_NORMED=q_norm is not None,
        IS_PAIRED=is_paired,
        IS_ROUNDED=is_rounded,
    )
    return out, grown


def _stride(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> int:
    """Return the stride between tokens, which must be the same in q, k and v."""
    tokens, dim = k.shape[1], k.shape[3]
    stride = k.stride(1 if tokens > 1 else 0)
    for x in (q, k, v):
        expected = (tokens * stride, stride, dim, 1)
        assert all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), expected, strict=True)), (
            f"tokens lie {x.stride()} apart, expected {expected}"
        )
    assert cos.is_contiguous() and sin.is_contiguous(), f"{cos.stride()}, {sin.stride()}"
    return stride
