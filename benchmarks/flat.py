"""Check that a window costs the same anywhere in a long speech: render a tape of many minutes as a server
does.

    python benchmarks/flat.py DIR [--minutes 10] [--dtype float32] [--json]

The tape repeats the frames of a short speech, since its content does not affect the time.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from dataclasses import replace
from typing import Any

import torch

import zoo
from serving.tools.requests import first_request
from zoo.contract import Family, View

PLACES = (0.1, 0.25, 0.5, 0.75, 0.95)  # as a share of the speech
AROUND = 20  # windows in a median


def stretches(family: Family[Any], offset: int, num_frames: int) -> list[tuple[int, int]]:
    """Return (start, count) of the largest windows, on the window's grid."""
    window, cuts, start = family.spec.window, [], 0
    while start < num_frames:
        stop = start + window.sizes[-1]
        on_grid = offset + (stop - offset) // window.grid * window.grid
        stop = min(on_grid, num_frames)
        cuts.append((start, stop - start))
        start = stop
    return cuts


@torch.inference_mode()
def measure(family: Family[Any], minutes: float) -> dict[str, Any]:
    """Time the renderer alone, so that the language model's maximum length does not matter."""
    spec = family.spec
    num_frames = round(60 * minutes * spec.frame_rate_hz)
    prompt = next(family.prompts(first_request(family, max_frames=50)))
    spoken = zoo.generate(family, first_request(family, max_frames=50)).frames
    prompt.max_frames = num_frames
    family.spec = replace(spec, max_frames=num_frames)
    state = family.state(1, num_frames)
    family.admit(state, 0, prompt)
    repeats = -(-num_frames // len(spoken))
    state.tape[0, :num_frames] = spoken.repeat(repeats, *(1,) * (spoken.dim() - 1))[:num_frames]
    state.ready[0] = num_frames
    state.done[0] = True
    took_ms, resident_mib = [], []
    for start, count in stretches(family, prompt.grid_offset, num_frames):
        stop, began = start + count, time.perf_counter()
        fields = (torch.tensor([value]) for value in (0, start, count, stop == num_frames))
        slots, first, frames, is_last = fields
        length = spec.window.length_bucket(stop)
        family.render(state, View(slots, first, frames, is_last, spec.window.bucket(count), length))
        took_ms.append(1000 * (time.perf_counter() - began))
        resident_mib.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return {"windows": len(took_ms), "audio_s": num_frames / spec.frame_rate_hz} | {
        f"at_{place:.0%}": around(took_ms, resident_mib, int(place * len(took_ms))) for place in PLACES
    }


def around(took_ms: list[float], resident_mib: list[float], at: int) -> dict[str, float]:
    near = took_ms[max(0, at - AROUND // 2) : at + AROUND // 2]
    return {"median_ms": round(statistics.median(near), 1), "peak_memory_mib": round(resident_mib[at])}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    family = zoo.load(options.directory, device="cpu", dtype=options.dtype)
    result = {"family": family.spec.family, **measure(family, options.minutes)}
    print(json.dumps(result) if options.json else "\n".join(f"{k}: {v}" for k, v in result.items()))


if __name__ == "__main__":
    main()
