"""Admission: the estimates of turns and lengths, the predictions from them, and their effect under load. All
on a virtual clock."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.engine.engine import Event, Failed, Finished, Full, QueuedRequest
from serving.engine.intake import too_late
from serving.engine.schedule.admission import (
    Correction,
    Costs,
    Expected,
    Forecaster,
    IterationLoad,
    Lengths,
    Line,
    Outlook,
    capacity,
    first_audio_s,
)
from serving.engine.schedule.numbers import CAPACITY_PART, LATE_FACTOR, MIN_ITERATIONS, RECENT_WEIGHT
from serving.protocol import Listener
from serving.tools.simulate import Cost, Heard, Simulation, Voice, goodput, poisson
from zoo.request import Request, RequestError

COST = Cost(
    step_s=lambda slots: 0.015 + 0.004 * slots,
    prefill_s=lambda tokens: 0.002 + 1e-4 * tokens,
    render_s=lambda rows, frames: 0.001 + 0.0005 * rows * frames,
    turn_s=0.001,
)
seconds = st.floats(1e-5, 0.05)


def learned(
    own: float, slot: float, token: float, frame: float, turns: int = 300, noise: float = 0.0
) -> Costs:
    chance, costs = np.random.default_rng(0), Costs()
    for _ in range(turns):
        load = chance.integers(0, 9), chance.integers(0, 2) * chance.integers(0, 257), chance.integers(0, 60)
        took_s = own + slot * load[0] + token * load[1] + frame * load[2]
        costs.record(IterationLoad(*map(int, load)), took_s * (1 + noise * chance.standard_normal()))
    return costs


@settings(max_examples=30, deadline=None)
@given(seconds, seconds, seconds, seconds)
def test_the_cost_of_an_iteration_is_learned_from_iterations(own, slot, token, frame):
    costs = learned(own, slot, token / 100, frame / 10)
    expected_s = own + 5 * slot + 1 * token + 3 * frame
    assert costs.iteration_s(5, 100, 30) == pytest.approx(expected_s, rel=0.02)
    assert costs.prefill_s(100) == pytest.approx(token, rel=0.1, abs=0.02 * expected_s)


def test_a_rare_long_iteration_hardly_changes_the_estimate():
    costs = learned(0.01, 0.001, 1e-5, 1e-4, noise=0.1)
    before_s = costs.iteration_s(4)
    costs.record(IterationLoad(4, 0, 0), 30.0)
    assert costs.iteration_s(4) < 2 * before_s


def test_costs_are_remembered_while_the_load_does_not_change():
    """A thousand turns of four slots alone, and then a prompt."""
    costs = learned(0.01, 0.001, 1e-4, 1e-4)
    for _ in range(1000):
        costs.record(IterationLoad(4, 0, 4), 0.01 + 4 * 0.001 + 4e-4)
    assert costs.prefill_s(100) == pytest.approx(0.01, rel=0.2)
    assert costs.iteration_s(8) == pytest.approx(0.018, rel=0.2)


@pytest.mark.parametrize("seed", range(4))
def test_equal_iterations_leave_other_estimates_unchanged(seed):
    """All slots are taken for thousands of turns, and times stray. Earlier estimates once became a hundred
    times too large then, and every request was refused."""
    chance, costs = np.random.default_rng(seed), Costs()
    for turn in range(4000):
        slots = 8 if turn // 1000 % 2 == 0 else int(chance.integers(6, 9))
        frames = 32 if turn % 4 == 0 else int(chance.integers(0, 3))
        tokens = 60 if chance.random() < 0.15 else 0
        took_s = 0.004 + 0.003 * slots + 1e-4 * tokens + 0.002 * frames
        costs.record(IterationLoad(slots, tokens, frames), took_s * float(chance.lognormal(0, 0.35)))
        if turn > 200:
            assert costs.steady_s(8) == pytest.approx(0.044, rel=0.35)
    assert 0 <= costs.prefill_s(100) < 0.1


def test_slower_iterations_change_the_estimate():
    costs = learned(0.01, 0.001, 1e-5, 1e-4)
    for turn in range(400):
        costs.record(IterationLoad(turn % 9, 0, 4), 2 * (0.01 + 0.001 * (turn % 9) + 4e-4))
    assert costs.iteration_s(8, 0, 4) == pytest.approx(2 * 0.0184, rel=0.1)


def test_lengths_are_learned_from_speeches():
    lengths = Lengths(prior=1.0)
    assert lengths.expected(100) == 100 and lengths.usual(100) == 200
    for frames in (40, 50, 60) * 20:
        lengths.record(100, frames)
    assert lengths.expected(200) == pytest.approx(100, rel=0.1)
    assert 60 <= lengths.usual(100) <= 80
    assert lengths.expected(0) > 0  # a text may be empty, and its speech is not


def test_the_capacity_is_the_streams_made_in_real_time():
    costs = learned(0.01, 0.008, 1e-5, 0.0)
    assert capacity(costs, 0.08, 64) == int((CAPACITY_PART * 0.08 - 0.01) / 0.008)
    assert capacity(costs, 0.08, 4) == 4
    assert capacity(costs, 0.08, 64, other_models_s=0.02) == int((CAPACITY_PART * 0.08 - 0.03) / 0.008)
    assert capacity(costs, 0.0185, 64) == 1
    assert capacity(costs, 0.01, 64) == 64  # too slow for one: then for all
    assert capacity(Costs(), 0.08, 64) == 64  # nothing is known


def line_of(outlook: Outlook, *ahead: Expected) -> Line:
    line = Line(outlook)
    for one in ahead:
        line.join(one)
    return line


def test_first_audio_comes_after_prompts_and_who_speaks():
    costs = learned(0.01, 0.005, 1e-4, 0.0)
    free = Line(Outlook(max_concurrency=2, first_iterations=3, left=(10.0,)))
    turn_s = 0.01 + 2 * 0.005
    assert first_audio_s(costs, free, Expected(100, 50)) == pytest.approx(0.01 + 3 * turn_s, rel=0.05)
    full = Outlook(max_concurrency=2, first_iterations=3, left=(10.0, 40.0))
    ahead = [Expected(0, 100.0), Expected(0, 5.0)]
    for waiting, begins in ((0, 10), (1, 40), (2, 45)):
        predicted_s = first_audio_s(costs, line_of(full, *ahead[:waiting]), Expected(0, 50))
        assert predicted_s == pytest.approx((begins + 3) * turn_s, rel=0.05)
    # fewer places than speakers: two have to end before
    assert first_audio_s(costs, Line(Outlook(1, 3, (10.0, 40.0))), Expected(0, 50)) == pytest.approx(
        43 * turn_s, rel=0.05
    )
    assert first_audio_s(costs, free, Expected(0, 50), ready_s=7.0) > 7.0


@given(
    st.lists(st.floats(1, 500), max_size=20),
    st.lists(st.builds(Expected, st.floats(0, 500), st.floats(1, 500)), max_size=20),
    st.integers(1, 20),
    st.builds(Expected, st.floats(0, 500), st.floats(1, 500)),
)
def test_nobody_comes_earlier_for_a_longer_line(left, ahead, places, newcomer):
    costs = learned(0.01, 0.001, 1e-5, 1e-4, turns=MIN_ITERATIONS)
    line = Line(Outlook(places, 2, tuple(left)))
    predictions = [first_audio_s(costs, line, newcomer)]
    for one in ahead:
        line.join(one)
        predictions.append(first_audio_s(costs, line, newcomer))
    assert all(earlier <= later + 1e-9 for earlier, later in itertools.pairwise(predictions))


def test_predictions_are_corrected_by_measured_times():
    correction = Correction()
    for _ in range(200):
        correction.record(correction.factor * 1.0, 1.5)
    assert correction.factor == pytest.approx(1.5, rel=0.01)
    for _ in range(200):
        correction.record(1.0, 100.0)
    assert correction.factor == pytest.approx(3.0)


# load


def served(rate: float, duration_s: float = 25.0, **more) -> Simulation:
    simulation = Simulation(Voice(), COST, settings={"max_slots": 8, "max_ttfa_s": 1.0, **more})
    simulation.run(poisson(rate, duration_s))
    return simulation


def capacity_hz() -> float:
    """Requests a second that eight slots can speak: 48 frames each, of which a turn makes eight."""
    turn_s = COST.turn_s + COST.step_s(8) + COST.render_s(8, 1) + COST.prefill_s(60) / 6
    return 8 / (48 * turn_s)


def test_goodput_holds_under_overload_and_admitted_listeners_hear_no_gap():
    good = {}
    for times in (1, 2, 5):
        simulation = served(times * capacity_hz())
        accepted = [one for one in simulation.heard if not isinstance(one.end, Full)]
        assert all(isinstance(one.end, Finished) for one in accepted)
        good[times] = goodput(simulation.heard, 1.2, simulation.clock.now_s)
        assert np.mean([one.late_s <= 0.05 for one in accepted]) >= 0.99
        late = [one.ttfa_s for one in accepted if one.submitted_s > 5]  # something is known by then
        assert np.percentile(late, 95) <= 1.2
    assert good[1] > 0.7 * capacity_hz()
    assert min(good[2], good[5]) >= 0.9 * max(good.values())


def test_without_admission_by_time_few_requests_are_heard_in_time():
    """That the test above can fail."""
    simulation = served(2 * capacity_hz(), max_ttfa_s=None)
    assert goodput(simulation.heard, 1.2, simulation.clock.now_s) < 0.5 * capacity_hz()


def test_a_refusal_is_immediate_and_says_when_to_retry():
    simulation = served(5 * capacity_hz(), 10.0)
    refused = [one for one in simulation.heard if isinstance(one.end, Full)]
    assert refused and all(one.ended_s == one.submitted_s for one in refused)
    assert all(1 <= one.end.retry_after_s <= 60 for one in refused)
    assert "first audio is expected in" in str(refused[-1].end)


def test_only_as_many_streams_run_as_are_made_in_real_time():
    """Turns of all eight would take longer than a frame lasts."""
    slow = Cost(step_s=lambda slots: 0.01 + 0.015 * slots, turn_s=0.001)
    simulation = Simulation(Voice(), slow, settings={"max_slots": 8, "max_ttfa_s": 30.0})
    simulation.run(poisson(2.0, 60.0))
    heard = [one for one in simulation.heard if one.submitted_s > 10 and isinstance(one.end, Finished)]
    assert 2 <= simulation.model.forecaster.outlook.max_concurrency <= 4
    assert len(heard) > 20 and np.mean([one.late_s <= 0.05 for one in heard]) >= 0.99


def test_every_slot_runs_under_the_throughput_policy():
    slow = Cost(step_s=lambda slots: 0.01 + 0.015 * slots, turn_s=0.001)
    most = {}
    for policy in ("streaming", "throughput"):
        settings = {"max_slots": 8, "max_ttfa_s": 600.0, "policy": policy}
        simulation = Simulation(Voice(), slow, settings=settings)
        simulation.run([(0.0, Request(text="x" * 60, seed=seed, max_frames=50)) for seed in range(16)])
        for seed in range(16, 32):
            simulation.submit(Request(text="x" * 60, seed=seed, max_frames=50))
        simulation.turn()
        most[policy] = len(simulation.model.running)
    assert most["streaming"] < 8 and most["throughput"] == 8


def play(simulation: Simulation, seed: int, speed: float) -> Heard:
    """A request of four seconds, whose listener plays at that speed."""
    heard = Heard(simulation.clock.now_s)
    place = simulation.engine.accept(
        f"{seed}", lambda event: simulation.hear(heard, event), listener=Listener(speed=speed), text_bytes=60
    )
    simulation.engine.prepare(place, lambda: Request(text="x" * 60, seed=seed, max_frames=50))
    return heard


def test_a_fast_listener_counts_as_often_as_its_speed():
    """Eight streams are made in time. Next to a listener who plays three times as fast there are five others,
    and the estimate of all eight stays."""
    slow = Cost(
        step_s=lambda slots: 0.004 + 0.007 * slots,
        render_s=lambda rows, frames: 0.0005 + 2e-5 * rows * frames,
    )
    for speed, num in ((1.0, 8), (1.5, 8), (2.0, 7), (3.0, 6), (0.5, 8)):
        simulation = Simulation(Voice(), slow, settings={"max_slots": 8, "max_ttfa_s": 60.0})
        heard = [play(simulation, seed, speed if seed == 0 else 1.0) for seed in range(8)]
        simulation.turn()
        assert len(simulation.model.running) == num
        simulation.run([])
        assert all(isinstance(one.end, Finished) for one in heard)


def test_a_listener_who_plays_faster_than_the_model_speaks_counts_once():
    """One stream alone is made 1.6 times as fast as it is heard."""
    slow = Cost(step_s=lambda slots: 0.05 + 0.001 * slots, render_s=lambda rows, frames: 0.0)
    simulation = Simulation(Voice(), slow, settings={"max_slots": 8, "max_ttfa_s": 60.0})
    forecaster = simulation.model.forecaster
    assert forecaster.max_concurrency([1.0] * 7 + [1.5]) == 8
    assert forecaster.max_concurrency([1.5, 1.5]) == 7
    assert forecaster.max_concurrency([2.0, 4.0]) == 8


def test_a_burst_at_a_fresh_server_is_heard_in_time_or_refused_at_once():
    """The warm-up has timed the launches, so the first request is predicted as well as the hundredth."""
    simulation = Simulation(Voice(guard=1.0), COST, settings={"max_slots": 8, "max_ttfa_s": 6.0})
    heard = simulation.run([(0.002 * i, Request(text="x" * 60, seed=i)) for i in range(200)])
    taken = [one for one in heard if isinstance(one.end, Finished)]
    assert len(taken) > 16 and all(one.ttfa_s <= 6.0 for one in taken)
    refused = [one for one in heard if isinstance(one.end, Full)]
    assert len(taken) + len(refused) == 200 and all(one.ended_s == one.submitted_s for one in refused)


def test_costs_follow_from_launches_that_were_timed():
    costs = Costs()
    costs.seed(COST, 8, (1, 4, 25))
    assert costs.is_known
    for slots in (1, 8):
        expected_s = COST.step_s(slots) + COST.render_s(slots, 1)
        assert float(costs.steady_s(slots)) == pytest.approx(expected_s, rel=0.1)
    assert costs.prefill_s(64) == pytest.approx(COST.prefill_s(64), rel=0.3)


@pytest.mark.parametrize("is_made", [True, False])
def test_a_request_that_would_be_heard_far_too_late_by_now_is_refused(is_made):
    """Launches become ten times as slow once twelve requests were accepted. The ones at the end of the line
    are told so before they were heard, and then the others are heard in time."""
    times = 1.0
    cost = Cost(step_s=lambda slots: times * COST.step_s(slots), render_s=COST.render_s)
    simulation = Simulation(Voice(guard=1.0), cost, settings={"max_slots": 2, "max_ttfa_s": 10.0})
    first = [simulation.submit(Request(text="x" * 60, seed=seed)) for seed in range(6)]
    later = [Heard(0.0) for _ in range(6)]
    for i, heard in enumerate(later):
        queued = simulation.engine.accept(f"{i}", partial(simulation.hear, heard), text_bytes=60)
        if is_made:
            simulation.engine.prepare(queued, lambda i=i: Request(text="x" * 60, seed=10 + i))
    times = 10.0
    simulation.run([], until_s=100.0)
    refused = [one for one in (*first, *later) if isinstance(one.end, Failed)]
    assert refused and all(one.first_s is None and one.end.code == "engine_full" for one in refused)
    assert all(1 <= one.end.retry_after_s <= 60 for one in refused)
    assert all(one.ttfa_s <= 1.2 * LATE_FACTOR * 10.0 for one in first if isinstance(one.end, Finished))
    assert simulation.model.counters.num_refused == len(refused)
    assert simulation.engine.num_requests == sum(one.end is None for one in later)


class LateLock(threading.Condition):
    """A lock that another thread takes first, for `meanwhile`."""

    def __init__(self, meanwhile: Callable[[], None]):
        super().__init__()
        self.meanwhile = [meanwhile]

    def __enter__(self) -> bool:
        if self.meanwhile:
            self.meanwhile.pop()()
        return super().__enter__()


def refused_late(meanwhile: Callable[[Simulation, QueuedRequest], None]) -> tuple[Simulation, list[Event]]:
    """Refuse a waiting request, and call `meanwhile` just before. Return what was delivered to it."""
    simulation = Simulation(Voice(), COST, settings={"max_slots": 2, "max_ttfa_s": 10.0})
    engine = simulation.engine
    events: list[Event] = []
    queued = engine.accept("late", events.append, text_bytes=60, reference_bytes=1000)
    engine.intake.late = lambda: [(queued, too_late(60.0, 10.0))]
    engine.inbox.lock = LateLock(partial(meanwhile, simulation, queued))
    engine.lifecycle.refuse_late()
    engine.intake.late = list
    simulation.run([])
    return simulation, events


def test_requests_in_line_are_looked_at_ten_times_a_second():
    """A look at each of hundreds takes as long as a step on a GPU."""
    simulation = Simulation(Voice(), COST, settings={"max_slots": 2, "max_ttfa_s": 10.0})
    clock, looks = simulation.clock, list[float]()
    simulation.engine.intake.late = lambda: looks.append(clock.now_s) or []
    iterations = 0
    while clock.now_s < 1.0:
        simulation.engine.turn()
        clock.now_s += 0.004
        iterations += 1
    assert iterations > 200 and 9 <= len(looks) <= 11


def test_a_request_whose_prompt_is_built_before_it_is_refused_is_spoken():
    def prepare(simulation: Simulation, queued: QueuedRequest) -> None:
        simulation.engine.prepare(queued, lambda: Request(text="x" * 60, seed=1))

    simulation, events = refused_late(prepare)
    assert [type(event) for event in events if isinstance(event, Finished | Failed)] == [Finished]
    assert simulation.model.counters.num_refused == 0


def test_a_request_that_is_cancelled_before_it_is_refused_leaves_once():
    simulation, [event] = refused_late(lambda simulation, queued: simulation.engine.cancel(queued.id))
    assert event == Finished("cancelled", 0, {})
    assert simulation.engine.intake.reference_bytes == 0


def test_the_first_clone_says_how_long_the_next_one_takes():
    forecaster = Forecaster(8, 0.08, 1, True)
    forecaster.record_prompt(100, 3.0, has_recordings=True)
    assert forecaster.prepare_s == {True: 3.0}
    forecaster.record_prompt(100, 5.0, has_recordings=True)
    assert forecaster.prepare_s[True] == pytest.approx(4.0)
    for _ in range(200):
        forecaster.record_prompt(100, 0.1, has_recordings=True)
    forecaster.record_prompt(100, 5.1, has_recordings=True)
    assert forecaster.prepare_s[True] == pytest.approx(0.1 + RECENT_WEIGHT * 5.0, rel=0.1)


def test_an_idle_engine_refuses_nobody_however_slow_the_first_clone_was():
    """Else it would refuse all later ones, and never see that they are fast."""
    room = Simulation(Voice(guard=1.0), COST, settings={"max_slots": 8, "max_ttfa_s": 10.0})
    room.model.forecaster.record_prompt(100, 60.0, has_recordings=True)

    def clone(seed: int) -> QueuedRequest:
        hear = partial(room.hear, Heard(room.clock.now_s))
        return room.engine.accept(f"{seed}", hear, text_bytes=60, reference_bytes=1)

    taken = clone(0)
    with pytest.raises(Full, match="first audio is expected"):
        clone(1)
    room.turn()
    assert not taken.has_left
    for seed in range(2, 12):
        room.engine.prepare(taken, lambda: Request(text="x" * 60))
        room.run([])
        taken = clone(seed)
    assert room.model.forecaster.prepare_s[True] < 10.0
    assert clone(12)


def test_a_line_is_walked_once_an_iteration(monkeypatch):
    """And not for each refusal, which holds the engine's lock meanwhile."""
    simulation = Simulation(Voice(), COST, settings={"max_slots": 2, "max_ttfa_s": 1.0})
    joined = []
    join = Line.join
    monkeypatch.setattr(Line, "join", lambda self, *args: (joined.append(1), join(self, *args)))
    heard = [simulation.submit(Request(text="x" * 60, seed=seed)) for seed in range(300)]
    num_taken = sum(one.end is None for one in heard)
    assert num_taken < 20 and len(joined) == num_taken
    simulation.turn()
    joined.clear()
    heard = [simulation.submit(Request(text="x" * 60, seed=1000 + seed)) for seed in range(300)]
    assert len(joined) < 40


@pytest.mark.slow
def test_a_session_that_waits_for_text_takes_the_place_of_nobody():
    """Two may speak at once. Two sessions have played all of their audio, so two listeners are heard at once,
    and then the sessions speak on."""
    slow = Cost(step_s=lambda slots: 0.01 + 0.025 * slots, render_s=lambda rows, frames: 0.0)
    simulation = Simulation(Voice(guard=1.0), slow, settings={"max_slots": 8, "max_ttfa_s": 60.0})
    assert simulation.model.forecaster.max_concurrency([]) == 2
    sessions = [
        simulation.submit(Request(text="x" * 10, seed=i, max_frames=60, is_open=True)) for i in (1, 2)
    ]
    while simulation.turn() or simulation.clock.now_s < 5.0:
        pass
    assert simulation.model.scheduler.slots.is_starved.sum() == 2
    first, second, third = (simulation.submit(Request(text="x" * 60, seed=i)) for i in (3, 4, 5))
    while simulation.turn():
        pass
    assert first.ttfa_s < 0.5 and second.ttfa_s < 0.5 and third.ttfa_s > 2.0
    for name in ("request-1", "request-2"):
        simulation.engine.feed(name, range(60), is_last=True)
    simulation.run([])
    assert all(isinstance(one.end, Finished) for one in (*sessions, first, second, third))


def run_alone(simulation: Simulation) -> None:
    """Let the engine run as in its thread, until only news can wake it."""
    engine = simulation.engine

    def sleep(seconds: float | None) -> None:
        if seconds is None:
            engine.stop()
        else:
            simulation.clock.now_s += seconds

    engine.inbox.sleep = sleep
    engine.run()


def full_of_sessions(num: int, **settings: float) -> Simulation:
    """Return an engine whose slots wait for text, while their listeners have audio."""
    slow = Cost(step_s=lambda slots: 0.01 + 0.025 * slots, render_s=lambda rows, frames: 0.0)
    simulation = Simulation(Voice(guard=1.0), slow, settings=settings)
    for i in range(num):
        simulation.submit(Request(text="x" * 10, seed=100 + i, max_frames=60, is_open=True))
    while simulation.turn():
        pass
    assert simulation.model.scheduler.slots.is_starved.sum() == num
    return simulation


def test_a_request_gets_its_place_once_sessions_have_played_their_audio():
    """No news wakes the engine then."""
    simulation = full_of_sessions(2, max_slots=8, max_ttfa_s=60.0)
    heard = simulation.submit(Request(text="x" * 60, seed=1))
    run_alone(simulation)
    assert isinstance(heard.end, Finished) and heard.ttfa_s < 1.5


def test_a_request_that_waits_for_sessions_is_refused_once_it_is_late():
    simulation = full_of_sessions(1, max_slots=1, max_ttfa_s=2.0)
    heard = simulation.submit(Request(text="x" * 60, seed=1))
    run_alone(simulation)
    assert isinstance(heard.end, Failed) and heard.end.code == "engine_full"
    assert heard.ended_s - heard.submitted_s < LATE_FACTOR * 2.0


def test_lengths_are_not_learned_from_text_that_arrives():
    """The request was accepted with the first words of a long text."""
    simulation = Simulation(Voice(guard=1.0), COST, settings={"max_slots": 2})
    before = simulation.model.forecaster.lengths.mean
    heard = simulation.submit(Request(text="hum", max_frames=100, is_open=True))
    simulation.engine.feed("request-1", range(100), is_last=True)
    simulation.run([])
    assert isinstance(heard.end, Finished) and heard.end.frames == 100
    assert simulation.model.forecaster.lengths.mean == before


def test_a_request_whose_prompt_fails_leaves_the_line():
    """An engine that rests has no iteration in which the line would be made again."""
    simulation = Simulation(Voice(), COST, settings={"max_slots": 2, "max_ttfa_s": 2.0})

    def bad() -> Request:
        raise RequestError("text", "bad")

    for i in range(50):
        queued = simulation.engine.accept(f"{i}", lambda event: None, text_bytes=60)
        with pytest.raises(RequestError):
            simulation.engine.prepare(queued, bad)


def test_a_frame_of_seven_steps_needs_seven_iterations():
    """Of iterations that take a tenth of a frame, a model of one step per frame can make many streams at
    once, and a model of seven steps per frame fewer."""
    slow, fast = (
        Forecaster(8, frame_s=0.08, first_iterations=steps, is_timed=True, steps=steps) for steps in (7, 1)
    )
    for each in (slow, fast):
        for slots in (1, 4, 8) * 20:
            each.record_iteration(IterationLoad(slots=slots), 0.002 * slots, 0.002 * slots)
        each.record_speakers(np.array([10.0]), 0)
    assert fast.max_concurrency([]) == 8
    assert slow.max_concurrency([]) == 5
    assert slow.outlook.left == (70.0,) and fast.outlook.left == (10.0,)
    assert slow.expected(100).iterations == pytest.approx(7 * fast.expected(100).iterations)
