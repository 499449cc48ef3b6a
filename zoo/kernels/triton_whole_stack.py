"""`zoo.nn.whole_stack` on a GPU, in Triton: all blocks of a small stack in one launch.

Each multiprocessor has a program, which does its part of every block. A block has five phases. No program begins a
phase before all programs have finished the last one:

    project     qkv = norm(x) W            attend      mixed = attention(qkv, cache)
    combine     x += mixed W               widen       inner = silu(norm(x) W_gate) * norm(x) W_up
    narrow      x += inner W

Before a program waits, it asks the L2 cache for the weights that it reads next, so the memory is busy meanwhile. The
launch is a cooperative one: the driver starts it only when all programs can run at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.kernels.triton_frame_attention import _turned

PHASES = 5
WARPS = 8
MAX_ITEMS = 8  # heads that a program attends to at once; more do not fit into registers
# Values of a sum that each warp multiplies at once, and pipeline stages, by the rows of a tile. An RTX 4090 has 99 KB
# of shared memory for them.
STEPS = {16: (32, 3), 32: (16, 4), 64: (16, 3)}
COLUMNS = (32, 16, 8)  # of a tile
ROUND_COLUMNS = 8  # a further tile of the same program takes about as long as so many more columns


@triton.jit
def _meet(arrived: tl.tensor):
    """Wait until all programs are here. `arrived` changes its sign each time, and its other bits are 0 then."""
    tl.debug_barrier()
    here = tl.where(tl.program_id(0) == 0, -2147483648 - tl.num_programs(0) + 1, 1).to(tl.int32)
    before = tl.atomic_add(arrived, here, sem="acq_rel", scope="gpu")
    now = before
    while (before ^ now) >= 0:
        now = tl.atomic_add(arrived, 0, sem="acq_rel", scope="gpu")
    tl.debug_barrier()


@triton.jit
def _ask_for(weight: tl.tensor, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Have the L2 cache load the weights of the program's first tile."""
    tile = tl.program_id(0) % tl.cdiv(OUTPUTS, COLUMNS)
    PER_LINE: tl.constexpr = 128 * 8 // weight.dtype.element_ty.primitive_bitwidth
    last = tl.minimum((tile + 1) * COLUMNS, OUTPUTS) * WIDTH - PER_LINE
    for start in tl.range(tile * COLUMNS * WIDTH, last + 1, 256 * PER_LINE, num_stages=1):
        line = weight + tl.minimum(start + tl.arange(0, 256) * PER_LINE, last)
        tl.inline_asm_elementwise(
            "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [line.to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _multiply(
    x: tl.tensor,
    norm: tl.tensor,
    weight: tl.tensor,
    added: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    eps: tl.tensor,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    WARPS: tl.constexpr,
    IS_NORMED: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_ADDED: tl.constexpr,
):
    """Compute the program's tiles [ROWS, COLUMNS] of out [rows, OUTPUTS] = x W^T; x [rows, WIDTH], weight
    [OUTPUTS, WIDTH]. Each warp sums up STEP values at a time, so a chain of products is short. IS_NORMED: of
    norm(x). IS_GATED: weight has gate and then up, [2 OUTPUTS, WIDTH]. IS_ADDED: plus added [rows, OUTPUTS]."""
    kind = x.dtype.element_ty
    across: tl.constexpr = tl.cdiv(OUTPUTS, COLUMNS)
    d = tl.arange(0, WARPS)[:, None] * STEP + tl.arange(0, STEP)[None, :]  # [WARPS, STEP]
    for tile in tl.range(tl.program_id(0), across * tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=1):
        row = tile // across * ROWS + tl.arange(0, ROWS)
        column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
        # rows and columns beyond an edge wrap around, and are not stored
        x_at = x + (row % rows * WIDTH)[None, :, None] + d[:, None, :]  # [WARPS, ROWS, STEP]
        # [WARPS, STEP, COLUMNS]
        weight_at = weight + (column % OUTPUTS * WIDTH)[None, None, :] + d[:, :, None]
        size = tl.zeros((ROWS,), tl.float32)
        if IS_NORMED:
            squares = tl.zeros((WARPS, ROWS, STEP), tl.float32)
            for start in tl.range(0, WIDTH, WARPS * STEP, num_stages=STAGES):
                a = _loaded(x_at + start, (start + d)[:, None, :] < WIDTH, WIDTH % (WARPS * STEP) == 0)
                squares += a.to(tl.float32) * a.to(tl.float32)
            size = tl.rsqrt(tl.sum(tl.sum(squares, 2), 0) / WIDTH + eps)
        sums = tl.zeros((WARPS, ROWS, COLUMNS), tl.float32)
        up = tl.zeros((WARPS, ROWS, COLUMNS), tl.float32)
        for start in tl.range(0, WIDTH, WARPS * STEP, num_stages=STAGES):
            IS_EVEN: tl.constexpr = WIDTH % (WARPS * STEP) == 0
            a = _loaded(x_at + start, (start + d)[:, None, :] < WIDTH, IS_EVEN)
            b = _loaded(weight_at + start, (start + d)[:, :, None] < WIDTH, IS_EVEN)
            if IS_NORMED:  # rounded twice, as RMSNorm does
                a = (a.to(tl.float32) * size[None, :, None]).to(kind).to(tl.float32)
                factor = _loaded(norm + start + d, start + d < WIDTH, IS_EVEN)
                a = (a * factor.to(tl.float32)[:, None, :]).to(kind)
            sums = tl.dot(a, b, sums, input_precision="ieee")
            if IS_GATED:
                c = _loaded(weight_at + start + OUTPUTS * WIDTH, (start + d)[:, :, None] < WIDTH, IS_EVEN)
                up = tl.dot(a, c, up, input_precision="ieee")
        # sums are rounded where a product of its own would round them
        y = tl.sum(sums, 0).to(kind).to(tl.float32)
        is_stored = (row < rows)[:, None] & (column < OUTPUTS)[None, :]
        place = row[:, None] * OUTPUTS + column[None, :]
        if IS_GATED:
            y = (y * tl.sigmoid(y)).to(kind).to(tl.float32) * tl.sum(up, 0).to(kind).to(tl.float32)
        if IS_ADDED:
            y += tl.load(added + place, mask=is_stored, other=0.0).to(tl.float32)
        tl.store(out + place, y.to(kind), mask=is_stored)


@triton.jit
def _loaded(at: tl.tensor, is_there: tl.tensor, IS_EVEN: tl.constexpr):
    """Load values, or 0 outside of the mask. IS_EVEN: all are there."""
    if IS_EVEN:
        return tl.load(at)
    return tl.load(at, mask=is_there, other=0.0)


@triton.jit
def _attend(
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    first: tl.tensor,
    cache: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    out: tl.tensor,
    batch: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    CACHED: tl.constexpr,
    KEYS: tl.constexpr,
    ITEMS: tl.constexpr,
    IS_NORMED: tl.constexpr,
    IS_PAIRED: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
):
    """Attend to ITEMS key heads of frames at once: qkv [batch * TOKENS, ...] -> out [batch * TOKENS, heads * DIM].
    New keys and values are written to cache [batch, 2, KV_HEADS, CACHED, DIM]."""
    ACROSS: tl.constexpr = (GROUP + 2) * KV_HEADS * DIM
    n, d = tl.arange(0, KEYS)[:, None], tl.arange(0, PADDED_DIM)[None, :]
    is_value = d < DIM
    further = KV_HEADS * CACHED * DIM  # from a key to its value
    num_tiles = tl.cdiv(batch * KV_HEADS, ITEMS)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=1):
        item = tile * ITEMS + tl.arange(0, ITEMS)
        is_item = (item < batch * KV_HEADS)[:, None]
        b, head, at_first = item // KV_HEADS, item % KV_HEADS, (item * 0)[:, None] + first
        base = (((b * 2 * KV_HEADS + head) * CACHED) * DIM)[:, None]  # [ITEMS, 1]: of the head's first key
        at = base[None, :, :] + (n * DIM)[:, :, None] + d[None, :, :]  # [KEYS, ITEMS, PADDED_DIM]
        is_old = (n < first)[:, :, None] & is_value[None, :, :] & is_item[None, :, :]
        key = tl.load(cache + at, mask=is_old, other=0.0)
        value = tl.load(cache + at + further, mask=is_old, other=0.0)
        for token in tl.static_range(TOKENS):
            place = ((b * TOKENS + token) * ACROSS + (GROUP * KV_HEADS + head) * DIM)[:, None]
            new_key = _turned(
                qkv, place, is_item, at_first + token, k_norm, cos, sin, eps,
                DIM, PADDED_DIM, IS_NORMED, IS_PAIRED, IS_ROUNDED,
            )  # fmt: skip
            new_value = tl.load(qkv + place + KV_HEADS * DIM + d, mask=is_value & is_item, other=0.0)
            is_new = (n == first + token)[:, :, None]
            key = tl.where(is_new, new_key[None, :, :], key)
            value = tl.where(is_new, new_value.to(tl.float32)[None, :, :], value)
            kept = cache + base + (first + token) * DIM + d
            tl.store(kept, new_key, mask=is_value & is_item)
            tl.store(kept + further, new_value.to(tl.float32), mask=is_value & is_item)
        for token in tl.static_range(TOKENS):
            for member in tl.static_range(GROUP):
                place = ((b * TOKENS + token) * ACROSS + (head * GROUP + member) * DIM)[:, None]
                query = _turned(
                    qkv, place, is_item, at_first + token, q_norm, cos, sin, eps,
                    DIM, PADDED_DIM, IS_NORMED, IS_PAIRED, IS_ROUNDED,
                )  # fmt: skip
                scores = tl.sum(key * query[None, :, :], 2) * scale  # [KEYS, ITEMS]
                scores = tl.where(n <= first + token, scores, float("-inf"))
                weights = tl.exp(scores - tl.max(scores, 0)[None, :])
                mixed = tl.sum(value * weights[:, :, None], 0) / tl.sum(weights, 0)[:, None]
                place = (((b * TOKENS + token) * KV_HEADS + head) * GROUP + member)[:, None] * DIM
                tl.store(out + place + d, mixed.to(out.dtype.element_ty), mask=is_value & is_item)


@triton.jit
def _address(table: tl.tensor, part: tl.constexpr, KIND: tl.constexpr):
    """Load an address from a table."""
    return tl.multiple_of(tl.load(table + part).to(tl.pointer_type(KIND)), 16)


@triton.jit(do_not_specialize=["first", "batch", "layers"])
def _run_stack(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    first: tl.tensor,
    cache: tl.tensor,
    table: tl.tensor,
    qkv: tl.tensor,
    mixed: tl.tensor,
    inner: tl.tensor,
    out: tl.tensor,
    arrived: tl.tensor,
    batch: tl.tensor,
    layers: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    CACHED: tl.constexpr,
    KEYS: tl.constexpr,
    ITEMS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    WARPS: tl.constexpr,
    PROJECTED: tl.constexpr,
    COMBINED: tl.constexpr,
    WIDENED: tl.constexpr,
    NARROWED: tl.constexpr,
    IS_NORMED: tl.constexpr,
    IS_PAIRED: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    PHASE: tl.constexpr,
    IS_ASKED_FOR: tl.constexpr,
):
    """Run all blocks (PHASE -1), or one phase of a block whose row `table` begins with. x and out [batch, TOKENS,
    WIDTH]; blocks add to out, which the first block makes of x."""
    kind = x.dtype.element_ty
    QUERIES: tl.constexpr = GROUP * KV_HEADS * DIM
    ACROSS: tl.constexpr = (GROUP + 2) * KV_HEADS * DIM
    rows = batch * TOKENS
    for layer in tl.range(0, layers, num_stages=1, disable_licm=True):
        block = table + layer * 8  # as many as `zoo.nn.whole_stack.PARTS`
        norm, mlp_norm = _address(block, 0, kind), _address(block, 1, kind)
        q_norm, k_norm = _address(block, 2, kind), _address(block, 3, kind)
        project, combine = _address(block, 4, kind), _address(block, 5, kind)
        widen, narrow = _address(block, 6, kind), _address(block, 7, kind)
        given = out
        if layer == 0:
            given = x
        if PHASE < 0 or PHASE == 0:
            _multiply(
                given, norm, project, given, qkv, rows, eps,
                ACROSS, WIDTH, ROWS, PROJECTED, STEP, STAGES, WARPS, True, False, False,
            )  # fmt: skip
        if PHASE < 0:
            if IS_ASKED_FOR:
                _ask_for(combine, WIDTH, QUERIES, COMBINED)
            _meet(arrived)
        if PHASE < 0 or PHASE == 1:
            kept = cache + layer * batch * (2 * KV_HEADS * CACHED * DIM)
            _attend(
                qkv, cos, sin, first, kept, q_norm, k_norm, mixed, batch, scale, eps,
                KV_HEADS, GROUP, DIM, PADDED_DIM, TOKENS, CACHED, KEYS, ITEMS, IS_NORMED, IS_PAIRED, IS_ROUNDED,
            )  # fmt: skip
        if PHASE < 0:
            _meet(arrived)
        if PHASE < 0 or PHASE == 2:
            _multiply(
                mixed, norm, combine, given, out, rows, eps,
                WIDTH, QUERIES, ROWS, COMBINED, STEP, STAGES, WARPS, False, False, True,
            )  # fmt: skip
        if PHASE < 0:
            if IS_ASKED_FOR:
                _ask_for(widen, INNER, WIDTH, WIDENED)
                _ask_for(widen + INNER * WIDTH, INNER, WIDTH, WIDENED)
            _meet(arrived)
        if PHASE < 0 or PHASE == 3:
            _multiply(
                out, mlp_norm, widen, out, inner, rows, eps,
                INNER, WIDTH, ROWS, WIDENED, STEP, STAGES, WARPS, True, True, False,
            )  # fmt: skip
        if PHASE < 0:
            if IS_ASKED_FOR:
                _ask_for(narrow, WIDTH, INNER, NARROWED)
            _meet(arrived)
        if PHASE < 0 or PHASE == 4:
            _multiply(
                inner, norm, narrow, out, out, rows, eps,
                WIDTH, INNER, ROWS, NARROWED, STEP, STAGES, WARPS, False, False, True,
            )  # fmt: skip
        if layer + 1 < layers:  # so PHASE < 0
            if IS_ASKED_FOR:
                _ask_for(_address(block, 12, kind), ACROSS, WIDTH, PROJECTED)
            _meet(arrived)


def constants(
    batch: int, tokens: int, width: int, inner: int, heads: int, kv_heads: int, dim: int, cached: int,
    programs: int,
) -> dict[str, Any]:  # fmt: skip
    """Return the compile-time constants of `_run_stack` that follow from sizes. cached: positions of the cache.
    programs: as many as the device has multiprocessors."""
    rows = min(64, max(16, triton.next_power_of_2(batch * tokens)))
    step, stages = STEPS[rows]
    tiles_down = triton.cdiv(batch * tokens, rows)
    sizes = {
        "PROJECTED": (heads + 2 * kv_heads) * dim,
        "COMBINED": width,
        "WIDENED": inner,
        "NARROWED": width,
    }
    return {
        "WIDTH": width,
        "INNER": inner,
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "DIM": dim,
        "PADDED_DIM": triton.next_power_of_2(dim),
        "TOKENS": tokens,
        "CACHED": cached,
        "KEYS": triton.next_power_of_2(cached),
        "ITEMS": min(MAX_ITEMS, triton.next_power_of_2(triton.cdiv(batch * kv_heads, programs))),
        "ROWS": rows,
        "STEP": step,
        "STAGES": stages,
        **{name: columns_of_tile(outputs, tiles_down, programs) for name, outputs in sizes.items()},
        "WARPS": WARPS,
        "num_warps": WARPS,
    }


def columns_of_tile(outputs: int, tiles_down: int, programs: int) -> int:
    """Return how many columns a tile has, so that the busiest program is done first."""

    def busiest(columns: int) -> int:
        tiles = triton.cdiv(outputs, columns) * tiles_down
        return triton.cdiv(tiles, programs) * (columns + ROUND_COLUMNS)

    return min(COLUMNS, key=busiest)


def run_stack(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    first: int,
    cache: Tensor,
    arrived: Tensor,
    table: Tensor,
    inner: int,
    heads: int,
    scale: float,
    eps: float,
    is_normed: bool,
    is_paired: bool,
    is_rounded: bool,
    is_whole: bool = True,
) -> Tensor:
    """Do the same as `zoo.nn.whole_stack.whole_stack`. is_whole: in one launch; otherwise one for each phase of
    each block."""
    batch, tokens, width = x.shape
    layers, _, _, kv_heads, cached, dim = cache.shape
    assert all(tensor.is_contiguous() for tensor in (x, cos, sin, cache)) and cache.numel() < 1 << 31, (
        cache.shape
    )
    programs = num_programs(x)
    sizes = constants(batch, tokens, width, inner, heads, kv_heads, dim, cached, programs)
    out = room(x, width)
    qkv, mixed, gated = room(x, (heads + 2 * kv_heads) * dim), room(x, heads * dim), room(x, inner)
    how = {"IS_NORMED": is_normed, "IS_PAIRED": is_paired, "IS_ROUNDED": is_rounded, "IS_ASKED_FOR": is_whole}
    buffers = qkv, mixed, gated, out, arrived

    def launch(x: Tensor, cache: Tensor, table: Tensor, layers: int, phase: int) -> None:
        _run_stack[(programs,)](
            x, cos, sin, first, cache, table, *buffers, batch, layers, scale, eps,
            **sizes, **how, PHASE=phase, launch_cooperative_grid=is_whole,
        )  # fmt: skip

    if is_whole:
        launch(x, cache, table, layers, -1)
        return out
    for layer in range(layers):
        for phase in range(PHASES):
            launch(out if layer else x, cache[layer], table[layer], 1, phase)
    return out


def room(x: Tensor, width: int) -> Tensor:
    """Return an empty tensor [B, T, width] like x."""
    return x.new_empty(*x.shape[:-1], width)


def num_programs(x: Tensor) -> int:
    """Return one program for each multiprocessor of the device of x, so that all can run at once."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count
