"""Compile and record everything that a request can need before the first one comes, on the spare slot
alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product

import numpy as np
import torch
from torch import Tensor

from compile_cache.artifacts import Entry
from compile_cache.graphs import Graphs, Launch
from compile_cache.lower import any_size
from compile_cache.strategy import Whole
from serving.engine.device.page_table import INT
from serving.engine.device.runner import Runner
from serving.engine.device.staging import WARM_SLOTS
from serving.engine.device.streams import Stream
from zoo.contract import Batch, View

WARM_S = 3.0  # that the sizes of renders may take together
TIMED_LAUNCHES = 3  # of one kind and size; the shortest counts
TIMED_POSITIONS = 256  # in the KV cache of each sequence of a timed step


@torch.inference_mode()
def warm(runner: Runner, progress: Callable[[float, str], None], entry: Entry | None = None) -> None:
    """Warm a runner; no slot, page or tape changes. progress: is told the fraction that is done, and what
    comes next. entry: where compiled code is found, or left."""
    if entry is not None and runner.is_recorded:
        runner.lowered.keep_in(entry, runner.codec)
    works = stages(runner, entry)
    for i, (name, stream, stage) in enumerate(works):
        progress(i / len(works), name)
        with stream.here():
            stage()
    progress(1.0, "warm")


def stages(runner: Runner, entry: Entry | None = None) -> list[tuple[str, Stream, Callable[[], None]]]:
    """Return the name of each stage of `warm`, the stream that it belongs to, and what it does."""
    lm, renders = runner.streams.lm, runner.streams.renders
    found: list[tuple[str, Stream, Callable[[], None]]] = [
        ("step", lm, partial(warm_step, runner, entry)),
        ("prefill", lm, partial(warm_prefill, runner)),
    ]
    if runner.has_mixed:
        found.append(("mixed step", lm, partial(warm_mixed, runner)))
    window = runner.family.spec.window
    for frames in reversed(window.sizes):
        for length in window.lengths or (0,):
            found.append((f"render {frames}", renders, partial(warm_render, runner, frames, length)))
    if not runner.is_recorded:
        found.append(("sizes of renders", renders, partial(warm_sizes, runner)))
    return found


def warm_step(runner: Runner, entry: Entry | None = None) -> None:
    """On a CPU one graph serves every size; on a GPU every size is recorded, the largest first."""
    runner.kv_lens[runner.table.spares] = 1
    for size in sorted(runner.sizes.buckets, reverse=True) if runner.is_recorded else [WARM_SLOTS]:
        for key, batch in step_batches(runner, size):
            if runner.lowered.how[0] == Whole():
                mark_sizes(batch, tokens="sequences")
                any_size(runner.state.tensors().values(), 0, "slots")
                if entry is not None and not runner.is_recorded:
                    runner.lowered.take_step(entry, batch)
            runner.lowered.step_graphs.record(key, partial(runner.lowered.step, batch))


def step_batches(runner: Runner, size: int) -> Iterator[tuple[tuple[object, ...], Batch]]:
    """Yield the key and the inputs of a step of `size` spare slots; where second lanes open late, of each
    number of them that is recorded."""
    if not runner.family.spec.opens_late:
        yield ("step", size), runner.staging.batch(runner.staging.step(spare_slots(runner, size))())
        return
    sizes = runner.sizes.open_rows(size) if runner.is_recorded else [size]
    for num_open in reversed(sizes):
        opened = np.arange(num_open, dtype=INT)
        batch = runner.staging.batch(runner.staging.step(spare_slots(runner, size), opened)())
        yield ("step", size, num_open), batch


def warm_prefill(runner: Runner) -> None:
    """On a GPU every number of tokens is recorded, the largest first."""
    for num_tokens in sorted(runner.sizes.prefill_tokens, reverse=True) if runner.is_recorded else [3]:
        inputs, batch = prefill_of(runner, num_tokens)
        if runner.lowered.how[1] == Whole():
            mark_sizes(batch, tokens="tokens")
            any_size((inputs,), 0, "tokens")
        runner.lowered.step_graphs.record(
            ("prefill", num_tokens), partial(runner.lowered.prefill, inputs, batch)
        )


def warm_mixed(runner: Runner) -> None:
    """Every size is recorded, the largest first."""
    for rows, num_tokens in sorted(
        product(runner.sizes.mixed_buckets, runner.sizes.mixed_tokens), reverse=True
    ):
        batch = mixed_of(runner, rows, num_tokens)
        if runner.lowered.how[0] == Whole():
            mark_sizes(batch, tokens="inputs")
            any_size(runner.state.tensors().values(), 0, "slots")
        runner.lowered.step_graphs.record(("mixed", rows, num_tokens), partial(runner.lowered.mixed, batch))


def mixed_of(runner: Runner, rows: int, num_tokens: int) -> Batch:
    """Return the inputs of a step of `rows` spare slots that also reads a prompt of the spare slot."""
    room = runner.table.max_pages * runner.page_tokens - 1
    spares, own = runner.table.spares, min(num_tokens, room)
    runner.kv_lens[spares] = own + 1
    opened = np.arange(rows, dtype=INT) if runner.family.spec.opens_late else None
    slots, counts = spare_slots(runner, rows), np.array([own], INT)
    return runner.staging.batch(runner.staging.mixed(slots, opened, spares[:1], counts, num_tokens)())


def prefill_of(runner: Runner, num_tokens: int) -> tuple[Tensor, Batch]:
    """Return the inputs of a prefill of the spare slot. On a GPU there are as many as are recorded."""
    room = runner.table.max_pages * runner.page_tokens
    sequences, own = runner.sequences(spare_slots(runner, 1))[:1], min(num_tokens, room)
    runner.kv_lens[sequences] = own
    owner, positions = np.repeat(sequences, num_tokens), np.arange(num_tokens, dtype=INT) % room
    arrive, num_tokens = runner.staging.prefill(sequences, owner, positions, np.array([0, own], INT))
    inputs, is_audio = runner.staging.inputs[:num_tokens], runner.staging.is_audio[:num_tokens]
    if not runner.is_recorded:
        family = runner.family
        inputs = torch.zeros(num_tokens, family.spec.width, dtype=family.dtype, device=runner.device)
        is_audio = torch.zeros(num_tokens, dtype=torch.bool, device=runner.device)
    return inputs, runner.staging.batch(arrive(), is_audio)


def warm_render(runner: Runner, frames: int, length: int) -> None:
    sizes = sorted(runner.sizes.render_buckets(frames), reverse=True) if runner.is_recorded else [WARM_SLOTS]
    for size in sizes:
        view = nothing_of(runner, size, frames, length)
        if runner.lowered.how[2] == Whole():
            any_size((view.slots, view.start, view.count, view.is_last), 0, "batch")
        with tf32(runner.codec != "float32"):
            runner.lowered.render_graphs.record(
                ("render", size, frames, length), partial(runner.lowered.render, view)
            )


def warm_sizes(runner: Runner) -> None:
    """Launch as many sizes of renders as there is time for, the smallest first.

    A CPU renders any number of rows with the same code, but a size's first launch takes up to three times as
    long as the next, since the library makes its kernels then. A listener would hear that.
    """
    end_s = time.perf_counter() + WARM_S
    window = runner.family.spec.window
    shapes = [
        (rows, frames)
        for frames in window.sizes
        for rows in range(1, runner.sizes.rows_of_launch(frames) + 1)
    ]
    for rows, frames in sorted(shapes, key=lambda shape: shape[0] * shape[1]):
        if time.perf_counter() >= end_s:
            break
        if rows != WARM_SLOTS:  # the graph's own
            runner.lowered.render(nothing_of(runner, rows, frames, window.usual_length))


class LaunchTimes:
    """Seconds of single launches of a warm runner, on the spare slot alone, until the device is done."""

    def __init__(self, runner: Runner):
        self.runner = runner
        self._took_s: dict[Hashable, float] = {}  # by the launch's key: admission and rendering ask alike

    def step_s(self, slots: int) -> float:
        runner, table = self.runner, self.runner.table
        with runner.streams.lm.here(), torch.inference_mode():
            runner.kv_lens[table.spares] = min(TIMED_POSITIONS, table.max_pages * table.page_tokens)
            rows = spare_slots(runner, runner.sizes.step_rows(slots))
            # with all second lanes, where they open late
            key, batch = next(step_batches(runner, len(rows)))
            return self._timed(runner.lowered.step_graphs, key, partial(runner.lowered.step, batch))

    def prefill_s(self, tokens: int) -> float:
        """Return what prompts add to a step that reads them, or what a launch of their own takes."""
        runner = self.runner
        if runner.has_mixed:
            rows, num_tokens = runner.sizes.mixed(runner.num_slots, tokens)
            return max(self._mixed_s(rows, num_tokens) - self.step_s(rows), 0.0)
        with runner.streams.lm.here(), torch.inference_mode():
            inputs, batch = prefill_of(runner, min(tokens, runner.sizes.prefill_tokens[-1]))
            prefill = partial(runner.lowered.prefill, inputs, batch)
            return self._timed(runner.lowered.step_graphs, ("prefill", len(inputs)), prefill)

    def _mixed_s(self, rows: int, num_tokens: int) -> float:
        runner = self.runner
        with runner.streams.lm.here(), torch.inference_mode():
            mixed = partial(runner.lowered.mixed, mixed_of(runner, rows, num_tokens))
            return self._timed(runner.lowered.step_graphs, ("mixed", rows, num_tokens), mixed)

    def render_s(self, rows: int, frames: int) -> float:
        """More rows than a launch has take several launches."""
        most = self.runner.sizes.rows_of_launch(frames)
        num, rest = divmod(rows, most)
        whole_s = num * self._render_s(most, frames) if num else 0.0
        return whole_s + (self._render_s(rest, frames) if rest else 0.0)

    def _render_s(self, rows: int, frames: int) -> float:
        runner = self.runner
        with runner.streams.renders.here(), torch.inference_mode():
            length = runner.family.spec.window.usual_length
            view = nothing_of(runner, rows, frames, length)
            key = ("render", len(view.slots), frames, length)
            render = partial(runner.lowered.render, view)
            return self._timed(runner.lowered.render_graphs, key, render)

    def _timed(self, graphs: Graphs, key: Hashable, launch: Launch) -> float:
        if key not in self._took_s:
            self._took_s[key] = min(self._launched(graphs, key, launch) for _ in range(TIMED_LAUNCHES))
        return self._took_s[key]

    def _launched(self, graphs: Graphs, key: Hashable, launch: Launch) -> float:
        began_s = self.runner.timer()
        graphs.run(key, launch)
        if self.runner.is_recorded:
            torch.cuda.synchronize(self.runner.device)
        return self.runner.timer() - began_s


def nothing_of(runner: Runner, rows: int, frames: int, length: int) -> View:
    """Return a view of `rows` empty stretches of the spare slot."""
    nothing = np.zeros(rows, INT)
    arrive = runner.staging.render(spare_slots(runner, rows), nothing, nothing, nothing.astype(bool), frames)
    return View(**arrive(), frames=frames, length=length)


@contextmanager
def tf32(is_wanted: bool) -> Iterator[None]:
    """Record launches that multiply fp32 on tensor cores, with ten bits of each factor's fraction. The
    switches are the process's, so they are only thrown while the server is idle."""
    matmul = torch.backends.cuda.matmul.allow_tf32
    cudnn = torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = is_wanted or matmul
        torch.backends.cudnn.allow_tf32 = is_wanted or cudnn
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn


def spare_slots(runner: Runner, size: int) -> np.ndarray:
    """Return slots that no request reads."""
    return np.full(size, runner.state.spare, INT)


def mark_sizes(batch: Batch, tokens: str) -> None:
    """Mark the sizes that may vary in a graph; equal names mean equal sizes. Recorded launches have a
    page table of one width, and a prefill of one number of sequences.
    """
    any_size((batch.positions, batch.kv_write_index), 0, tokens)
    any_size((batch.kv,), 0, "rows")
    any_size((batch.page,), 0, "page")
    is_recorded = batch.kv.device.type != "cpu"
    if batch.prompts is not None and batch.prompt_rows is not None:
        any_size((batch.prompts, batch.is_audio), 0, "prompts")
        any_size((batch.prompt_rows,), 0, tokens)
    else:
        any_size((batch.is_audio,), 0, tokens)
    if tokens == "tokens" and is_recorded:
        return
    any_size((batch.slots,), 0, "batch")
    any_size((batch.kv_lens, batch.page_table), 0, "sequences")
    if batch.reads is not None and batch.outputs is not None:
        any_size((batch.reads,), 0, tokens)
        any_size((batch.outputs,), 1, "batch")
    if batch.block_tables is not None and batch.seq_lens is not None:
        any_size((batch.block_tables, batch.seq_lens), 0, "sequences")
    any_size((batch.cu_seqlens,), 0, "edges")
    if not is_recorded:
        any_size((batch.page_table,), 1, "pages")
