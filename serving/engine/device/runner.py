"""One family's launches on its slots and pages.

The host counts every position itself, so page tables and lengths never wait for the device. The device
sends back one small report per launch (frames ready, done, text), which is read a launch later, and the
rendered samples, which are read when they are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from serving.engine.device.arena import Arena, paged_past
from serving.engine.device.launches import Chunk, Render
from serving.engine.device.lowered import Lowered
from serving.engine.device.page_copies import PageCopies
from serving.engine.device.page_table import INT, PageTable
from serving.engine.device.staging import PREFILL_TOKENS, Sizes, Staging, padded
from serving.engine.device.streams import AsyncCopy, Observer
from zoo.contract import NEVER, Family, Lane, Prompt, View
from zoo.nn import flashinfer_attention
from zoo.nn.rows import to_device

NARROW_CODECS = {"fp16": torch.float16, "bf16": torch.bfloat16}
CODECS = ("float32", "tf32", *NARROW_CODECS)


def narrow_codec(family: Family[Any], codec: str) -> None:
    """Let a family's codec compute in the format of `--codec`. Raises ValueError if it has no such form."""
    if (dtype := NARROW_CODECS.get(codec)) is not None:
        family.narrow_codec(dtype)


class Runner(PageCopies):
    """A family on a device with `num_slots` slots, and pages of an arena that has the family in it.

    prefill_tokens: of one launch, at most. codec: in which precision a GPU renders, one of `CODECS`.
    attention: of a GPU's steps, one of `flashinfer_attention.KINDS`; ValueError if it is not possible.
    observer: is told of each launch once it returned, and of each wait for the device. timer: times launches.
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
        attention: str = "auto",
    ):
        super().__init__(arena, family.device)
        self.family = family
        self.num_slots = num_slots
        self.codec = codec
        narrow_codec(family, codec)
        self.is_recorded = family.device.type == "cuda"
        self.state = family.state(num_slots)
        page_rows = arena.page_rows(family)
        self.table = PageTable(
            num_slots,
            family.spec.lanes,
            arena.page_tokens(family),
            page_rows,
            family.spec.max_positions,
            scratch=arena.families.index(family) * page_rows,
        )
        self.sizes = Sizes(family, num_slots, self.is_recorded, is_deterministic, prefill_tokens)
        self.past = self._new_past()
        kv = arena.rows(family)
        kind = flashinfer_attention.kind(attention, kv, self.page_tokens, is_deterministic)
        self.staging = Staging(family, self.table, self.sizes, kv, self.past, kind)
        self.lowered = Lowered(family, self.state, self.streams, self.is_recorded, compile)
        self.prompts: dict[int, tuple[Lane, ...]] = {}

    def _new_past(self) -> np.ndarray | None:
        """Return the pages of each slot's past [S + 1, P], all of them the family's scratch page."""
        past = paged_past(self.family)
        if past is None:
            return None
        self.state.arena = self.arena.values(self.family)
        width = past.max_chunks * self.arena.chunk_pages(self.family) + 1
        return np.full((self.num_slots + 1, width), self.arena.families.index(self.family), INT)

    @property
    def is_synchronous(self) -> bool:
        """Whether a launch returns when it is done."""
        return self.device.type == "cpu"

    @property
    def is_compiled(self) -> bool:
        return self.lowered.is_compiled

    @property
    def graph_misses(self) -> int:
        return self.lowered.graph_misses

    @property
    def page_tokens(self) -> int:
        return self.table.page_tokens

    @property
    def kv_lens(self) -> np.ndarray:
        """Positions of each sequence."""
        return self.table.kv_lens

    @property
    def kv(self) -> Tensor:
        return self.staging.kv

    # slots

    def sequences(self, slots: np.ndarray) -> np.ndarray:
        """Return all lanes of slots [B] as sequences [L * B], in blocks of B."""
        return self.table.sequences(slots)

    def open(self, slot: int, prompt: Prompt, pages: Sequence[Sequence[int]], skips: Sequence[int]) -> None:
        """Move a request in. Of each lane: its pages, and how many positions they already hold. Work of the
        slot's earlier tenant is in flight at most on the stream of steps."""
        sequences = self.sequences(np.array([slot]))
        for sequence, own in zip(sequences.tolist(), [*pages, []], strict=False):
            self.table.set_pages(sequence, own)
        self.kv_lens[sequences] = 0
        self.kv_lens[sequences[: len(skips)]] = skips
        self.table.opens_at[slot] = NEVER
        self.prompts[slot] = prompt.lanes
        for tensor in prompt.tensors():
            self.streams.lm.borrow(tensor)

        def move_in() -> tuple[()]:
            self.family.admit(self.state, slot, prompt)
            return ()

        self.streams.lm.run(move_in)

    def open_lane(self, slot: int, lane: Lane, pages: Sequence[int], skip: int) -> None:
        """Give a slot its second lane, which joins once the first one is as long. skip: positions that its
        pages hold."""
        self.set_pages(slot, 1, pages)
        self.kv_lens[self.table.sequence(slot, 1)] = skip
        self.table.opens_at[slot] = len(lane.inputs)
        self.prompts[slot] = (self.prompts[slot][0], lane)

    def length_at(self, slot: int, step: int) -> int:
        """Return how many inputs a slot's first lane has read before a step."""
        return len(self.prompts[slot][0].inputs) - 1 + step

    def fill_past(self, prompt: Prompt, first: int, pages: Sequence[int]) -> None:
        """Write the chunks of the past that a prompt brings along, from a first one on, to their pages."""
        at = torch.tensor(pages, dtype=torch.int64)

        def work() -> tuple[()]:
            self.family.fill_past(self.state, prompt, first, to_device(at, self.device))
            return ()

        self.streams.lm.run(work)

    def close(self, slot: int) -> None:
        self.prompts.pop(slot, None)

    def set_pages(self, slot: int, lane: int, pages: Sequence[int]) -> None:
        """Give a lane all its pages: those it had, and new ones, or none."""
        self.table.set_pages(self.table.sequence(slot, lane), pages)

    def set_past(self, slot: int, pages: Sequence[int]) -> None:
        """Give a slot all pages of its past: those it had, and new ones. The engine must launch a step before
        it renders frames on the new pages."""
        assert self.past is not None, f"{self.family.spec.family} keeps no past in pages"
        self.past[slot] = self.past[-1]
        self.past[slot, : len(pages)] = pages

    def feed(self, slot: int, tokens: Sequence[int], is_last: bool) -> int:
        """Give a slot more text. Return how many more steps it allows. Raises RequestError for more than the
        slot holds."""
        with self.streams.lm.here(), torch.inference_mode():
            return self.family.feed(self.state, slot, tokens, is_last)

    def end(self, slot: int) -> None:
        """End a slot's answer: the next step makes nothing, and reports that the slot is done."""

        def work() -> tuple[()]:
            self.state.done[slot] = True
            self.state.written[slot] = -1
            return ()

        self.streams.lm.run(work)

    def frames(self, slot: int, count: int) -> AsyncCopy:
        """Return the first frames on a slot's tape [F, *frame], on their way to the host."""
        return self.streams.lm.run(lambda: (self.state.tape[slot, :count],))

    # launches

    @property
    def has_mixed(self) -> bool:
        """Whether `step` reads prompts in the same launch."""
        return self.sizes.has_mixed

    def _fill(self, chunks: Sequence[Chunk]) -> tuple[np.ndarray, np.ndarray, Callable[[int], Any]]:
        """Lengthen the sequences of chunks. Return the sequences [C], by how many positions [C], and a
        function that gives a launch of so many positions their inputs, and whether each is audio."""
        sequences = np.array([self.table.sequence(chunk.slot, chunk.lane) for chunk in chunks], INT)
        counts = np.array([chunk.stop - chunk.start for chunk in chunks], INT)
        self.kv_lens[sequences] += counts
        lanes = [self.prompts[chunk.slot][chunk.lane] for chunk in chunks]
        stretches = [slice(chunk.start, chunk.stop) for chunk in chunks]

        def gather(num_tokens: int) -> tuple[Tensor, Tensor]:
            staging, each = self.staging, list(zip(lanes, stretches, strict=True))
            inputs = staging.gather([lane.inputs[at] for lane, at in each], staging.inputs, num_tokens)
            marks = [lane.audio_mask[at] for lane, at in each]
            return inputs, staging.gather(marks, staging.is_audio, num_tokens)

        return sequences, counts, gather

    def prefill(self, chunks: Sequence[Chunk]) -> None:
        """Fill the pages of stretches of prompts. Nothing is emitted and nothing comes back."""
        sequences, counts, gather = self._fill(chunks)
        owner = np.repeat(sequences, counts)
        positions = np.concatenate([np.arange(chunk.start, chunk.stop, dtype=INT) for chunk in chunks])
        starts = np.concatenate(([0], np.cumsum(counts)))
        arrive, num_tokens = self.staging.prefill(sequences, owner, positions, starts)

        def work() -> tuple[()]:
            inputs, is_audio = gather(num_tokens)
            batch = self.staging.batch(arrive(), is_audio)
            launch = partial(self.lowered.prefill, inputs, batch)
            self.lowered.step_graphs.run(("prefill", num_tokens), launch)
            return ()

        began_s = self.timer()
        self.streams.lm.run(work)
        self._observe("prefill", len(chunks), began_s)

    def step(self, slots: np.ndarray) -> AsyncCopy:
        """Make one frame for each of `slots` [B]. The report is [B, 4 or 5], as of `Family.step`.
        The host's work is vectors of B."""
        opened = self._lengthen(slots)
        rows = padded(slots, self.sizes.step_rows(len(slots)), self.state.spare)
        key: tuple[str, int] | tuple[str, int, int] = ("step", len(rows))
        if opened is not None:
            num_open = next(n for n in self.sizes.open_rows(len(rows)) if n >= len(opened))
            opened = padded(opened, num_open, -1)
            key = (*key, num_open)
        arrive = self.staging.step(rows, opened)

        def work() -> tuple[Tensor]:
            launch = partial(self.lowered.step, self.staging.batch(arrive()))
            (report,) = self.lowered.step_graphs.run(key, launch)
            return (report[: len(slots)],)

        return self._run_step(slots, work)

    def mixed(self, slots: np.ndarray, chunks: Sequence[Chunk]) -> AsyncCopy:
        """Do `prefill` and then `step` in one launch. Only if `has_mixed`."""
        filled, counts, gather = self._fill(chunks)
        opened = self._lengthen(slots)
        num_rows, num_tokens = self.sizes.mixed(len(slots), int(counts.sum()))
        rows = padded(slots, num_rows, self.state.spare)
        if opened is not None:
            opened = padded(opened, num_rows, -1)
        arrive = self.staging.mixed(rows, opened, filled, counts, num_tokens)

        def work() -> tuple[Tensor]:
            gather(num_tokens)
            launch = partial(self.lowered.mixed, self.staging.batch(arrive()))
            (report,) = self.lowered.step_graphs.run(("mixed", num_rows, num_tokens), launch)
            return (report[: len(slots)],)

        return self._run_step(slots, work)

    def _lengthen(self, slots: np.ndarray) -> np.ndarray | None:
        """Lengthen the sequences of slots that take a step. Return the places of those whose second lanes do,
        too; None if these lanes do not open late."""
        opened = self.table.opened(slots) if self.family.spec.opens_late else None
        self.kv_lens[self.sequences(slots) if opened is None else self.table.running(slots, opened)] += 1
        self.kv_lens[self.table.spares] = 1
        return opened

    def _run_step(self, slots: np.ndarray, work: Callable[[], tuple[Tensor]]) -> AsyncCopy:
        began_s = self.timer()
        copy = self.streams.lm.run(work, self.observer)
        self._observe("step", len(slots), began_s)
        return copy

    def render(self, due: Render) -> AsyncCopy:
        """Return samples [B, N], and how many of each row are valid [B]."""
        rows = self.sizes.rows_of_launch(due.frames)
        size = None
        if due.is_reproducible:
            rows = size = self.sizes.reproducible_rows(due.frames)
        parts = [slice(first, first + rows) for first in range(0, len(due.slots), rows)]
        staged = [
            self.staging.render(
                due.slots[at], due.start[at], due.count[at], due.is_last[at], due.frames, size
            )
            for at in parts
        ]

        def work() -> tuple[Tensor, Tensor]:
            samples, valid = [], []
            for at, arrive in zip(parts, staged, strict=True):
                view = View(**arrive(), frames=due.frames, length=due.length)
                key = ("render", len(view.slots), due.frames, due.length)
                began_s = self.timer()
                made = self.lowered.render_graphs.run(key, partial(self.lowered.render, view))
                num = len(due.slots[at])
                self._observe("render", num, began_s)
                # The next launch of this size writes to the same place.
                if self.is_recorded and len(parts) > 1:
                    made = tuple(part.clone() for part in made)
                samples.append(made[0][:num])
                valid.append(made[1][:num])
            return torch.cat(samples), torch.cat(valid)

        return self.streams.renders.run(work, self.observer)

    def _observe(self, event: str, rows: int, began_s: float) -> None:
        if self.observer is not None:
            self.observer(event, rows, self.timer() - began_s)
