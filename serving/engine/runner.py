"""Where host meets device: the arena, the slots' state, and the launches (streams.py: what comes back of them).

The host counts every position itself, so page tables and lengths never wait for the device. What comes back
is one small report per launch (frames ready, done, text), which is read a launch later, and the rendered samples,
which are read when they are there.

A slot's lanes are sequences of their own, in pages of their own, that take every step together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compile_cache import limits, saved
from compile_cache.artifacts import Entry
from compile_cache.graphs import Graphs
from compile_cache.lower import lower
from compile_cache.strategy import Eager, Lowering, Parts
from serving.engine.launches import Chunk, Render
from serving.engine.streams import AsyncCopy, LaunchInputs, Observer, Streams
from zoo.contract import Batch, Family, Lane, Prompt, View
from zoo.nn.rows import to_device

PAGE_TOKENS = 16  # positions of a page; where models share an arena, of the one with the largest positions
# of a render on a CPU: in larger launches a decoder's layers do not find each other's outputs in the cache
CACHED_SAMPLES = 150_000
# of a render on a GPU: a larger one takes no less time for each, and all the more memory (benchmarks/LOG.md)
RECORDED_SAMPLES = 600_000
INT = np.int64
WARM_SLOTS = 2  # of a launch that stands for all sizes while graphs are built
PREFILL_TOKENS = (16, 64, 256, 1024)  # of recorded launches; a shorter one is padded up to one


def row_bytes(family: Family[Any]) -> int:
    """The keys, or the values, of one position in one layer."""
    return family.spec.kv.row_values * family.dtype.itemsize


def token_bytes(family: Family[Any]) -> int:
    """All that one position keeps."""
    return family.spec.kv.token_bytes(family.dtype)


def recorded_rows(family: Family[Any], frames: int, slots: int) -> int:
    """Windows of `frames` frames that a GPU renders in one launch, at most."""
    return max(1, min(slots, RECORDED_SAMPLES // (frames * family.spec.frame_samples)))


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
        total = limits.memory_bytes()
    if num_bytes > total:
        raise ValueError(
            f"{num_bytes} bytes of KV memory are more than this machine's {device.type} has: {total}"
        )


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
        self.streams = Streams(self.device)
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

    @property
    def by_page(self) -> Tensor:
        """-> [P, bytes]"""
        return self.bytes.view(self.num_pages, -1)

    def hand_over(self, pages: Sequence[int], family: Family[Any]) -> list[int]:
        """The family will write to these pages -> those to be cleared. What was written in another dtype may
        be NaN in this one, and attention reads past a sequence's end with a weight of 0, which does not hide
        a NaN."""
        foreign = [page for page in pages if self.dtypes[page] not in (None, family.dtype)]
        for page in pages:
            self.dtypes[page] = family.dtype
        return foreign

    def clear(self, pages: Sequence[int]) -> None:
        if pages:
            at = to_device(torch.tensor(pages), self.device)
            self.by_page.index_fill_(0, at, 0)


class Runner:
    """A family on a device with `num_slots` slots, and pages of an arena that has the family in it.

    prefill_tokens: of one launch, at most. codec: in which precision a GPU renders, "tf32" or "float32".
    observer: told of each launch once it returned, and of each wait for the device. timer: what launches are timed
    by.
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
        prefill_tokens: int = PREFILL_TOKENS[-1],
        codec: str = "float32",
    ):
        self.family, self.num_slots, self.arena, self.device = family, num_slots, arena, family.device
        self.streams, self.is_recorded = arena.streams, family.device.type == "cuda"
        self.is_deterministic, self.codec = is_deterministic, codec
        self.kv = arena.rows(family)
        self.page_tokens, self.page_rows = arena.page_tokens(family), arena.page_rows(family)
        self.page = torch.arange(self.page_tokens, device=self.device)
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
        self.buckets = up_to(num_slots, strategy.batches)
        self.render_batches = strategy.render_batches
        self.prefill_tokens = [n for n in PREFILL_TOKENS if n < prefill_tokens] + [prefill_tokens]
        # What runs side by side shares no memory.
        self.step_graphs, self.render_graphs = Graphs(self.device), Graphs(self.device)
        # a prefill's, at places that never move; by a launch whose size is not recorded they are not used
        self.inputs = torch.zeros(
            prefill_tokens * self.is_recorded, family.spec.width, dtype=family.dtype, device=self.device
        )
        self.is_audio = torch.zeros(len(self.inputs), dtype=torch.bool, device=self.device)
        num_sequences = num_slots * len(self.lanes)
        self.no_audio = torch.zeros(
            num_sequences + WARM_SLOTS * len(self.lanes), dtype=torch.bool, device=self.device
        )
        numbers = num_sequences * (4 + self.max_pages) + num_slots + 1
        self.step_inputs = LaunchInputs(self.device, numbers, 6)
        self.prefill_inputs = LaunchInputs(self.device, numbers + 2 * prefill_tokens, 6)
        self.render_inputs = LaunchInputs(self.device, 4 * num_slots, 4)
        lowerings = (strategy.step, strategy.prefill, strategy.render)
        if self.is_recorded:
            lowerings = (strategy.step, strategy.gpu_prefill, strategy.gpu_render)
        self.lowerings: tuple[Lowering, ...] = lowerings if compile else (Eager(), Eager(), Eager())
        step, prefill, render = self.lowerings
        self._step, self._hidden = lower(family.step, step), lower(family.hidden, prefill)
        # One for each length bucket: Dynamo keeps eight graphs of a function at most. What is lowered in parts is so once.
        lengths, once = family.spec.window.lengths or (0,), isinstance(render, Parts)
        renders = (
            [lower(family.render, render)] * len(lengths)
            if once
            else [lower(family.render, render) for _ in lengths]
        )
        self._render = dict(zip(lengths, renders, strict=True))

    @property
    def is_compiled(self) -> bool:
        return any(how != Eager() for how in self.lowerings)

    @property
    def graph_misses(self) -> int:
        return self.step_graphs.misses + self.render_graphs.misses

    # slots

    def sequences(self, slots: np.ndarray) -> np.ndarray:
        """slots [B] -> all lanes of them [L * B], in blocks of B."""
        return (slots + self.lanes * (self.num_slots + 1)).ravel()

    def open(self, slot: int, prompt: Prompt, pages: Sequence[Sequence[int]], skips: Sequence[int]) -> None:
        """A request moves in. Of each lane: its pages, and how many positions they already hold. Nothing of
        the slot's earlier tenant is under way but on the stream of steps."""
        for sequence, own, skip in zip(self.sequences(np.array([slot])).tolist(), pages, skips, strict=True):
            self.page_table[sequence] = self.scratch
            self.page_table[sequence, : len(own)] = np.asarray(own, INT) * self.page_rows
            self.kv_lens[sequence] = skip
        self.prompts[slot] = prompt.lanes
        foreign = self.arena.hand_over([page for own in pages for page in own], self.family)
        for tensor in prompt.tensors():
            self.streams.lm.borrow(tensor)

        def move_in() -> tuple[()]:
            self.arena.clear(foreign)
            self.family.admit(self.state, slot, prompt)
            return ()

        self.streams.lm.run(move_in)

    def close(self, slot: int) -> None:
        self.prompts.pop(slot, None)

    def set_pages(self, slot: int, lane: int, pages: Sequence[int]) -> None:
        """Of one lane, all that it has: those it had, and new ones, or none."""
        sequence = slot + lane * (self.num_slots + 1)
        self.page_table[sequence] = self.scratch
        self.page_table[sequence, : len(pages)] = np.asarray(pages, INT) * self.page_rows
        foreign = self.arena.hand_over(pages, self.family)
        if foreign:
            self.streams.lm.run(partial(self._clear, foreign))

    def _clear(self, pages: Sequence[int]) -> tuple[()]:
        self.arena.clear(pages)
        return ()

    def save(self, pages: Sequence[int]) -> AsyncCopy:
        """What is written to these pages by now, and by what is under way -> a copy on the host."""
        at = torch.tensor(pages)
        return self.streams.lm.run(lambda: (self.arena.by_page[to_device(at, self.device)],))

    def restore(self, pages: Sequence[int], saved: AsyncCopy) -> None:
        """Write to as many other pages what was saved."""
        [values] = saved.tensors()
        assert len(pages) == len(values), f"{len(values)} saved pages are written to {len(pages)}"
        at = torch.tensor(pages)

        def work() -> tuple[()]:
            self.arena.by_page[to_device(at, self.device)] = values.to(self.device, non_blocking=True)
            return ()

        self.streams.lm.run(work)

    def feed(self, slot: int, tokens: Sequence[int], is_last: bool) -> int:
        """More text for a slot -> how many more steps it allows. Raises RequestError for more than the slot
        holds."""
        with self.streams.lm.here(), torch.inference_mode():
            return self.family.feed(self.state, slot, tokens, is_last)

    def frames(self, slot: int, count: int) -> Tensor:
        """The first frames on a slot's tape [F, *frame], on the host. Waits for the device: for the end of a
        pass alone."""
        (frames,) = self.streams.lm.run(lambda: (self.state.tape[slot, :count],)).tensors()
        return frames

    # launches

    def take_step(self, entry: Entry, batch: Batch) -> None:
        """The step as it was saved, where it was; else as it is compiled for such a batch, and saved."""
        file = entry.directory / "step.saved"
        if entry.is_found:
            self._step = saved.loaded(self.family.step, file)
        else:
            self._step = saved.compiled(self.family.step, (self.state, batch), file)

    def launch_step(self, batch: Batch) -> tuple[Tensor]:
        return (self._step(self.state, batch),)

    def launch_prefill(self, inputs: Tensor, batch: Batch) -> tuple[()]:
        self._hidden(inputs, batch)
        return ()

    def launch_render(self, view: View) -> tuple[Tensor, ...]:
        samples, valid = self._render[view.length](self.state, view)
        return samples, valid

    def prefill(self, chunks: Sequence[Chunk]) -> None:
        """Fill the pages of stretches of prompts. Nothing is emitted and nothing comes back."""
        slots = np.array([chunk.slot for chunk in chunks], INT)
        sequences = slots + np.array([chunk.lane for chunk in chunks], INT) * (self.num_slots + 1)
        counts = np.array([chunk.stop - chunk.start for chunk in chunks], INT)
        self.kv_lens[sequences] += counts
        owner = np.repeat(sequences, counts)
        positions = np.concatenate([np.arange(chunk.start, chunk.stop, dtype=INT) for chunk in chunks])
        starts = np.concatenate(([0], np.cumsum(counts)))
        lanes = [self.prompts[chunk.slot][chunk.lane] for chunk in chunks]
        stretches = [slice(chunk.start, chunk.stop) for chunk in chunks]
        arrive, num_tokens = self.stage_prefill(sequences, owner, positions, starts)

        def work() -> tuple[()]:
            rows = [lane.inputs[at] for lane, at in zip(lanes, stretches, strict=True)]
            marks = [lane.audio_mask[at] for lane, at in zip(lanes, stretches, strict=True)]
            inputs = self._gather(rows, self.inputs, num_tokens)
            batch = self.batch(arrive(), self._gather(marks, self.is_audio, num_tokens))
            self.step_graphs.run(("prefill", num_tokens), partial(self.launch_prefill, inputs, batch))
            return ()

        began_s = self.timer()
        self.streams.lm.run(work)
        self._observe("prefill", len(chunks), began_s)

    def step(self, slots: np.ndarray) -> AsyncCopy:
        """One frame for each of `slots` [B] -> the report [B, 3]: frames ready, whether it is done, and the
        text token of this step or -1. The work here is vectors of B."""
        self.kv_lens[self.sequences(slots)] += 1
        self.kv_lens[self.spares] = 1
        padded = np.full(self.bucket(len(slots)), self.state.spare, INT)
        padded[: len(slots)] = slots
        arrive = self.stage_step(padded)

        def work() -> tuple[Tensor]:
            batch = self.batch(arrive())
            (report,) = self.step_graphs.run(("step", len(padded)), partial(self.launch_step, batch))
            return (report[: len(slots)],)

        began_s = self.timer()
        copy = self.streams.lm.run(work, self.observer)
        self._observe("step", len(slots), began_s)
        return copy

    def render(self, due: Render) -> AsyncCopy:
        """-> samples [B, N], and how many of each row are valid [B]."""
        rows = self._render_rows(due)
        parts = [slice(first, first + rows) for first in range(0, len(due.slots), rows)]
        staged = [
            self.stage_render(due.slots[at], due.start[at], due.count[at], due.is_last[at], due.frames)
            for at in parts
        ]

        def work() -> tuple[Tensor, Tensor]:
            samples, valid = [], []
            for at, arrive in zip(parts, staged, strict=True):
                view = View(**arrive(), frames=due.frames, length=due.length)
                key = ("render", len(view.slots), due.frames, due.length)
                began_s = self.timer()
                made = self.render_graphs.run(key, partial(self.launch_render, view))
                num = len(due.slots[at])
                self._observe("render", num, began_s)
                # the next launch of this size writes to the same place
                if self.is_recorded and len(parts) > 1:
                    made = tuple(part.clone() for part in made)
                samples.append(made[0][:num])
                valid.append(made[1][:num])
            return torch.cat(samples), torch.cat(valid)

        return self.streams.renders.run(work, self.observer)

    def _observe(self, event: str, rows: int, began_s: float) -> None:
        if self.observer is not None:
            self.observer(event, rows, self.timer() - began_s)

    def _gather(self, parts: Sequence[Tensor], place: Tensor, num_rows: int) -> Tensor:
        """One behind the other; where launches are recorded, at the beginning of `place`."""
        if not self.is_recorded:
            return torch.cat(list(parts))
        num = sum(map(len, parts))
        torch.cat(list(parts), out=place[:num])
        return place[:num_rows]

    @property
    def is_synchronous(self) -> bool:
        """Whether a launch returns when it is done."""
        return self.family.device.type == "cpu"

    def _render_rows(self, due: Render) -> int:
        """Rows of one launch. They do not know of each other, so a CPU takes a few at a time; and one, where
        no company may change a bit."""
        if due.is_pinned:
            return 1
        return self.rows_of_launch(due.frames)

    def rows_of_launch(self, frames: int) -> int:
        """Windows of `frames` frames that are rendered in one launch, at most."""
        if self.is_recorded:
            return recorded_rows(self.family, frames, self.num_slots)
        if self.family.strategy.cuts_renders:
            return self.num_slots
        return max(1, min(self.num_slots, CACHED_SAMPLES // (frames * self.family.spec.frame_samples)))

    def bucket(self, count: int) -> int:
        """The launch's size: any on a CPU, where one graph serves all; a recorded one on a GPU; one for all
        where that is asked for."""
        if self.is_deterministic:
            return self.num_slots
        return next(n for n in self.buckets if n >= count) if self.is_recorded else count

    def render_buckets(self, frames: int) -> list[int]:
        """Sizes of recorded renders of windows of `frames` frames."""
        most = recorded_rows(self.family, frames, self.num_slots)
        return [most] if self.is_deterministic else up_to(most, self.render_batches)

    # what launches read

    def stage_step(self, slots: np.ndarray) -> Callable[[], dict[str, Tensor]]:
        """slots [B], padded."""
        sequences = self.sequences(slots)
        positions = self.kv_lens[sequences] - 1
        return self.step_inputs.stage(
            {"slots": slots}
            | self._places(sequences, sequences, positions, np.arange(len(sequences) + 1, dtype=INT))
        )

    def stage_prefill(
        self, sequences: np.ndarray, owner: np.ndarray, positions: np.ndarray, starts: np.ndarray
    ) -> tuple[Callable[[], dict[str, Tensor]], int]:
        """sequences [N]; owner [T], a sequence, and positions [T] say whose position each input is; starts
        [N + 1]. -> the inputs, and how many tokens the launch has: where it is recorded, more, which
        belong to no sequence and write to the scratch page."""
        places = self._places(sequences, owner, positions, starts)
        num_tokens = len(positions)
        if self.is_recorded:
            num_tokens = next(n for n in self.prefill_tokens if n >= num_tokens)
            num_sequences = self.num_slots * len(self.lanes)
            places["positions"] = padded(places["positions"], num_tokens, 0)
            places["kv_write_index"] = padded(places["kv_write_index"], num_tokens, self.scratch)
            places["page_table"] = padded(places["page_table"], num_sequences, self.scratch)
            places["kv_lens"] = padded(places["kv_lens"], num_sequences, 0)
            places["cu_seqlens"] = padded(starts, num_sequences + 1, starts[-1])
        return self.prefill_inputs.stage({"slots": np.zeros(1, INT)} | places), num_tokens

    def stage_render(
        self, slots: np.ndarray, start: np.ndarray, count: np.ndarray, is_last: np.ndarray, frames: int
    ) -> Callable[[], dict[str, Tensor]]:
        """All [B]; padded where launches are recorded. frames: of the window."""
        fields = {"slots": slots, "start": start, "count": count, "is_last": is_last}
        if self.is_recorded:
            size = next(n for n in self.render_buckets(frames) if n >= len(slots))
            for name, value in fields.items():
                fields[name] = padded(value, size, self.state.spare if name == "slots" else 0)
        return self.render_inputs.stage(fields)

    def batch(self, fields: dict[str, Tensor], is_audio: Tensor | None = None) -> Batch:
        """is_audio [T], of a prefill; a step finds out by itself."""
        if is_audio is None:
            is_audio = self.no_audio[: len(fields["positions"])]
        return Batch(**fields, kv=self.kv, page=self.page, is_audio=is_audio)

    def _places(
        self, sequences: np.ndarray, owner: np.ndarray, positions: np.ndarray, starts: np.ndarray
    ) -> dict[str, np.ndarray]:
        return {
            "positions": positions,
            "kv_write_index": self.page_table[owner, positions // self.page_tokens]
            + positions % self.page_tokens,
            "page_table": self.page_table[sequences, : self._width(sequences)],
            "kv_lens": self.kv_lens[sequences],
            "cu_seqlens": starts,
        }

    def _width(self, sequences: np.ndarray) -> int:
        """Columns of the page table that a launch gets: all where it is recorded. Else as many as are needed,
        up to a power of two so that launches look alike."""
        if self.is_recorded:
            return self.max_pages
        pages = int(-(-self.kv_lens[sequences].max() // self.page_tokens))
        return min(1 << (pages - 1).bit_length(), self.max_pages)


def up_to(most: int, sizes: Sequence[int]) -> list[int]:
    return [n for n in sizes if n < most] + [most]


def padded(values: np.ndarray, length: int, filler: int) -> np.ndarray:
    """With rows of `filler` up to `length`."""
    whole = np.full((length, *values.shape[1:]), filler, values.dtype)
    whole[: len(values)] = values
    return whole
