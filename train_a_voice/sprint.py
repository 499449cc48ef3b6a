"""A training run of a given time on a device: steps recorded as CUDA graphs, and a rate that falls to zero at
the end.

The learning rate follows the time, so it is down at the end however many steps fit into it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Losses = dict[str, Tensor]
WARMUP = 3  # eager steps before a step is recorded
SAVE_S = 60.0


def pick_device(name: str | None) -> torch.device:
    """Return the named device; by default CUDA if it is available, else the CPU."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' is not available; use --device cpu")
    torch.set_float32_matmul_precision("high")
    return torch.device(name)


class Clock:
    """The share of a run that is over, at the start and in between. It is 1 at `end_s` (time.time()).

    is_further: whether the run trains a finished voice further, also once it is stopped and continued."""

    is_further = False

    def __init__(self, end_s: float, start: float = 0.0, is_further: bool = False):
        self.began_s, self.end_s, self.start = time.time(), end_s, start
        self.is_further = is_further
        assert end_s > self.began_s, f"the run would end {self.began_s - end_s:.0f} s before it begins"

    @property
    def share(self) -> float:
        passed = (time.time() - self.began_s) / (self.end_s - self.began_s)
        return min(1.0, self.start + (1 - self.start) * passed)


class Every:
    """Return True when `seconds` have passed since it last did, and the first time."""

    def __init__(self, seconds: float):
        self.seconds, self.last_s = seconds, 0.0

    def __call__(self) -> bool:
        is_due = time.time() - self.last_s >= self.seconds
        if is_due:
            self.last_s = time.time()
        return is_due


def rate(peak: float, warmup: int, step: int, share: float) -> float:
    """Return the learning rate: up over the first steps, then down along half a cosine to a hundredth."""
    return peak * min(1.0, (step + 1) / warmup) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * share)))


class Step:
    """A training step that may be recorded.

    `compute` reads only tensors that stay in place, and returns the loss and the values to log. The
    optimiser's learning rate is a tensor."""

    def __init__(
        self,
        module: nn.Module,
        optimiser: torch.optim.Optimizer,
        compute: Callable[[], tuple[Tensor, Losses]],
    ):
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.optimiser, self.compute = optimiser, compute
        self.graph: torch.cuda.CUDAGraph | None = None
        self.values: Losses = {}
        self.runs = 0

    def __call__(self, graphs: GraphPool | None) -> Losses:
        """Run the step. Return the values to log: tensors that the next step overwrites."""
        if self.graph is not None:
            self.graph.replay()
        elif graphs is not None and self.runs >= WARMUP:
            self.graph = graphs.record(self._run)
            self.graph.replay()
        else:
            self._run()
        self.runs += 1
        return self.values

    def _run(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        loss, values = self.compute()
        # Detached, or the values would keep the autograd graph alive.
        self.values = {name: value.detach() for name, value in values.items()}
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.optimiser.step()


class GraphPool:
    """CUDA graphs that share memory, because they never run at the same time.

    All work of a run goes to `stream`, recorded or not. A recording may not wait for another stream, and a
    parameter's gradient is accumulated on the stream of its first use."""

    def __init__(self) -> None:
        self.handle, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def record(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.handle, stream=self.stream):
            run()
        return graph


class Log:
    """Sums of logged values on the device. The host waits for them only when a line is written."""

    def __init__(self, path: Path):
        self.path, self.sums, self.count = path, {}, 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self.began_s = time.time()

    sums: dict[str, Tensor]

    def add(self, values: Losses) -> None:
        for name, value in values.items():
            value = value.detach().float()
            self.sums[name] = self.sums[name] + value if name in self.sums else value.clone()
        self.count += 1

    def write(self, **beside: Any) -> None:
        line: dict[str, Any] = {"s": round(time.time() - self.began_s, 1)} | beside
        line |= {name: round(float(value) / self.count, 4) for name, value in self.sums.items()}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
        self.sums, self.count = {}, 0


def save(path: Path, module: nn.Module, step: int, **beside: Any) -> None:
    """Save the parameters in bfloat16, as in a checkpoint, atomically."""
    tensors = {name: p.detach().to("cpu", torch.bfloat16) for name, p in module.named_parameters()}
    part = path.with_suffix(".part")
    torch.save({"step": step, "module": tensors} | beside, part)
    os.replace(part, path)


def optimiser_of(
    parameters: list[nn.Parameter], device: torch.device, weight_decay: float
) -> torch.optim.AdamW:
    is_cuda = device.type == "cuda"
    start = torch.tensor(1e-9, device=device) if is_cuda else 1e-9
    return torch.optim.AdamW(
        parameters, lr=start, betas=(0.9, 0.98), weight_decay=weight_decay, capturable=is_cuda, fused=True
    )


def set_rate(optimiser: torch.optim.Optimizer, value: float) -> None:
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def run(
    module: nn.Module,
    optimiser: torch.optim.Optimizer,
    next_step: Callable[[int, float], Step],
    clock: Clock,
    log: Log,
    path: Path,
    *,
    peak: float,
    warmup: int,
    records: bool,
    log_s: float = 5.0,
    between: Callable[[int, float], dict[str, Any]] | None = None,
    most_steps: int | None = None,
) -> int:
    """Run steps until the clock ends, and return their number.

    next_step: from a step's number and the elapsed share of the run to the step to run. between: called
    before each line of the log; returns further values to log. records: whether steps become CUDA graphs. The
    state is saved every minute and at the end."""
    graphs = GraphPool() if records else None
    step, logged_s, saved_s = 0, time.time(), time.time()
    every = 1  # steps between looks at the clock: the host must not run far ahead of the device
    with contextlib.nullcontext() if graphs is None else torch.cuda.stream(graphs.stream):
        while clock.share < 1 and (most_steps is None or step < most_steps):
            for _ in range(every):
                share = clock.share
                set_rate(optimiser, rate(peak, warmup, step, share))
                log.add(next_step(step, share)(graphs))
                step += 1
            if graphs is not None:
                graphs.stream.synchronize()
                every = 8
            if time.time() - logged_s > log_s:
                extra = between(step, clock.share) if between is not None else {}
                log.write(step=step, rate=rate(peak, warmup, step, clock.share), **extra)
                logged_s = time.time()
            if time.time() - saved_s > SAVE_S:
                save(path, module, step, share=share, is_further=clock.is_further)
                saved_s = time.time()
        save(path, module, step, share=1.0)
        extra = between(step, 1.0) if between is not None else {}
        if log.count:
            log.write(step=step, **extra)
    return step
