"""Fill the compile cache before anyone waits for it: `zoo warm`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import zoo
from compile_cache.counts import counts
from serving.engine.engine import Engine
from serving.engine.prepare_for_host import prepare_for_host


def warm(
    model: str,
    *,
    device: str | None = None,
    dtype: str | None = None,
    max_slots: int = 8,
    progress: Callable[[float, str], None] = lambda fraction, stage: None,
) -> dict[str, Any]:
    """Do what a server with the same settings does before it is ready, and keep what was compiled -> what
    that was. Raises ValueError."""
    began_s = time.perf_counter()
    family = zoo.load(model, device=device, dtype=dtype)
    place = prepare_for_host(family)
    engine = Engine(family, max_slots=max_slots)
    loaded_s, before = time.perf_counter(), counts()
    engine.warm(progress)
    made = counts() - before
    return {
        "family": family.spec.family,
        "variant": family.spec.variant,
        "device": str(family.device),
        "dtype": str(family.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "cache": str(place),
        "graphs": made.graphs,
        "found": made.found,
        "compiled": made.compiled,
        "load_s": loaded_s - began_s,
        "warm_s": time.perf_counter() - loaded_s,
    }
