"""Everything that a machine with a GPU is needed for, in one call: checks, then figures, then one result file.

    python benchmarks/device.py --out RESULT.json [--families qwen3_tts voxcpm2 higgs_v3] [--size published] [--streams 1 16 64]

Checks of every family, on a tiny checkpoint: the device's greedy fp32 codes equal the CPU's, or its latents are near them with the same
noise; what is compiled and recorded equals the plain loop; alone equals batched, with sampling on; bf16 runs. Then `serving.tools.bench` at the
published size with random weights (time does not depend on the values), with and without recorded launches. It needs torch 2.11 or newer,
numpy, safetensors, einops and tokenizers, and no network; it runs on a CPU too (`--size tiny`), where the checks compare the CPU with
itself.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
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
from serving.engine.engine import Audio, Engine
from serving.engine.prepare_for_host import prepare_for_host
from serving.tools.bench import bench
from zoo.contract import Spec

PUBLISHED = {"qwen3_tts": "1.7b", "voxcpm2": "full", "higgs_v3": "full"}
TEXTS = ("Good morning.", "The quick brown fox jumps over the lazy dog.", "It is a quarter to eight, and the train leaves now.")


def requests(spec: Spec, temperature: float | None) -> list[zoo.Request]:
    """temperature 0 where there is something to choose; other families' noise is given beside."""
    voice = spec.voices[0] if spec.voices else None
    temperature = None if spec.noise_shape else temperature
    return [zoo.Request(text=text, voice=voice, seed=i, temperature=temperature, max_frames=40) for i, text in enumerate(TEXTS)]


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


def check(name: str, device: str) -> dict[str, object]:
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tiny"
        importlib.import_module(f"zoo.{name}.demo").write(path, size="tiny", dtype=torch.float32)
        here, there = zoo.load(path, device="cpu", dtype="float32"), zoo.load(path, device=device, dtype="float32")
        prepare_for_host(there)
        spec = here.spec
        noise = torch.randn(40, *spec.noise_shape, generator=torch.Generator().manual_seed(0)) if spec.noise_shape else None
        gaps = []
        for request in requests(spec, 0):
            ours, theirs = (zoo.generate(family, request, noise=noise).frames.double() for family in (there, here))
            gaps.append(float((ours - theirs).abs().max()) if ours.shape == theirs.shape else None)
        results["frames_apart_from_cpu"] = gaps  # 0 where frames are codes
        for compile in (False, True):
            work = requests(spec, None)
            batched = together(there, work, compile)
            apart = [zoo.generate(there, request).samples.numpy() for request in work]
            same = [len(a) == len(b) for a, b in zip(apart, batched, strict=True)]
            gap = max(float(np.abs(a - b).max()) for a, b in zip(apart, batched, strict=True) if len(a) == len(b)) if any(same) else None
            results["batched_compiled" if compile else "batched_eager"] = {"lengths_equal": same, "largest_sample_gap": gap}
        half = zoo.load(path, device=device, dtype="bfloat16")
        prepare_for_host(half)
        results["bf16_frames"] = [len(samples) // half.spec.frame_samples for samples in together(half, requests(spec, None), True)]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--families", nargs="+", choices=sorted(PUBLISHED), default=list(PUBLISHED))
    parser.add_argument("--size", default="published", help="one of the demo checkpoints' sizes, or published")
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

    for name in options.families:
        stage(f"{name} checks", partial(check, name, device))
        size = PUBLISHED[name] if options.size == "published" else options.size
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / size
            importlib.import_module(f"zoo.{name}.demo").write(path, size=size)
            for compile in (True, False):
                measure = partial(bench, str(path), streams=tuple(options.streams), frames=options.frames, compile=compile)
                stage(f"{name} {size} {'compiled' if compile else 'eager'}", partial(measure, say=partial(print, flush=True)))
    sys.exit(any(isinstance(part, dict) and "error" in part for part in result.values()))


if __name__ == "__main__":
    main()
