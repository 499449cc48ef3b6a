"""Run a family's step, prefill and render over fake tensors, through the server's own runner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import fields, replace
from itertools import product
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.rehearsal.launches import Log, Recorder
from compile_cache.artifacts import Entry
from compile_cache.graphs import Graphs
from compile_cache.strategy import Eager, Parts
from serving.engine.device.arena import Arena
from serving.engine.device.launches import Chunk, Render
from serving.engine.device.page_table import INT
from serving.engine.device.runner import Runner
from serving.engine.device.warmup import tf32, warm_mixed, warm_prefill, warm_render, warm_step
from serving.engine.memory.memory_plan import usual_kv_bytes
from zoo.contract import NEVER, Batch, Family, Lane, View
from zoo.request import AudioClip

SPEECH_HZ = 16_000  # of what a user says


class Rehearsed(Runner):
    """A runner that counts its launches. Each happens as it would be recorded, but none is recorded."""

    def __init__(
        self,
        family: Family[Any],
        slots: Sequence[int],
        context: int,
        log: Log,
        codec: str,
        is_largest_window: bool,
        memory: int = 1,
        uncompiled: Collection[str] = (),
    ):
        """memory: how many times the usual KV memory there is; uncompiled: places of parts of a render that run as
        they are written."""
        kv_memory_bytes = memory * usual_kv_bytes(family, max(slots))
        render = family.strategy.gpu_render
        if isinstance(render, Parts):
            compiled = tuple(part for part in render.parts if part.place not in uncompiled)
            family.strategy = replace(family.strategy, gpu_render=Parts(compiled))
        super().__init__(family, max(slots), Arena([family], kv_memory_bytes), codec=codec)
        self.context, self.log = context, log
        window = family.spec.window
        self.windows, self.lengths = window.sizes, window.lengths or (0,)
        if is_largest_window:
            self.windows, self.lengths = (max(self.windows),), (max(self.lengths),)
        self.sizes.buckets = self.sizes.mixed_buckets = self.sizes.render_batches = sorted(slots)
        self.plain = self.lowered.step, self.lowered.prefill, self.lowered.render
        self.mixed_plainly = self.lowered.mixed
        self.lowered.step, self.lowered.prefill = self.launch_step, self.launch_prefill
        self.lowered.mixed = self.launch_mixed
        self.lowered.render = self.launch_render
        # during a count, by shape: the logged events, and the output
        self.renders: dict[tuple[int, int, int], tuple[list[Counter[Any]], tuple[Tensor, ...]]] = {}

    def launch_step(self, batch: Batch) -> tuple[Tensor]:
        with self.log.of("recorded"):
            return self.plain[0](_own(batch))

    def launch_mixed(self, batch: Batch) -> tuple[Tensor]:
        with self.log.of("recorded"):
            return self.mixed_plainly(_own(batch))

    def launch_prefill(self, inputs: Tensor, batch: Batch) -> tuple[()]:
        with self.log.of("recorded"):
            return self.plain[1](_own_tensor(inputs), _own(batch))

    def launch_render(self, view: View) -> tuple[Tensor, ...]:
        """Launch a render; count a second launch of the same shape without running it.

        Many slots are rendered by several launches of one shape. On a device the second one replays what the
        first one recorded."""
        shape = len(view.slots), view.frames, view.length
        if shape in self.renders:
            counted, out = self.renders[shape]
            self.log.repeat(counted)
            return out
        before = self.log.counted()
        with self.log.of("recorded"), tf32(self.codec != "float32"):
            out = self.plain[2](_own(view))
        self.renders[shape] = [now - past for now, past in zip(self.log.counted(), before, strict=True)], out
        return out

    def lower(self, parts: Collection[str], entry: Entry) -> None:
        """Compile what the server's warm-up compiles, or take it from an entry of the cache."""
        self.lowered.keep_in(entry, self.codec)
        names = ("step", "mixed", "prefill", "render")
        ways = self.lowered.how[:1] + self.lowered.how
        step, mixed, prefill, render = (
            how != Eager() and part in parts for part, how in zip(names, ways, strict=True)
        )
        with mock.patch.object(Graphs, "record", lambda graphs, key, launch: launch()):
            if step:
                warm_step(self)
            if mixed:
                warm_mixed(self)
            if prefill:
                warm_prefill(self)
            for frames, length in product(self.windows, self.lengths) if render else ():
                warm_render(self, frames, length)

    def count_step(self, num_slots: int) -> None:
        """Count one step of `num_slots` slots with `context` positions in each lane, of which all are open."""
        self.table.opens_at[:] = self.context
        self._count(lambda: self.step(np.arange(num_slots)), num_slots, self.context)

    def count_prefill(self, tokens: Sequence[int]) -> None:
        """Count one launch that fills the given number of positions of each prompt. A second lane that opens late
        is filled from pages that all requests share."""
        chunks = self._chunks(range(len(tokens)), tokens)
        self._count(lambda: self.prefill(chunks), len(tokens), 0)

    def count_mixed(self, num_slots: int, tokens: Sequence[int]) -> None:
        """Count a step as of `count_step` that also fills the given number of positions of the last slots' prompts. They
        end where the other slots are."""
        first = num_slots - len(tokens)
        chunks = self._chunks(range(first, num_slots), tokens)
        self.table.opens_at[:first] = self.context
        self.table.opens_at[first:] = NEVER
        kv_lens = np.full_like(self.kv_lens, self.context)
        for chunk in chunks:
            kv_lens[self.table.sequence(chunk.slot, chunk.lane)] -= chunk.stop
        self._count(lambda: self.mixed(np.arange(num_slots), chunks), num_slots, kv_lens)

    def _chunks(self, slots: Iterable[int], tokens: Sequence[int]) -> list[Chunk]:
        inputs = torch.zeros(max(tokens), self.family.spec.width, dtype=self.family.dtype, device=self.device)
        lane = Lane(inputs, (), torch.zeros(max(tokens), dtype=torch.bool, device=self.device))
        lanes = range(1 if self.family.spec.opens_late else self.family.spec.lanes)
        each = list(zip(slots, tokens, strict=True))
        for slot, _ in each:
            self.prompts[slot] = (lane,) * len(lanes)
        return [Chunk(slot, 0, count, True, n) for slot, count in each for n in lanes]

    def count_render(self, num_slots: int, frames: int, length: int = 0) -> None:
        """Count one window of `frames` frames for `num_slots` slots, in a length bucket."""
        start, count = np.zeros(num_slots, INT), np.full(num_slots, frames, INT)
        due = Render(np.arange(num_slots), start, count, np.zeros(num_slots, bool), frames, 0.0, length)
        self._count(lambda: self.render(due), num_slots, self.context)

    def count_listen(self, seconds: float) -> None:
        """Count the encoder of one clip."""
        samples = np.random.default_rng(0).uniform(-0.5, 0.5, int(seconds * SPEECH_HZ)).astype(np.float32)
        listener = self.family.writer.ear
        self._count(lambda: listener.encode(AudioClip(samples, SPEECH_HZ)), 1, 0)

    def _count(self, launch: Callable[[], Any], num_slots: int, kv_lens: int | np.ndarray) -> None:
        """kv_lens: of each sequence, before the launch."""
        row_bytes = self.family.spec.kv.row_values * self.family.dtype.itemsize
        self.log.kv = self.kv
        self.log.live_kv_bytes = 2 * num_slots * self.family.spec.lanes * self.context * row_bytes
        self.kv_lens[:] = kv_lens
        self.log.clear()
        self.renders.clear()
        with Recorder(self.log):
            launch()


Inputs = TypeVar("Inputs", Batch, View)


def _own(inputs: Inputs) -> Inputs:
    """Return the same inputs with tensors that are not views.

    Dynamo asks for the base of a view unless the view was created in inference mode, which is true on a
    device but never for fake tensors."""
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
