"""What a codec on a second GPU would gain, predicted from launches that were measured on an H200.

    python -m benchmarks.split_codec

A device that takes the steps of all streams, and renders what they make, needs s + r seconds for it. With a
second device for the renders, the slower part decides: the gain is (s + r) / max(s, r), never more than 2.
Copies between the devices are not counted. Two replicas gain 2.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "2026-11-23-h200-published-sizes.json"


def measured(figures: dict[str, Any], name: str) -> dict[tuple[int, ...], float]:
    """Return the milliseconds of launches by the numbers in their names."""
    found = (re.fullmatch(rf"{name} ([\d ]+), ms", key) for key in figures)
    return {tuple(map(int, match[1].split())): figures[match[0]] for match in found if match}


def parts(figures: dict[str, Any]) -> tuple[int, float, float]:
    """Return the most streams that were measured, and the milliseconds of steps and of renders for a frame of
    each. Renders are of the window that costs least per frame."""
    steps = measured(figures, "step")
    streams = max(steps)[0]
    each_ms = min(took / (rows * frames) for (rows, frames, *_), took in measured(figures, "render").items())
    return streams, steps[streams,], streams * each_ms


def main() -> None:
    rows: dict[str, tuple[int, float, float]] = {}
    sections = json.loads(RESULT.read_text()).values()
    for section in filter(lambda each: isinstance(each, dict), sections):
        for name, figures in section.items():
            if name.startswith("figures=") and measured(figures, "step") and measured(figures, "render"):
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
