"""Count how much this process has compiled, and how much it found in the cache. It reads the counters of
Dynamo, Inductor and saved.py."""

from __future__ import annotations

from dataclasses import dataclass

from torch._dynamo.utils import counters

from compile_cache.saved import Counted


@dataclass(frozen=True)
class Counts:
    """The counters of compilation.

    graphs: functions that were traced, which takes seconds each even if the cache has their kernels.
    found, compiled: saved functions, and the kernels of other functions.
    """

    graphs: int
    found: int
    compiled: int

    def __sub__(self, before: Counts) -> Counts:
        return Counts(self.graphs - before.graphs, self.found - before.found, self.compiled - before.compiled)


def counts() -> Counts:
    """Return the counts since the process began."""
    inductor, aot = counters["inductor"], counters["aot_autograd"]
    return Counts(
        counters["stats"]["unique_graphs"],
        Counted.found + inductor["fxgraph_cache_hit"] + aot["autograd_cache_hit"],
        Counted.compiled + inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"],
    )
