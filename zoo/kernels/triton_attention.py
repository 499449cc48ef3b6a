"""Paged attention on a GPU, in Triton: one kernel for steps, whole prompts and parts of prompts. Imported
only when a GPU is used, because CPU builds of torch lack Triton.

A tile is a few tokens of one sequence with all query heads that share a key head, so keys and values are read
once for the group. The kernel looks up a tile's sequence and its length on the device: a recorded launch
stays valid while sequences grow, the page table may be as wide as the longest sequence, and the host never
waits. Positions beyond a sequence's length are not loaded, so their contents cannot matter.

    tokens      0 1 2 3 4 5 | 6 | 7 8 9 10 11 | 12 13          cu_seqlens 0 6 7 12, then padding
    tiles of 4  [-----) [-)   [)   [-----) [)    [--)          the last one gives zeros

In a step, the program that reads new keys takes them from the matrix's output, rotates them, and writes them
to the pages for later steps. So everything between the two matrices of a block is one launch, and a second
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
    cos: tl.tensor,
    sin: tl.tensor,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    IS_TURNED: tl.constexpr,
):
    """Load the rows of x that begin at `place` [R], of tokens `at` [R] -> [R, PADDED_DIM], rotated if
    IS_TURNED."""
    if IS_TURNED:
        place, at, is_row = place[:, None], at[:, None], is_row[:, None]
        rows = _turned(x, place, is_row, at, x, cos, sin, 0.0, DIM, PADDED_DIM, False, False, True)
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
    token_stride: tl.tensor,
    scale: tl.tensor,
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
):
    """Compute one tile, one key head, one split. page_table and kv_write_index belong to layer 0; `layer`
    gives the offset.
    token_stride: from one token to the next in q, k and v. scale: in base 2. If SPLITS is 1: out [T, H, D].
    Otherwise, in fp32: out [T, H, SPLITS, D] and log_sums [T, H, SPLITS] in base 2.

    IS_WRITING: the new positions are not in the pages yet. The first split of each token's own tile writes
    them. Programs that read new keys take them from k and rotate them, so that no program waits for
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
    q_place = token * token_stride + (head * GROUP + member) * DIM
    query = _rows(q, q_place, is_row, token, cos, sin, DIM, PADDED_DIM, IS_TURNED)
    limit = tl.minimum(length - stop + token + 1, last)  # positions that a row sees
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED_DIM], tl.float32)
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
    if IS_WRITING:
        # Mostly a single iteration, so there is nothing to prefetch.
        for at in tl.range(0, num_new, NEW, num_stages=1):
            n = start + at + tl.arange(0, NEW)
            new_place, is_new = n * token_stride + head * DIM, n < end
            new_k = _rows(k, new_place, is_new, n, cos, sin, DIM, PADDED_DIM, IS_TURNED)
            new_v = _rows(v, new_place, is_new, n, cos, sin, DIM, PADDED_DIM, False)
            key = tl.load(kv_write_index + n, mask=is_new, other=0) + own_rows
            key = key * (KV_HEADS * DIM) + head * DIM
            own = (is_new & (n >= begin))[:, None] & (d < DIM)[None, :]
            tl.store(kv + key[:, None] + d[None, :], new_k, mask=own)
            tl.store(kv + (key + PAGE_TOKENS * KV_HEADS * DIM)[:, None] + d[None, :], new_v, mask=own)
            is_seen = is_new[None, :] & (n[None, :] <= token[:, None])
            top, total, mixed = _seen(query, new_k, new_v, is_seen, top, total, mixed, scale)

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
    kv: tl.tensor,
    kv_write_index: tl.tensor,
    out: tl.tensor,
    layer: tl.tensor,
    token_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    IS_TURNED: tl.constexpr,
):
    """Write the key and value of one token and key head to the pages, and its rotated queries to out [T, H,
    D]."""
    token, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, PADDED_DIM)
    one = tl.arange(0, 1)
    place = token * token_stride + head * DIM + one
    key = _rows(k, place, one == 0, token + one, cos, sin, DIM, PADDED_DIM, IS_TURNED)
    value = _rows(v, place, one == 0, token + one, cos, sin, DIM, PADDED_DIM, False)
    at = ((tl.load(kv_write_index + token) + 2 * layer * PAGE_TOKENS) * KV_HEADS + head) * DIM + d[None, :]
    tl.store(kv + at, key, mask=(d < DIM)[None, :])
    tl.store(kv + at + PAGE_TOKENS * KV_HEADS * DIM, value, mask=(d < DIM)[None, :])
    member = tl.arange(0, PADDED_GROUP)
    is_row, own = member < GROUP, head * GROUP + member
    place = token * token_stride + own * DIM
    query = _rows(q, place, is_row, token + 0 * member, cos, sin, DIM, PADDED_DIM, IS_TURNED)
    at = (token * KV_HEADS * GROUP + own) * DIM
    tl.store(out + at[:, None] + d[None, :], query, mask=is_row[:, None] & (d < DIM)[None, :])


def constants(
    q: Tensor, kv: Tensor, page_tokens: int, is_step: bool, splits: int, new: str = ""
) -> dict[str, int]:
    """Return the compile-time constants of `_attend`: sizes at which its registers do not spill (the build
    test checks that). fp32 is multiplied without tensor cores, in smaller tiles. new: the treatment of new
    positions: "" (they are already in the pages), "written", or "turned" (rotated and written)."""
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
        "IS_WRITING": new != "",
        "IS_TURNED": new == "turned",
        "num_warps": 8 if padded_dim > 128 else 4,
        "num_stages": 3,
    }


def paged_attention(
    q: Tensor,
    kv: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    cu_seqlens: Tensor,
    page_tokens: int,
    scale: float,
) -> Tensor:
    """Do the same as `zoo.nn.attention.paged_attention`. Tokens from cu_seqlens[-1] on are padding, whose
    result is zero."""
    return _launch(q.contiguous(), None, None, kv, page_table, kv_lens, cu_seqlens, page_tokens, 0, scale)


def rotary_paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    kv: Tensor,
    kv_write_index: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    cu_seqlens: Tensor,
    page_tokens: int,
    layer: int,
    scale: float,
) -> Tensor:
    """Do the same as `zoo.nn.attention.rotary_paged_attention`. q, k and v may be slices of one tensor."""
    table = None
    if cos is not None and sin is not None:
        assert cos.is_contiguous() and sin.is_contiguous(), f"{cos.stride()}, {sin.stride()}"
        table = cos, sin
    rest = page_table, kv_lens, cu_seqlens, page_tokens, layer, scale
    # In a prompt, many tiles would read and rotate the same new keys. Products in fp32 leave no registers for
    # it.
    if len(q) == len(page_table) and q.dtype in TURNED_WHERE_READ:
        return _launch(q, (k, v, kv_write_index), table, kv, *rest)
    turned = rotate_and_write(q, k, v, cos, sin, kv, kv_write_index, page_tokens, layer)
    return _launch(turned, None, None, kv, *rest)


def rotate_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    kv: Tensor,
    kv_write_index: Tensor,
    page_tokens: int,
    layer: int,
) -> Tensor:
    """Rotate queries and keys if cos and sin are given, and write keys and values to the pages, in one launch
    -> rotated queries [T, H, D]. kv_write_index: of layer 0."""
    turned, (heads, dim), kv_heads = q.new_empty(q.shape), q.shape[1:], k.shape[1]
    is_turned = cos is not None and sin is not None
    # q is a placeholder that is not read
    cos, sin = (q if table is None else table for table in (cos, sin))
    sizes = heads // kv_heads, triton.next_power_of_2(heads // kv_heads), dim
    padded_dim = max(16, triton.next_power_of_2(dim))
    tensors, stride = (q, k, v, cos, sin, kv, kv_write_index, turned), _token_stride(q, k, v)
    _write[len(q), kv_heads](*tensors, layer, stride, kv_heads, *sizes, padded_dim, page_tokens, is_turned)
    return turned


def _launch(
    q: Tensor,
    new: tuple[Tensor, Tensor, Tensor] | None,
    table: tuple[Tensor, Tensor] | None,
    kv: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    cu_seqlens: Tensor,
    page_tokens: int,
    layer: int,
    scale: float,
) -> Tensor:
    """Launch `_attend`, and `_join` if there are splits. new: keys, values, and the rows to write them to.
    table: cos and sin."""
    (num_tokens, heads, dim), (num_sequences, columns) = q.shape, page_table.shape
    assert kv.is_contiguous() and q.dtype == kv.dtype, f"{q.dtype} over {kv.dtype}, {kv.stride()}"
    # Both kinds of launch give the same result for any counts; this chooses the faster one.
    is_step = num_tokens == num_sequences
    splits = NUM_SPLITS if is_step and columns * page_tokens > ONE_PASS else 1
    how = "" if new is None else "written" if table is None else "turned"
    sizes = constants(q, kv, page_tokens, is_step, splits, how)
    assert page_table.stride(1) == 1, f"page numbers of a sequence lie {page_table.stride(1)} apart"
    out = parts = q.new_empty(q.shape)
    log_sums = kv_lens  # unused
    if splits > 1:
        parts = q.new_empty(num_tokens, heads, splits, dim, dtype=torch.float32)
        log_sums = q.new_empty(num_tokens, heads, splits, dtype=torch.float32)
    num_tiles = num_tokens // (sizes["ROWS"] // sizes["PADDED_GROUP"]) + num_sequences + 1
    k, v, kv_write_index = new or (q, q, kv_lens)  # placeholders that are not read, like those of the table
    _attend[kv.shape[1], num_tiles, splits](
        q,
        k,
        v,
        *(table or (q, q)),
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
        _token_stride(q, k, v),
        scale * math.log2(math.e),
        **sizes,
    )
    if splits > 1:
        _join[(num_tokens * heads,)](parts, log_sums, out, dim, sizes["PADDED_DIM"], splits, num_warps=1)
    return out


def _token_stride(*parts: Tensor) -> int:
    """Return the stride between tokens, which must be the same in all parts."""
    stride = parts[0].stride(0)
    for x in parts:
        expected = (stride, x.shape[2], 1)
        assert all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), expected, strict=True)), (
            f"tokens lie {x.stride()} apart, expected {expected}"
        )
    return stride
