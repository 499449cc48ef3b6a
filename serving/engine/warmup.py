"""What a runner compiles and records before its first request: everything that a request can need, on the
spare slot alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from compile_cache.lower import any_size
from compile_cache.strategy import Lowering, Whole
from serving.engine.runner import INT, Runner
from zoo.contract import Batch, View


@torch.inference_mode()
def warm(runner: Runner, progress: Callable[[float, str], None]) -> None:
    """No slot, page or tape changes. `progress` is told the fraction that is done, and what comes next."""
    stages: list[tuple[str, Callable[[], None]]] = [
        ("step", partial(warm_step, runner)),
        ("prefill", partial(warm_prefill, runner)),
    ]
    window = runner.family.spec.window
    for frames in reversed(window.sizes):
        for length in window.lengths or (0,):
            stages.append((f"render {frames}", partial(warm_render, runner, frames, length)))
    for i, (name, stage) in enumerate(stages):
        progress(i / len(stages), name)
        stage()
    progress(1.0, "warm")


def warm_step(runner: Runner) -> None:
    """On a CPU one graph serves every size; on a GPU every size and page-table width is recorded, the largest
    first."""
    sizes, widths = [2], [1]
    if runner.device.type == "cuda":
        sizes = sorted(runner.buckets, reverse=True)
        widths = [1 << i for i in reversed(range((runner.max_pages - 1).bit_length() + 1))]
    for size in sizes:
        for width in widths:
            batch = spare_batch(runner, runner.lowerings[0], size, 1, min(width, runner.max_pages))
            runner.graphs.record((size, batch.page_table.shape[1]), partial(runner.launch_step, batch))


def warm_prefill(runner: Runner) -> None:
    lowering, family = runner.lowerings[1], runner.family
    batch = spare_batch(runner, lowering, 2, 3)
    inputs = torch.zeros(len(batch.positions), family.spec.width, dtype=family.dtype, device=runner.device)
    if lowering == Whole():
        any_size((inputs,), 0, "tokens")
    runner.launch_prefill(inputs, batch)


def warm_render(runner: Runner, frames: int, length: int) -> None:
    slots, start, count = (runner.place(np.full(2, value, INT)) for value in (runner.state.spare, 0, 0))
    is_last = runner.place(np.zeros(2, bool))
    if runner.lowerings[2] == Whole():
        any_size((slots, start, count, is_last), 0, "batch")
    runner.launch_render(View(slots, start, count, is_last, frames, length))


def spare_batch(runner: Runner, lowering: Lowering, size: int, tokens: int, columns: int = 1) -> Batch:
    """A launch of `size` slots, with `tokens` inputs in each lane, which writes where nobody reads."""
    spare = np.full(size, runner.state.spare, INT)
    sequences = runner.sequences(spare)
    runner.kv_lens[runner.spares] = tokens
    positions = np.tile(np.arange(tokens, dtype=INT), len(sequences))
    starts = np.arange(len(sequences) + 1, dtype=INT) * tokens
    batch = runner.batch(spare, sequences, np.repeat(sequences, tokens), positions, starts, columns)
    if lowering == Whole():
        any_size((batch.slots,), 0, "batch")
        any_size((batch.kv_lens, batch.page_table), 0, "sequences")
        any_size(
            (batch.positions, batch.kv_write_index, batch.is_audio),
            0,
            "sequences" if tokens == 1 else "tokens",
        )
        any_size((batch.cu_seqlens,), 0, "edges")
        any_size((batch.page_table,), 1, "pages")
    return batch
