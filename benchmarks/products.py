"""Time all matrix products of a step, one after the other, by number of streams and layout of the weights.

    python benchmarks/products.py DIR [--streams 1 2 4 8 16] [--threads 1]

Each layout is used for all large matrices, and the last row has the faster one for each shape, without int8. A server
uses ours in stacks of blocks, which are one operator there.
Products run in the order of a step, so a matrix that is read fifteen times a frame counts fifteen times.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

import zoo
from compile_cache import choices
from serving.engine.device.arena import PAGE_TOKENS, Arena, common_page_bytes
from serving.engine.device.runner import Runner
from serving.tools.requests import first_request
from zoo import kernels
from zoo.nn.block import PreNormBlock
from zoo.nn.linear import FusedLinear
from zoo.nn.pack import pack
from zoo.nn.packed import BlockedLinear, BlockedSwiGLU, PackedLinear

PRODUCTS = (nn.Linear, FusedLinear, BlockedLinear, BlockedSwiGLU, PackedLinear)
# the form of all large matrices (None: the faster one for each shape), and whether they are rounded to int8
LAYOUTS: dict[str, tuple[str | None, bool]] = {
    "oneDNN's, 32 bits": ("onednn", False),
    "ours": ("blocks", False),
    "ours, int8": ("blocks", True),
    "the faster one": (None, False),
}
TRIES = 7


def assumed(layout: str | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if layout is None else choices.assumed(layout)


def calls_of_a_step(
    directory: str, streams: int, layout: str | None, is_int8: bool = False
) -> list[tuple[nn.Module, Tensor]]:
    """Return the products of an eager step and what each of them reads, in their order."""
    family = zoo.load(directory, "cpu", "float32", keeps_bf16=True)
    # blocks apart, so that each product is called and has every layout
    with mock.patch.object(PreNormBlock, "is_stacked", False), assumed(layout):
        pack(family, is_int8=is_int8)
    lanes, pages = family.spec.lanes, 4
    arena = Arena([family], (streams * lanes * pages + 2) * common_page_bytes([family]))
    runner = Runner(family, streams, arena, compile=False)
    request = first_request(family, text="Hello there.")
    for slot in range(streams):
        first = [1 + lane * pages for lane in range(slot * lanes, (slot + 1) * lanes)]
        own = [range(page, page + pages) for page in first]
        runner.open(slot, family.prompt(request), own, [pages * PAGE_TOKENS // 2] * lanes)
    calls: list[tuple[nn.Module, Tensor]] = []
    inside = {layer for mlp in family.modules() if isinstance(mlp, BlockedSwiGLU) for layer in mlp.children()}
    for module in family.modules():
        if isinstance(module, PRODUCTS) and module not in inside:
            module.register_forward_hook(lambda module, given, made: calls.append((module, given[0].clone())))
    runner.step(np.arange(streams)).read()
    for module in family.modules():
        module._forward_hooks.clear()
    return calls


def best_ms(calls: list[tuple[nn.Module, Tensor]]) -> float:
    """Return the shortest time of several tries."""
    times = []
    for _ in range(TRIES):
        began_s = time.perf_counter()
        for module, rows in calls:
            module(rows)
        times.append(time.perf_counter() - began_s)
    return 1e3 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernels.build()
    print(f"| layout, ms | {' | '.join(map(str, options.streams))} |\n|{'---|' * (1 + len(options.streams))}")
    with torch.inference_mode():
        for name, how in LAYOUTS.items():
            found = [best_ms(calls_of_a_step(options.directory, num, *how)) for num in options.streams]
            print(f"| {name} | {' | '.join(f'{ms:.1f}' for ms in found)} |", flush=True)


if __name__ == "__main__":
    main()
