"""`zoo warm`: fill the compile cache ahead of time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from compile_cache.artifacts import Entry
from compile_cache.counts import counts
from serving.engine.device.prepare_for_host import cache_place, cached, prepare_for_host
from serving.engine.engine import Engine
from serving.engine.loading import load, sizes
from serving.settings import Settings
from zoo.contract import Family


def warm(
    settings: Settings, progress: Callable[[float, str], None] = lambda fraction, stage: None
) -> list[dict[str, Any]]:
    """Warm up like a server with these settings, and keep the compiled code. Returns the counts and times of
    each model. Raises ValueError."""
    began_s = time.perf_counter()
    how = settings.model
    max_slots, kv_memory_bytes = sizes(settings)
    families = load(settings.models, how.device, how.dtype, progress, chunked=how.chunked)
    prepare_for_host(*families.values(), weights=how.weights, depth=how.depth)
    engine = Engine(
        families,
        max_slots=max_slots,
        kv_memory_bytes=kv_memory_bytes,
        policy=settings.latency.policy,
        is_deterministic=how.deterministic,
        codec=how.codec,
        attention=how.attention,
    )
    load_s = time.perf_counter() - began_s
    made = []

    @contextmanager
    def counted(family: Family[Any]) -> Iterator[Entry]:
        before = counts()
        began_s = time.perf_counter()
        place = cache_place(family)
        with cached(family) as entry:
            yield entry
        new = counts() - before
        made.append(
            {
                "family": family.spec.family,
                "variant": family.spec.variant,
                "device": str(family.device),
                "dtype": str(family.dtype).removeprefix("torch."),
                "threads": torch.get_num_threads(),
                "cache": str(place),
                "graphs": new.graphs,
                "found": new.found,
                "compiled": new.compiled,
                "load_s": load_s,
                "warm_s": time.perf_counter() - began_s,
            }
        )

    engine.warm(progress, counted)
    return [{"model": name} | result for name, result in zip(families, made, strict=True)]
