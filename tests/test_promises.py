"""The promises of every family and of the engine. Run over `toy.py` and over every folder of `zoo/`, as tiny
random models."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain, cycle, islice
from typing import Any

import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func
from models import (
    NAMES,
    TOYS,
    Clock,
    Listener,
    alone,
    family,
    first_pass,
    requests,
    serve,
    with_and_without_lag,
)
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes

from compile_cache.counts import counts
from compile_cache.lower import with_own_code
from compile_cache.strategy import Eager, Part, Parts, Strategy, Whole
from serving.engine.device import warmup
from serving.engine.device.arena import PAGE_TOKENS, Arena, token_bytes
from serving.engine.device.launches import Chunk, Render
from serving.engine.device.runner import Runner
from serving.engine.engine import Engine, Failed, Finished
from serving.engine.job import NO_AUDIO
from serving.engine.schedule.policy import Streaming
from zoo.contract import NEVER, Family, State, View, Window
from zoo.request import Request

every_family = pytest.mark.parametrize("name", NAMES)
# These promises concern the engine more than the family, so the toys are enough for quick runs.
slow_for_families = pytest.mark.parametrize(
    "name", [name if name in TOYS else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
# With fp32, other shapes and loud random weights, up to 2e-5 is rounding, as the test in float64 shows.
SAMPLES = {"rtol": 0, "atol": 5e-5}
Lengths = dict[tuple[int, int], int]  # by (slot, lane)
LATENTS = 5e-5  # for frames of floats in fp32 and other shapes; up to 1e-5 is rounding


class RunnerHarness:
    """A runner driven by hand. Every slot has as many pages as it can need, in shuffled order."""

    def __init__(self, name: str, num_slots: int, compile: bool = False):
        self.name, self.family = name, family(name)
        spec = self.family.spec
        each = 30 if spec.steps_per_frame > 1 else 12
        self.lanes = spec.lanes
        count = num_slots * self.lanes * each
        arena = Arena([self.family], (1 + count) * PAGE_TOKENS * token_bytes(self.family))
        self.runner = Runner(self.family, num_slots, arena, compile)
        dealt = iter(random.Random(0).sample(range(1, 1 + count), count))
        self.pages = [[list(islice(dealt, each)) for _ in range(self.lanes)] for _ in range(num_slots)]
        self.is_done = np.ones(num_slots, bool)

    def open(
        self, slot: int, request: Request, pages: Sequence[Sequence[int]] = (), skips: Sequence[int] = ()
    ) -> Lengths:
        """Open slots -> the number of positions to prefill by (slot, lane). The first step reads the last
        position of each prompt."""
        prompt = next(self.family.prompts(request))
        assert max(prompt.max_positions) <= len(self.pages[slot][0]) * PAGE_TOKENS
        self.runner.open(slot, prompt, pages or self.pages[slot], skips or [0] * self.lanes)
        self.is_done[slot] = False
        return {(slot, lane): len(reads.inputs) - 1 for lane, reads in enumerate(prompt.lanes)}

    def start(self, *pairs: tuple[int, Request]) -> None:
        """Open slots and prefill their whole prompts in one launch."""
        self.prefill(
            {
                where: (0, length)
                for slot, request in pairs
                for where, length in self.open(slot, request).items()
            }
        )

    def prefill(self, stretches: dict[tuple[int, int], tuple[int, int]]) -> None:
        """Prefill {(slot, lane): (start, stop)} in one launch, without the empty stretches."""
        chunks = [
            Chunk(slot, start, stop, False, lane)
            for (slot, lane), (start, stop) in stretches.items()
            if start < stop
        ]
        if chunks:
            self.runner.prefill(chunks)

    def step(self, slots: np.ndarray | None = None) -> None:
        slots = np.flatnonzero(~self.is_done) if slots is None else slots
        report = self.runner.step(slots).read()[0]
        self.is_done[slots] = report[:, 1]
        if self.family.spec.opens_late:
            self.open_lanes(dict(zip(slots.tolist(), report[:, 4].tolist(), strict=True)))

    def open_lanes(self, steps: dict[int, int]) -> None:
        """Fill the second lanes that open. steps: the one from which each slot's second lane runs."""
        table = self.runner.table
        opens = {slot: step for slot, step in steps.items() if step < NEVER == table.opens_at[slot]}
        for slot, step in opens.items():
            lane = self.family.second_lane(self.runner.length_at(slot, step))
            self.runner.open_lane(slot, lane, self.pages[slot][1], 0)
            self.prefill({(slot, 1): (0, len(lane.inputs))})

    def finish(self) -> None:
        while not self.is_done.all():
            self.step()

    def codes(self, slot: int) -> Tensor:
        return self.runner.state.tape[slot, : self.runner.state.ready[slot]]

    def agrees(self, pairs: Iterable[tuple[int, Request]]) -> None:
        """Check that every slot has the codes of its request alone."""
        for slot, request in pairs:
            truth = first_pass(self.name, request).frames
            atol = LATENTS if truth.is_floating_point() else 0
            whose = f"{slot}, {request}: "
            torch.testing.assert_close(self.codes(slot), truth, rtol=0, atol=atol, msg=whose.__add__)


def snapshot(state: State) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in vars(state).items() if isinstance(value, Tensor)}


# codes do not depend on the rest of the batch


@every_family
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_alone_equals_batched(name, batch):
    """Requests start and end at different times, in shuffled slots, with different sampling."""
    stage, asked = RunnerHarness(name, 8), requests(name, batch)
    slots = random.Random(batch).sample(range(8), batch)
    late = list(zip(slots, asked, strict=True))
    for tick in range(100):
        arriving, late = (late[:2], late[2:]) if tick % 3 == 0 else ([], late)
        if arriving:
            stage.start(*arriving)
        if not stage.is_done.all():
            stage.step()
    assert not late and stage.is_done.all()
    stage.agrees(zip(slots, asked, strict=True))


@every_family
def test_padding_does_not_change_other_slots(name, monkeypatch):
    stage, (asked, resting) = RunnerHarness(name, 8), requests(name, 2)
    monkeypatch.setattr(stage.runner.sizes, "step_rows", lambda count: 8)
    stage.start((2, asked), (5, resting))
    state, kv = snapshot(stage.runner.state), stage.runner.kv.clone()
    while not stage.is_done[2]:
        stage.step(np.array([2]))
    stage.agrees([(2, asked)])
    # all other slots, without the spare row, which may be written
    others = torch.tensor([slot for slot in range(8) if slot != 2])
    for field, before in state.items():
        assert torch.equal(getattr(stage.runner.state, field)[others], before[others]), field
    own = {0, *chain(*stage.pages[2])}  # page 0 is scratch
    pages = torch.tensor([page for page in range(stage.runner.arena.num_pages) if page not in own])
    by_page = (stage.runner.arena.num_pages, -1)
    assert torch.equal(stage.runner.kv.view(by_page)[pages], kv.view(by_page)[pages])


@every_family
def test_a_step_after_done_changes_nothing(name):
    stage, asked = RunnerHarness(name, 3), requests(name, 3)
    stage.start(*enumerate(asked))
    stage.finish()
    before = snapshot(stage.runner.state)
    stage.step(np.arange(3))
    assert stage.is_done.all()
    for field, value in snapshot(stage.runner.state).items():
        assert torch.equal(value, before[field]), field


@slow_for_families
def test_a_reused_slot_is_a_fresh_one(name):
    """The previous request may have ended, or may have been cancelled midway."""
    stage, (first, second, third) = RunnerHarness(name, 1), requests(name, 7, max_frames=40)[2::2]
    stage.start((0, first))
    stage.finish()
    samples = [render_in(stage.family, stage.runner.state, [0], [[4]])[0]]
    stage.start((0, second))
    stage.step()
    stage.start((0, third))
    stage.finish()
    stage.agrees([(0, third)])
    samples += render_in(stage.family, stage.runner.state, [0], [[4]])
    for heard, request in zip(samples, (first, third), strict=True):
        torch.testing.assert_close(heard, first_pass(name, request).samples, **SAMPLES)


# prompts


@slow_for_families
@pytest.mark.parametrize("sizes", [(1,), (5,), (16,), (3, 1, 16, 2)], ids=str)
def test_chunked_prefill_equals_whole(name, sizes):
    """Three prompts are prefilled in parallel, in different chunks, while a fourth request takes steps."""
    stage, asked = RunnerHarness(name, 4), requests(name, 4)
    *chunked, speaking = asked
    stage.start((3, speaking))
    lengths = {
        where: length
        for slot, request in enumerate(chunked)
        for where, length in stage.open(slot, request).items()
    }
    at = dict.fromkeys(lengths, 0)
    size = {
        where: cycle(sizes[i % len(sizes) :] + sizes[: i % len(sizes)]) for i, where in enumerate(lengths)
    }
    while at != lengths:
        stop = {where: min(at[where] + next(size[where]), length) for where, length in lengths.items()}
        stage.prefill({where: (at[where], stop[where]) for where in lengths})
        at = stop
        if not stage.is_done[3]:
            stage.step(np.array([3]))
    stage.finish()
    stage.agrees(enumerate(asked))


@every_family
def test_shared_pages_equal_recomputed_ones(name):
    """The second request reads the first one's pages and computes only the rest of its prompt."""
    stage, (long, *_) = RunnerHarness(name, 2), requests(name, 3)[2:]
    other = replace(long, seed=long.seed + 1)
    stage.start((0, long))
    lengths = stage.open(1, other)
    shared = [length // PAGE_TOKENS for length in lengths.values()]
    assert all(
        count >= 1 and length % PAGE_TOKENS for count, length in zip(shared, lengths.values(), strict=True)
    )
    # a lane that opens late has no prompt
    pages = [[*theirs[:count], *own] for theirs, own, count in zip(*stage.pages, shared, strict=False)]
    stage.open(1, other, pages, [count * PAGE_TOKENS for count in shared])
    stage.prefill(
        {
            where: (count * PAGE_TOKENS, length)
            for (where, length), count in zip(lengths.items(), shared, strict=True)
        }
    )
    stage.finish()
    stage.agrees([(0, long), (1, other)])


@with_and_without_lag
def test_the_engine_shares_the_pages_of_equal_prompts(name, report_lag):
    long = requests(name, 3)[2]
    asked = [long, replace(long, seed=7), replace(long, seed=8)]
    engine = Engine(family(name), max_slots=2, compile=False, report_lag=report_lag, clock=Clock())
    # the second arrives while the first one speaks, the third long after it
    listeners = serve(engine, {0: asked[:1], 2: asked[1:2], 60: asked[2:]})
    for listener, request in zip(listeners, asked, strict=True):
        np.testing.assert_allclose(listener.samples, alone(name, request).samples, **SAMPLES)
    whole_pages = sum(
        (len(lane.inputs) - 1) // PAGE_TOKENS for lane in next(family(name).prompts(long)).lanes
    )
    shared = engine.stats()["pages_shared"]
    # those of lanes that open late are shared, too
    assert shared >= 2 * whole_pages > 0 if family(name).spec.opens_late else shared == 2 * whole_pages > 0


# samples


def at_most(window: Window, frames: int) -> int:
    """Return the largest multiple of the window's grid up to `frames` and up to its largest size."""
    return min(max(frames // window.grid, 1) * window.grid, window.sizes[-1])


@torch.inference_mode()
def render_in(
    family: Family, state: State, slots: Sequence[int], sizes: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Render the tapes of several slots in the same launches, each in windows of its own repeating sizes.
    Slots that are done get empty windows."""
    spec = family.spec
    where, ready = torch.tensor(slots), state.ready[list(slots)]
    start, pieces = torch.zeros_like(ready), [[torch.zeros(0)] for _ in slots]
    wanted = [cycle(size) for size in sizes]
    while (start < ready).any():
        count = torch.tensor([at_most(spec.window, next(want)) for want in wanted])
        if spec.window.grid_offset:
            count = torch.where(start == 0, spec.window.grid_offset, count)
        count = torch.minimum(count, ready - start)
        frames = spec.window.bucket(int(count.max()))
        is_last = start + count == ready
        length = spec.window.length_bucket(int((start + count).max()))
        samples, valid = family.render(state, View(where, start, count, is_last, frames, length))
        assert len(samples) == len(slots) and samples.dtype == torch.float32
        for row, num_samples in enumerate(valid):
            pieces[row].append(samples[row, :num_samples])
        start = start + count
    return [torch.cat(parts) for parts in pieces]


@slow_for_families
@pytest.mark.parametrize("sizes", [[[1]] * 3, [[2, 4, 25], [3], [25, 1]]], ids=str)
def test_windows_joined_equal_the_tape_at_once(name, sizes):
    """Render in float64, where only a mistake can cause a difference that is visible in float32 samples."""
    asked = [
        replace(requests(name, 1)[0], text="a", seed=seed, max_frames=frames)
        for seed, frames in enumerate((60, 33, 8))
    ]
    stage, exact = RunnerHarness(name, 4), family(name, "float64")
    stage.start(*enumerate(asked, 1))
    stage.finish()
    tape, ready = stage.runner.state.tape, stage.runner.state.ready
    assert ready.max() > 25 and ready[1:4].min() > 1

    def state() -> State:
        fresh = exact.state(4)
        fresh.tape.copy_(tape)
        fresh.ready.copy_(ready)
        return fresh

    for slot, heard in enumerate(render_in(exact, state(), [1, 2, 3], sizes), 1):
        frames = int(ready[slot])
        length = exact.spec.window.length_bucket(frames)
        view = View(
            torch.tensor([slot]),
            torch.tensor([0]),
            torch.tensor([frames]),
            torch.tensor([True]),
            frames,
            length,
        )
        [whole], [num_samples] = exact.render(state(), view)
        torch.testing.assert_close(heard, whole[:num_samples], rtol=0, atol=1e-6)


@with_and_without_lag
@pytest.mark.parametrize("policy", ["streaming", "throughput"])
def test_streamed_equals_generated(name, policy, report_lag):
    """There are more requests than slots, and prompts are prefilled in chunks of 7 positions."""
    asked = requests(name, 8, max_frames=30)
    engine = Engine(
        family(name), max_slots=3, compile=False, report_lag=report_lag, policy=policy, clock=Clock()
    )
    [model] = engine.models.values()
    model.scheduler.policy = replace(model.scheduler.policy, prefill_tokens=7)
    listeners = serve(engine, {0: asked[:2], 3: asked[2:3], 4: asked[3:7], 20: asked[7:]})
    for listener, request in zip(listeners, asked, strict=True):
        truth = alone(name, request)
        np.testing.assert_allclose(listener.samples, truth.samples, **SAMPLES)
        is_cut = len(truth.frames) == request.max_frames or is_out_of_tokens(name, request, listener)
        reason = "length" if is_cut else "stop"
        if len(truth.frames) == 0 and not (family(name).spec.answers and truth.text):
            assert listener.end == Failed(NO_AUDIO, "no_audio")
        else:
            assert isinstance(listener.end, Finished) and (listener.end.reason, listener.end.frames) == (
                reason,
                len(truth.frames),
            )
        assert "".join(listener.texts) == truth.text
        window = family(name).spec.window
        assert (
            len(listener.chunks) > 1
            or listener.frames < max(8, 2 * window.grid) + window.lookahead
            or policy == "throughput"
        )


def is_out_of_tokens(name: str, request: Request, listener: Listener) -> bool:
    """Return whether an answer has all the tokens that it may have, of text and audio together."""
    if not (family(name).spec.answers and isinstance(listener.end, Finished)):
        return False
    made = listener.end.frames + listener.end.usage.get("text_tokens", 0)
    return made == request.options.get("max_tokens")


@with_and_without_lag
def test_a_deterministic_engine_gives_equal_requests_equal_bits(name, report_lag):
    """The requests run alone or next to others that start and end; windows are cut at the same frames."""
    asked, *others = requests(name, 5, max_frames=30)

    def heard(arrivals: dict[int, list[Request]], turn_s: float) -> bytes:
        clock = Clock()
        settings = {"compile": False, "report_lag": report_lag, "is_deterministic": True}
        engine = Engine(family(name), max_slots=3, clock=clock, **settings)
        clock.now_s = turn_s
        listeners = serve(engine, arrivals)
        return next(
            ear for ear, request in zip(listeners, chain(*arrivals.values()), strict=True) if request is asked
        ).samples.tobytes()

    alone_bits = heard({0: [asked]}, 0.0)
    assert heard({0: [others[0], asked], 2: others[1:]}, 5.0) == alone_bits
    assert heard({0: others[:2], 3: [asked], 9: others[2:]}, 9.0) == alone_bits


# speed changes nothing


def everything(name: str) -> Strategy:
    """Return a strategy that compiles every verb. A render that no device compiles as a whole is compiled in
    its parts: one graph of it would repeat every step of a flow's solver, and tracing it would take most of
    this file's time."""
    render = family(name).strategy.gpu_render
    return Strategy(Whole(), Whole(), render if isinstance(render, Parts) else Whole())


def knows_one_size(part: Part) -> bool:
    """Return whether a part is compiled for one number of frames, the only one that a GPU renders."""
    return all("frames" not in sizes for _, sizes in part.any_size)


def fix_sizes(monkeypatch) -> None:
    """Make a CPU's renders as long as a GPU's, where no size follows from a value."""
    for module in [each for each in sys.modules.values() if "may_follow_values" in vars(each)]:
        monkeypatch.setattr(module, "may_follow_values", lambda like: False)


def lowered_equals_eager(name: str, strategy: Strategy, monkeypatch) -> None:
    """Check that one graph per verb and window shape serves every batch. Each part of a verb has one graph for all
    lengths, or one for each. A verb's graph is built for two rows of the spare slot."""
    for package in family(name).encoder_packages:  # importing them later would invalidate a graph
        importlib.import_module(package)
    monkeypatch.setattr(family(name), "strategy", strategy)
    window = family(name).spec.window
    if name not in TOYS:  # one size with its lengths is as good as all of them and takes a third of the time
        window = replace(window, sizes=window.sizes[:1])
        monkeypatch.setattr(family(name), "spec", replace(family(name).spec, window=window))
    windows, num_lengths = window.sizes, max(1, len(window.lengths))
    num_expected = (
        (strategy.step == Whole())
        + (strategy.prefill == Whole())
        + len(windows) * num_lengths * (strategy.render == Whole())
    )
    is_in_parts, num_parts = isinstance(strategy.render, Parts), 0
    if is_in_parts:
        num_parts = len(strategy.render.parts)
        if any(knows_one_size(part) for part in strategy.render.parts):
            fix_sizes(monkeypatch)
    before = counts().graphs
    stage = RunnerHarness(name, 5, compile=True)
    warmup.warm(stage.runner, lambda fraction, stage: None)
    # A part is compiled when it first runs, and warm-up's empty windows do not reach every part.
    assert is_in_parts or counts().graphs - before == num_expected
    asked = requests(name, 8, max_frames=20)
    with torch.compiler.set_stance("default" if is_in_parts else "fail_on_recompile"):
        for batch in (asked[:1], asked[1:3], asked[3:]):
            pairs = list(enumerate(batch))
            ends = {where: end for slot, request in pairs for where, end in stage.open(slot, request).items()}
            for start, stop in ((0, 1), (1, 4), (4, 1000)):
                stage.prefill({where: (start, min(stop, end)) for where, end in ends.items()})
            stage.finish()
            stage.agrees(pairs)
            rows = np.array([slot for slot, _ in pairs if stage.runner.state.ready[slot] > 0])
            count = stage.runner.state.ready[rows].clamp(max=windows[-1]).numpy()
            is_last = count == stage.runner.state.ready[rows].numpy()
            length = window.length_bucket(int(count.max()))
            heard, valid = stage.runner.render(
                Render(rows, np.zeros_like(rows), count, is_last, windows[-1], 0.0, length)
            ).read()
            for row, slot in enumerate(rows):
                samples = heard[row, : valid[row]]
                np.testing.assert_allclose(
                    samples, first_pass(name, batch[slot]).samples[: len(samples)], **SAMPLES
                )
    made = counts().graphs - before - num_expected
    assert num_parts <= made <= num_parts * num_lengths


def passed(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
    """Do what Inductor does with a graph before it writes code. Sizes that vary may not decide anything there."""
    joint_graph_passes(graph)
    return make_boxed_func(graph.forward)


through_passes = aot_autograd(fw_compiler=passed, decompositions=select_decomp_table())


@pytest.mark.compile
@every_family
@pytest.mark.parametrize(
    ("backend", "is_everything"),
    [("eager", True), (through_passes, False)],
    ids=["everything", "as asked for"],
)
def test_lowered_equals_eager(name, backend, is_everything, monkeypatch):
    def compiled(function):
        return torch.compile(with_own_code(function), backend=backend, fullgraph=True, dynamic=False)

    torch._dynamo.reset()
    monkeypatch.setattr("compile_cache.lower.traced", compiled)
    lowered_equals_eager(name, everything(name) if is_everything else family(name).strategy, monkeypatch)


@pytest.mark.compile
def test_compiled_equals_eager(monkeypatch):
    """Compile the toys with the full compiler, one after the other, as in a server with both: `step` is the
    same code for any number of lanes. A real family would take minutes."""
    torch._dynamo.reset()
    for name in ("toy", "toy_guided"):
        lowered_equals_eager(name, Strategy(Whole(), Whole(), Eager()), monkeypatch)


# cancel


def at_rest(engine: Engine) -> dict[str, object]:
    """Return everything that a request could leave behind."""
    shared = {
        "pages": engine.pages.free,
        "jobs": (dict(engine.intake.known), list(engine.inbox.news.jobs), set(engine.inbox.news.cancelled)),
    }
    return shared | {
        name: {
            "slots": sorted(model.tenants.free),
            "jobs": (list(model.queue.jobs), dict(model.running)),
            "in flight": (list(model.round.steps), list(model.round.renders)),
            "prompts": (dict(model.runner.prompts), dict(model.scheduler.slots.prompt.queue)),
            "open": model.scheduler.slots.is_occupied.tolist(),
        }
        for name, model in engine.models.items()
    }


def moment(engine: Engine, id: str) -> str:
    """Return a request's place in the engine."""
    if id not in engine.intake.known:
        return "in the inbox" if any(job.id == id for job in engine.inbox.news.jobs) else "ended"
    slot, scheduler = engine.intake.known[id].slot, engine.intake.known[id].model.scheduler
    if slot < 0:
        return "waiting"
    if slot in scheduler.slots.prompt.queue:
        return "in its prompt" if scheduler.slots.prompt.num_prefilled[slot, 0] else "admitted"
    return "speaking"


@pytest.mark.slow
@with_and_without_lag
def test_cancels_at_any_moment_leave_nothing_behind(name, report_lag):
    num_requests = 2000 if name == "toy" else 400 if name in TOYS else 100
    chance = random.Random(4 + report_lag)
    kv_memory_bytes = 24 * family(name).spec.lanes * PAGE_TOKENS * token_bytes(family(name))
    engine = Engine(
        family(name),
        max_slots=8,
        kv_memory_bytes=kv_memory_bytes,
        compile=False,
        report_lag=report_lag,
        clock=Clock(),
    )
    [model] = engine.models.values()
    # so that there are moments inside a prompt
    model.scheduler.policy = Streaming(prefill_tokens=12)
    before = at_rest(engine)
    kinds = requests(name, 16, max_frames=10)
    listeners: dict[str, Listener] = {}
    cancels: dict[int, list[str]] = {}
    moments = set()
    turn = 0
    while len(listeners) < num_requests or engine.intake.known or turn <= max(cancels):
        for _ in range(chance.choice((0, 0, 1, 2, 5)) if len(engine.intake.known) < 20 else 0):
            if len(listeners) < num_requests:
                id = f"request-{len(listeners)}"
                listeners[id] = Listener()
                engine.speak(id, replace(chance.choice(kinds), seed=chance.getrandbits(63)), listeners[id])
                cancels.setdefault(turn + chance.choice((0, 0, 1, 2, 3, 5, 8, 13, 30, 1000)), []).append(id)
        for id in cancels.get(turn, ()):
            moments.add(moment(engine, id))
            engine.cancel(id)
        engine.turn()
        engine.clock.now_s += 0.05
        turn += 1
    while engine.turn():
        pass
    engine.turn()  # collects what was in flight when the last request ended
    assert len(listeners) == num_requests and all(listener.has_ended_well for listener in listeners.values())
    reasons = {listener.reason for listener in listeners.values()}
    assert reasons >= {"length", "cancelled"}
    often = {"in the inbox", "waiting", "in its prompt", "speaking", "ended"}
    assert moments == often | {"admitted"} if name in TOYS else moments >= often
    assert at_rest(engine) == before
    assert engine.pages.shared > 0
