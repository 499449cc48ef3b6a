"""Attention over stretches of streams on a GPU, as in CosyVoice 2's flow: compared with the plain operator and timed.

    python benchmarks/device_stretch.py [--tiles]    needs a GPU and half a minute; part of device.py's `kernels`

Streams have many ages, and their pasts lie in pages of one chunk. A time is that of attention and of writing to the
cache, two launches in a recorded graph. For comparison all pages are copied, the unused ones too. --tiles
times other sizes of a tile, for `constants` in zoo/kernels/triton_stretch.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import Tensor

from benchmarks.device_kernels import DEVICE, KERNEL_GAPS, Alone, Put, gap, random
from zoo import kernels
from zoo.nn.s3.stretch import Seen, Stretch

HEADS, DIM = 8, 64
# streams, frames of each, chunks that the first stream has spoken (each other one has spoken seven more), and whether
# positions are relative, as in the encoder
LAUNCHES = (
    (1, 50, 0, False),
    (1, 50, 39, False),
    (1, 200, 0, False),
    (12, 100, 0, False),
    (64, 50, 0, False),
    (12, 100, 0, True),
)
CHUNK, CHUNKS, KEPT = 50, 20, 100  # frames of a chunk, chunks of a past, frames of a prompt
RECORDED = 8
# keys of a tile, warps, pipeline stages
TILES = ((32, 4, 3), (32, 4, 4), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 3), (128, 8, 2))
Compare = Callable[[str, torch.dtype, Callable[..., Any], tuple[Any, ...]], None]


def stretches(compare: Compare, put: Put, alone: Alone) -> None:
    """Report the largest gap to the plain operator, and the times."""
    for streams, frames, age, is_relative in LAUNCHES:
        kind = "relative attention" if is_relative else "attention"
        name = f"{kind} over a stretch, {streams} x {frames} from {age}"
        given = arguments(streams, frames, age, is_relative)
        compare(name, torch.bfloat16, attended, given)
        if DEVICE == "cuda":
            with alone(put), torch.inference_mode():
                call = partial(kernels.on_gpu, "triton_stretch", "stretch_attention", *given)
                put(f"{name}, us", recorded_us(call))
                put(f"{name}, us to copy the past", copied_us(*given[4:6]))


def arguments(streams: int, frames: int, age: int, is_relative: bool) -> tuple[Any, ...]:
    """Return the arguments of `stretch_attention`: as the flow's estimator has them, or its encoder."""
    lanes = 1 if is_relative else 2
    rows, width = streams * lanes, HEADS * DIM
    slots = torch.arange(streams, device=DEVICE)
    start = KEPT + (age + slots * 7) % 40 * CHUNK
    count, kept, capacity = torch.full_like(slots, frames), torch.full_like(slots, KEPT), CHUNKS * CHUNK
    seen = Seen(Stretch(slots, start, count, kept, frames, capacity, CHUNK), 1)
    arena = random(1 + streams * CHUNKS, CHUNK * lanes * 2 * width, dtype=torch.bfloat16)
    pages = 1 + torch.arange(streams * CHUNKS, device=DEVICE).view(streams, -1)
    pages = torch.cat((pages, torch.zeros_like(pages[:, :1])), 1)
    qkv = random(rows, frames, 3 * width, dtype=torch.bfloat16).split(width, -1)
    layers = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    where = seen.index, seen.start, seen.count, seen.num_kept, CHUNK, capacity, HEADS
    scores = None
    if is_relative:
        scores = random(rows, HEADS, frames, seen.max_distance + CHUNK, dtype=torch.bfloat16)
    return *qkv, scores, arena, pages, layers, 0, 0, *where


def attended(
    q: Tensor, k: Tensor, v: Tensor, scores: Tensor | None, arena: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """Return what attention gives, and the pages with the new keys and values. The arguments stay as they are."""
    arena = arena.clone()
    # no stream has the first page
    return torch.ops.zoo.stretch_attention.default(q, k, v, scores, arena, *rest), arena[1:]


def recorded_us(call: Callable[[], object]) -> float:
    """Return the time of a call in a recorded graph of RECORDED of them."""
    from triton.testing import do_bench_cudagraph

    def several() -> None:
        for _ in range(RECORDED):
            call()

    return round(1e3 * float(do_bench_cudagraph(several, rep=20, return_mode="median")) / RECORDED, 2)


def copied_us(arena: Tensor, pages: Tensor) -> float:
    """Return the time that a copy of all pasts takes: their bytes are read, and as many are written."""
    pasts = arena[1 : pages.numel() - len(pages) + 1]
    return recorded_us(partial(torch.empty_like(pasts).copy_, pasts))


def tiles(put: Put) -> None:
    """Report the times with each of TILES."""
    from zoo.kernels import triton_stretch as ours

    for launch in LAUNCHES:
        call, found = partial(ours.stretch_attention, *arguments(*launch)), {}
        for block, num_warps, num_stages in TILES:
            sizes = {"BLOCK": block, "num_warps": num_warps, "num_stages": num_stages}
            changed = partial(_with, ours.constants, sizes)
            with mock.patch.object(ours, "constants", changed):
                found[str((block, num_warps, num_stages))] = recorded_us(call)
        put(f"{launch} by tile, us", found)


def _with(constants: Callable[..., dict[str, int]], sizes: dict[str, int], *given: Any) -> dict[str, int]:
    return constants(*given) | sizes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiles", action="store_true", help="time other sizes of a tile, too")
    options = parser.parse_args()
    wrong: list[str] = []

    def compare(name: str, dtype: torch.dtype, operator: Callable[..., Any], given: tuple[Any, ...]) -> None:
        found = gap(operator, *given)
        print(name, found, flush=True)
        wrong.extend([name] * (found > KERNEL_GAPS[dtype]))

    stretches(compare, partial(print, flush=True), lambda _: nullcontext())
    if options.tiles:
        with torch.inference_mode():
            tiles(partial(print, flush=True))
    sys.exit(f"launches that differ from the plain operator: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
