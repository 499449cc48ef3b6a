"""The part `codec=FAMILY=SIZE` of device.py: one family's codec in each format of `zoo serve --codec`.

    python benchmarks/device_codec.py FAMILY=SIZE      alone; on a CPU the errors only

Weights are random. A model's large files have holes instead of values, so that no gigabytes are written. Of each
format:

    snr_db        the samples of two windows next to those in float32
    times         of two recorded launches, as the server renders, and the slowest kernels (device_launches.py)
    convolutions  of the renders in 16 bits: us of each way, and the largest difference from cuDNN's
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import Tensor

import zoo
from benchmarks import device_launches
from benchmarks.device_kernels import DEVICE, Alone, Put
from compile_cache import choices
from zoo.checkpoint.synthetic import write_tensors
from zoo.nn import row_convolution

SMALL_BYTES = 1 << 30  # of a file that is written with values
ROWS = (12, 64)  # at most, of the largest window and of the smallest
STREAMS = 4  # whose samples are compared
# "tf32 rows" is no option: TF32 with the layout of the formats in 16 bits
FORMS: dict[str, torch.dtype | None] = {
    "float32": None,
    "tf32": None,
    "tf32 rows": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
Convolution = tuple[torch.dtype, torch.Size, torch.Size, int]  # x and weight of the operator, dilation


@torch.inference_mode()
def formats(name: str, size: str, put: Put, alone: Alone) -> None:
    from zoo.checkpoint import synthetic

    with tempfile.TemporaryDirectory() as directory:
        with mock.patch.object(synthetic, "write_tensors", write_small):
            path = zoo.families()[name].write_demo(Path(directory) / size, size, dtype=torch.bfloat16)
        expected = None
        for form, dtype in FORMS.items():
            family = load(path)
            if dtype is not None:
                family.narrow_codec(dtype)
            found: dict[str, Any] = {}
            samples = spoken(family, form != "float32", 8 if size.startswith("tiny") else 1000)
            expected = samples if expected is None else expected
            found["snr_db"] = round(snr_db(samples, expected), 1)
            if form != "float32" and DEVICE == "cuda":
                found |= times(family, put, alone)
            put(form, found)
            del family
            if DEVICE == "cuda":
                torch.cuda.empty_cache()


def write_small(path: Path, shapes: Any, fill: Any, dtype: torch.dtype) -> None:
    """Write a file of random tensors, with holes instead of values if it is large."""
    from benchmarks.rehearsal.shapes import write_holes

    size = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
    (write_holes if size > SMALL_BYTES else write_tensors)(path, shapes, fill, dtype)


def load(path: Path) -> Any:
    """Load a model and fill its codec's weights at random, except those that the checkpoint has values for."""

    family = zoo.load(path, device=DEVICE, dtype="bfloat16")
    noise = torch.Generator(DEVICE).manual_seed(0)
    codec = next(part for part in (getattr(family, name, None) for name in ("codec", "vae")) if part)
    for key, value in [*codec.decoder.named_parameters(), *codec.decoder.named_buffers()]:
        if not value.is_floating_point() or value.any():
            continue
        if key.endswith(("alpha", "norm.weight", "scale.weight")):
            value.fill_(1.0)
        else:
            fan_in = value[0].numel() if value.dim() > 1 else 100
            if ".up." in key and value.dim() > 2:
                fan_in = 2 * len(value)
            value.normal_(0, fan_in**-0.5, generator=noise)
    return family


def spoken(family: Any, is_tf32: bool, codes: int) -> Tensor:
    """Return the samples of STREAMS streams' first windows, the smallest and the largest, on the CPU.

    codes: how many codes there are to choose from."""
    from serving.engine.device.warmup import tf32
    from serving.tools.requests import first_request
    from zoo.contract import View

    window = family.spec.window
    frames = sum(window.sizes) + window.lookahead
    prompt = next(family.prompts(first_request(family, text="A.", max_frames=frames)))
    state = family.state(STREAMS, frames)
    noise = torch.Generator(DEVICE).manual_seed(1)
    for slot in range(STREAMS):
        family.admit(state, slot, prompt)
    if state.tape.is_floating_point():
        state.tape[:STREAMS].normal_(generator=noise)
    else:
        state.tape[:STREAMS].random_(0, codes, generator=noise)
    state.ready[:STREAMS] = frames
    slots, start, made = torch.arange(STREAMS, device=DEVICE), 0, []
    each = torch.ones_like(slots)
    with tf32(is_tf32):
        for count in (window.sizes[0], window.sizes[-1]):
            length = window.length_bucket(start + count)
            view = View(slots, start * each, count * each, each < 0, count, length)
            samples, valid = family.render(state, view)
            made.append(samples[:, : int(valid[0])])
            start += count
    return torch.cat(made, 1).double().cpu()


def snr_db(samples: Tensor, expected: Tensor) -> float:
    error = (samples - expected).square().sum()
    return float(10 * torch.log10(expected.square().sum() / error)) if error else float("inf")


def times(family: Any, put: Put, alone: Alone) -> dict[str, Any]:
    """Record the largest window of few streams and the smallest of many, and time them alone. The ways of a
    convolution are chosen while others use the device, and timed again alone."""
    from serving.engine.device.arena import Arena
    from serving.engine.device.runner import Runner
    from serving.engine.device.warmup import warm_render
    from serving.engine.memory.memory_plan import usual_kv_bytes

    runner = Runner(family, max(ROWS), Arena([family], usual_kv_bytes(family, 1)), codec="float32")
    runner.codec = "tf32"  # of all that is not in rows
    window = family.spec.window
    with (
        tempfile.TemporaryDirectory() as directory,
        choices.kept_in(Path(directory)),
        convolved() as seen,
        runner.streams.renders.here(),
    ):
        for rows, frames in zip(ROWS, (window.sizes[-1], window.sizes[0]), strict=True):
            runner.sizes.render_batches = (min(rows, runner.sizes.rows_of_launch(frames)),)
            warm_render(runner, frames, window.usual_length)
    found: dict[str, Any] = {}
    with alone(put):
        device_launches.times(runner, lambda name, value: found.update({name: value}))
        found["convolutions"] = ways_of(seen)
    return found


@contextmanager
def convolved() -> Iterator[set[Convolution]]:
    """Yield the convolutions over rows that a GPU computes in this context."""
    seen, computed = set[Convolution](), row_convolution.computed

    def noted(way: str, x: Tensor, weight: Tensor, dilation: int) -> Tensor:
        seen.add((x.dtype, x.shape, weight.shape, dilation))
        return computed(way, x, weight, dilation)

    with mock.patch.object(row_convolution, "computed", noted):
        yield seen


def ways_of(seen: set[Convolution]) -> dict[str, dict[str, float]]:
    """Return the us of each way of each convolution, with cold caches, and its largest difference from cuDNN's
    result."""
    found = {}
    noise = torch.Generator(DEVICE).manual_seed(0)
    for dtype, *shapes, dilation in sorted(seen, key=str):
        x, weight = (torch.randn(one, device=DEVICE, generator=noise).to(dtype) for one in shapes)
        weight *= weight[0].numel() ** -0.5
        ways = {
            way: partial(row_convolution.computed, way, x, weight, dilation)
            for way in row_convolution.ways(x.device)
        }
        expected = row_convolution.plain(x, weight, dilation)
        took = {f"{way}, us": round(choices.time_us(one), 1) for way, one in ways.items()}
        gaps = {f"{way}, gap": float((one() - expected).abs().max()) for way, one in ways.items()}
        del gaps[f"{row_convolution.CUDNN}, gap"]
        name = f"{' x '.join(map(str, x.shape))} to {len(weight)}, {weight.shape[1]} taps {dilation} apart"
        found[name] = took | gaps
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="FAMILY=SIZE")
    name, _, size = parser.parse_args().model.partition("=")
    if name not in zoo.families() or not size:
        parser.error(f"FAMILY=SIZE is needed, with one of: {', '.join(zoo.families())}")
    formats(name, size, lambda form, found: print(form, found, flush=True), lambda _: nullcontext())


if __name__ == "__main__":
    main()
