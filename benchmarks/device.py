"""Everything that a machine with a GPU is needed for, in one call: checks, then figures, then one result file.

    python benchmarks/device.py --out RESULT.json [--size 1.7b] [--streams 1 16 64] [--frames 100]

Checks, on a tiny checkpoint: greedy fp32 codes on the device equal the CPU's; what is compiled and recorded equals the plain loop; alone
equals batched, with sampling on; bf16 runs. Then `serving.bench` at a published size with random weights (time does not depend on the
values), with and without recorded launches. It needs torch 2.11 or newer, numpy, safetensors, einops and tokenizers, and no network; it
runs on a CPU too (`--size tiny`), where the checks compare the CPU with itself.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch

import zoo
from serving.bench import bench
from serving.engine import Audio, Engine
from serving.fit import fit
from zoo.qwen3_tts import demo

TEXTS = ("Good morning.", "The quick brown fox jumps over the lazy dog.", "It is a quarter to eight, and the train leaves now.")


def requests(temperature: float | None) -> list[zoo.Request]:
    return [zoo.Request(text=text, voice="ryan", seed=i, temperature=temperature, max_frames=40) for i, text in enumerate(TEXTS)]


def together(family: zoo.Family, work: list[zoo.Request], compile: bool) -> list[np.ndarray]:
    """All at once through the engine -> each one's samples."""
    engine = Engine(family, max_slots=4, compile=compile)
    engine.warm(lambda *_: None)
    heard: list[list[np.ndarray]] = [[] for _ in work]
    for i, request in enumerate(work):
        engine.speak(str(i), request, lambda event, i=i: heard[i].append(event.samples) if isinstance(event, Audio) else None)
    while engine.turn():
        pass
    return [np.concatenate(pieces) for pieces in heard]


def check(device: str) -> dict[str, object]:
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tiny"
        demo.write(path, size="tiny", dtype=torch.float32)
        here, there = zoo.load(path, device="cpu", dtype="float32"), zoo.load(path, device=device, dtype="float32")
        fit(there)
        alone = [zoo.generate(here, request) for request in requests(0)]
        results["greedy_codes_equal_cpu"] = all(
            torch.equal(zoo.generate(there, request).frames, speech.frames) for request, speech in zip(requests(0), alone, strict=True)
        )
        for compile in (False, True):
            work = requests(None)
            batched = together(there, work, compile)
            apart = [zoo.generate(there, request).samples.numpy() for request in work]
            same = [len(a) == len(b) for a, b in zip(apart, batched, strict=True)]
            gap = max(float(np.abs(a - b).max()) for a, b in zip(apart, batched, strict=True) if len(a) == len(b)) if any(same) else None
            results["batched_compiled" if compile else "batched_eager"] = {"lengths_equal": same, "largest_sample_gap": gap}
        half = zoo.load(path, device=device, dtype="bfloat16")
        fit(half)
        results["bf16_frames"] = [len(samples) // half.spec.frame_samples for samples in together(half, requests(None), True)]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--size", default="1.7b", choices=sorted(demo.SIZES))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--frames", type=int, default=100)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result: dict[str, object] = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "size": options.size,
    }

    def stage(name: str, run) -> None:
        """A stage that fails is part of the result; the next one runs all the same, and the exit status tells."""
        print(f"== {name}", flush=True)
        try:
            result[name] = run()
        except Exception:  # whatever a device does, the stages before it and after it are worth keeping
            result[name] = {"error": traceback.format_exc()}
            print(result[name]["error"], file=sys.stderr)  # type: ignore[index]
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")

    stage("checks", lambda: check(device))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / options.size
        demo.write(path, size=options.size)
        for compile in (True, False):
            stage(
                "compiled" if compile else "eager",
                lambda compile=compile: bench(
                    str(path), streams=tuple(options.streams), frames=options.frames, compile=compile, say=partial(print, flush=True)
                ),
            )
    print(json.dumps(result["checks"]))
    sys.exit(any(isinstance(part, dict) and "error" in part for part in result.values()))


if __name__ == "__main__":
    main()
