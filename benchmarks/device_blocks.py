"""A transformer block of CosyVoice 2's and Chatterbox's flow on a GPU: its kernels compared with the plain operators,
and the time of a block in its old form, compiled by inductor, and in its new forms.

    python benchmarks/device_blocks.py [--tiles]       needs a GPU and a minute or two; the part `blocks` of device.py

A time is that of one block in a recorded graph of BLOCKS blocks, each with weights of its own: together they
are larger than an H100's L2 cache, as in a step of the solver. Attention is timed apart from the rest. --tiles times
each kernel with other sizes of its tiles, for the tables in zoo/kernels/triton_transformer.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.device_kernels import DEVICE, KERNEL_GAPS, Alone, Put, gap, random
from compile_cache import choices
from zoo import kernels
from zoo.nn import transformer
from zoo.nn.s3.stretch import Seen, Stretch

CHANNELS, HEADS, DIM = 256, 8, 64
ROWS = ((2, 50), (2, 200), (24, 100), (128, 50))  # two for each stream, and frames
BLOCKS = 32
CHUNK, CHUNKS, KEPT = 50, 20, 100  # frames of a chunk, chunks of a past, frames of a prompt
# candidates for the tables of triton_transformer.py
TILES: dict[str, tuple[tuple[int, ...], ...]] = {
    "NORM_TILES": (
        *((16, 32, 4, 3, 2), (16, 64, 4, 3, 2), (32, 32, 4, 3, 2), (32, 64, 4, 3, 2), (32, 64, 8, 3, 2)),
        *((64, 32, 4, 3, 2), (64, 64, 4, 2, 2), (64, 64, 8, 2, 2), (64, 128, 8, 2, 1), (128, 64, 8, 3, 1)),
    ),
    "ADD_TILES": (
        *((16, 16, 128, 4, 4), (16, 32, 128, 4, 4), (16, 64, 128, 4, 4), (32, 32, 128, 4, 4)),
        *(
            (32, 64, 128, 4, 4),
            (64, 32, 64, 4, 4),
            (64, 64, 64, 4, 4),
            (128, 64, 64, 8, 4),
            (128, 128, 64, 8, 3),
        ),
    ),
    "MLP_TILES": (
        *((16, 32, 4, 3), (16, 64, 4, 3), (16, 64, 8, 3), (32, 32, 4, 3), (32, 64, 8, 3), (64, 32, 8, 2)),
        (64, 64, 8, 2),
    ),
}
Compare = Callable[[str, torch.dtype, Callable[..., Any], tuple[Any, ...]], None]


def blocks(put: Put, alone: Alone) -> None:
    """Report each kernel's largest gap to the plain operator, and the times. Raises AssertionError for a large
    gap."""
    wrong: list[str] = []

    def compare(
        name: str, dtype: torch.dtype, operator: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> None:
        found = gap(operator, *arguments)
        put(name, found)
        wrong.extend([name] * (found > KERNEL_GAPS[dtype]))

    measure(compare, put, alone)
    assert not wrong, f"kernels that differ from the plain operators: {', '.join(wrong)}"


def measure(compare: Compare, put: Put, alone: Alone) -> None:
    dtype, old = torch.bfloat16, torch.compile(plain_block, dynamic=True)
    for rows, frames in ROWS:
        name = f"block of {rows} x {frames}"
        given = [before_and_after(rows, frames, seed) for seed in range(BLOCKS)]
        before, after = given[0]
        compare(f"{name}, norm and product", dtype, torch.ops.zoo.norm_linear.default, before)
        for way in transformer.WAYS:
            with choices.assumed(way):
                operator = torch.ops.zoo.after_attention.default
                compare(f"{name}, after attention, {way}", dtype, operator, after)
        compare(f"{name}, attention", dtype, attended, stretch(rows, frames))
        if DEVICE == "cuda":
            with torch.inference_mode():
                old(before, after)  # is compiled, for any number of rows
            with alone(put), torch.inference_mode():
                put(f"{name}, us without attention", times_us(old, given))
                put(f"{name}, us of attention", attention_us(rows, frames))


def plain_block(before: tuple[Any, ...], after: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Return what follows a block's attention, and the next block's queries, keys and values."""
    x = transformer.plain(*after)
    _, *norm, factor = before
    return x, F.linear(F.layer_norm(x, x.shape[-1:], *norm), factor)


def new_block(way: str, before: tuple[Any, ...], after: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    x = transformer.computed(way, *after)
    return x, kernels.on_gpu("triton_transformer", "norm_linear", x, *before[1:], None)


def before_and_after(rows: int, frames: int, seed: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the arguments of `norm_linear` and of `after_attention`. Results are small enough for the allowed
    differences."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int, scale: float) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(DEVICE, torch.bfloat16)

    def linear(out: int, into: int) -> tuple[Tensor, Tensor]:
        return numbers(out, into, scale=into**-0.5 / 8), numbers(out, scale=1 / 16)

    inner = HEADS * DIM
    x, y = numbers(rows, frames, CHANNELS, scale=1 / 8), numbers(rows, frames, inner, scale=1.0)
    norm = 1 + numbers(CHANNELS, scale=0.1), numbers(CHANNELS, scale=0.1), 1e-5
    mlp = *linear(4 * CHANNELS, CHANNELS), *linear(CHANNELS, 4 * CHANNELS)
    before = x, *norm, linear(3 * inner, CHANNELS)[0]
    return before, (y, *linear(CHANNELS, inner), x, *norm, *mlp)


def times_us(old: Callable[..., Any], given: list[tuple[Any, ...]]) -> dict[str, float]:
    """Return the time of one block in its old form and in each new form."""
    forms: dict[str, Callable[..., Any]] = {"inductor": old}
    forms |= {way: partial(new_block, way) for way in transformer.WAYS}
    return {name: recorded_us([partial(form, *one) for one in given]) for name, form in forms.items()}


def recorded_us(calls: list[Callable[[], object]]) -> float:
    """Return the time of one of these calls, all of them one after the other in a recorded graph."""
    from triton.testing import do_bench_cudagraph

    def all_of_them() -> None:
        for call in calls:
            call()

    return round(1e3 * float(do_bench_cudagraph(all_of_them, rep=20, return_mode="median")) / len(calls), 2)


def stretch(rows: int, frames: int) -> tuple[Any, ...]:
    """Return the arguments of `stretch_attention` for streams of every age, in pages of one chunk."""
    streams, width = rows // 2, HEADS * DIM
    slots = torch.arange(streams, device=DEVICE)
    start = KEPT + slots * 7 % 40 * CHUNK
    tokens = Stretch(
        slots, start, torch.full_like(slots, frames), torch.full_like(slots, KEPT), frames, 0, CHUNK
    )
    tokens.capacity = CHUNKS * CHUNK
    seen = Seen(tokens, 1)
    arena = random(1 + streams * CHUNKS, CHUNK * 2 * 2 * width, dtype=torch.bfloat16)
    pages = 1 + torch.arange(streams * CHUNKS, device=DEVICE).view(streams, -1)
    pages = torch.cat((pages, torch.zeros_like(pages[:, :1])), 1)
    qkv = random(rows, frames, 3 * width, dtype=torch.bfloat16).split(width, -1)
    layers = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    where = seen.index, seen.start, seen.count, seen.num_kept, CHUNK, CHUNKS * CHUNK, HEADS
    return *qkv, arena, pages, layers, 0, 0, *where


def attended(q: Tensor, k: Tensor, v: Tensor, arena: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return what attention gives, and the pages that it wrote to."""
    arena = arena.clone()
    return torch.ops.zoo.stretch_attention.default(q, k, v, arena, *rest), arena[1:]  # the first is nobody's


def attention_us(rows: int, frames: int) -> dict[str, float]:
    """Return the time of attention and of writing to the cache, in two launches and as it is."""
    from zoo.kernels import triton_stretch

    calls = [partial(kernels.on_gpu, "triton_stretch", "stretch_attention", *stretch(rows, frames))] * 8
    with mock.patch.object(triton_stretch, "KEEPING_TILES", 0):
        apart = recorded_us(calls)
    return {"in two launches": apart, "as it is": recorded_us(calls)}


def tiles(put: Put) -> None:
    """Report the time of each kernel with each candidate for its tiles, and the fastest one."""
    from zoo.kernels import triton_transformer as ours

    for rows, frames in ROWS:
        given = [before_and_after(rows, frames, seed) for seed in range(BLOCKS)]
        wide = random(rows, frames, 4 * CHANNELS, dtype=torch.bfloat16)
        calls: dict[tuple[str, str], list[Callable[[], object]]] = {
            ("NORM_TILES", "norm, qkv"): [partial(ours.norm_linear, *before, None) for before, _ in given],
            ("NORM_TILES", "norm, widen"): [partial(ours.norm_linear, *x[3:9]) for _, x in given],
            ("ADD_TILES", "project"): [partial(ours.linear_add, *x[:4]) for _, x in given],
            ("ADD_TILES", "narrow"): [partial(ours.linear_add, wide, *x[9:], x[3]) for _, x in given],
            ("MLP_TILES", "in one"): [partial(ours.mlp_in_one, *x) for _, x in given],
        }
        for (table, name), each in calls.items():
            found: dict[str, float | str] = {}
            for tile in TILES[table]:
                with mock.patch.object(ours, table, {ours.MORE: tile}):
                    try:
                        found[str(tile)] = recorded_us(each)
                    except Exception as error:  # a tile may need more than a program of this card can have
                        found[str(tile)] = f"{type(error).__name__}: {str(error)[:80]}"
            times = {tile: us for tile, us in found.items() if isinstance(us, float)}
            put(
                f"{rows} x {frames}, {name}, us",
                found | {"fastest": min(times, key=lambda tile: times[tile])},
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiles", action="store_true", help="time the kernels with other tiles, too")
    options = parser.parse_args()
    wrong = []

    def compare(name: str, dtype: torch.dtype, operator: Callable[..., Any], given: tuple[Any, ...]) -> None:
        found = gap(operator, *given)
        print(name, found, flush=True)
        wrong.extend([name] * (found > KERNEL_GAPS[dtype]))

    @contextmanager
    def alone(put: Put) -> Iterator[None]:
        yield

    blocks(compare, partial(print, flush=True), alone)
    if options.tiles:
        with torch.inference_mode():
            tiles(partial(print, flush=True))
    sys.exit(f"kernels that differ from the plain operators: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
