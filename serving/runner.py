"""The only file where host meets device: the arena, the slots' state, the launches, and what comes back of them.

The host counts every position itself, so page tables and lengths never wait for the device. What comes back is one small report per
launch (frames ready, done, text) and the rendered samples; both are asked for when the launch is made and read a launch later.

A slot's lanes are sequences of their own, in pages of their own, that take every step together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compile_cache.graphs import Graphs
from compile_cache.lower import any_size, lower
from compile_cache.strategy import Eager, Lowering, Whole
from serving.scheduler import Chunk, Render
from zoo.contract import Batch, Family, Lane, Prompt, View

PAGE_TOKENS = 16  # positions of a page; where models share an arena, of the one with the largest positions
CACHED_SAMPLES = 150_000  # of a render on a CPU: in larger launches a decoder's layers do not find each other's outputs in the cache
INT = np.int64


def row_bytes(family: Family) -> int:
    """The keys, or the values, of one position in one layer."""
    return family.spec.kv.row_values * family.dtype.itemsize


def token_bytes(family: Family) -> int:
    """All that one position keeps."""
    return family.spec.kv.token_bytes(family.dtype)


def common_page_bytes(families: Sequence[Family]) -> int:
    """The size of a page that suits all: PAGE_TOKENS of the largest positions, and up to whole rows of everybody's.

    The others get as many of their positions into a page as fit, so less than one position of a page is left over, at most a 16th of it.
    Raises ValueError where whole rows of all would more than double the page.
    """
    most, step = max(PAGE_TOKENS * token_bytes(family) for family in families), math.lcm(*map(row_bytes, families))
    size = -(-most // step) * step
    if size > 2 * most:
        rows = ", ".join(f"{family.spec.family} {row_bytes(family)}" for family in families)
        raise ValueError(
            f"no page suits all these models: rows of keys take (bytes) {rows}, so a page of whole rows takes {size}, where {most} are "
            "needed: serve them apart"
        )
    return size


class Arena:
    """Pages of bytes on the device. Every family in it reads them as rows of its own keys and values, `page_tokens` positions a page.

    Page i is the scratch of family i, which padding writes to. Raises ValueError for a size that leaves no other page.
    """

    def __init__(self, families: Sequence[Family], kv_bytes: int):
        self.families, self.device = tuple(families), families[0].device
        assert all(family.device == self.device for family in families), f"one arena, on {[str(family.device) for family in families]}"
        self.page_bytes = common_page_bytes(families)
        self.num_pages, self.num_scratch = kv_bytes // self.page_bytes, len(families)
        if self.num_pages <= self.num_scratch:
            whose, least = "this model" if len(families) == 1 else "these models", self.num_scratch + 1
            raise ValueError(
                f"{kv_bytes} bytes of KV memory hold no page: a page of {whose} takes {self.page_bytes}, and {least} are the least"
            )
        self.bytes = torch.zeros(self.num_pages * self.page_bytes, dtype=torch.uint8, device=self.device)
        self.dtypes: list[torch.dtype | None] = [None] * self.num_pages  # of what was last written to each page

    def page_tokens(self, family: Family) -> int:
        return self.page_bytes // token_bytes(family)

    def page_rows(self, family: Family) -> int:
        return self.page_bytes // row_bytes(family)

    def rows(self, family: Family) -> Tensor:
        """-> [rows, H, D], the whole arena in the family's shape."""
        kv = family.spec.kv
        return self.bytes.view(family.dtype).view(-1, kv.num_heads, kv.head_dim)

    def hand_over(self, pages: Sequence[int], family: Family) -> None:
        """The family will write to these pages. What was written in another dtype is cleared: it may be NaN in this one, and attention
        reads past a sequence's end with a weight of 0, which does not hide a NaN."""
        foreign = [page for page in pages if self.dtypes[page] not in (None, family.dtype)]
        if foreign:
            self.bytes.view(self.num_pages, -1).index_fill_(0, torch.tensor(foreign, device=self.device), 0)
        for page in pages:
            self.dtypes[page] = family.dtype


class Pending:
    """Something the device was asked for. `read` gives it to the host, and waits only if the device is not there yet."""

    def __init__(self, value: Tensor):
        if value.device.type == "cuda":
            self._host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._host.copy_(value, non_blocking=True)
            self._event: torch.cuda.Event | None = torch.cuda.Event()
            self._event.record()
        else:
            self._host, self._event = value, None

    def read(self) -> np.ndarray:
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()


class Runner:
    """A family on a device with `num_slots` slots, and pages of an arena that has the family in it."""

    def __init__(self, family: Family, num_slots: int, arena: Arena, compile: bool = True):
        self.family, self.num_slots, self.arena, self.device = family, num_slots, arena, family.device
        self.kv = arena.rows(family)
        self.page_tokens, self.page_rows = arena.page_tokens(family), arena.page_rows(family)
        self.state = family.state(num_slots)
        self.most_pages = -(-family.spec.max_positions // self.page_tokens)

        # by sequence: the first lane of each slot and of the spare one, then the second lanes; where a sequence has no page stands the
        # family's scratch
        self.scratch = arena.families.index(family) * self.page_rows
        rows, self.lanes = num_slots + 1, np.arange(family.spec.lanes, dtype=INT)[:, None]
        self.table = np.full((len(self.lanes) * rows, self.most_pages), self.scratch, INT)
        self.lengths = np.zeros(len(self.lanes) * rows, INT)
        self.spares = self.sequences(np.array([self.state.spare], INT))
        self.prompts: dict[int, tuple[Lane, ...]] = {}

        strategy = family.strategy
        self.buckets = [n for n in strategy.batches if n < num_slots] + [num_slots]
        self.graphs = Graphs(self.device)
        self.slate = Slate(self.device)
        self.hows = (strategy.step, strategy.prefill, strategy.render) if compile else (Eager(), Eager(), Eager())
        verbs: tuple[Callable[..., Any], ...] = (family.step, family.hidden, family.render)
        self._step, self._hidden, self._render = (lower(verb, how) for verb, how in zip(verbs, self.hows, strict=True))

    # slots

    def sequences(self, slots: np.ndarray) -> np.ndarray:
        """slots [B] -> all lanes of them [L * B], in blocks of B."""
        return (slots + self.lanes * (self.num_slots + 1)).ravel()

    def open(self, slot: int, prompt: Prompt, pages: Sequence[Sequence[int]], skips: Sequence[int]) -> None:
        """A request moves in. Of each lane: its pages, and how many positions they already hold."""
        for sequence, own, skip in zip(self.sequences(np.array([slot])).tolist(), pages, skips, strict=True):
            self.arena.hand_over(own, self.family)
            self.table[sequence] = self.scratch
            self.table[sequence, : len(own)] = np.asarray(own, INT) * self.page_rows
            self.lengths[sequence] = skip
        self.prompts[slot] = prompt.lanes
        with torch.inference_mode():
            self.family.admit(self.state, slot, prompt)

    def close(self, slot: int) -> None:
        self.prompts.pop(slot, None)

    # launches

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[Chunk]) -> None:
        """Fill the pages of stretches of prompts. Nothing is emitted and nothing comes back."""
        slots = np.array([chunk.slot for chunk in chunks], INT)
        sequences = slots + np.array([chunk.lane for chunk in chunks], INT) * (self.num_slots + 1)
        counts = np.array([chunk.stop - chunk.start for chunk in chunks], INT)
        self.lengths[sequences] += counts
        positions = np.concatenate([np.arange(chunk.start, chunk.stop, dtype=INT) for chunk in chunks])
        batch = self._batch(slots, sequences, np.repeat(sequences, counts), positions, np.concatenate(([0], np.cumsum(counts))))
        self._hidden(torch.cat([self.prompts[chunk.slot][chunk.lane].inputs[chunk.start : chunk.stop] for chunk in chunks]), batch)

    @torch.inference_mode()
    def step(self, slots: np.ndarray) -> Pending:
        """One frame for each of `slots` [B] -> the report [B, 3]: frames ready, whether it is done, and the text token of this step or -1.
        The work here is vectors of B."""
        self.lengths[self.sequences(slots)] += 1
        self.lengths[self.spares] = 1
        padded = np.full(self._bucket(len(slots)), self.state.spare, INT)
        padded[: len(slots)] = slots
        sequences = self.sequences(padded)
        batch = self._batch(padded, sequences, sequences, self.lengths[sequences] - 1, np.arange(len(sequences) + 1, dtype=INT))
        self.graphs.run((len(padded), batch.rows.shape[1]), lambda: self._step(self.state, batch))
        at, state = batch.slots[: len(slots)], self.state
        return Pending(torch.stack((state.ready[at], state.done[at].long(), state.written[at]), 1))

    @torch.inference_mode()
    def render(self, due: Render) -> Pending:
        """-> samples [B, frames * frame_samples], of which count * frame_samples are valid. Rows do not know of each other, so a CPU takes
        a few at a time."""
        count = len(due.slots)
        rows = max(1, CACHED_SAMPLES // (due.frames * self.family.spec.frame_samples)) if self.device.type == "cpu" else count
        parts = []
        for first in range(0, count, rows):
            at = slice(first, first + rows)
            view = View(self._place(due.slots[at]), self._place(due.start[at]), self._place(due.count[at]), due.frames)
            parts.append(self._render(self.state, view))
        return Pending(torch.cat(parts) if len(parts) > 1 else parts[0])

    def _bucket(self, count: int) -> int:
        """The launch's size: any on a CPU, where one graph serves all; a recorded one on a GPU."""
        return count if self.device.type == "cpu" else next(n for n in self.buckets if n >= count)

    def _width(self, sequences: np.ndarray) -> int:
        """Columns of the page table that a launch needs, up to a power of two so that launches look alike."""
        pages = int(-(-self.lengths[sequences].max() // self.page_tokens))
        return min(1 << (pages - 1).bit_length(), self.most_pages)

    def _batch(
        self, slots: np.ndarray, sequences: np.ndarray, owner: np.ndarray, positions: np.ndarray, starts: np.ndarray, columns: int = 0
    ) -> Batch:
        """slots [B]; sequences [N]; owner [T], a sequence, and positions [T] say whose position each input is; columns of the page table,
        else as many as needed."""
        return self.slate.fill(
            self.kv,
            self.page_tokens,
            slots=slots,
            positions=positions,
            writes=self.table[owner, positions // self.page_tokens] + positions % self.page_tokens,
            rows=self.table[sequences, : columns or self._width(sequences)],
            lengths=self.lengths[sequences],
            starts=starts,
        )

    def _place(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    # warm-up

    @torch.inference_mode()
    def warm(self, progress: Callable[[float, str], None]) -> None:
        """Compile and record everything a request can need, on the spare slot alone: no slot, page or tape changes."""
        stages: list[tuple[str, Callable[[], None]]] = [("step", self._warm_step), ("prefill", self._warm_prefill)]
        stages += [(f"render {n}", partial(self._warm_render, n)) for n in reversed(self.family.spec.window.new)]
        for i, (name, stage) in enumerate(stages):
            progress(i / len(stages), name)
            stage()
        progress(1.0, "warm")

    def _warm_batch(self, how: Lowering, size: int, tokens: int, columns: int = 1) -> Batch:
        """A launch of `size` slots, with `tokens` inputs in each lane, which writes where nobody reads."""
        spare = np.full(size, self.state.spare, INT)
        sequences = self.sequences(spare)
        self.lengths[self.spares] = tokens
        positions = np.tile(np.arange(tokens, dtype=INT), len(sequences))
        starts = np.arange(len(sequences) + 1, dtype=INT) * tokens
        batch = self._batch(spare, sequences, np.repeat(sequences, tokens), positions, starts, columns)
        if how == Whole():
            any_size((batch.slots,), 0, "batch")
            any_size((batch.lengths, batch.rows), 0, "sequences")
            any_size((batch.positions, batch.writes), 0, "sequences" if tokens == 1 else "tokens")
            any_size((batch.starts,), 0, "edges")
            any_size((batch.rows,), 1, "pages")
        return batch

    def _warm_step(self) -> None:
        """On a CPU one graph serves every size; on a GPU every size and page-table width is recorded, the largest first."""
        sizes, widths = [2], [1]
        if self.device.type == "cuda":
            sizes = sorted(self.buckets, reverse=True)
            widths = [1 << i for i in reversed(range((self.most_pages - 1).bit_length() + 1))]
        for size in sizes:
            for width in widths:
                batch = self._warm_batch(self.hows[0], size, 1, min(width, self.most_pages))
                self.graphs.record((size, batch.rows.shape[1]), partial(self._step, self.state, batch))

    def _warm_prefill(self) -> None:
        batch = self._warm_batch(self.hows[1], 2, 3)
        inputs = torch.zeros(len(batch.positions), self.family.spec.width, dtype=self.family.dtype, device=self.device)
        if self.hows[1] == Whole():
            any_size((inputs,), 0, "tokens")
        self._hidden(inputs, batch)

    def _warm_render(self, frames: int) -> None:
        slots, start, count = (self._place(np.full(2, value, INT)) for value in (self.state.spare, 0, 0))
        if self.hows[2] == Whole():
            any_size((slots, start, count), 0, "batch")
        self._render(self.state, View(slots, start, count, frames))


class Slate:
    """The inputs of a launch. On a GPU every field has a place of its own that never moves, so a recorded launch reads the new values."""

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
