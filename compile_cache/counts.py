"""How often this process has compiled, and how much of it came out of the cache. Dynamo and Inductor count;
this reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch._dynamo.utils import counters


@dataclass(frozen=True)
class Counts:
    """graphs: functions turned into graphs, which costs seconds each even where the code is found; found and
    compiled: their kernels."""

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
        inductor["fxgraph_cache_hit"] + aot["autograd_cache_hit"],
        inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"],
    )
