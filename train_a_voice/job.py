"""A training run that may be killed at any moment and continues from its last checkpoint with the same steps.

It keeps a log of JSON lines, and pauses while a file exists.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

CHECKPOINT_S = 240.0
PAUSE_S = 2.0


class Job:
    def __init__(self, directory: Path, pause_file: Path | None):
        directory.mkdir(parents=True, exist_ok=True)
        self.checkpoint, self.log_path, self.pause_file = (
            directory / "job.pt",
            directory / "log.jsonl",
            pause_file,
        )
        self.saved_at_s = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        if not self.checkpoint.exists():
            return None
        return torch.load(self.checkpoint, weights_only=True)

    def save(self, state: dict[str, Any]) -> None:
        """Save atomically: a reader finds the old file or the new one."""
        part = self.checkpoint.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, self.checkpoint)
        self.saved_at_s = time.monotonic()

    def is_due(self) -> bool:
        return time.monotonic() - self.saved_at_s > CHECKPOINT_S

    def rest(self) -> None:
        """Wait while the pause file exists."""
        while self.pause_file is not None and self.pause_file.exists():
            time.sleep(PAUSE_S)

    def log(self, **values: Any) -> None:
        rounded = {
            name: round(value, 5) if isinstance(value, float) else value for name, value in values.items()
        }
        with open(self.log_path, "a", encoding="utf-8") as file:
            file.write(json.dumps(rounded) + "\n")


class Meter:
    """Means of added values, logged every `every` steps with the run's CPU seconds."""

    def __init__(self, job: Job, every: int, cpu_s: float):
        self.job, self.every, self.cpu_s = job, every, cpu_s
        self.began_s = time.process_time()
        self.values: dict[str, list[float]] = {}

    def add(self, step: int, **values: Tensor) -> None:
        for name, value in values.items():
            self.values.setdefault(name, []).append(float(value.detach()))
        if step % self.every == 0:
            means = {name: sum(seen) / len(seen) for name, seen in self.values.items()}
            self.job.log(step=step, cpu_s=self.count(), time=time.time(), **means)
            self.values.clear()

    def count(self) -> float:
        """Return the CPU seconds so far."""
        now_s = time.process_time()
        self.cpu_s += now_s - self.began_s
        self.began_s = now_s
        return self.cpu_s


class Average:
    """A running average of a module's parameters over about 1 / (1 - decay) steps, fewer at the start.

    It sounds almost like a run whose learning rate has fallen to zero."""

    def __init__(self, module: nn.Module, decay: float):
        self.parameters = dict(module.named_parameters())
        self.values = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.decay = decay

    @torch.no_grad()
    def update(self, step: int) -> None:
        weight = max(1 - self.decay, 1 / (step + 9))
        values: list[Tensor] = list(self.values.values())
        torch._foreach_lerp_(values, list(self.parameters.values()), weight)


@dataclass(frozen=True)
class Schedule:
    """A learning rate that rises over `warmup` steps and then stays, so a run can continue as long as there
    is time.

    A run with an `end` may reduce it linearly, almost to zero, over its last `anneal` steps."""

    peak: float
    warmup: int
    end: int | None = None
    anneal: int = 0

    def rate(self, step: int) -> float:
        rate = self.peak * min(1.0, (step + 1) / self.warmup)
        if self.end is not None and self.anneal:
            rate *= min(1.0, max(0.02, (self.end - step) / self.anneal))
        return rate

    def goes_on(self, step: int) -> bool:
        return self.end is None or step < self.end


def keep(
    job: Job, module: nn.Module, optimiser: torch.optim.Optimizer, average: Average, step: int, cpu_s: float
) -> None:
    job.save(
        {
            "step": step,
            "cpu_s": cpu_s,
            "module": {name: p.detach() for name, p in module.named_parameters()},
            "average": average.values,
            "optimiser": optimiser.state_dict(),
        }
    )


@torch.no_grad()
def resume(
    job: Job, module: nn.Module, optimiser: torch.optim.Optimizer, average: Average
) -> tuple[int, float]:
    """Return the finished steps and their CPU seconds."""
    state = job.load()
    if state is None:
        return 0, 0.0
    for name, parameter in module.named_parameters():
        parameter.copy_(state["module"][name])
        average.values[name].copy_(state["average"][name])
    optimiser.load_state_dict(state["optimiser"])
    return state["step"], state["cpu_s"]


Losses = dict[str, Tensor]


def train(
    job: Job,
    module: nn.Module,
    optimiser: torch.optim.Optimizer,
    schedule: Schedule,
    decay: float,
    log_every: int,
    compute: Callable[[int], tuple[Tensor, Losses]],
) -> None:
    """Continue from the job's checkpoint until the schedule ends or the process is killed.

    compute: from a step's number to its loss and the values to log."""
    average = Average(module, decay)
    step, cpu_s = resume(job, module, optimiser, average)
    meter = Meter(job, log_every, cpu_s)
    while schedule.goes_on(step):
        job.rest()
        for group in optimiser.param_groups:
            group["lr"] = schedule.rate(step)
        torch.manual_seed(step)
        loss, values = compute(step)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        step += 1
        average.update(step)
        meter.add(step, **values)
        if job.is_due() or not schedule.goes_on(step):
            keep(job, module, optimiser, average, step, meter.count())
