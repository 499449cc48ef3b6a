"""Rules that hold under any load: no request starves, bounds are kept, possible deadlines are met, and every
request ends once. The real engine on a virtual clock, and requests of all kinds: plain, metered, flexible,
fast, that leave, that do not read."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.engine.device.arena import PAGE_TOKENS, token_bytes
from serving.engine.engine import Audio, Event, Failed, Finished, Full
from serving.engine.schedule import admission
from serving.engine.schedule import policy as policies
from serving.engine.schedule.admission import IterationLoad
from serving.engine.schedule.numbers import MAX_SKIPS
from serving.engine.schedule.policy import Streaming
from serving.protocol import Listener
from serving.tools.simulate import RATE_HZ, Cost, Heard, Simulation, Voice, poisson
from zoo.request import Request

EXAMPLES = settings(max_examples=25, deadline=None, derandomize=True, database=None)
FRAME_S = 0.08
COST = Cost(
    step_s=lambda slots: 0.004 + 0.002 * slots,
    prefill_s=lambda tokens: 0.001 + 2e-5 * tokens,
    render_s=lambda rows, frames: 0.0005 + 1e-4 * rows * frames,
    save_s=1e-5,
)
UNREAD_S, STALL_S = 2.0, 5.0
MAX_WAITING = 6


@dataclass
class Asked:
    """A request, and how its listener behaves. leaves_s: after so long; reads: 0 for who takes nothing, 1 for
    all at once."""

    at_s: float
    size: int  # of its prompt
    frames: int
    leaves_s: float | None = None
    reads: float = 1.0
    is_flex: bool = False
    speed: float = 1.0
    events: list[Event] = field(default_factory=list)
    heard: Heard | None = None
    num_read: int = 0


asked = st.builds(
    Asked,
    at_s=st.floats(0, 2),
    size=st.integers(1, 300),
    frames=st.integers(1, 150),
    leaves_s=st.none() | st.floats(0, 3),
    reads=st.sampled_from([1.0, 1.0, 0.3, 0.0]),
    is_flex=st.booleans(),
    speed=st.sampled_from([1.0, 1.0, 0.25, 4.0]),
)
rooms = st.fixed_dictionaries(
    {
        "slots": st.integers(1, 6),
        "pages": st.integers(60, 120),
        "saved_pages": st.integers(0, 60),
        "policy": st.sampled_from(["streaming", "throughput", "fifo"]),
        "is_async": st.booleans(),
        "max_ttfa_s": st.none() | st.floats(0.3, 3.0),
    }
)


class Room:
    """An engine and its clients. `look` is called after every turn."""

    def __init__(self, slots, pages, saved_pages, policy, is_async, max_ttfa_s, cost=COST, guard=4.0):
        """guard: times its frames that a speech may have, as far as its prompt says."""
        voice = Voice(frames_per_byte=0.8, guard=guard)
        page_bytes = PAGE_TOKENS * token_bytes(voice)
        self.simulation = Simulation(
            voice,
            cost,
            is_async,
            {
                "max_slots": slots,
                "kv_memory_bytes": (1 + pages) * page_bytes,
                "swap_memory_bytes": saved_pages * page_bytes,
                "policy": policy,
                "max_ttfa_s": max_ttfa_s,
                "max_waiting": MAX_WAITING,
                "max_unread_s": UNREAD_S,
                "max_stall_s": STALL_S,
            },
        )
        self.engine, self.model, self.clock = (
            self.simulation.engine,
            self.simulation.model,
            self.simulation.clock,
        )
        self.admitted: list[int] = []  # in order

    def submit(self, index: int, one: Asked) -> None:
        one.heard = Heard(self.clock.now_s)

        def deliver(event: Event) -> None:
            one.events.append(event)
            one.heard.take(event, self.clock.now_s, RATE_HZ)

        request = Request(text="x" * one.size, seed=index, max_frames=one.frames)
        try:
            place = self.engine.accept(
                f"{index}",
                deliver,
                listener=Listener(speed=one.speed, is_flexible=one.is_flex, is_metered=one.reads < 1),
                text_bytes=one.size,
            )
        except Full as full:
            one.heard.end = full
            return
        self.engine.prepare(place, lambda: request)

    def run(self, all_asked: list[Asked], look: Callable[[], None] = lambda: None) -> None:
        """Run until every request has ended."""
        waiting = sorted(enumerate(all_asked), key=lambda pair: pair[1].at_s)
        here: dict[int, Asked] = {}
        for _ in range(100_000):
            while waiting and waiting[0][1].at_s <= self.clock.now_s:
                index, one = waiting.pop(0)
                self.submit(index, one)
                here[index] = one
            for index, one in list(here.items()):
                self.listen(index, one)
                if one.heard.end is not None:
                    del here[index]
            is_busy = self.simulation.turn()
            running = [int(job.id) for job in self.model.running.values()]
            self.admitted += [index for index in running if index not in self.admitted]
            look()
            if not is_busy and not self.engine.num_requests and not here:
                if not waiting:
                    return
                self.clock.now_s = max(self.clock.now_s, waiting[0][1].at_s)
            elif not is_busy:
                self.clock.now_s += 0.02  # all are held back
        pytest.fail(f"{self.engine.num_requests} requests have not ended")

    def listen(self, index: int, one: Asked) -> None:
        """It leaves when its time has come, and reads at its pace."""
        now_s = self.clock.now_s
        if one.leaves_s is not None and now_s >= one.heard.submitted_s + one.leaves_s:
            self.engine.cancel(f"{index}")
        if one.reads < 1 and one.heard.first_s is not None:
            given = sum(event.frames for event in one.events if isinstance(event, Audio))
            taken = min(given, int(one.reads * (now_s - one.heard.first_s) / FRAME_S))
            if taken > one.num_read:
                self.engine.consume(f"{index}", taken - one.num_read)
                one.num_read = taken


@pytest.mark.slow
@settings(EXAMPLES, max_examples=40)
@given(st.lists(asked, min_size=1, max_size=25), rooms)
def test_every_request_ends_once_and_leaves_nothing(all_asked, room):
    """Clients leave, do not read or are refused, and pages are few: after every turn the counts of pages and
    slots are right, and the bounds of the queue and of promised pages are kept."""
    max_ttfa_s = room["max_ttfa_s"]
    room = Room(**room)
    engine, model, pages = room.engine, room.model, room.engine.pages
    pause = model.pause

    def pause_and_count(job) -> None:
        pause(job)
        saved = [job for job in model.running.values() if job.pages.saved is not None]
        assert sum(sum(model.pages.num_written(job)) for job in saved) <= engine.paging.max_saved

    model.pause = pause_and_count

    def look() -> None:
        held = [page for job in model.running.values() for lane in job.pages.lanes for page in lane]
        assert pages.free + len(set(held)) == pages.num_pages
        assert all(pages._references[page] == held.count(page) for page in set(held))
        assert (
            len(model.running) + len(model.tenants.free) + len(model.tenants.leaving)
            == model.runner.num_slots
        )
        for is_flex in (False, True):
            assert (
                sum(place.listener.is_flexible == is_flex for place in model.queue.requests.values())
                <= MAX_WAITING
            )

    room.run(all_asked, look)
    for one in all_asked:
        ends = [event for event in one.events if isinstance(event, Finished | Failed)]
        if isinstance(one.heard.end, Full):
            assert not one.events
            continue
        assert ends == one.events[-1:] and ends
        spoken = sum(event.frames for event in one.events if isinstance(event, Audio))
        match ends[0]:
            case Finished("cancelled", frames):
                assert one.leaves_s is not None and spoken <= frames <= one.frames
            case Finished(_, frames):
                assert frames == spoken == one.frames
            case Failed(code="engine_full"):  # it would have been heard too late
                assert max_ttfa_s is not None and spoken == 0 and not one.is_flex
            case Failed(code=code):
                assert code == "stalled" and one.reads < 1
    assert (
        not engine.num_requests and not model.queue.requests and not model.running and not engine.intake.known
    )
    assert pages.free == pages.num_pages
    assert sorted(model.tenants.free) == list(range(model.runner.num_slots)) and not model.tenants.leaving
    assert (
        not model.scheduler.slots.is_occupied.any()
        and not model.scheduler.slots.prompt.queue
        and not engine.intake.reference_bytes
    )


@EXAMPLES
@given(
    st.integers(2, 8),
    st.booleans(),
    st.lists(
        st.tuples(st.floats(0, 3), st.integers(1, 256), st.integers(20, 200), st.sampled_from([1.0, 0.25])),
        min_size=1,
        max_size=30,
    ),
)
def test_short_iterations_cause_no_gap(slots, is_async, arrivals):
    """A load that is feasible by construction: whatever falls into a turn (a step of all slots, all the
    prompt positions that there may be, a window of the largest shape for each) takes a third of a frame at
    most, and most of that whatever it is."""
    worst_s = FRAME_S / 3
    cost = Cost(
        step_s=lambda count: 0.05 * worst_s * count / slots,
        prefill_s=lambda tokens: 0.05 * worst_s * tokens / 256,
        render_s=lambda rows, frames: 0.1 * worst_s * rows * frames / (25 * slots),
        turn_s=0.8 * worst_s,
    )
    room = Room(slots, 2000, 0, "streaming", is_async, None, cost)
    room.engine.limits.max_waiting = len(arrivals)
    all_asked = [Asked(at_s, size, frames, speed=speed) for at_s, size, frames, speed in arrivals]
    room.run(all_asked)
    for one in all_asked:
        assert isinstance(one.heard.end, Finished) and one.heard.end.frames == one.frames
        if one.speed == 1:  # what `Heard` plays at
            assert one.heard.late_s <= 1e-9
    assert room.model.scheduler.num_underruns == 0


@pytest.mark.slow
@EXAMPLES
@given(
    st.integers(60, 90),
    st.integers(2, 4),
    st.lists(st.tuples(st.floats(0, 6), st.integers(1, 40), st.integers(1, 30)), max_size=60),
)
def test_a_large_request_at_the_head_is_skipped_a_bounded_number_of_times(pages, slots, small):
    """It needs nearly all pages, and small ones keep coming: MAX_SKIPS of them go before it, and it is
    next."""
    room = Room(slots, pages, 0, "streaming", False, None, guard=2.0)
    room.engine.limits.max_waiting = 100
    positions = (pages - 2) * PAGE_TOKENS
    first = [Asked(0.0, 30, 60) for _ in range(slots - 1)]
    head = Asked(0.01, positions // 2, positions // 4)
    later = [Asked(0.02 + at_s, size, frames) for at_s, size, frames in small]
    room.run([*first, head, *later])
    for one in (*first, head, *later):
        assert isinstance(one.heard.end, Finished) and one.heard.end.frames == one.frames
    before = room.admitted[: room.admitted.index(len(first))]
    assert len([index for index in before if index > len(first)]) <= MAX_SKIPS


def test_an_urgent_listener_does_not_wait_for_the_windows_of_others():
    """If a launch returns when it is done, each window is delivered before the next one of the same turn is
    rendered."""
    room, rendered, given, turns = Room(6, 2000, 0, "streaming", False, None), [], [], []
    render, flush = room.model.runner.render, []

    def noted(due):
        assert given == rendered and len(flush) >= len(rendered)
        rendered.append(due.slots.tolist())
        given.append([])
        return render(due)

    room.model.runner.render = noted
    room.engine.after_turn = lambda: flush.append(None)
    plain = Room.submit

    def submit(index: int, one: Asked) -> None:
        plain(room, index, one)
        deliver = room.model.queue.requests[f"{index}"].deliver

        def note(event: Event) -> None:
            if isinstance(event, Audio):
                [slot] = [slot for slot, job in room.model.running.items() if job.id == f"{index}"]
                given[-1].append(slot)
            deliver(event)

        [job] = room.engine.inbox.news.jobs
        job.request.deliver = note

    room.submit = submit
    room.run([Asked(0.02 * i, 10, 120) for i in range(12)], look=lambda: turns.append(len(rendered)))
    assert any(after - before > 1 for before, after in itertools.pairwise(turns))


def test_first_audio_lasts_until_the_next_window_if_iterations_are_long(monkeypatch):
    """A turn takes most of a frame, and one that fills a prompt takes longer than a frame: who was given one
    frame ran dry."""
    cost = Cost(
        step_s=lambda slots: 0.042 + 0.001 * slots,
        prefill_s=lambda tokens: 0.03,
        render_s=lambda rows, frames: 0.004 * rows + 0.0025 * rows * frames,
    )
    late = []
    for turns in (0, policies.FIRST_WINDOW_ITERATIONS):
        monkeypatch.setattr(policies, "FIRST_WINDOW_ITERATIONS", turns)
        simulation = Simulation(Voice(), cost, settings={"max_slots": 8, "max_ttfa_s": 60.0})
        simulation.run(poisson(0.8, 20.0))  # until it is known what turns take
        begins_s = simulation.clock.now_s
        arrivals = [(begins_s + at_s, request) for at_s, request in poisson(0.8, 60.0, seed=1)]
        heard = simulation.run(arrivals)
        assert all(isinstance(one.end, Finished) for one in heard)
        late.append(np.mean([one.late_s > 0.001 for one in heard]))
    before, now = late
    assert now <= 0.05 < 0.15 <= before


def slow(jitter: Callable[[], float] = lambda: 1.0) -> Cost:
    """The measured cost of a model whose turn takes most of a frame on two cores. jitter: returns the factor
    by which a launch takes longer."""
    return Cost(
        step_s=lambda slots: jitter() * (0.0258 + 0.0019 * slots),
        prefill_s=lambda tokens: jitter() * 0.012,
        render_s=lambda rows, frames: (
            jitter() * ((0.010 if frames == 1 else 0.012) + (0.003 + 0.0024 * frames) * rows)
        ),
        turn_s=0.001,
    )


def begun(cost: Cost, slots: int) -> Simulation:
    """Return a simulation that has measured its turns."""
    simulation = Simulation(Voice(guard=1.0), cost, settings={"max_slots": slots, "max_ttfa_s": 600.0})
    for rate in (2.0, 4.0):
        begins_s = simulation.clock.now_s
        simulation.run([(begins_s + at_s, request) for at_s, request in poisson(rate, 3.0, text_bytes=20)])
    return simulation


def asked_at(simulation: Simulation, arrivals: list[tuple[float, int]]) -> list[Heard]:
    begins_s = simulation.clock.now_s
    return simulation.run(
        [
            (begins_s + at_s, Request(text="x" * 12, seed=1000 + seed, max_frames=frames))
            for seed, (at_s, frames) in enumerate(sorted(arrivals))
        ]
    )


@pytest.mark.slow
@settings(EXAMPLES, max_examples=40)
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.floats(0, 4), st.integers(5, 60)), min_size=1, max_size=12),
)
def test_newcomers_cause_no_gap_if_an_iteration_takes_most_of_a_frame(slots, arrivals):
    """Up to four listeners speak, and newcomers come at any time. A turn of four takes two thirds of a frame,
    and with newcomers more than one."""
    heard = asked_at(begun(slow(), slots), arrivals)
    assert all(isinstance(one.end, Finished) for one in heard)
    assert max(one.late_s for one in heard) <= 1e-9


def uneven(seed: int) -> Callable[[], float]:
    """Return factors of launch times: most launches take up to a tenth longer, and one in fifty nearly twice
    as long."""
    chance = np.random.default_rng(seed)
    return lambda: float(np.exp(abs(chance.normal(0, 0.08)))) * (1.8 if chance.random() < 0.02 else 1.0)


def at_random(rate: float, count: int, frames: int = 25) -> list[tuple[float, int]]:
    times = np.cumsum(np.random.default_rng(0).exponential(1 / rate, count))
    return [(float(at_s), frames) for at_s in times]


@pytest.mark.slow
def test_a_launch_that_takes_twice_its_time_causes_no_gap(monkeypatch):
    """First audio lasts for more turns than it takes to make the next."""
    late = []
    for turns in (3, policies.FIRST_WINDOW_ITERATIONS):
        monkeypatch.setattr(policies, "FIRST_WINDOW_ITERATIONS", turns)
        heard = asked_at(begun(slow(uneven(0)), 8), at_random(1.6, 150))
        late.append(np.mean([one.late_s > 0 for one in heard]))
    before, now = late
    assert now <= 0.02 < 0.05 <= before


@pytest.mark.slow
@settings(EXAMPLES, max_examples=40)
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.floats(0, 4), st.integers(5, 60)), min_size=1, max_size=12),
)
def test_a_prompt_longer_than_an_iteration_causes_no_gap(slots, arrivals):
    """A listener that would run dry meanwhile is served before the prompt is filled."""
    cost = replace(slow(), prefill_s=lambda tokens: 0.06)
    heard = asked_at(begun(cost, slots), arrivals)
    assert all(isinstance(one.end, Finished) for one in heard)
    assert max(one.late_s for one in heard) <= 1e-9


@pytest.mark.slow
def test_prompts_wait_while_a_listener_would_run_dry(monkeypatch):
    """They take 120 ms, more than most listeners have in hand."""
    late, waits = [], Streaming.delays_prompts
    for waiting in (lambda *_: False, waits):
        monkeypatch.setattr(Streaming, "delays_prompts", waiting)
        heard = asked_at(begun(replace(slow(), prefill_s=lambda tokens: 0.12), 8), at_random(1.2, 150))
        late.append(np.mean([one.late_s > 0 for one in heard]))
    without, now = late
    assert now < 0.02 < 0.1 < without


def test_batched_windows_leave_time_for_more_streams(monkeypatch):
    """Most of the machine is asked for: with a launch for each listener newcomers wait longer. A window alone
    takes 20 ms, each other row of it 9, as it was measured."""
    facts = []
    cost = replace(
        slow(uneven(1)), render_s=lambda rows, frames: 0.011 + (0.004 if frames == 1 else 0.009) * rows
    )
    for part in (2.0, policies.BATCHED_PART):
        monkeypatch.setattr(policies, "BATCHED_PART", part)
        simulation, launches = begun(cost, 8), []
        render = simulation.model.runner.render

        def counted(due, render=render, launches=launches):
            launches.append(len(due.slots))
            return render(due)

        simulation.model.runner.render = counted
        heard = asked_at(simulation, at_random(3.2, 150))
        ttfa_s = np.quantile([one.ttfa_s for one in heard], 0.9)
        facts.append((np.mean(launches), ttfa_s, np.mean([one.late_s > 0 for one in heard])))
    (rows, ttfa_s, late), (joined_rows, joined_ttfa_s, joined_late) = facts
    assert joined_rows > 1.2 * rows and joined_ttfa_s < 0.8 * ttfa_s and max(late, joined_late) <= 0.03


@pytest.mark.slow
def test_stale_estimates_are_tried(monkeypatch):
    """Turns of two seemed to take twice as long as turns of one, so one listener speaks at a time. The time
    of two is measured again only if the engine tries it, while the speaking listener has audio left."""
    waited = []
    for turns in (10**9, admission.STALE_ITERATIONS):
        monkeypatch.setattr(admission, "STALE_ITERATIONS", turns)
        simulation = begun(slow(lambda: 1.25), 8)
        costs = simulation.model.forecaster.costs
        for _ in range(600):
            costs.record(IterationLoad(1, 0, 1), 0.045)
            costs.record(IterationLoad(2, 0, 2), 0.09)
        heard = asked_at(simulation, at_random(1.2, 100))
        waited.append(np.median([one.ttfa_s for one in heard[50:]]))
        assert all(isinstance(one.end, Finished) for one in heard)
    stuck, now = waited
    assert now < 0.3 < 3 < stuck
