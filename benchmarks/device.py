"""All that a machine with a GPU is needed for, in one call: checks, then figures, then one result file.

    python benchmarks/device.py --out RESULT.json [--models FAMILY=SIZE ...] [--streams 1 16 64]
    python benchmarks/device.py --out RESULT.json --models qwen3_tts=1.7b voxcpm2=full higgs_v3=full

A SIZE is one of the family's demo checkpoints, with random weights: time does not depend on the values.
Without --models, every family's smallest. Checks of every family, on a tiny checkpoint: the device's greedy
fp32 codes equal the CPU's, or its latents are near them with the same noise; what is compiled and recorded
equals the plain loop; alone equals batched, with sampling on; bf16 runs. Then `serving.tools.bench`, with and
without recorded launches. It needs torch 2.11 or newer, numpy, safetensors, einops and tokenizers, and no
network; it runs on a CPU too, where the checks compare the CPU with itself.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch

import zoo
from serving.engine.engine import Audio, Engine, Event
from serving.engine.prepare_for_host import prepare_for_host
from serving.tools.bench import bench
from serving.tools.requests import first_request

TEXTS = (
    "Good morning.",
    "The quick brown fox jumps over the lazy dog.",
    "It is a quarter to eight, and the train leaves now.",
)


def requests(family: zoo.Family, is_greedy: bool) -> list[zoo.Request]:
    """Greedy where there is something to choose; other families' noise is given beside."""
    temperature = 0.0 if is_greedy and not family.spec.noise_shape else None
    fields = {"temperature": temperature, "max_frames": 40}
    return [first_request(family, text=text, seed=i, **fields) for i, text in enumerate(TEXTS)]


def together(family: zoo.Family, work: list[zoo.Request], compile: bool) -> list[np.ndarray]:
    """All at once through the engine -> each one's samples."""
    engine = Engine(family, max_slots=4, compile=compile)
    engine.warm(lambda *_: None)
    heard: list[list[np.ndarray]] = [[] for _ in work]
    for i, request in enumerate(work):
        engine.speak(str(i), request, partial(hear, heard[i]))
    while engine.turn():
        pass
    return [np.concatenate(pieces) for pieces in heard]


def hear(pieces: list[np.ndarray], event: Event) -> None:
    if isinstance(event, Audio):
        pieces.append(event.samples)


def check(name: str, device: str) -> dict[str, object]:
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as directory:
        path = zoo.families()[name].write_demo(Path(directory) / "tiny", "tiny", dtype=torch.float32)
        here, there = (
            zoo.load(path, device="cpu", dtype="float32"),
            zoo.load(path, device=device, dtype="float32"),
        )
        prepare_for_host(there)
        spec = here.spec
        noise = (
            torch.randn(40, *spec.noise_shape, generator=torch.Generator().manual_seed(0))
            if spec.noise_shape
            else None
        )
        gaps = []
        for request in requests(here, is_greedy=True):
            ours, theirs = (
                zoo.generate(family, request, noise=noise).frames.double() for family in (there, here)
            )
            gaps.append(float((ours - theirs).abs().max()) if ours.shape == theirs.shape else None)
        results["frames_apart_from_cpu"] = gaps  # 0 where frames are codes
        for compile in (False, True):
            work = requests(there, is_greedy=False)
            batched = together(there, work, compile)
            apart = [zoo.generate(there, request).samples.numpy() for request in work]
            same = [len(a) == len(b) for a, b in zip(apart, batched, strict=True)]
            gap = (
                max(
                    float(np.abs(a - b).max())
                    for a, b in zip(apart, batched, strict=True)
                    if len(a) == len(b)
                )
                if any(same)
                else None
            )
            results["batched_compiled" if compile else "batched_eager"] = {
                "lengths_equal": same,
                "largest_sample_gap": gap,
            }
        half = zoo.load(path, device=device, dtype="bfloat16")
        prepare_for_host(half)
        spoken = together(half, requests(half, is_greedy=False), True)
        results["bf16_frames"] = [len(samples) // half.spec.frame_samples for samples in spoken]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True)
    smallest = [f"{name}=tiny" for name in zoo.families()]
    parser.add_argument("--models", nargs="+", metavar="FAMILY=SIZE", default=smallest)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--frames", type=int, default=100)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result: dict[str, object] = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }

    def stage(name: str, run) -> None:
        """A stage that fails is part of the result; the next one runs all the same, and the exit status
        tells."""
        print(f"== {name}", flush=True)
        try:
            result[name] = run()
        except Exception:  # whatever a device does, the stages before it and after it are worth keeping
            result[name] = {"error": traceback.format_exc()}
            print(result[name]["error"], file=sys.stderr)  # type: ignore[index]
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")

    for model in options.models:
        name, size = model.split("=")
        stage(f"{name} checks", partial(check, name, device))
        with tempfile.TemporaryDirectory() as directory:
            path = zoo.families()[name].write_demo(Path(directory) / size, size)
            for compile in (True, False):
                measure = partial(
                    bench, str(path), streams=tuple(options.streams), frames=options.frames, compile=compile
                )
                logged = partial(measure, log_line=partial(print, flush=True))
                stage(f"{name} {size} {'compiled' if compile else 'eager'}", logged)
    sys.exit(any(isinstance(part, dict) and "error" in part for part in result.values()))


if __name__ == "__main__":
    main()
