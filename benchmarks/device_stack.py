"""The code predictors' blocks on a GPU: each pass in one launch, in one launch for each phase, and layer by layer.

    python benchmarks/device_stack.py [FAMILY ...]    needs a GPU, and minutes to compile; the first way, with 1 and 64
                                                      streams, is part of device.py's `kernels`

It has the shapes of published models and random weights in bfloat16, and compares all results with the plain operator.
A time is that of a pass with one token a frame, in a recorded graph with cold caches. `zoo serve --depth whole` takes
the first of the three ways.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import Tensor, nn

from benchmarks.device_kernels import DEVICE, Alone, Put, Way, random, recorded
from compile_cache import choices
from zoo import kernels
from zoo.fish_s2.depth import FastBlock
from zoo.kernels.gpu import of_gpu
from zoo.nn.frame_stack import FrameBlock, frame_stack, join
from zoo.nn.norm import RMSNorm
from zoo.qwen3_tts.depth import DepthBlock

STREAMS = (1, 8, 16, 32, 64, 128)
WAYS = {"whole": True, "a launch a phase": False}
GAP = 0.15  # of results of about 1, after several layers in bf16; between 2 and 4 a step of bf16 is 1/64


@dataclass(frozen=True)
class Sizes:
    """A published code predictor."""

    make: type[FrameBlock]
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    positions: int  # of a frame
    head_dim: int = 128
    eps: float = 1e-6


PUBLISHED = {
    "qwen3_tts": Sizes(DepthBlock, 5, 1024, 3072, 16, 8, 16),
    "fish_s2": Sizes(FastBlock, 4, 2560, 9728, 32, 8, 10),
    "csm": Sizes(FrameBlock, 4, 1024, 8192, 8, 2, 32),
}


def stacks(
    put: Put, alone: Alone, names: Sequence[str], ways: Sequence[str], streams: Sequence[int]
) -> list[str]:
    """Report the largest gap to the plain operator, and the times. Return what differs more than GAP."""
    wrong: list[str] = []
    with torch.inference_mode():
        for name, way in product(names, ways):
            model = joined(PUBLISHED[name])
            for num in streams:
                with computed(way):
                    found = frame(model, PUBLISHED[name], num)
                    with kernels.plain():
                        expected = frame(model, PUBLISHED[name], num)
                    gap = float((found.float() - expected.float()).nan_to_num(nan=torch.inf).abs().max())
                    what = f"code predictor of {name}, {num} streams, {way}"
                    put(what, gap)
                    wrong.extend([what] * (gap > GAP))
                    if DEVICE == "cuda":
                        with alone(put):
                            put(f"{what}, us", recorded_us(one_pass(model, PUBLISHED[name], num)))
    return wrong


def layer_by_layer(put: Put, name: str) -> None:
    """Report the times of compiled layers."""
    sizes = PUBLISHED[name]
    model = random_stack(sizes)
    compiled = torch.compile(partial(one_token, model, sizes), dynamic=True)
    with torch.inference_mode():
        for streams in reversed(STREAMS):
            run = partial(compiled, random(streams, 1, sizes.hidden, dtype=torch.bfloat16))
            put(f"code predictor of {name}, {streams} streams, layer by layer, us", recorded_us(run))


@contextmanager
def computed(way: str) -> Iterator[None]:
    """Let the operator compute in one of WAYS."""
    if DEVICE != "cuda":
        yield
        return
    module = of_gpu("triton_whole_stack")
    with mock.patch.object(module, "run_stack", partial(module.run_stack, is_whole=WAYS[way])):
        yield


def random_stack(sizes: Sizes) -> nn.Module:
    """Return `layers` and `norm`."""
    made = nn.Module()
    made.layers = nn.ModuleList(sizes.make(sizes) for _ in range(sizes.layers))
    made.norm = RMSNorm(sizes.hidden, sizes.eps)
    for parameter in made.parameters():
        value = random(*parameter.shape, dtype=torch.bfloat16)
        parameter.data = 1 + value / 8 if value.dim() == 1 else value * value.shape[1] ** -0.5
    return made.requires_grad_(False)


def joined(sizes: Sizes) -> nn.Module:
    made = random_stack(sizes)
    join(made)
    return made


def started(model: nn.Module, sizes: Sizes, x: Tensor) -> Callable[[Tensor, slice], Tensor]:
    """Return `frame_stack` for a frame of the rows x."""
    angle = torch.arange(sizes.positions * sizes.head_dim, device=x.device).view(sizes.positions, -1) / 100
    return frame_stack(model.layers, model.norm, angle.cos(), angle.sin(), x)


def frame(model: nn.Module, sizes: Sizes, streams: int) -> Tensor:
    """Return the results of all passes of a frame [passes, B, D]. All read the same inputs."""
    inputs = random(streams, sizes.positions, sizes.hidden, dtype=torch.bfloat16)
    run = started(model, sizes, inputs)
    first = run(inputs[:, :2], slice(0, 2))
    others = (run(inputs[:, at : at + 1], slice(at, at + 1)) for at in range(2, sizes.positions))
    return torch.stack((first, *others))


def one_token(model: nn.Module, sizes: Sizes, x: Tensor) -> Tensor:
    """Return the result of the last pass of a frame whose other positions are undefined: x [B, 1, D] -> [B, D]"""
    return started(model, sizes, x)(x, slice(sizes.positions - 1, sizes.positions))


def one_pass(model: nn.Module, sizes: Sizes, streams: int) -> Callable[[], Tensor]:
    """Return a function that runs the last pass of a frame."""
    x = random(streams, 1, sizes.hidden, dtype=torch.bfloat16)
    run = started(model, sizes, x)
    return lambda: run(x, slice(sizes.positions - 1, sizes.positions))


def recorded_us(run: Way) -> float:
    """Return the us of a function in a recorded graph."""
    return round(choices.time_us(recorded(run)), 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "families", nargs="*", metavar="FAMILY", help=f"{', '.join(PUBLISHED)} (default: all)"
    )
    options = parser.parse_args()
    names = options.families or list(PUBLISHED)
    if unknown := set(names) - set(PUBLISHED):
        parser.error(f"{', '.join(sorted(unknown))} has no code predictor; possible: {', '.join(PUBLISHED)}")

    def put(name: str, value: object) -> None:
        print(f"{name}: {value}", flush=True)

    wrong = stacks(put, lambda _: nullcontext(), names, tuple(WAYS), STREAMS)
    for name in names:
        layer_by_layer(put, name)
    sys.exit("\n".join(f"differs from the plain operator: {what}" for what in wrong) or 0)


if __name__ == "__main__":
    main()
