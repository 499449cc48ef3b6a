"""The scheduler: windows on a grid, samples that the renderer keeps back, and reproducible windows."""

from __future__ import annotations

import random

import numpy as np
import pytest
from schedulers import FRAME_S, WINDOW, Timed, deliver, due, report, speaking

from serving.engine.schedule.policy import Fifo, Streaming, Throughput
from serving.protocol import Listener


def test_a_window_ends_on_the_grid_which_the_prompt_may_shift():
    scheduler = speaking(sizes=(5, 10), grid=5, slots=())
    scheduler.timing.latency_s = 0.01
    scheduler.open(0, prompt_tokens=0, grid_offset=3)
    report(scheduler, {0: 2})
    assert due(scheduler, 0.0) == []  # the first point of the grid is frame 3
    report(scheduler, {0: 7})
    assert due(scheduler, 0.0) == [({0: (0, 3)}, 5)]
    deliver(scheduler, {0: 3}, 0.0)
    report(scheduler, {0: 17})
    assert due(scheduler, 0.0) == [({0: (3, 10)}, 10)]
    report(scheduler, {0: 21}, done=[0])
    assert due(scheduler, 0.0) == [({0: (13, 8)}, 10)]  # the end of the speech is no point of the grid
    assert scheduler.slots.tape.is_end_rendered[0]


@pytest.mark.parametrize(
    ("offset", "turn_s", "latency_s", "hold_s", "first"),
    [
        (
            3,
            0.01,
            0.1,
            0.0,
            3,
        ),  # 240 ms of audio, and the next stretch is there after five turns and a window: 150 ms
        (3, 0.03, 0.1, 0.0, 8),  # after 250 ms
        (3, 0.01, 0.2, 0.0, 8),
        (3, 0.01, 0.1, 0.1, 8),  # the renderer keeps 100 ms back
        (3, 0.01, 0.0, 0.0, 8),  # nobody knows yet what a window takes
        (0, 0.50, 0.1, 0.0, 5),  # a stretch of the grid is enough, however long turns are
    ],
)
def test_a_first_stretch_waits_for_more_frames_if_it_would_end_before_the_next_one(
    offset, turn_s, latency_s, hold_s, first
):
    scheduler = speaking(sizes=(5, 10), grid=5, slots=())
    scheduler.timing.iteration_s, scheduler.timing.latency_s, scheduler.timing.hold_s = (
        turn_s,
        latency_s,
        hold_s,
    )
    scheduler.open(0, prompt_tokens=0, grid_offset=offset)
    for ready in range(1, first):
        report(scheduler, {0: ready})
        assert due(scheduler, 0.0) == []
    report(scheduler, {0: first})
    assert due(scheduler, 0.0) == [({0: (0, first)}, 5 if first <= 5 else 10)]


def test_fifo_has_even_windows_on_a_grid_too():
    scheduler = speaking(policy=Fifo(), sizes=(5, 10), grid=5, slots=())
    scheduler.open(0, prompt_tokens=0, grid_offset=3)
    report(scheduler, {0: 7})
    assert due(scheduler, 0.0) == []
    report(scheduler, {0: 8})
    assert due(scheduler, 0.0) == [({0: (0, 8)}, 10)]
    report(scheduler, {0: 14})
    assert due(scheduler, 0.0) == [({0: (8, 5)}, 5)]


def test_a_grid_waits_for_its_lookahead():
    scheduler = speaking(sizes=(25,), grid=25, context=3)
    report(scheduler, {0: 27})
    assert due(scheduler, 0.0) == []
    report(scheduler, {0: 28})
    assert due(scheduler, 0.0) == [({0: (0, 25)}, 25)]


def test_sizes_off_the_grid_are_no_window():
    with pytest.raises(AssertionError, match="multiples of the grid 5 expected"):
        speaking(sizes=(1, 5), grid=5)


def test_samples_that_the_renderer_keeps_back_are_flushed_by_a_window_of_no_frames():
    """All frames were handed out before it was known that no more come."""
    scheduler = speaking(sizes=(1, 4), hold_samples=100)
    report(scheduler, {0: 1})
    [first] = scheduler.take_due_windows(0.0)
    assert first.is_last.tolist() == [False]
    deliver(scheduler, {0: 1}, 0.0)
    report(scheduler, {0: 1}, done=[0])
    assert scheduler.finished_slots().size == 0
    [last] = scheduler.take_due_windows(0.0)
    assert (last.count.tolist(), last.is_last.tolist(), last.frames) == ([0], [True], 1)
    assert scheduler.take_due_windows(9.0) == [] and scheduler.finished_slots().size == 0
    scheduler.record_delivery(last.slots, last.count, np.array([0.01]), last.is_last, 0.0, 0.0)
    assert scheduler.finished_slots().tolist() == [0]


def test_a_renderer_that_keeps_nothing_back_needs_no_flush():
    scheduler = speaking(sizes=(1, 4))
    report(scheduler, {0: 1})
    due(scheduler, 0.0)
    deliver(scheduler, {0: 1}, 0.0)
    report(scheduler, {0: 1}, done=[0])
    assert scheduler.take_due_windows(0.0) == [] and scheduler.finished_slots().tolist() == [0]


@pytest.mark.parametrize("policy", [Streaming(), Fifo()], ids=lambda policy: policy.name)
def test_a_reproducible_window_is_due_once_its_own_frames_are_there(policy):
    scheduler = speaking(policy=policy, sizes=(10,), grid=10, slots=())
    scheduler.open(0, prompt_tokens=0, grid_offset=3, listener=Listener(is_reproducible=True))
    for ready, windows in ((2, []), (3, [({0: (0, 3)}, 10)]), (12, []), (13, [({0: (3, 10)}, 10)])):
        report(scheduler, {0: ready})
        assert due(scheduler, 0.0) == windows
        for window, _ in windows:
            deliver(scheduler, {0: window[0][1]}, 0.0)


@pytest.mark.parametrize("policy", [Streaming(), Throughput()], ids=lambda policy: policy.name)
def test_reproducible_windows_do_not_depend_on_the_clock(policy):
    """However often it is asked, and whenever."""

    def windows(seed: int) -> list[tuple[int, int, int]]:
        rng, scheduler, cuts, now = random.Random(seed), Timed(1, policy, WINDOW, FRAME_S), [], 0.0
        scheduler.open(0, prompt_tokens=0, listener=Listener(is_reproducible=True))
        ready = 0
        while not scheduler.finished_slots().size:
            ready, now = min(ready + rng.randrange(4), 83), now + rng.choice([0.01, 0.1, 3.0])
            report(scheduler, {0: ready}, done=[0] if ready == 83 else ())
            for render in scheduler.take_due_windows(now):
                assert render.is_reproducible
                cuts.append((int(render.start[0]), int(render.count[0]), render.frames))
                deliver(scheduler, {0: int(render.count[0])}, now)
        return cuts

    cuts = windows(0)
    assert sum(count for _, count, _ in cuts) == 83 and all(windows(seed) == cuts for seed in range(1, 8))
