"""CUDA graphs: a launch recorded once and replayed as a whole. On a CPU, the launch itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

Launch = Callable[[], tuple[Tensor, ...]]


class Graphs:
    """Recorded launches by key, and where each leaves its results. They share one memory pool, so record the
    largest first, and record and replay on one stream, one after the other."""

    def __init__(self, device: torch.device):
        self.device = device
        self.recorded: dict[Hashable, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.misses = 0

    def record(self, key: Hashable, launch: Launch) -> None:
        """Run `launch` until it is warm, then record it, on the current stream. It must read and write tensors that stay
        where they are."""
        for _ in range(2):
            launch()
        if self.device.type != "cuda":
            return
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        # On a stream of its own: matrix products keep a workspace for each stream that they are recorded on, and torch's
        # usual one would give launches that run side by side the same.
        stream = torch.cuda.current_stream(self.device)
        with torch.cuda.graph(graph, pool=self.pool, stream=stream):
            results = launch()
        self.recorded[key] = graph, results

    def run(self, key: Hashable, launch: Launch) -> tuple[Tensor, ...]:
        """Replay what was recorded under `key`; where nothing was, run `launch` (on a GPU that is counted as
        a miss). -> its results; of a replay they lie where the next one will write."""
        recorded = self.recorded.get(key)
        if recorded is not None:
            graph, results = recorded
            graph.replay()
            return results
        self.misses += self.device.type == "cuda"
        return launch()
