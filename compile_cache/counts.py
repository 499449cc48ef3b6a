"""How often this process has compiled, and how much of it came out of the cache. Dynamo, Inductor and saved.py count;
this reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch._dynamo.utils import counters

from compile_cache.saved import Counted


@dataclass(frozen=True)
class Counts:
    """graphs: functions turned into graphs, which costs seconds each even where their kernels are found; found and
    compiled: functions that were saved, and the kernels of others."""

    graphs: int
    found: int
    compiled: int

    def __sub__(self, before: Counts) -> Counts:
        return Counts(self.graphs - before.graphs, self.found - before.found, self.compiled - before.compiled)


def counts() -> Counts:
    """Since the process began."""
    inductor, aot = counters["inductor"], counters["aot_autograd"]
    return Counts(
        counters["stats"]["unique_graphs"],
        Counted.found + inductor["fxgraph_cache_hit"] + aot["autograd_cache_hit"],
        Counted.compiled + inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"],
    )
