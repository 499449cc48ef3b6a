"""`zoo.nn.frame_attention` on a GPU, in Triton. One program has some queries of a key head in one frame, and all keys
that they can see: a tile each. New keys are made in the program that reads them, so that nobody waits for who writes them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 32  # queries of a program: more do not fit into its registers


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
):
    """Rows of x that begin at `place` [R], of positions `at` [R] -> normed and turned [R, PADDED_DIM] fp32."""
    d = tl.arange(0, PADDED_DIM)
    # whom a value turns with, and which way
    other = d ^ 1 if IS_PAIRED else (d + DIM // 2) % DIM
    sign = tl.where(other > d, -1.0, 1.0)
    whole = is_row[:, None] & (d < DIM)[None, :]
    a = tl.load(x + place[:, None] + d[None, :], mask=whole, other=0.0)
    b = tl.load(x + place[:, None] + other[None, :], mask=whole, other=0.0)
    kind = a.dtype
    if IS_NORMED:
        wide = a.to(tl.float32)
        size = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)[:, None]
        # rounded before the weight and after it, as RMSNorm does
        weight = tl.load(norm + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
        other_weight = tl.load(norm + other, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
        a = ((wide * size).to(kind).to(tl.float32) * weight).to(kind)
        b = ((b.to(tl.float32) * size).to(kind).to(tl.float32) * other_weight).to(kind)
    turn = tl.load(cos + at[:, None] * DIM + d[None, :], mask=whole, other=0.0).to(tl.float32)
    lift = tl.load(sin + at[:, None] * DIM + d[None, :], mask=whole, other=0.0).to(tl.float32)
    y = a.to(tl.float32) * turn + b.to(tl.float32) * sign[None, :] * lift
    return y.to(kind).to(tl.float32) if IS_ROUNDED else y


@triton.jit
def _attend_frame(
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
    PADDED_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    CACHED: tl.constexpr,
    KEYS: tl.constexpr,
    IS_NORMED: tl.constexpr,
    IS_PAIRED: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
):
    """One frame, one key head, ROWS of its queries. CACHED: positions of the cache, or 0 where there is none."""
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = 0
    if CACHED > 0:
        first = tl.load(position).to(tl.int32)
    d = tl.arange(0, PADDED_DIM)

    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    token, member = row // PADDED_GROUP, row % PADDED_GROUP
    is_row = (token < TOKENS) & (member < GROUP)
    place = (b * TOKENS + token) * token_stride + (head * GROUP + member) * DIM
    query = _turned(
        q,
        place,
        is_row,
        first + token,
        q_norm,
        cos,
        sin,
        eps,
        DIM,
        PADDED_DIM,
        IS_NORMED,
        IS_PAIRED,
        IS_ROUNDED,
    )

    n = tl.arange(0, KEYS)
    is_new = (n >= first) & (n < first + TOKENS)
    place = (b * TOKENS + n - first) * token_stride + head * DIM
    key = _turned(
        k, place, is_new, n, k_norm, cos, sin, eps, DIM, PADDED_DIM, IS_NORMED, IS_PAIRED, IS_ROUNDED
    )
    whole = is_new[:, None] & (d < DIM)[None, :]
    is_old = (n < first)[:, None] & (d < DIM)[None, :]
    at = ((b * 2 * KV_HEADS + head) * CACHED + n[:, None]) * DIM + d[None, :]  # of a key in the cache
    further = KV_HEADS * CACHED * DIM  # from a key to its value
    if CACHED > 0:
        key += tl.load(cache + at, mask=is_old, other=0.0)
        tl.store(grown + at, key, mask=whole | is_old)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale  # [ROWS, KEYS]
    last = first + (token if CACHED > 0 else TOKENS - 1 + 0 * token)  # that a row sees
    scores = tl.where(n[None, :] <= last[:, None], scores, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, 1)[:, None])
    weights = weights / tl.sum(weights, 1)[:, None]

    value = tl.load(v + place[:, None] + d[None, :], mask=whole, other=0.0).to(tl.float32)
    if CACHED > 0:
        value += tl.load(cache + at + further, mask=is_old, other=0.0)
        tl.store(grown + at + further, value, mask=whole | is_old)
    mixed = tl.dot(weights, value, input_precision="ieee")
    place = ((b * TOKENS + token) * KV_HEADS + head) * GROUP + member
    whole = is_row[:, None] & (d < DIM)[None, :]
    tl.store(out + place[:, None] * DIM + d[None, :], mixed.to(out.dtype.element_ty), mask=whole)


def constants(heads: int, kv_heads: int, dim: int, tokens: int, cached: int) -> dict[str, int]:
    """What `_attend_frame` is compiled for, beside what is done to queries and keys. cached: positions of the cache,
    or 0."""
    group = triton.next_power_of_2(heads // kv_heads)
    rows = min(max(16, group * triton.next_power_of_2(tokens)), MAX_ROWS)
    return {
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "PADDED_GROUP": group,
        "DIM": dim,
        "PADDED_DIM": max(16, triton.next_power_of_2(dim)),
        "TOKENS": tokens,
        "ROWS": rows,
        "CACHED": cached,
        "KEYS": max(16, triton.next_power_of_2(cached or tokens)),
        "num_warps": 8 if dim > 64 else 4,
    }


def frame_attention(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, scale: float) -> Tensor:
    """As `zoo.nn.frame_attention.frame_attention`, whose arguments it takes. q, k and v may be parts of one tensor."""
    return _launch(q, k, v, cos, sin, scale, None, None, None, None, 0.0, False, True)[0]


def grow_frame_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    position: Tensor,
    cache: Tensor,
    *how: Any,
) -> tuple[Tensor, Tensor]:
    """As `zoo.nn.frame_attention.grow_frame_attention`, whose arguments it takes."""
    return _launch(q, k, v, cos, sin, scale, position, cache, *how)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    position: Tensor | None,
    cache: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    is_paired: bool,
    is_rounded: bool,
) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, dim = q.shape
    stride = q.stride(1 if tokens > 1 else 0)
    for x in (q, k, v):
        expected = (tokens * stride, stride, dim, 1)
        assert all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), expected, strict=True)), (
            f"tokens lie {x.stride()} apart, expected {expected}"
        )
    assert cos.is_contiguous() and sin.is_contiguous(), f"{cos.stride()}, {sin.stride()}"
    out = q.new_empty(q.shape)
    grown = out if cache is None else torch.empty_like(cache)

    def pointer(tensor: Tensor | None) -> Tensor:
        return q if tensor is None else tensor  # one that is not read

    sizes = constants(heads, k.shape[2], dim, tokens, 0 if cache is None else cache.shape[3])
    num_tiles = triton.cdiv(tokens * sizes["PADDED_GROUP"], sizes["ROWS"])
    _attend_frame[batch, k.shape[2], num_tiles](
        q,
        k,
        v,
        cos,
        sin,
        pointer(position),
        pointer(cache),
        pointer(q_norm),
        pointer(k_norm),
        out,
        grown,
        stride,
        scale,
        eps,
        **sizes,
        IS_NORMED=q_norm is not None,
        IS_PAIRED=is_paired,
        IS_ROUNDED=is_rounded,
    )
    return out, grown
