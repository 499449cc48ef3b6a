"""Measure the host's work per step by the number of running requests: everything but the lowered calls.

    python benchmarks/host.py DIR [--slots 1 2 4 8 16] [--steps 150]

Times are CPU times of the engine's thread, so other processes do not count. The engine's clock is that time,
too: on a busy machine's clock, listeners would be at risk, and get more and smaller windows. A step includes
scheduling, page tables, launching, reading reports and delivering audio. The state is steady: no request
starts or ends.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

from torch import Tensor

import zoo
from serving.engine.device.runner import Runner
from serving.engine.engine import Engine
from zoo.contract import Family, State
from zoo.request import Request

SETTLED = 40  # steps before the clock starts: prompts, first audio


class Launches:
    """The CPU time that the thread spends inside a runner's launches, and how many of them are renders."""

    def __init__(self, runner: Runner):
        self.spent_s = 0.0
        self.num_renders = 0
        runner.observer, runner.timer = self, time.thread_time

    def __call__(self, event: str, rows: int, seconds: float) -> None:
        self.spent_s += seconds
        self.num_renders += event == "render"


def without_end(family: Family[Any]) -> Family[Any]:
    """Return the family with an `emit` that never ends a request."""
    emit = family.emit

    def emit_on(state: State, slots: Tensor, h: Tensor) -> None:
        emit(state, slots, h)
        state.done[slots] = False

    family.emit = emit_on
    return family


def host_ms(family: Family[Any], slots: int, policy: str, steps: int) -> tuple[float, float]:
    """Return the milliseconds of host work per step with `slots` running requests, and the renders per
    step."""
    engine = Engine(family, max_slots=slots, policy=policy, compile=False, clock=time.thread_time)
    [model] = engine.models.values()
    launches = Launches(model.runner)
    voice = family.spec.voices[0] if family.spec.voices else None
    for line in range(slots):
        asked = Request(
            text="one two three four five", voice=voice, seed=line, max_frames=SETTLED + steps + 60
        )
        engine.speak(str(line), asked, lambda event: None)
    for _ in range(SETTLED):
        engine.turn()
    spent_s, num_renders, began = launches.spent_s, launches.num_renders, time.thread_time()
    for _ in range(steps):
        engine.turn()
    took_s = time.thread_time() - began
    assert len(model.running) == slots, (
        f"only {len(model.running)} of {slots} requests are still running; they ended too early to measure"
    )
    host_s = took_s - (launches.spent_s - spent_s)
    return 1e3 * host_s / steps, (launches.num_renders - num_renders) / steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    family = without_end(zoo.load(options.directory, device="cpu", dtype="float32"))
    for policy in ("streaming", "throughput"):
        first = None
        for slots in options.slots:
            ms, renders = min(host_ms(family, slots, policy, options.steps) for _ in range(3))
            first = first or ms
            facts = f"host {ms:.3f} ms a step  {ms / first:.2f}x  {renders:.2f} renders a step"
            print(f"{policy:10} {slots:3} slots  {facts}", flush=True)


if __name__ == "__main__":
    main()
