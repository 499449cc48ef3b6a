"""The real engine on a virtual clock, at the costs that counts predict for a card."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from benchmarks.rehearsal.cards import Card
from benchmarks.rehearsal.costs import Counts
from benchmarks.simulated_loads import voice_of
from compile_cache.strategy import Strategy
from serving.engine.device.launches import Chunk, Render
from serving.engine.device.staging import up_to
from serving.tools.simulate import Cost, SimulatedRunner, Simulation, use_gpu_rules

# The host's own seconds a step, and of each stream: Qwen3-TTS on an H200's host
# (benchmarks/results/2026-11-26-h200-128-slots.json).
TURN_S, TURN_STREAM_S = 1.1e-3, 5.6e-5

MIXED_SLOTS = 64  # of the steps that were counted with prompts


class PredictedRunner(SimulatedRunner):
    """A runner whose launches take what `counts` predict: by the number of prompts, and by a render's length."""

    def __init__(self, counts: Counts, seconds: Callable[..., float], *arguments: Any):
        """seconds: of a launch, by its name, rows, frames and length."""
        super().__init__(*arguments)
        self.counts, self.seconds = counts, seconds

    def prefill_s(self, chunks: Sequence[Chunk]) -> float:
        return self.seconds("mixed", len(chunks))

    def prefill_alone_s(self, chunks: Sequence[Chunk]) -> float:
        return self.seconds("prefill", len(chunks))

    def frames_of(self, num_steps: np.ndarray) -> np.ndarray:
        return self.counts.frames(num_steps)

    def render_s(self, due: Render) -> float:
        return self.seconds("render", len(due.slots), due.frames, due.length)


def simulation(counts: Counts, card: Card, num_slots: int, strategy: Strategy) -> Simulation:
    """Return an engine at predicted costs. strategy: the family's, for the sizes of its recorded renders."""

    @cache
    def seconds(name: str, rows: int, frames: int = 0, length: int = 0) -> float:
        if name == "mixed":  # what it takes longer than a step
            return counts.cost(card, name, rows).device_s - counts.cost(card, "step", MIXED_SLOTS).device_s
        return counts.cost(card, name, rows, frames, length).device_s

    def rows_of(frames: int) -> list[int]:
        most = strategy.render_samples // round(frames * counts.frame_s * counts.sample_rate_hz)
        return up_to(max(1, min(num_slots, most)), strategy.render_batches)

    window = counts.window
    length = window.usual_length
    cost = Cost(
        step_s=partial(seconds, "step"),
        prefill_s=lambda tokens: seconds("mixed", 1),
        render_s=lambda rows, frames: seconds("render", rows, frames, length),
        turn_s=TURN_S,
        turn_slot_s=TURN_STREAM_S,
    )
    voice = voice_of(window, counts.frame_s, counts.sample_rate_hz, math.ceil(counts.steps_per_frame))
    runner = partial(PredictedRunner, counts, seconds)
    made = Simulation(voice, cost, True, {"max_slots": num_slots}, make_runner=runner)
    use_gpu_rules(made.model, cost, rows_of)
    return made
