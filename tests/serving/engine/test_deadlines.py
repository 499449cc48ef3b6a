"""The choice of the next window if steps wait for renders: every rule alone, then whole engines on a virtual
clock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_cache.strategy import Strategy
from serving.engine.engine import Finished
from serving.engine.model_worker import ModelWorker
from serving.engine.schedule.numbers import MAX_WINDOWS_AHEAD, WINDOW_COST_MARGIN
from serving.engine.schedule.one_window import Deadlines, next_window
from serving.engine.schedule.policy import Streaming
from serving.engine.schedule.scheduler import Scheduler
from serving.engine.schedule.window_cost import WindowCost
from serving.protocol import Listener
from serving.tools.simulate import Cost, Heard, Simulation, Voice
from zoo.contract import Window
from zoo.request import Request

EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True, database=None)
LEAST, MOST, STEP_S = 25, 100, 0.005


def known(fixed_s: float = 0.065, frame_s: float = 0.005) -> WindowCost:
    cost = WindowCost()
    for frames in (25, 50, 100):
        cost.record(frames, fixed_s + frame_s * frames)
    return cost


COST = known()  # with its margin a window of 25 takes 0.247 s, and with a turn 0.252


def listeners(*slots: dict[str, float]) -> Deadlines:
    """Return deadlines of listeners. slots: left_s, pending, and other values that differ from a playing
    listener's."""
    usual = {
        "missing": 0,
        "plays": True,
        "is_first": False,
        "num_skipped": 0,
        "is_due": False,
        "is_ending": False,
    }
    rows = [usual | slot for slot in slots]
    columns = {name: np.array([row[name] for row in rows]) for name in (*usual, "left_s", "pending")}
    is_new = any(row["is_first"] or row.get("is_new") for row in rows)
    return Deadlines(**columns, has_newcomers=is_new)


def first(pending: int = 31, **more: float) -> dict[str, float]:
    return {"left_s": 0.0, "pending": pending, "plays": False, "is_first": True, **more}


def one(*slots: dict[str, float]) -> tuple[int, int] | None:
    return next_window(listeners(*slots), COST, LEAST, MOST, STEP_S)


# what windows take


@pytest.mark.parametrize("frame_s", [0.0, 0.002, 0.02])
def test_the_cost_of_windows_is_learned_with_a_margin(frame_s):
    cost, chance = WindowCost(), np.random.default_rng(0)
    for frames in chance.integers(1, 100, 300):
        cost.record(float(frames), chance.normal(1, 0.02) * (0.05 + frame_s * frames))
    for frames in (1, 30, 100):
        assert cost(frames) == pytest.approx(
            WINDOW_COST_MARGIN * (0.05 + frame_s * frames), abs=0.02 * (0.05 + frame_s * 100)
        )


def test_windows_of_one_size_predict_that_size():
    cost = WindowCost()
    assert cost(4) == 0.0  # nothing is known
    for _ in range(9):
        cost.record(4, 0.02)
    assert cost(4) == pytest.approx(WINDOW_COST_MARGIN * 0.02)
    assert cost.fixed_s == 0.0  # a larger one may take as much longer


# one after the other


def test_a_listener_out_of_slack_goes_before_a_first_window():
    """The first window of 31 frames would take 0.29 s with its turn, and a listener's own 0.25, twice:
    another may have begun."""
    assert one({"left_s": 0.8, "pending": 25}, first()) == (1, MOST)
    assert one({"left_s": 0.75, "pending": 25}, first()) == (0, 25)
    assert one({"left_s": 0.75, "pending": 25, "plays": False}, first()) == (1, MOST)


def test_windows_with_earlier_deadlines_reduce_the_slack():
    """Each of three alone has time for a first window; together the last has not, and the first of them
    begins."""
    three = [{"left_s": left_s, "pending": 25} for left_s in (1.1, 1.0, 0.9)]
    assert one(three[0], first()) == (1, MOST)
    assert one(*three, first()) == (2, 25)


def test_steps_come_first_if_the_urgent_listener_has_no_frames():
    late = {"left_s": 0.5, "pending": 0, "missing": 10}
    assert one(late, first()) is None
    assert one({**late, "left_s": 0.0}, first()) == (1, MOST)  # who has run dry has nothing to lose
    assert one(late, {"left_s": 0.6, "pending": 25}) is None
    assert one(late, {"left_s": 0.4, "pending": 25}) == (1, 25)


@pytest.mark.parametrize(("missing", "slot"), [(2, 1), (20, None)])
def test_steps_that_frames_still_need_take_time_too(missing, slot):
    assert one({"left_s": 0.82, "pending": 0, "missing": missing}, first()) == (slot and (slot, MOST))


def test_a_first_window_is_skipped_a_bounded_number_of_times():
    late = {"left_s": 0.1, "pending": 25}
    assert one(late, first(num_skipped=MAX_WINDOWS_AHEAD - 1)) == (0, 25)
    assert one(late, first(num_skipped=MAX_WINDOWS_AHEAD)) == (1, MOST)
    assert one(late, first(num_skipped=MAX_WINDOWS_AHEAD), first(num_skipped=MAX_WINDOWS_AHEAD + 1)) == (
        2,
        MOST,
    )


def test_other_windows_wait_until_they_must_while_a_listener_has_heard_nothing():
    due = {"left_s": 2.0, "pending": 50, "is_due": True}
    assert one(due) == (0, 50)
    assert one(due, first(pending=0, is_first=False, is_new=True)) is None


@pytest.mark.parametrize(("left_s", "frames"), [(9.0, 100), (1.0, 62), (0.8, 31), (0.7, 25)])
def test_a_window_is_as_large_as_the_slack_of_others_allows(left_s, frames):
    """Two windows and one that may have begun take the other 0.756 s, and each frame more 0.0065."""
    due = {"left_s": 0.2, "pending": 100, "is_due": True}
    assert one(due, {"left_s": left_s, "pending": 0}) == (0, frames)


def test_the_last_few_frames_join_the_window_before_them():
    tail = {"left_s": 0.2, "pending": 38, "is_ending": True}
    other = {"left_s": 0.6, "pending": 0}
    assert one(tail, other) == (0, 38)
    assert one({**tail, "is_ending": False}, other) == (0, 25)
    assert one({**tail, "pending": 50}, other) == (0, 25)


def test_a_full_window_waits_for_listeners_with_earlier_deadlines():
    due = {"left_s": 2.0, "pending": 100, "is_due": True}
    assert one(due, {"left_s": 1.5, "pending": 0}) == (0, pytest.approx(100, abs=40))
    assert one(due, {"left_s": 0.6, "pending": 0, "missing": 5}) is None


# of a scheduler's slots


def scheduler(
    ready: list[int], plays_until_s: list[float] | None = None, **opened: list[Listener]
) -> Scheduler:
    """Return a scheduler whose slots have `ready` frames on their tapes. opened: arguments of
    `Scheduler.open` for each slot."""
    made = Scheduler(len(ready), Streaming(), Window((25, 50, 100), grid=25), 0.04, is_one_by_one=True)
    made.timing.window_cost = COST
    for slot, frames in enumerate(ready):
        made.open(slot, prompt_tokens=0, **{name: values[slot] for name, values in opened.items()})
        made.report(np.array([slot]), np.array([frames]), np.array([False]))
    if plays_until_s is not None:
        made.slots.listener.plays_until_s[:] = plays_until_s
    return made


def windows(made: Scheduler, now: float) -> list[tuple[list[int], list[int]]]:
    return [(render.slots.tolist(), render.count.tolist()) for render in made.take_due_windows(now)]


def test_an_iteration_has_one_window():
    three = scheduler([25, 0, 30])
    assert [windows(three, 0.0) for _ in range(3)] == [[([0], [25])], [([2], [25])], []]


def test_flexible_requests_get_their_windows_last():
    flexible_first = scheduler(
        [25, 50], listener=[Listener(is_flexible=True), Listener()], plays_until_s=[-np.inf, 0.9]
    )
    assert [windows(flexible_first, 0.0) for _ in range(3)] == [[([1], [50])], [([0], [25])], []]


def test_a_second_pass_is_no_newcomer():
    assert windows(scheduler([25, 25], plays_until_s=[-np.inf, 0.5]), 0.0) == [([1], [25])]
    assert windows(scheduler([25, 25], plays_until_s=[-np.inf, 5.0]), 0.0) == [([0], [25])]


@pytest.mark.parametrize(
    ("offset", "ready", "missing"), [(0, 0, 28), (6, 0, 9), (6, 9, 25), (6, 20, 14), (24, 27, 25)]
)
def test_the_steps_to_the_next_point_of_the_grid(offset, ready, missing):
    """A second pass: its listener hears, and its first point may be close."""
    window = Window((25, 50), lookahead=3, grid=25)
    one_slot = Scheduler(1, Streaming(), window, 0.04, is_one_by_one=True)
    one_slot.open(0, prompt_tokens=0, grid_offset=offset)
    one_slot.slots.listener.plays_until_s[0] = 1.0
    one_slot.slots.tape.num_ready[0] = ready
    one_slot.slots.tape.num_rendered[0] = (
        max(ready - 3 - offset, -1) >= 0 and offset + (ready - 3 - offset) // 25 * 25
    )
    listeners = Deadlines.of(one_slot.snapshot(0.0), np.zeros(1, bool))
    assert listeners.pending[0] <= 0 and listeners.missing.tolist() == [missing]


# whole engines: windows on a grid that take long, one after the other

SLOW = Cost(
    step_s=lambda slots: 0.004 + 0.0003 * slots,
    prefill_s=lambda tokens: 0.007 + 0.0002 * tokens,
    render_s=lambda rows, frames: rows * (0.065 + 0.005 * frames),
    turn_s=0.001,
)


def grid_voice() -> Voice:
    voice = Voice(Window((25, 50, 100), lookahead=3, grid=25, hold_samples=160), frame_s=0.04, guard=1.0)
    voice.strategy = Strategy(cuts_renders=True)
    return voice


def asked(policy: str, arrivals: list[tuple[float, int, int]], cost: Cost = SLOW) -> list[Heard]:
    """arrivals: when, bytes of a text, which set where the grid begins, and frames. Behind some whom the
    engine has learned from."""
    simulation = Simulation(
        grid_voice(), cost, settings={"max_slots": 8, "max_ttfa_s": 600.0, "policy": policy}
    )
    simulation.run([(2.0 * i, Request(text="x" * 12, seed=1000 + i, max_frames=100)) for i in range(6)])
    begins_s = simulation.clock.now_s
    return simulation.run(
        [
            (begins_s + at_s, Request(text="x" * size, seed=seed, max_frames=frames))
            for seed, (at_s, size, frames) in enumerate(sorted(arrivals))
        ]
    )


def at_random(rate: float, count: int, seed: int = 0) -> list[tuple[float, int, int]]:
    chance = np.random.default_rng(seed)
    times = np.cumsum(chance.exponential(1 / rate, count))
    return [(float(at_s), int(chance.integers(5, 30)), int(chance.integers(60, 160))) for at_s in times]


@pytest.mark.slow
@EXAMPLES
@given(
    st.lists(st.tuples(st.floats(0, 6), st.integers(1, 50), st.integers(1, 160)), min_size=1, max_size=6),
    st.sampled_from(["streaming", "throughput", "fifo"]),
)
def test_every_listener_hears_the_whole_speech(arrivals, policy):
    heard = asked(policy, arrivals)
    assert all(isinstance(one.end, Finished) for one in heard)
    assert sum(one.audio_s for one in heard) == pytest.approx(
        0.04 * sum(frames for _, _, frames in arrivals), abs=0.01
    )


@pytest.mark.slow
@EXAMPLES
@given(st.lists(st.tuples(st.floats(0, 8), st.integers(1, 50), st.integers(30, 160)), min_size=1, max_size=4))
def test_few_listeners_hear_no_gap(arrivals):
    assert max(one.late_s for one in asked("streaming", arrivals)) <= 1e-9


@pytest.mark.slow
def test_near_capacity_streaming_has_no_gaps_and_fifo_has_many():
    streaming, fifo = (asked(policy, at_random(0.9, 120)) for policy in ("streaming", "fifo"))
    assert (
        np.mean([one.late_s > 1e-9 for one in streaming])
        <= 0.01
        < 0.2
        <= np.mean([one.late_s > 1e-9 for one in fifo])
    )


@pytest.mark.slow
def test_overload_makes_newcomers_wait_and_causes_no_gap():
    heard = asked("streaming", at_random(2.0, 80))
    assert all(isinstance(one.end, Finished) for one in heard)
    assert np.mean([one.late_s > 0.05 for one in heard]) <= 0.02


def test_a_machine_too_slow_for_one_serves_two():
    """Each is late with every window, and none of them is starved for the other."""
    slower = replace(SLOW, render_s=lambda rows, frames: rows * 0.06 * frames)
    heard = asked("streaming", [(0.0, 12, 600), (1.0, 12, 100)], slower)
    assert all(isinstance(one.end, Finished) for one in heard)
    assert heard[1].ttfa_s < 0.5 * (heard[0].ended_s - heard[0].submitted_s)


def test_steps_wait_for_windows_if_launches_are_synchronous():
    for is_async in (False, True):
        simulation = Simulation(grid_voice(), SLOW, is_async)
        model: ModelWorker = simulation.model
        assert (model.scheduler.timing.window_cost is not None) is not is_async
