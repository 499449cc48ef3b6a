"""Measure the CPU seconds that a second of audio costs to render, in total and by part, on one thread.

    python benchmarks/render.py DIR [--streams 1 8] [--dtype bfloat16] [--profile]

CPU time is meaningful on a busy machine, and wall time is not. All streams have the same length, so they
share one launch. The windows are those of a new stream, up to the second largest size. The first pass warms
up.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import zoo
from serving.tools.requests import first_request
from zoo import kernels
from zoo.contract import Family, View
from zoo.nn.pack import pack


def windows(family: Family[Any], offset: int) -> list[tuple[int, int]]:
    """Return (start, count) of each window: one that ends on the grid, then each size but the largest."""
    cuts, start = [], 0
    for count in (offset or family.spec.window.grid, *sorted(family.spec.window.sizes)[:-1]):
        cuts.append((start, count))
        start += count
    return cuts


def clocks(family: Family[Any], spent_s: dict[str, float]) -> None:
    """Add the CPU seconds of each part of the family to `spent_s`."""

    def add(name: str, sign: int) -> Callable[..., None]:
        def note(*_: Any) -> None:
            spent_s[name] += sign * time.process_time()

        return note

    part: nn.Module
    for name, part in family.named_children():
        part.register_forward_pre_hook(add(name, -1))
        part.register_forward_hook(add(name, 1))


@torch.inference_mode()
def render(family: Family[Any], streams: int, spent_s: dict[str, float]) -> None:
    """Render window by window and print CPU seconds per second of audio."""
    prompt = next(family.prompts(first_request(family, max_frames=4 * family.spec.window.sizes[-1])))
    cuts = windows(family, prompt.grid_offset)
    num_frames = sum(cuts[-1])
    state = family.state(streams, num_frames)
    for slot in range(streams):
        family.admit(state, slot, prompt)
    values = torch.arange(state.tape.shape[1]) % 8  # tiny models have few codes
    state.tape[:streams] = values.view(-1, *(1,) * (state.tape.dim() - 2))
    state.ready[:streams] = num_frames
    for start, count in cuts:
        spent_s.clear()
        slots, one = torch.arange(streams), torch.ones(streams, dtype=torch.int64)
        frames, length = family.spec.window.bucket(count), family.spec.window.length_bucket(start + count)
        began_s = time.process_time()
        family.render(state, View(slots, start * one, count * one, one < 0, frames, length))
        spent_s["render"] = time.process_time() - began_s
        audio_s = streams * count / family.spec.frame_rate_hz
        each = ", ".join(f"{name} {value / audio_s:.3f}" for name, value in spent_s.items())
        print(
            f"{streams} stream{'s' * (streams != 1)}, frames {start} to {start + count}: {each} CPU-s a second of audio",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--profile", action="store_true", help="then profile one more pass and print its operators"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    family = zoo.load(options.directory, device="cpu", dtype=options.dtype)
    kernels.build()
    pack(family)
    spent_s: dict[str, float] = defaultdict(float)
    clocks(family, spent_s)
    for streams in (options.streams[0], *options.streams):
        render(family, streams, spent_s)
    if options.profile:
        with torch.profiler.profile(record_shapes=True) as seen:
            render(family, options.streams[0], spent_s)
        by_shape = seen.key_averages(group_by_input_shape=True)
        print(by_shape.table("self_cpu_time_total", row_limit=30, max_shapes_column_width=110))


if __name__ == "__main__":
    main()
