"""What launches cost on three devices, for the simulator: two CPUs with two cores each, and an H200.

The CPU figures are a Qwen3-TTS of size mid, about as the log has its launches; those of the H200 are the 1.7B
model, measured (benchmarks/results/2026-11-23-h200-published-sizes.json). CONTEXT: the CPU with a renderer
that reads three frames more than it returns, such as that of Orpheus. COSY: a CosyVoice 2, whose windows lie
on a grid; its launches on the H200 are those of benchmarks/results/2026-11-27-h200-cosyvoice2.json.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from serving.tools.simulate import Cost

# Milliseconds of a render, by frames of the window and then by rows of the launch.
H200_RENDER_MS = {
    25: {2: 3.4, 4: 5.4, 8: 9.4, 12: 13.4},
    4: {2: 1.4, 4: 1.7, 8: 2.3, 16: 3.9, 32: 6.7, 64: 12.5},
    1: {2: 1.1, 4: 1.2, 8: 1.4, 16: 1.8, 32: 2.7, 64: 4.5},
}

COSY_H200_RENDER_MS = {
    25: {2: 24.5, 4: 26.2, 8: 31.9, 16: 42.7, 32: 64.9, 50: 87.8},
    50: {2: 26.2, 4: 30.2, 8: 39.2, 16: 58.4, 25: 79.3},
    100: {2: 30.3, 4: 39.3, 8: 56.0, 12: 74.5},
}


def render_s(table_ms: dict[int, dict[int, float]], rows: int, frames: int) -> float:
    """Return the seconds of a render, which takes several launches where it has more rows than were
    measured."""
    measured_ms = table_ms[frames]
    max_rows = max(measured_ms)
    total_ms = 0.0
    while rows > 0:
        total_ms += measured_ms[next(n for n in measured_ms if n >= min(rows, max_rows))]
        rows -= max_rows
    return total_ms / 1e3


CPU = Cost(
    step_s=lambda slots: 0.026 + 0.003 * slots,
    prefill_s=lambda tokens: 0.010 + 0.0006 * tokens,
    render_s=lambda rows, frames: 0.006 + 0.0055 * rows * frames,
)
SLOW_CPU = Cost(
    step_s=lambda slots: 0.034 + 0.004 * slots,
    prefill_s=lambda tokens: 0.013 + 0.0008 * tokens,
    render_s=lambda rows, frames: 0.008 + 0.0072 * rows * frames,
)
H200 = Cost(
    step_s=lambda slots: 0.0047 + 1.1e-5 * slots,
    prefill_s=lambda tokens: 0.0004,  # predicted: a step with a prompt of 100 positions, and one without
    prefill_alone_s=lambda tokens: 0.0019,
    render_s=partial(render_s, H200_RENDER_MS),
    turn_s=0.001,
    turn_slot_s=2e-5,
)
CONTEXT_CPU = Cost(
    step_s=CPU.step_s,
    prefill_s=CPU.prefill_s,
    render_s=lambda rows, frames: CPU.render_s(rows, 3 + frames),
)
COSY_CPU = Cost(
    step_s=lambda slots: 0.004 + 0.0003 * slots,
    prefill_s=lambda tokens: 0.007 + 0.0002 * tokens,
    render_s=lambda rows, frames: rows * (0.065 + 0.005 * frames),
    turn_s=0.001,
)
COSY_H200 = Cost(
    step_s=lambda slots: 0.00108 + 2e-6 * slots,
    prefill_s=lambda tokens: 0.0002,  # predicted is half of it
    prefill_alone_s=lambda tokens: 0.0013,
    render_s=partial(render_s, COSY_H200_RENDER_MS),
    turn_s=0.0006,
    turn_slot_s=2e-5,
)


def times(cost: Cost, factor: float) -> Cost:
    """Return costs whose launches take `factor` times as long."""
    alone_s = cost.prefill_alone_s or cost.prefill_s
    return replace(
        cost,
        step_s=lambda slots: factor * cost.step_s(slots),
        prefill_s=lambda tokens: factor * cost.prefill_s(tokens),
        prefill_alone_s=lambda tokens: factor * alone_s(tokens),
        render_s=lambda rows, frames: factor * cost.render_s(rows, frames),
    )
