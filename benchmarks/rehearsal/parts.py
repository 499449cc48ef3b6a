"""A family's step, prefill and render over fake tensors, through the server's own runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.rehearsal.launches import Log, Recorder
from compile_cache.strategy import Eager, Lowering
from serving.engine.engine import usual_kv_bytes
from serving.engine.runner import INT, Arena, Runner
from serving.engine.scheduler import Chunk, Render
from serving.engine.warmup import spare_batch
from zoo.contract import Batch, Family, Lane


class Rehearsed(Runner):
    """A runner whose launches are counted."""

    def __init__(self, family: Family[Any], num_slots: int, context: int, log: Log):
        super().__init__(family, num_slots, Arena([family], usual_kv_bytes(family, num_slots)))
        self.context, self.log = context, log

    def launch_step(self, batch: Batch) -> None:
        super().launch_step(_own(batch))

    def lower_step(self, num_slots: int) -> None:
        """As the warm-up does, for the sizes that it marks."""
        self.launch_step(spare_batch(self, self.lowerings[0], num_slots, 1))

    def count_step(self, num_slots: int) -> None:
        """One step of so many slots, each with `context` positions."""
        self._count(lambda: self.step(np.arange(num_slots)), self.lowerings[0], num_slots, self.context)

    def count_prefill(self, tokens: Sequence[int]) -> None:
        """One launch that fills so many positions of each of these prompts."""
        inputs = torch.zeros(max(tokens), self.family.spec.width, dtype=self.family.dtype, device=self.device)
        lane = Lane(inputs, (), torch.zeros(max(tokens), dtype=torch.bool, device=self.device))
        lanes = range(self.family.spec.lanes)
        for slot in range(len(tokens)):
            self.prompts[slot] = (lane,) * len(lanes)
        chunks = [Chunk(slot, 0, count, True, n) for slot, count in enumerate(tokens) for n in lanes]
        self._count(lambda: self.prefill(chunks), self.lowerings[1], len(tokens), 0)

    def count_render(self, num_slots: int, frames: int, length: int = 0) -> None:
        """One window of `frames` frames of so many slots, in a length bucket."""
        start, count = np.zeros(num_slots, INT), np.full(num_slots, frames, INT)
        due = Render(np.arange(num_slots), start, count, np.zeros(num_slots, bool), frames, length)
        self._count(lambda: self.render(due), self.lowerings[2], num_slots, self.context)

    def _count(self, launch: Callable[[], Any], lowering: Lowering, num_slots: int, context: int) -> None:
        row_bytes = self.family.spec.kv.row_values * self.family.dtype.itemsize
        self.log.kv = self.kv
        self.log.live_kv_bytes = 2 * num_slots * self.family.spec.lanes * self.context * row_bytes
        if not isinstance(lowering, Eager):
            self.kv_lens[:] = context
            launch()  # what is compiled now is not counted
        self.kv_lens[:] = context
        self.log.clear()
        with Recorder(self.log):
            launch()


def _own(batch: Batch) -> Batch:
    """The same launch, of tensors that are nobody's views. Dynamo asks what a view is a view of, unless it
    was made in inference mode, as it is on a device; fake tensors never are."""

    def own(value: Tensor) -> Tensor:
        tensor = torch.empty_like(value)
        for name, mark in vars(value).items():
            if name.startswith("_dynamo"):
                setattr(tensor, name, mark)
        return tensor

    given = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name != "kv"}
    tensors: dict[str, Any] = {name: own(value) for name, value in given.items() if isinstance(value, Tensor)}
    return replace(batch, **tensors)
