"""More processes that compile for a part of device.py, so that its start takes as long as its longest stage.

    the part        step ────────────────────────────┐  the others: found in Inductor's cache, which all
    compilers       mixed step ── end                │  of them share
                    prefill ── end                   │
                    each window of a render ── end   │

A start compiles its stages one after the other, and each spends most of its time in one thread. Every compiler loads
the model, warms one stage as a server does, and ends. It needs --cache-dir; a stage that an earlier call has compiled
only costs its processor time.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from compile_cache.strategy import Parts
from serving.engine.device.runner import Runner
from serving.engine.device.warmup import stages

NICE = "5"  # the part itself goes first


@contextmanager
def beside(count: int, checkpoint: Path) -> Iterator[None]:
    """Run `count` compilers for the part of this process, which was given `checkpoint`, until the context ends."""
    command = ["nice", "-n", NICE, sys.executable, *sys.argv, "--checkpoint", str(checkpoint), "--compiler"]
    processes = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.DEVNULL) for i in range(count)
    ]  # in this process's group, with which they are stopped and killed
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@torch.inference_mode()  # as the warm-up: a graph for gradients would be another one
def compile_stage(runner: Runner, index: int) -> str | None:
    """Warm stage `index` of those behind the step and return its name. Windows that share their code are warmed once,
    by the first one, for whose sizes that code is laid out. Returns None if there is no such stage."""
    _, *later = stages(runner)
    prompts = [each for each in later if not each[0].startswith("render")]
    renders = later[len(prompts) :]
    shares = isinstance(runner.lowered.how[2], Parts)
    order = [*reversed(prompts), *(renders[:1] if shares else renders)]
    if index >= len(order):
        return None
    name, stream, stage = order[index]
    with stream.here():
        stage()
    return name
