"""Compare VoxCPM2's flow-matching solve for all slots at once with one slot after the other.

python benchmarks/cfm.py DIR [--dtype bfloat16] [--slots 1 4 16 64] [--compile]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

import zoo
from compile_cache.lower import any_size, lower
from compile_cache.strategy import Whole
from zoo.nn.pack import pack


def best_ms(call: Callable[[], object], tries: int) -> float:
    times = []
    for _ in range(tries):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)


def solve_all(solve: Callable[..., torch.Tensor], rows: list[tuple[torch.Tensor, ...]]) -> None:
    for row in rows:
        solve(*row)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    family = zoo.load(options.directory, dtype=options.dtype)
    pack(family)
    dtype, shape = family.dtype, family.spec.noise_shape
    width = family.config.dit.hidden
    solve = lower(family.net.solver, Whole()) if options.compile else family.net.solver
    for slots in sorted(options.slots, reverse=True):
        mu, before, noise = (
            torch.randn(slots, 2, width, dtype=dtype),
            torch.randn(slots, *shape, dtype=dtype),
            torch.randn(slots, *shape),
        )
        given = (mu, before, noise.to(dtype), torch.full((slots,), 2.0), torch.full((slots,), 10))
        if options.compile:
            any_size(given, 0, "batch")
        solve(*given)
        one_by_one = [tuple(value[i : i + 1] for value in given) for i in range(slots)]
        batched, apart = (
            best_ms(partial(solve_all, solve, rows), options.tries) for rows in ([given], one_by_one)
        )
        print(
            f"{slots:3} slots  at once {batched:8.1f} ms  one by one {apart:8.1f} ms  {apart / batched:.1f}x",
            flush=True,
        )


if __name__ == "__main__":
    main()
