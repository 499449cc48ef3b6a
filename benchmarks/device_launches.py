"""The times of a runner's recorded launches, by the device's clock, and their slowest kernels."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch

from benchmarks.device_kernels import Put
from serving.engine.device import warmup
from serving.engine.device.runner import Runner

REPLAYS, REPLAYS_MS = 20, 60  # limits for one graph
OVERLAP_MS = 200  # of each kind, while both run
# CUDA's priorities of steps and renders
ORDERS = {"steps first": (-1, 0), "equal": (0, 0), "renders first": (0, -1)}
Recorded = dict[Hashable, tuple[Any, Any]]  # launch -> its graph and its results


def times(runner: Runner, put: Put) -> None:
    """Report the milliseconds of each launch, of empty slots with TIMED_POSITIONS positions each."""
    for graphs in (runner.lowered.step_graphs, runner.lowered.render_graphs):
        for key, (graph, _) in graphs.recorded.items():
            stage(runner, key)
            put(f"{name(key)}, ms", replay_ms(graph))
        if graphs.recorded:  # the first graph is the largest
            key, (graph, _) = next(iter(graphs.recorded.items()))
            stage(runner, key)
            put(f"longest in {name(key)}", longest(graph))


def beside_each_other(runner: Runner, put: Put) -> None:
    """Report what a render and the steps beside it take, of the fewest rows and of the most, with the most slots: with
    steps that go first, as in a server, with equal kinds, and with renders that go first."""
    steps, renders = runner.lowered.step_graphs.recorded, runner.lowered.render_graphs.recorded
    if not runner.is_recorded or not steps or not renders:
        return
    lm, usual, urgent = runner.streams.lm.cuda, runner.streams.renders.cuda, torch.cuda.Stream(priority=-1)
    step = next(iter(steps))
    rows = sorted(renders, key=lambda key: key[1] * key[2])
    stage(runner, step)
    plain = torch.cuda.Stream()
    first, equal = steps[step][0], recorded_on(plain, runner, step)[0]
    for render in (rows[0], rows[-1]):
        stage(runner, step)
        stage(runner, render)
        behind, ahead = renders[render][0], recorded_on(urgent, runner, render)[0]
        put(
            f"{name(step)} beside {name(render)}, ms",
            {
                "steps first": overlapped_ms((first, behind), (lm, usual)),
                "equal": overlapped_ms((equal, behind), (plain, usual)),
                "renders first": overlapped_ms((equal, ahead), (plain, urgent)),
            },
        )


def recorded_again(runner: Runner, order: str) -> tuple[Recorded, Recorded]:
    """Record all steps and renders once more, with the priorities of one of ORDERS. Call it on the thread that records
    the others: a library makes its handle for a thread when it is first used, which a recording refuses."""
    found: list[Recorded] = []
    graphs = runner.lowered.step_graphs, runner.lowered.render_graphs
    for known, priority in zip(graphs, ORDERS[order], strict=True):
        stream, pool = torch.cuda.Stream(priority=priority), torch.cuda.graph_pool_handle()
        keys = [key for key in known.recorded if not name(key).startswith(("prefill", "mixed"))]
        found.append({key: recorded_on(stream, runner, key, pool) for key in keys})
    return found[0], found[1]


@torch.inference_mode()
def recorded_on(stream: Any, runner: Runner, key: Any, pool: Any = None) -> tuple[Any, Any]:
    """Record a launch again, on another stream: kernels of a recorded launch keep the priority of its stream. Return the
    graph and its results."""
    kind, *sizes = key
    if kind == "render":
        view, usual = warmup.nothing_of(runner, *sizes), runner.streams.renders.pool
        launch = partial(runner.lowered.render, view)
    else:
        [batch] = [batch for known, batch in warmup.step_batches(runner, sizes[0]) if known == key]
        launch, usual = partial(runner.lowered.step, batch), runner.streams.lm.pool
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(runner.device)
    with (
        warmup.tf32(kind == "render" and runner.codec != "float32"),
        torch.cuda.graph(graph, pool=pool or usual, stream=stream),
    ):
        results = launch()
    return graph, results


def overlapped_ms(graphs: tuple[Any, Any], streams: tuple[Any, Any]) -> dict[str, float]:
    """Return the milliseconds of a step alone and beside renders, and of a render alone and beside steps. Each kind
    of graph has its own stream, on which one replay follows the other, for about as long as the other kind runs."""
    alone = [replay_ms(graph) for graph in graphs]
    counts = [max(2, round(OVERLAP_MS / ms)) for ms in alone]
    torch.cuda.synchronize()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(count + 1)] for count in counts]
    for marks, stream in zip(events, streams, strict=True):
        marks[0].record(stream)
    for i in range(max(counts)):
        for graph, stream, marks in zip(graphs, streams, events, strict=True):
            if i + 1 < len(marks):
                with torch.cuda.stream(stream):
                    graph.replay()
                marks[i + 1].record(stream)
    torch.cuda.synchronize()
    # what ran before the other kind had ended counts
    end_ms = min(events[0][0].elapsed_time(marks[-1]) for marks in events)
    beside = []
    for marks in events:
        done = [mark for mark in marks if events[0][0].elapsed_time(mark) <= end_ms + 1e-3]
        beside.append(done[0].elapsed_time(done[-1]) / max(len(done) - 1, 1))
    both = zip(("step", "render"), alone, beside, strict=True)
    return {
        f"{kind} {how}": round(ms, 3)
        for kind, *two in both
        for how, ms in zip(("alone", "beside"), two, strict=True)
    }


def name(key: Hashable) -> str:
    return " ".join(map(str, key)) if isinstance(key, tuple) else str(key)


@torch.inference_mode()
def stage(runner: Runner, key: Hashable) -> None:
    """Write the inputs of empty slots to the places that a recorded launch reads. Launches of all sizes read the same
    places, in which other numbers lie after a launch of another size."""
    assert isinstance(key, tuple)
    kind, *sizes = key
    streams = runner.streams
    with (streams.renders if kind == "render" else streams.lm).here():
        if kind == "render":
            warmup.nothing_of(runner, *sizes)
        elif kind == "prefill":
            warmup.prefill_of(runner, *sizes)
        elif kind == "mixed":
            warmup.mixed_of(runner, *sizes)
        else:
            most = runner.table.max_pages * runner.table.page_tokens
            runner.kv_lens[runner.table.spares] = min(warmup.TIMED_POSITIONS, most)
            next(known for known, _ in warmup.step_batches(runner, sizes[0]) if known == key)
    if runner.is_recorded:
        torch.cuda.synchronize(runner.device)


def replay_ms(graph: Any) -> float:
    """Return the milliseconds of a replay by the device's clock, after one warm-up replay."""

    def replays_ms(count: int) -> float:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        for _ in range(count):
            graph.replay()
        events[1].record()
        torch.cuda.synchronize()
        return events[0].elapsed_time(events[1]) / count

    return round(replays_ms(max(2, min(REPLAYS, int(REPLAYS_MS / replays_ms(1))))), 3)


def longest(graph: Any) -> dict[str, list[float]]:
    """Return launches and total us of one replay, by kernel."""
    from torch.profiler import ProfilerActivity, profile

    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        graph.replay()
        torch.cuda.synchronize()
    kernels = sorted(seen.key_averages(), key=lambda kernel: -kernel.device_time_total)
    return {kernel.key[:90]: [kernel.count, round(kernel.device_time_total)] for kernel in kernels[:25]}
