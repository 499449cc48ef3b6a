"""Paged attention on a GPU, in Triton: one kernel for steps, whole prompts and parts of prompts. Imported
only when a GPU is used, because CPU builds of torch lack Triton.

A tile is a few tokens of one sequence with all query heads that share a key head, so keys and values are read
once for the group. The kernel looks up a tile's sequence and its length on the device. So a recorded launch
stays valid while sequences grow, and the host never waits. The page table may be as wide as the longest
sequence. Positions beyond a sequence's length are not loaded, so their contents cannot matter.

    tokens      0 1 2 3 4 5 | 6 | 7 8 9 10 11 | 12 13          cu_seqlens 0 6 7 12, then padding
    tiles of 4  [-----) [-)   [)   [-----) [)    [--)          the last one gives zeros

In a step, the program that reads new keys takes them from the matrix's output, normalizes and rotates them, and
writes them to the pages for later steps. So everything between the two matrices of a block is one launch, and a second
one to merge splits.

If every sequence has one query, the positions of a sequence are split over NUM_SPLITS programs and merged
afterwards. The number is fixed, and a split's size depends only on the length of its sequence, so the other
sequences of a batch do not change a bit of the result. `zoo.nn.flashinfer_attention` may take a step's place.

Source: FlashAttention-2 (arXiv 2307.08691), section 3; Flash-Decoding (pytorch.org/blog/flash-decoding);
tiles of ragged sequences as in vLLM, vllm/v1/attention/ops/triton_unified_attention.py.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.kernels.triton_frame_attention import _turned
from zoo.nn.attention import Turn

NUM_SPLITS, MIN_SPLIT = 8, 256  # splits of a sequence, and the fewest positions of one
ONE_PASS = 1024  # positions; a page table with at most this many is not split
TURNED_WHERE_READ = {torch.bfloat16, torch.float16}
NEW = tl.constexpr(16)  # new keys that a step processes at once
# These change from launch to launch and must not cause a new kernel.
LENGTHS = ["num_sequences", "num_tokens", "table_stride", "layer"]


@triton.jit
def _seen(
    query: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    is_seen: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    scale: tl.tensor,
):
    """Add n keys and values [n, D] to the running softmax of query [ROWS, D], where is_seen [ROWS, n] -> its
    largest score [ROWS], its sum [ROWS], and its weighted sum of values [ROWS, D]."""
    scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
    return _weighed(scores, v, is_seen, top, total, mixed)


@triton.jit
def _weighed(
    scores: tl.tensor,
    v: tl.tensor,
    is_seen: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
):
    """Add n values [n, D] with scores [ROWS, n] in base 2 to the running softmax, as `_seen` does."""
    scores = tl.where(is_seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(higher > float("-inf"), higher, 0.0)  # a row may see none of these keys
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(weights, 1)
    mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return higher, total, mixed


@triton.jit
def _rows(
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
    IS_TURNED: tl.constexpr,
    IS_NORMED: tl.constexpr,
    IS_WIDE: tl.constexpr,
    IS_PAIRED: tl.constexpr,
):
    """Load the rows of x that begin at `place` [R], of tokens `at` [R] -> [R, PADDED_DIM], rotated if
    IS_TURNED, and normalized before that if IS_NORMED."""
    if IS_TURNED:
        place, at, is_row = place[:, None], at[:, None], is_row[:, None]
        rows = _turned(
            x, place, is_row, at, norm, cos, sin, eps,
            DIM, PADDED_DIM, IS_NORMED, IS_PAIRED, True, IS_WIDE,
        )  # fmt: skip
    else:
        d = tl.arange(0, PADDED_DIM)
        rows = tl.load(x + place[:, None] + d[None, :], mask=is_row[:, None] & (d < DIM)[None, :], other=0.0)
    return rows.to(x.dtype.element_ty)


@triton.jit(do_not_specialize=LENGTHS)
def _attend(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    kv: tl.tensor,
    kv_write_index: tl.tensor,
    page_table: tl.tensor,
    kv_lens: tl.tensor,
    cu_seqlens: tl.tensor,
    out: tl.tensor,
    log_sums: tl.tensor,
    num_sequences: tl.tensor,
    num_tokens: tl.tensor,
    table_stride: tl.tensor,
    layer: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    IS_WRITING: tl.constexpr,
    IS_TURNED: tl.constexpr,
    IS_NORMED: tl.constexpr,
    IS_WIDE: tl.constexpr,
    IS_PAIRED: tl.constexpr,
):
    """Compute one tile, one key head, one split. page_table and kv_write_index belong to layer 0; `layer`
    gives the offset.
    q_stride, k_stride, v_stride: from one token to the next. scale: in base 2. If SPLITS is 1: out [T, H, D].
    Otherwise, in fp32: out [T, H, SPLITS, D] and log_sums [T, H, SPLITS] in base 2.

    IS_WRITING: the new positions are not in the pages yet. The first split of each token's own tile writes
    them. Programs that read new keys take them from k and turn them, so that no program waits for
    another.
    """
    head, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    own_rows = 2 * layer * PAGE_TOKENS  # the layer's offset within a page
    TOKENS: tl.constexpr = ROWS // PADDED_GROUP
    # Sequence b begins with tile cu_seqlens[b] // TOKENS + b, which leaves enough tiles for the sequences
    # before it.
    b = 0
    for first in range(0, num_sequences, 128):
        n = first + tl.arange(0, 128)
        ends = tl.load(cu_seqlens + 1 + n, mask=n < num_sequences, other=0)
        b += tl.sum(((ends // TOKENS + 1 + n <= tile) & (n < num_sequences)).to(tl.int32))
    is_real = b < num_sequences  # tokens after all sequences are padding, of length 0
    start = tl.load(cu_seqlens + b).to(tl.int32)
    stop = tl.load(cu_seqlens + b + 1, mask=is_real, other=num_tokens).to(tl.int32)
    length = tl.load(kv_lens + b, mask=is_real, other=0).to(tl.int32)
    begin = start + (tile - start // TOKENS - b) * TOKENS
    if begin >= stop:
        return

    row, d = tl.arange(0, ROWS), tl.arange(0, PADDED_DIM)
    token, member = begin + row // PADDED_GROUP, row % PADDED_GROUP
    place = (token * KV_HEADS + head) * GROUP + member  # index of a query head among all
    is_row = (token < stop) & (member < GROUP)
    end = tl.minimum(begin + TOKENS, stop)  # end of the tile's tokens
    span = tl.maximum(tl.cdiv(tl.cdiv(length, SPLITS), BLOCK) * BLOCK, MIN_SPLIT)
    if SPLITS == 1:
        span = length
    first = split * span
    last = tl.minimum(first + span, length - stop + end)
    num_new = 0  # new keys that this program reads from k
    if IS_WRITING:
        last = tl.minimum(last, length - stop + start)
        num_new = tl.where((split == 0) & is_real, end - start, 0)
    # Most splits of short sequences have no positions. They return before they load anything, because the
    # device cannot hold all programs of a launch at once.
    if (SPLITS > 1) & (first >= last) & (num_new == 0):
        tl.store(log_sums + place * SPLITS + split, float("-inf"), mask=is_row)
        return

    whole = is_row[:, None] & (d < DIM)[None, :]
    q_place = token * q_stride + (head * GROUP + member) * DIM
    query = _rows(
        q, q_place, is_row, token, q_norm, cos, sin, eps,
        DIM, PADDED_DIM, IS_TURNED, IS_NORMED, IS_WIDE, IS_PAIRED,
    )  # fmt: skip
    limit = tl.minimum(length - stop + token + 1, last)  # positions that a row sees
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    if IS_WRITING:
        # Mostly a single iteration, so there is nothing to prefetch.
        for at in tl.range(0, num_new, NEW, num_stages=1, disable_licm=True):
            n = start + at + tl.arange(0, NEW)
            is_new = n < end
            new_k = _rows(
                k, n * k_stride + head * DIM, is_new, n, k_norm, cos, sin, eps,
                DIM, PADDED_DIM, IS_TURNED, IS_NORMED, IS_WIDE, IS_PAIRED,
            )  # fmt: skip
            new_v = tl.load(
                v + (n * v_stride + head * DIM)[:, None] + d[None, :],
                mask=is_new[:, None] & (d < DIM)[None, :],
                other=0.0,
            )
            key = tl.load(kv_write_index + n, mask=is_new, other=0) + own_rows
            key = key * (KV_HEADS * DIM) + head * DIM
            own = (is_new & (n >= begin))[:, None] & (d < DIM)[None, :]
            tl.store(kv + key[:, None] + d[None, :], new_k, mask=own)
            tl.store(kv + (key + PAGE_TOKENS * KV_HEADS * DIM)[:, None] + d[None, :], new_v, mask=own)
            is_seen = is_new[None, :] & (n[None, :] <= token[:, None])
            top, total, mixed = _seen(query, new_k, new_v, is_seen, top, total, mixed, scale)
    for at in range(first, last, BLOCK):
        n = at + tl.arange(0, BLOCK)
        page = tl.load(page_table + b * table_stride + n // PAGE_TOKENS, mask=n < last, other=0)
        # int64: an arena has more values than 2^31
        key = (page + own_rows + n % PAGE_TOKENS) * (KV_HEADS * DIM) + head * DIM
        there = (n < last)[:, None] & (d < DIM)[None, :]
        old_k = tl.load(kv + key[:, None] + d[None, :], mask=there, other=0.0)
        old_v = tl.load(
            kv + (key + PAGE_TOKENS * KV_HEADS * DIM)[:, None] + d[None, :], mask=there, other=0.0
        )
        is_seen = n[None, :] < limit[:, None]
        top, total, mixed = _seen(query, old_k, old_v, is_seen, top, total, mixed, scale)

    result = mixed / tl.where(total > 0, total, 1.0)[:, None]
    if SPLITS == 1:
        tl.store(out + place[:, None] * DIM + d[None, :], result.to(out.dtype.element_ty), mask=whole)
    else:
        part = place * SPLITS + split
        tl.store(out + part[:, None] * DIM + d[None, :], result, mask=whole & (total > 0)[:, None])
        tl.store(log_sums + part, tl.where(total > 0, top + tl.log2(total), float("-inf")), mask=is_row)


@triton.jit
def _join(
    parts: tl.tensor,
    log_sums: tl.tensor,
    out: tl.tensor,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Merge the splits of one query head. Splits without positions were not written."""
    place, s, d = tl.program_id(0), tl.arange(0, SPLITS), tl.arange(0, PADDED_DIM)
    sizes = tl.load(log_sums + place * SPLITS + s)
    top = tl.max(sizes, 0)
    weights = tl.exp2(sizes - tl.where(top > float("-inf"), top, 0.0))
    there = (sizes > float("-inf"))[:, None] & (d < DIM)[None, :]
    values = tl.load(parts + (place * SPLITS + s)[:, None] * DIM + d[None, :], mask=there, other=0.0)
    total = tl.sum(weights, 0)
    mixed = tl.sum(values * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + place * DIM + d, mixed.to(out.dtype.element_ty), mask=d < DIM)


@triton.jit(do_not_specialize=["layer"])
def _write(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    kv: tl.tensor,
    kv_write_index: tl.tensor,
    out: tl.tensor,
    layer: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    eps: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    IS_TURNED: tl.constexpr,
    IS_NORMED: tl.constexpr,
    IS_WIDE: tl.constexpr,
    IS_PAIRED: tl.constexpr,
):
    """Write the key and value of one token and key head to the pages, and its turned queries to out [T, H,
    D]."""
    token, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, PADDED_DIM)
    one = tl.arange(0, 1)
    key = _rows(
        k, token * k_stride + head * DIM + one, one == 0, token + one, k_norm, cos, sin, eps,
        DIM, PADDED_DIM, IS_TURNED, IS_NORMED, IS_WIDE, IS_PAIRED,
    )  # fmt: skip
    value = tl.load(v + token * v_stride + head * DIM + d, mask=d < DIM, other=0.0)
    at = ((tl.load(kv_write_index + token) + 2 * layer * PAGE_TOKENS) * KV_HEADS + head) * DIM + d
    tl.store(kv + at[None, :], key, mask=(d < DIM)[None, :])
    tl.store(kv + at + PAGE_TOKENS * KV_HEADS * DIM, value, mask=d < DIM)
    member = tl.arange(0, PADDED_GROUP)
    is_row, own = member < GROUP, head * GROUP + member
    query = _rows(
        q, token * q_stride + own * DIM, is_row, token + 0 * member, q_norm, cos, sin, eps,
        DIM, PADDED_DIM, IS_TURNED, IS_NORMED, IS_WIDE, IS_PAIRED,
    )  # fmt: skip
    at = (token * KV_HEADS * GROUP + own) * DIM
    tl.store(out + at[:, None] + d[None, :], query, mask=is_row[:, None] & (d < DIM)[None, :])


def constants(
    q: Tensor, kv: Tensor, page_tokens: int, is_step: bool, splits: int, turn: Turn | None = None
) -> dict[str, int]:
    """Return the compile-time constants of `_attend`: sizes at which its registers do not spill (the build
    test checks that). fp32 is multiplied without tensor cores, in smaller tiles. turn: what it does to queries
    and new keys; None: queries are turned, and keys are in the pages."""
    (_, heads, dim), kv_heads = q.shape, kv.shape[1]
    padded_group, padded_dim = triton.next_power_of_2(heads // kv_heads), max(16, triton.next_power_of_2(dim))
    wide = q.dtype == torch.float32
    rows = 16 if is_step else 32 if wide else 64
    block = 16 if wide else 64 if is_step else 32
    return {
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "PADDED_GROUP": padded_group,
        "DIM": dim,
        "PADDED_DIM": padded_dim,
        "PAGE_TOKENS": page_tokens,
        "ROWS": max(rows, padded_group),
        "BLOCK": block,
        "SPLITS": splits,
        "MIN_SPLIT": MIN_SPLIT,
        "IS_WRITING": turn is not None,
        **forms(turn or Turn()),
        "num_warps": 8 if padded_dim > 128 else 4,
        "num_stages": 3,
        # The assembler would rather spill a few bytes than use more than 128.
        **({} if turn is None else {"maxnreg": 168}),
    }


def forms(turn: Turn) -> dict[str, bool]:
    """Return the compile-time constants that say what happens to queries and keys."""
    is_turned, is_normed = turn.cos is not None, turn.q_norm is not None
    assert is_turned == (turn.sin is not None) and is_normed == (turn.k_norm is not None), turn
    assert is_turned or not is_normed, "a norm of heads comes with a rotation"
    return {
        "IS_TURNED": is_turned,
        "IS_NORMED": is_normed,
        "IS_WIDE": turn.is_wide,
        "IS_PAIRED": turn.is_paired,
    }


def rotary_paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    turn: Turn,
    kv: Tensor,
    kv_write_index: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    cu_seqlens: Tensor,
    page_tokens: int,
    layer: int,
    scale: float,
) -> Tensor:
    """Do the same as `zoo.nn.attention.rotary_paged_attention`. Tokens from cu_seqlens[-1] on are padding, whose
    result is zero. q, k and v may be slices of one tensor."""
    rest = page_table, kv_lens, cu_seqlens, page_tokens, layer, scale
    # In a prompt, many tiles would read and turn the same new keys. Products in fp32 leave no registers for it.
    if len(q) == len(page_table) and q.dtype in TURNED_WHERE_READ:
        return launch(q, kv, *rest, (k, v, kv_write_index, turn))
    return launch(turn_and_write(q, k, v, turn, kv, kv_write_index, page_tokens, layer), kv, *rest)


def turn_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    turn: Turn,
    kv: Tensor,
    kv_write_index: Tensor,
    page_tokens: int,
    layer: int,
) -> Tensor:
    """Turn queries and keys, and write keys and values to the pages, in one launch -> turned queries [T, H, D].
    kv_write_index: of layer 0."""
    turned, (heads, dim), kv_heads = q.new_empty(q.shape), q.shape[1:], k.shape[1]
    group, padded_dim = heads // kv_heads, max(16, triton.next_power_of_2(dim))
    sizes = kv_heads, group, triton.next_power_of_2(group), dim, padded_dim, page_tokens
    _write[len(q), kv_heads](
        q, k, v, *_tables(turn, q), kv, kv_write_index, turned, layer, *map(_token_stride, (q, k, v)),
        turn.eps, *sizes, **forms(turn),
    )  # fmt: skip
    return turned


def _tables(turn: Turn, unread: Tensor) -> list[Tensor]:
    """Return cos, sin and the weights of the norms; `unread` replaces each that is None."""
    tables = [unread if table is None else table for table in (turn.cos, turn.sin, turn.q_norm, turn.k_norm)]
    assert all(table is unread or table.is_contiguous() for table in tables), [x.stride() for x in tables]
    return tables


def launch(
    q: Tensor,
    kv: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    cu_seqlens: Tensor,
    page_tokens: int,
    layer: int,
    scale: float,
    new: tuple[Tensor, Tensor, Tensor, Turn] | None = None,
) -> Tensor:
    """Launch `_attend`, and `_join` if there are splits. new: keys, values, the rows to write them to, and what
    happens to queries and keys before that; None: queries are turned, and keys and values are in the pages."""
    (num_tokens, heads, dim), (num_sequences, columns) = q.shape, page_table.shape
    assert kv.is_contiguous() and q.dtype == kv.dtype, f"{q.dtype} over {kv.dtype}, {kv.stride()}"
    # Both kinds of launch give the same result for any counts; this chooses the faster one.
    is_step = num_tokens == num_sequences
    splits = NUM_SPLITS if is_step and columns * page_tokens > ONE_PASS else 1
    # Without new positions, the placeholders are not read.
    k, v, kv_write_index, turn = new or (q, q, kv_lens, Turn())
    sizes = constants(q, kv, page_tokens, is_step, splits, turn if new else None)
    assert page_table.stride(1) == 1, f"page numbers of a sequence lie {page_table.stride(1)} apart"
    out = parts = q.new_empty(q.shape)
    log_sums = kv_lens  # unused
    if splits > 1:
        parts = q.new_empty(num_tokens, heads, splits, dim, dtype=torch.float32)
        log_sums = q.new_empty(num_tokens, heads, splits, dtype=torch.float32)
    num_tiles = num_tokens // (sizes["ROWS"] // sizes["PADDED_GROUP"]) + num_sequences + 1
    _attend[kv.shape[1], num_tiles, splits](
        q,
        k,
        v,
        *_tables(turn, q),
        kv,
        kv_write_index,
        page_table,
        kv_lens,
        cu_seqlens,
        parts,
        log_sums,
        num_sequences,
        num_tokens,
        page_table.stride(0),
        layer,
        *map(_token_stride, (q, k, v)),
        scale * math.log2(math.e),
        turn.eps,
        **sizes,
    )
    if splits > 1:
        _join[(num_tokens * heads,)](parts, log_sums, out, dim, sizes["PADDED_DIM"], splits, num_warps=1)
    return out


def _token_stride(x: Tensor) -> int:
    """Return the stride between the tokens of x [T, H, D], whose heads must follow each other."""
    expected = x.shape[2], 1
    assert all(n == 1 or a == b for n, a, b in zip(x.shape[1:], x.stride()[1:], expected, strict=True)), (
        f"heads lie {x.stride()} apart, expected {expected}"
    )
    return x.stride(0)
