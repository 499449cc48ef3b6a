"""CUDA graphs: record a launch once and replay it as a whole. On a CPU, the launch itself runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

Launch = Callable[[], tuple[Tensor, ...]]


class Graphs:
    """Recorded launches by key, with the tensors that hold their results.

    pool: the memory pool that they share, with all other graphs of their stream. Record the largest first,
    and record and replay in order on that stream.
    """

    def __init__(self, device: torch.device, pool: Any = None):
        self.device = device
        self.pool = pool
        self.recorded: dict[Hashable, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}
        self.misses = 0

    def record(self, key: Hashable, launch: Launch) -> None:
        """Warm up `launch`, then record it on the current stream. Its tensors must keep their addresses."""
        for _ in range(2):
            launch()
        if self.device.type != "cuda":
            return
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        # Matrix products keep a workspace for each stream that they are recorded on. On torch's default
        # capture stream, launches that run at the same time would share one.
        stream = torch.cuda.current_stream(self.device)
        with torch.cuda.graph(graph, pool=self.pool, stream=stream):
            results = launch()
        self.recorded[key] = graph, results

    def run(self, key: Hashable, launch: Launch) -> tuple[Tensor, ...]:
        """Replay the launch recorded under `key`. If there is none, run `launch`; on a GPU this is a miss.

        Returns the results. The next replay overwrites those of a replay.
        """
        recorded = self.recorded.get(key)
        if recorded is not None:
            graph, results = recorded
            graph.replay()
            return results
        self.misses += self.device.type == "cuda"
        return launch()
