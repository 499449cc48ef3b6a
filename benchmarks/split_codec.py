"""What a codec on a second GPU would gain, predicted from launches that were measured on an H200.

    python -m benchmarks.split_codec

A device that takes the steps of all streams, and renders what they make, needs s + r seconds for it. With a
second device for the renders, the slower part decides: the gain is (s + r) / max(s, r), never more than 2.
Copies between the devices are not counted. Two replicas gain 2.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.simulated_gpu import timed

RESULT = Path(__file__).parent / "results" / "2026-11-23-h200-published-sizes.json"


def parts(figures: dict[str, Any]) -> tuple[int, float, float]:
    """Return the most streams that were measured, and the milliseconds of steps and of renders for a frame of
    each. Renders are of the window that costs least per frame."""
    steps = timed(figures, "step")
    streams = max(steps)[0]
    each_s = min(took_s / (rows * frames) for (rows, frames, *_), took_s in timed(figures, "render").items())
    return streams, 1e3 * steps[streams,], 1e3 * streams * each_s


def main() -> None:
    rows: dict[str, tuple[int, float, float]] = {}
    sections = json.loads(RESULT.read_text()).values()
    for section in filter(lambda each: isinstance(each, dict), sections):
        for name, figures in section.items():
            if name.startswith("figures=") and timed(figures, "step") and timed(figures, "render"):
                rows[name.removeprefix("figures=")] = parts(figures)
    for name, (streams, step_ms, render_ms) in rows.items():
        gain = (step_ms + render_ms) / max(step_ms, render_ms)
        share = render_ms / (step_ms + render_ms)
        print(
            f"{name:24} {streams:3} streams  step {step_ms:5.1f} ms  render {render_ms:5.1f} ms ({share:3.0%})  "
            f"gain {gain:.2f}"
        )


if __name__ == "__main__":
    main()
