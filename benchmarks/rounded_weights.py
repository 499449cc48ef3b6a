"""Count the greedy steps whose codes change with `--weights int8` or `fp8`, on any machine, and print a table.

    python benchmarks/rounded_weights.py int8|fp8 DIR [--family qwen3_tts ...] [--frames 20]

DIR keeps a demo checkpoint of size `mid` for each family; missing ones are written. Each step starts from the
state of the published weights, as with `zoo parity`. For latents, the table has their SNR.

int8: next to bf16 weights in fp32 arithmetic, the default on a CPU. It needs a CPU's kernels.
fp8: next to bf16, in the products' plain form, which the GPU's products are compared with
(benchmarks/device.py, part fp8).
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch

import zoo
from benchmarks.families import checkpoint
from serving.engine.engine import Engine
from serving.tools import parity
from serving.tools.requests import every_request
from zoo import kernels
from zoo.contract import Family
from zoo.nn import fp8
from zoo.nn.pack import num_in_int8, pack

HEADER = {
    "int8": "| | steps | int8 as published: steps (codes) |\n|---|---|---|",
    "fp8": "| | steps | bf16 as fp32: steps (codes) | fp8 as bf16 |\n|---|---|---|---|",
}


@dataclass
class Agreement:
    """Steps of two forms from equal states: how many there are, in how many all codes are equal, how many codes
    there are and how many differ, and the energies of the frames and of their differences."""

    steps: int = 0
    equal: int = 0
    codes: float = 0.0
    apart: float = 0.0
    signal: float = 0.0
    noise: float = 0.0

    def cell(self, has_codes: bool) -> str:
        if has_codes:
            return f"{self.equal} ({1 - self.apart / self.codes:.0%})"
        return f"{10 * np.log10(self.signal / self.noise):.1f} dB" if self.noise else "equal"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", choices=HEADER)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--family", nargs="+", default=sorted(zoo.families()), choices=sorted(zoo.families()))
    parser.add_argument("--frames", type=int, default=20)
    options = parser.parse_args()
    print(HEADER[options.weights], flush=True)
    row = {"int8": int8_row, "fp8": fp8_row}[options.weights]
    for name in options.family:
        print(row(name, checkpoint(name, options.directory), options.frames), flush=True)


def int8_row(name: str, path: Path, frames: int) -> str:
    plain, rounded = (zoo.load(path, "cpu", "float32", keeps_bf16=True) for _ in range(2))
    kernels.build()
    pack(rounded, is_int8=True)
    num_rounded = num_in_int8(rounded)
    if num_rounded == 0:
        return f"| {name}, no large matrix of 16 bits | | |"
    found = agreement(plain, rounded, frames)
    return f"| {name}, {num_rounded} products | {found.steps} | {found.cell(has_codes(plain))} |"


def fp8_row(name: str, path: Path, frames: int) -> str:
    exact, plain, rounded = (zoo.load(path, "cpu", dtype) for dtype in ("float32", "bfloat16", "bfloat16"))
    fp8.round_weights(rounded)
    num_rounded = sum(isinstance(layer, fp8.FP8Linear) for layer in rounded.modules())
    as_fp32, as_bf16 = (agreement(*pair, frames) for pair in ((exact, plain), (plain, rounded)))
    cells = str(as_bf16.steps), as_fp32.cell(has_codes(plain)), as_bf16.cell(has_codes(plain))
    return f"| {name}, {num_rounded} products | {' | '.join(cells)} |"


def has_codes(family: Family[Any]) -> bool:
    """Return whether frames are codes, and not latents."""
    return not family.spec.frame_dtype.is_floating_point


def agreement(plain: Family[Any], other: Family[Any], frames: int) -> Agreement:
    """Compare one greedy request. Every step of `other` starts from the state of `plain`."""
    [worker] = Engine(other, max_slots=1, compile=False).models.values()
    found, gap = Agreement(), parity.gap
    step_codes = math.prod(plain.spec.frame_shape) / plain.spec.steps_per_frame

    def noted(state: Any, served: Any, slot: int, first: int) -> float:
        ours, theirs = state.tape[0, first:].double(), served.tape[slot, first:].double()
        found.signal += float(ours.square().sum())
        found.noise += float((ours - theirs).square().sum())
        different = gap(state, served, slot, first)
        found.codes += step_codes
        found.apart += min(different, step_codes)
        return different

    with mock.patch.object(parity, "gap", noted):
        run = parity.follow(plain, worker, next(iter(every_request(plain, frames)[0].values())))
    found.steps, found.equal = run["steps"], run["steps_equal"]
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
