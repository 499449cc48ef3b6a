"""The only file where host meets device: the arena, the slots' state, the launches, and what comes back of
them.

The host counts every position itself, so page tables and lengths never wait for the device. What comes back
is one small report per launch (frames ready, done, text) and the rendered samples; both are asked for when
the launch is made and read a launch later.

A slot's lanes are sequences of their own, in pages of their own, that take every step together.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from compile_cache.graphs import Graphs
from compile_cache.lower import lower
from compile_cache.strategy import Eager
from serving.engine.scheduler import Chunk, Render
from zoo.contract import Batch, Family, Lane, Prompt, View

PAGE_TOKENS = 16  # positions of a page; where models share an arena, of the one with the largest positions
# of a render on a CPU: in larger launches a decoder's layers do not find each other's outputs in the cache
CACHED_SAMPLES = 150_000
INT = np.int64
Observer = Callable[[str, int, float], None]  # "prefill", "step", "render" or "wait"; its rows; its seconds


def row_bytes(family: Family[Any]) -> int:
    """The keys, or the values, of one position in one layer."""
    return family.spec.kv.row_values * family.dtype.itemsize


def token_bytes(family: Family[Any]) -> int:
    """All that one position keeps."""
    return family.spec.kv.token_bytes(family.dtype)


def common_page_bytes(families: Sequence[Family[Any]]) -> int:
    """The size of a page that suits all: PAGE_TOKENS of the largest positions, and up to whole rows of
    everybody's.

    The others get as many of their positions into a page as fit, so less than one position of a page is left
    over, at most a 16th of it.
    Raises ValueError where whole rows of all would more than double the page.
    """
    most, step = (
        max(PAGE_TOKENS * token_bytes(family) for family in families),
        math.lcm(*map(row_bytes, families)),
    )
    size = -(-most // step) * step
    if size > 2 * most:
        rows = ", ".join(f"{family.spec.family} {row_bytes(family)}" for family in families)
        raise ValueError(
            f"no page suits all these models: rows of keys take (bytes) {rows}, so a page of whole rows takes {size}, where {most} are "
            "needed: serve them apart"
        )
    return size


def check_there_is(num_bytes: int, device: torch.device) -> None:
    """Raises ValueError for more memory than the device has, whoever uses it now."""
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > total:
        raise ValueError(f"{num_bytes} bytes of KV memory are more than this machine's {device.type} has: {total}")


class Arena:
    """Pages of bytes on the device. Every family in it reads them as rows of its own keys and values,
    `page_tokens` positions a page.

    Page i is the scratch of family i, which padding writes to. Raises ValueError for a size that leaves no
    other page.
    """

    def __init__(self, families: Sequence[Family[Any]], kv_bytes: int):
        self.families, self.device = tuple(families), families[0].device
        assert all(family.device == self.device for family in families), (
            f"one arena, on {[str(family.device) for family in families]}"
        )
        self.page_bytes = common_page_bytes(families)
        self.num_pages, self.num_scratch = kv_bytes // self.page_bytes, len(families)
        if self.num_pages <= self.num_scratch:
            whose, least = "this model" if len(families) == 1 else "these models", self.num_scratch + 1
            raise ValueError(
                f"{kv_bytes} bytes of KV memory hold no page: a page of {whose} takes {self.page_bytes}, and {least} are the least"
            )
        check_there_is(self.num_pages * self.page_bytes, self.device)
        self.bytes = torch.zeros(self.num_pages * self.page_bytes, dtype=torch.uint8, device=self.device)
        # of what was last written to each page
        self.dtypes: list[torch.dtype | None] = [None] * self.num_pages

    def page_tokens(self, family: Family[Any]) -> int:
        return self.page_bytes // token_bytes(family)

    def page_rows(self, family: Family[Any]) -> int:
        return self.page_bytes // row_bytes(family)

    def rows(self, family: Family[Any]) -> Tensor:
        """-> [rows, H, D], the whole arena in the family's shape."""
        kv = family.spec.kv
        return self.bytes.view(family.dtype).view(-1, kv.num_heads, kv.head_dim)

    def hand_over(self, pages: Sequence[int], family: Family[Any]) -> None:
        """The family will write to these pages. What was written in another dtype is cleared: it may be NaN
        in this one, and attention reads past a sequence's end with a weight of 0, which does not hide a
        NaN."""
        foreign = [page for page in pages if self.dtypes[page] not in (None, family.dtype)]
        if foreign:
            self.bytes.view(self.num_pages, -1).index_fill_(0, torch.tensor(foreign, device=self.device), 0)
        for page in pages:
            self.dtypes[page] = family.dtype


class AsyncCopy:
    """Values that the device was asked for. `read` gives them to the host, and waits only if the device is
    not there yet."""

    def __init__(self, *values: Tensor, observer: Observer | None = None):
        self._event: torch.cuda.Event | None = None
        self._host, self._observer = values, observer
        if values[0].device.type == "cuda":
            self._host = tuple(
                torch.empty(value.shape, dtype=value.dtype, pin_memory=True) for value in values
            )
            for host, value in zip(self._host, values, strict=True):
                host.copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> tuple[np.ndarray, ...]:
        if self._event is not None:
            began_s = time.perf_counter()
            self._event.synchronize()
            if self._observer is not None:
                self._observer("wait", len(self._host[0]), time.perf_counter() - began_s)
        return tuple(value.numpy() for value in self._host)


class Runner:
    """A family on a device with `num_slots` slots, and pages of an arena that has the family in it.

    observer: told of each launch once it returned, and of each wait for the device. What it does to the state
    is in the launch's report. timer: what launches are timed by.
    """

    observer: Observer | None = None
    timer: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(
        self,
        family: Family[Any],
        num_slots: int,
        arena: Arena,
        compile: bool = True,
        is_deterministic: bool = False,
    ):
        self.family, self.num_slots, self.arena, self.device = family, num_slots, arena, family.device
        self.is_deterministic = is_deterministic
        self.kv = arena.rows(family)
        self.page_tokens, self.page_rows = arena.page_tokens(family), arena.page_rows(family)
        self.state = family.state(num_slots)
        self.max_pages = -(-family.spec.max_positions // self.page_tokens)

        # by sequence: the first lane of each slot and of the spare one, then the second lanes; where a
        # sequence has no page stands the family's scratch
        self.scratch = arena.families.index(family) * self.page_rows
        rows, self.lanes = num_slots + 1, np.arange(family.spec.lanes, dtype=INT)[:, None]
        self.page_table = np.full((len(self.lanes) * rows, self.max_pages), self.scratch, INT)
        self.kv_lens = np.zeros(len(self.lanes) * rows, INT)
        self.spares = self.sequences(np.array([self.state.spare], INT))
        self.prompts: dict[int, tuple[Lane, ...]] = {}

        strategy = family.strategy
        self.buckets = [n for n in strategy.batches if n < num_slots] + [num_slots]
        self.graphs = Graphs(self.device)
        self.launch_inputs = LaunchInputs(self.device)
        self.lowerings = (
            (strategy.step, strategy.prefill, strategy.render) if compile else (Eager(), Eager(), Eager())
        )
        step, prefill, render = self.lowerings
        self._step, self._hidden = lower(family.step, step), lower(family.hidden, prefill)
        # One for each length bucket: Dynamo keeps eight graphs of a function at most.
        self._render = {length: lower(family.render, render) for length in family.spec.window.lengths or (0,)}

    # slots

    def sequences(self, slots: np.ndarray) -> np.ndarray:
        """slots [B] -> all lanes of them [L * B], in blocks of B."""
        return (slots + self.lanes * (self.num_slots + 1)).ravel()

    def open(self, slot: int, prompt: Prompt, pages: Sequence[Sequence[int]], skips: Sequence[int]) -> None:
        """A request moves in. Of each lane: its pages, and how many positions they already hold."""
        for sequence, own, skip in zip(self.sequences(np.array([slot])).tolist(), pages, skips, strict=True):
            self.arena.hand_over(own, self.family)
            self.page_table[sequence] = self.scratch
            self.page_table[sequence, : len(own)] = np.asarray(own, INT) * self.page_rows
            self.kv_lens[sequence] = skip
        self.prompts[slot] = tuple(self._marked(lane) for lane in prompt.lanes)
        with torch.inference_mode():
            self.family.admit(self.state, slot, prompt)

    def _marked(self, lane: Lane) -> Lane:
        """The lane, with a mark for each input."""
        if lane.is_audio is not None:
            return lane
        return replace(lane, is_audio=torch.zeros(len(lane.inputs), dtype=torch.bool, device=self.device))

    def close(self, slot: int) -> None:
        self.prompts.pop(slot, None)

    @torch.inference_mode()
    def feed(self, slot: int, tokens: Sequence[int], is_last: bool) -> int:
        """More text for a slot -> how many more steps it allows. Raises RequestError for more than the slot
        holds."""
        return self.family.feed(self.state, slot, tokens, is_last)

    def frames(self, slot: int) -> Tensor:
        """What is on a slot's tape [F, *frame], on the host. Waits for the device: for the end of a pass
        alone."""
        return self.state.tape[slot, : int(self.state.ready[slot])].cpu()

    # launches

    def launch_step(self, batch: Batch) -> None:
        self._step(self.state, batch)

    def launch_prefill(self, inputs: Tensor, batch: Batch) -> None:
        self._hidden(inputs, batch)

    def launch_render(self, view: View) -> tuple[Tensor, Tensor]:
        return self._render[view.length](self.state, view)

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[Chunk]) -> None:
        """Fill the pages of stretches of prompts. Nothing is emitted and nothing comes back."""
        slots = np.array([chunk.slot for chunk in chunks], INT)
        sequences = slots + np.array([chunk.lane for chunk in chunks], INT) * (self.num_slots + 1)
        counts = np.array([chunk.stop - chunk.start for chunk in chunks], INT)
        self.kv_lens[sequences] += counts
        positions = np.concatenate([np.arange(chunk.start, chunk.stop, dtype=INT) for chunk in chunks])
        batch = self.batch(
            slots,
            sequences,
            np.repeat(sequences, counts),
            positions,
            np.concatenate(([0], np.cumsum(counts))),
        )
        lanes = [self.prompts[chunk.slot][chunk.lane] for chunk in chunks]
        stretches = [slice(chunk.start, chunk.stop) for chunk in chunks]
        batch.is_audio = torch.cat(
            [cast(Tensor, lane.is_audio)[at] for lane, at in zip(lanes, stretches, strict=True)]
        )
        inputs = torch.cat([lane.inputs[at] for lane, at in zip(lanes, stretches, strict=True)])  # [T, D]
        began_s = self.timer()
        self.launch_prefill(inputs, batch)
        self._observe("prefill", len(chunks), began_s)

    @torch.inference_mode()
    def step(self, slots: np.ndarray) -> AsyncCopy:
        """One frame for each of `slots` [B] -> the report [B, 3]: frames ready, whether it is done, and the
        text token of this step or -1. The work here is vectors of B."""
        self.kv_lens[self.sequences(slots)] += 1
        self.kv_lens[self.spares] = 1
        padded = np.full(self._bucket(len(slots)), self.state.spare, INT)
        padded[: len(slots)] = slots
        sequences = self.sequences(padded)
        batch = self.batch(
            padded,
            sequences,
            sequences,
            self.kv_lens[sequences] - 1,
            np.arange(len(sequences) + 1, dtype=INT),
        )
        began_s = self.timer()
        self.graphs.run((len(padded), batch.page_table.shape[1]), partial(self.launch_step, batch))
        self._observe("step", len(slots), began_s)
        at, state = batch.slots[: len(slots)], self.state
        report = torch.stack((state.ready[at], state.done[at].long(), state.written[at]), 1)
        return AsyncCopy(report, observer=self.observer)

    @torch.inference_mode()
    def render(self, due: Render) -> AsyncCopy:
        """-> samples [B, N], and how many of each row are valid [B]."""
        rows, parts = self._render_rows(due), []
        for first in range(0, len(due.slots), rows):
            at = slice(first, first + rows)
            slots, start, count, is_last = (
                self.place(field[at]) for field in (due.slots, due.start, due.count, due.is_last)
            )
            view = View(slots, start, count, is_last, due.frames, due.length)
            began_s = self.timer()
            parts.append(self.launch_render(view))
            self._observe("render", len(slots), began_s)
        samples, valid = zip(*parts, strict=True)
        return AsyncCopy(torch.cat(samples), torch.cat(valid), observer=self.observer)

    def _observe(self, event: str, rows: int, began_s: float) -> None:
        if self.observer is not None:
            self.observer(event, rows, self.timer() - began_s)

    def _render_rows(self, due: Render) -> int:
        """Rows of one launch. They do not know of each other, so a CPU takes a few at a time; and one, where
        no company may change a bit."""
        if due.is_pinned:
            return 1
        if self.device.type != "cpu":
            return len(due.slots)
        return max(1, CACHED_SAMPLES // (due.frames * self.family.spec.frame_samples))

    def _bucket(self, count: int) -> int:
        """The launch's size: any on a CPU, where one graph serves all; a recorded one on a GPU; one for all
        where that is asked for."""
        if self.is_deterministic:
            return self.num_slots
        return count if self.device.type == "cpu" else next(n for n in self.buckets if n >= count)

    def _width(self, sequences: np.ndarray) -> int:
        """Columns of the page table that a launch needs, up to a power of two so that launches look alike."""
        pages = int(-(-self.kv_lens[sequences].max() // self.page_tokens))
        return min(1 << (pages - 1).bit_length(), self.max_pages)

    def batch(
        self,
        slots: np.ndarray,
        sequences: np.ndarray,
        owner: np.ndarray,
        positions: np.ndarray,
        starts: np.ndarray,
        columns: int = 0,
    ) -> Batch:
        """slots [B]; sequences [N]; owner [T], a sequence, and positions [T] say whose position each input
        is; columns of the page table, else as many as needed."""
        return self.launch_inputs.fill(
            self.kv,
            self.page_tokens,
            slots=slots,
            positions=positions,
            kv_write_index=self.page_table[owner, positions // self.page_tokens]
            + positions % self.page_tokens,
            page_table=self.page_table[sequences, : columns or self._width(sequences)],
            kv_lens=self.kv_lens[sequences],
            cu_seqlens=starts,
            is_audio=np.zeros(len(positions), bool),
        )

    def place(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)


class LaunchInputs:
    """The inputs of a launch. On a GPU every field has a place of its own that never moves, so a recorded
    launch reads the new values."""

    def __init__(self, device: torch.device):
        self.device = device
        self.places: dict[str, Tensor] = {}

    def fill(self, kv: Tensor, page_tokens: int, **fields: np.ndarray) -> Batch:
        tensors = {name: self._put(name, np.ascontiguousarray(value)) for name, value in fields.items()}
        return Batch(**tensors, kv=kv, page_tokens=page_tokens)

    def _put(self, name: str, value: np.ndarray) -> Tensor:
        source = torch.from_numpy(value)
        if self.device.type == "cpu":
            return source
        place = self.places.get(name)
        if place is None or place.numel() < value.size:
            place = self.places[name] = torch.empty(value.size, dtype=source.dtype, device=self.device)
        target = place[: value.size].view(value.shape)
        target.copy_(source)
        return target
