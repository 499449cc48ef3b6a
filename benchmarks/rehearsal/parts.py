"""A family's step, prefill and render over fake tensors, through the server's own runner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, replace
from itertools import product
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.rehearsal.launches import Log, Recorder
from compile_cache.graphs import Graphs
from compile_cache.strategy import Eager
from serving.engine.launches import Chunk, Render
from serving.engine.memory_plan import usual_kv_bytes
from serving.engine.runner import INT, Arena, Runner
from serving.engine.warmup import tf32, warm_prefill, warm_render, warm_step
from zoo.contract import Batch, Family, Lane, View


class Rehearsed(Runner):
    """A runner whose launches are counted: nothing is recorded, so each happens as it would be recorded."""

    def __init__(self, family: Family[Any], slots: Sequence[int], context: int, log: Log, codec: str):
        kv_bytes = usual_kv_bytes(family, max(slots))
        super().__init__(family, max(slots), Arena([family], kv_bytes), codec=codec)
        self.context, self.log = context, log
        self.buckets = self.render_batches = sorted(slots)
        # of the count that is under way, by shape: what was logged, and what came out
        self.renders: dict[tuple[int, int, int], tuple[list[Counter[Any]], tuple[Tensor, ...]]] = {}

    def launch_step(self, batch: Batch) -> tuple[Tensor]:
        with self.log.of("recorded"):
            return super().launch_step(_own(batch))

    def launch_prefill(self, inputs: Tensor, batch: Batch) -> tuple[()]:
        with self.log.of("recorded"):
            return super().launch_prefill(_own_tensor(inputs), _own(batch))

    def launch_render(self, view: View) -> tuple[Tensor, ...]:
        """Many slots are rendered by several launches of one shape: as on a device, where a recorded one is replayed,
        the second is what the first one was."""
        shape = len(view.slots), view.frames, view.length
        if shape in self.renders:
            counted, out = self.renders[shape]
            self.log.repeat(counted)
            return out
        before = self.log.counted()
        with self.log.of("recorded"), tf32(self.codec == "tf32"):
            out = super().launch_render(_own(view))
        self.renders[shape] = [now - past for now, past in zip(self.log.counted(), before, strict=True)], out
        return out

    def lower(self, parts: Collection[str]) -> None:
        """What the warm-up compiles, as it does."""
        names = ("step", "prefill", "render")
        step, prefill, render = (
            how != Eager() and part in parts for part, how in zip(names, self.lowerings, strict=True)
        )
        window = self.family.spec.window
        with mock.patch.object(Graphs, "record", lambda graphs, key, launch: launch()):
            if step:
                warm_step(self)
            if prefill:
                warm_prefill(self)
            for frames, length in product(window.sizes, window.lengths or (0,)) if render else ():
                warm_render(self, frames, length)

    def count_step(self, num_slots: int) -> None:
        """One step of so many slots, each with `context` positions."""
        self._count(lambda: self.step(np.arange(num_slots)), num_slots, self.context)

    def count_prefill(self, tokens: Sequence[int]) -> None:
        """One launch that fills so many positions of each of these prompts."""
        inputs = torch.zeros(max(tokens), self.family.spec.width, dtype=self.family.dtype, device=self.device)
        lane = Lane(inputs, (), torch.zeros(max(tokens), dtype=torch.bool, device=self.device))
        lanes = range(self.family.spec.lanes)
        for slot in range(len(tokens)):
            self.prompts[slot] = (lane,) * len(lanes)
        chunks = [Chunk(slot, 0, count, True, n) for slot, count in enumerate(tokens) for n in lanes]
        self._count(lambda: self.prefill(chunks), len(tokens), 0)

    def count_render(self, num_slots: int, frames: int, length: int = 0) -> None:
        """One window of `frames` frames of so many slots, in a length bucket."""
        start, count = np.zeros(num_slots, INT), np.full(num_slots, frames, INT)
        due = Render(np.arange(num_slots), start, count, np.zeros(num_slots, bool), frames, 0.0, length)
        self._count(lambda: self.render(due), num_slots, self.context)

    def _count(self, launch: Callable[[], Any], num_slots: int, context: int) -> None:
        row_bytes = self.family.spec.kv.row_values * self.family.dtype.itemsize
        self.log.kv = self.kv
        self.log.live_kv_bytes = 2 * num_slots * self.family.spec.lanes * self.context * row_bytes
        self.kv_lens[:] = context
        self.log.clear()
        self.renders.clear()
        with Recorder(self.log):
            launch()


Inputs = TypeVar("Inputs", Batch, View)


def _own(inputs: Inputs) -> Inputs:
    """The same launch, of tensors that are nobody's views. Dynamo asks what a view is a view of, unless it
    was made in inference mode, as it is on a device; fake tensors never are."""
    given = {field.name: getattr(inputs, field.name) for field in fields(inputs) if field.name != "kv"}
    tensors: dict[str, Any] = {
        name: _own_tensor(one) for name, one in given.items() if isinstance(one, Tensor)
    }
    return replace(inputs, **tensors)


def _own_tensor(value: Tensor) -> Tensor:
    tensor = torch.empty_like(value)
    for name, mark in vars(value).items():
        if name.startswith("_dynamo"):
            setattr(tensor, name, mark)
    return tensor
