"""CUDA graphs: a launch recorded once and replayed as a whole. On a CPU, the launch itself."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Graphs:
    """Recorded launches by key. They share one memory pool, so record the largest first."""

    def __init__(self, device: torch.device):
        self.device = device
        self.recorded: dict[tuple, torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.misses = 0

    def record(self, key: tuple, launch: Callable[[], None]) -> None:
        """Run `launch` until it is warm, then record it. It must read and write tensors that stay where they
        are."""
        for _ in range(2):
            launch()
        if self.device.type != "cuda":
            return
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            launch()
        self.recorded[key] = graph

    def run(self, key: tuple, launch: Callable[[], None]) -> None:
        """Replay what was recorded under `key`; where nothing was, run `launch` (on a GPU that is counted as
        a miss)."""
        graph = self.recorded.get(key)
        if graph is not None:
            graph.replay()
            return
        self.misses += self.device.type == "cuda"
        launch()
