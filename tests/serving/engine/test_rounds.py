"""Two models where a launch returns when it is done: whose round comes when. The real engine on a virtual
clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.engine.device.arena import Arena
from serving.engine.engine import Engine, Finished
from serving.engine.schedule.rounds import by_need
from serving.tools.simulate import RATE_HZ, Clock, Cost, Heard, SimulatedRunner, Voice
from zoo.request import Request

EXAMPLES = settings(max_examples=25, deadline=None, derandomize=True, database=None)
FRAME_S = 0.08
QUICK = Cost(
    step_s=lambda slots: 0.003,
    prefill_s=lambda tokens: 0.001 + 1e-5 * tokens,
    render_s=lambda rows, frames: 0.001 + 0.0005 * rows * frames,
)
BUSY = Cost(
    step_s=lambda slots: 0.004 + 0.0005 * slots,
    prefill_s=lambda tokens: 0.001 + 5e-5 * tokens,
    render_s=lambda rows, frames: 0.001 + 0.0002 * rows * frames,
)


class Two:
    """A quick model and a busy one on one processor. Requests come when it is their time, in the middle of a
    turn too."""

    def __init__(self, quick: Cost = QUICK, busy: Cost = BUSY, policy: str = "streaming"):
        self.clock = Clock()
        self.waiting: list[tuple[float, str, int, int]] = []  # the last one comes next
        self.leaving: list[tuple[float, int]] = []  # when, and the number of the request
        self.heard: list[tuple[str, Heard]] = []
        self.longest_s = 0.0  # of what nobody can come between: a window, or prompts and the step behind them
        self.filled_s = 0.0  # what the prompts of this round took
        voices = {"quick": Voice(), "busy": Voice()}
        costs = {id(voices["quick"]): quick, id(voices["busy"]): busy}

        def make(voice: Voice, num_slots: int, arena: Arena, *_: Any) -> SimulatedRunner:
            runner = SimulatedRunner(self.clock, costs[id(voice)], False, voice, num_slots, arena)
            for name in ("prefill", "step", "render"):
                setattr(runner, name, self.watched(name, getattr(runner, name)))
            return runner

        self.engine = Engine(
            voices, clock=self.clock, make_runner=make, compile=False, report_lag=0, policy=policy
        )
        self.num_asked = 0

    def watched(self, name: str, launch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def work(what: Any) -> Any:
            began_s = self.clock.now_s
            result = launch(what)
            took_s = self.clock.now_s - began_s
            self.longest_s = max(self.longest_s, took_s + (self.filled_s if name == "step" else 0.0))
            self.filled_s = took_s if name == "prefill" else 0.0
            self.come()
            return result

        return work

    def come(self) -> None:
        while self.waiting and self.waiting[-1][0] <= self.clock.now_s:
            at_s, model, tokens, frames = self.waiting.pop()
            self.heard.append((model, self.ask(model, tokens, frames, at_s)))
        while self.leaving and self.leaving[-1][0] <= self.clock.now_s:
            self.engine.cancel(f"{self.leaving.pop()[1]}")

    def ask(self, model: str, tokens: int, frames: int, at_s: float | None = None) -> Heard:
        heard = Heard(self.clock.now_s if at_s is None else at_s)
        self.num_asked += 1
        request = Request(text="x" * tokens, seed=self.num_asked, max_frames=frames)

        def deliver(event: Any) -> None:
            heard.take(event, self.clock.now_s, RATE_HZ)

        self.engine.speak(f"{self.num_asked}", request, deliver, model)
        return heard

    def turn(self) -> bool:
        self.clock.now_s += 0.0005
        return self.engine.turn()

    def run(self, arrivals: list[tuple[float, str, int, int]]) -> list[tuple[str, Heard]]:
        """arrivals: when, of which model, how many positions and frames. Until all have ended."""
        self.waiting, self.heard = sorted(arrivals, reverse=True), []
        for _ in range(100_000):
            self.come()
            if not self.turn() and not self.engine.num_requests:
                if not self.waiting:
                    return self.heard
                self.clock.now_s = max(self.clock.now_s, self.waiting[-1][0])
        pytest.fail(f"{self.engine.num_requests} requests have not ended")


busy_ones = st.lists(
    st.tuples(st.floats(0, 3), st.just("busy"), st.integers(1, 256), st.integers(1, 80)),
    min_size=1,
    max_size=30,
)


@pytest.mark.slow
@EXAMPLES
@given(busy_ones, st.integers(2, 200), st.lists(st.floats(0.3, 1), min_size=1, max_size=8))
def test_first_audio_does_not_wait_for_the_round_of_another_model(others, tokens, gaps):
    """The other model speaks, gets newcomers and fills long prompts. First audio takes the time of its own
    prompt, step and window, and the rest of the launches under way: a prompt and a step at most."""
    begins_s, at_s = 0.0, []
    for gap_s in gaps:
        begins_s += gap_s
        at_s.append(begins_s)
    two = Two()
    two.run([(0.0, "quick", 10, 20), (0.0, "busy", 10, 20)])  # what turns take is known then
    now_s = two.clock.now_s
    arrivals = [(now_s + at, "quick", tokens, 3) for at in at_s]
    heard = two.run(arrivals + [(now_s + at, *what) for at, *what in others])
    own_s = 0.0005 + QUICK.prefill_s(tokens - 1) + QUICK.step_s(1) + QUICK.render_s(1, 1)
    for model, one in heard:
        assert isinstance(one.end, Finished)
        if model == "quick":
            assert own_s - QUICK.prefill_s(1) <= one.ttfa_s <= own_s + two.longest_s + 0.001


@pytest.mark.slow
@EXAMPLES
@given(
    st.lists(
        st.tuples(
            st.floats(0, 3), st.sampled_from(["quick", "busy"]), st.integers(1, 256), st.integers(1, 120)
        ),
        min_size=1,
        max_size=30,
    )
)
def test_two_models_with_short_iterations_cause_no_gap(arrivals):
    """The rounds of both together take half of a frame at most, so a model that is left out for a while is
    back in time."""
    worst_s = FRAME_S / 4
    cost = Cost(
        step_s=lambda slots: 0.6 * worst_s,
        prefill_s=lambda tokens: 0.15 * worst_s,
        render_s=lambda rows, frames: 0.1 * worst_s * rows * frames / (25 * 8),
        turn_s=0.0,
    )
    two = Two(cost, cost)
    for _, one in two.run(arrivals):
        assert isinstance(one.end, Finished) and one.late_s <= 1e-9
    assert all(model.scheduler.num_underruns == 0 for model in two.engine.models.values())


def test_a_model_whose_listeners_have_time_lets_others_begin():
    """A long prompt of one model takes eight turns. The other model takes no step until a listener would run
    dry, and none does."""
    two = Two()
    speakers = [two.ask("busy", 10, 200) for _ in range(3)]
    for _ in range(60):
        two.turn()
    newcomer = two.ask("quick", 2000, 5)
    frames = {model: [] for model in two.engine.models}
    while newcomer.first_s is None:
        two.turn()
        for name, model in two.engine.models.items():
            frames[name].append(int(model.scheduler.slots.tape.num_ready.sum()))
    assert len(set(frames["busy"])) == 1 and len(frames["quick"]) == 8
    while two.turn():
        pass
    assert all(isinstance(one.end, Finished) and one.late_s == 0 for one in [*speakers, newcomer])


def test_a_model_left_out_has_a_round_before_its_listeners_run_dry():
    """In one model a request is always about to begin. No listener of the other hears it, and all requests
    end."""
    prompts = Cost(QUICK.step_s, lambda tokens: 0.02, QUICK.render_s)
    two = Two(prompts)
    arrivals = [(0.2 + 0.05 * i, "quick", 250, 2) for i in range(100)]
    heard = two.run([(0.0, "busy", 10, 60), (0.0, "busy", 10, 60), *arrivals])
    assert all(isinstance(one.end, Finished) for _, one in heard)
    assert all(one.late_s <= 1e-9 for model, one in heard if model == "busy")


@pytest.mark.parametrize("policy", ["throughput", "fifo"])
def test_other_policies_give_every_model_a_round_in_order(policy):
    two = Two(policy=policy)
    two.ask("busy", 10, 50)
    for _ in range(30):
        two.turn()
    two.ask("quick", 10, 50)
    two.turn()
    models = list(two.engine.models.values())
    assert by_need(models, two.clock.now_s) == models
    two.turn()
    assert all(model.scheduler.slots.tape.num_ready.sum() for model in models)


@EXAMPLES
@given(
    st.lists(
        st.tuples(
            st.floats(0, 1),
            st.sampled_from(["quick", "busy"]),
            st.integers(1, 300),
            st.integers(1, 60),
            st.floats(0, 1),
        ),
        min_size=1,
        max_size=25,
    ),
    st.sampled_from([0.0, 0.02]),
)
def test_a_cancel_during_a_round_leaves_nothing_behind(asked, prefill_s):
    """Between any two launches, whatever was to be rendered or filled for it then; also where turns are long,
    and prompts seem to take no time."""
    long = Cost(lambda slots: 0.04, lambda tokens: prefill_s, lambda rows, frames: 0.01)
    two = Two(busy=long)
    arrivals = [(at_s, model, tokens, frames) for at_s, model, tokens, frames, _ in asked]
    in_order = sorted(asked, key=lambda one: one[:4])  # as they are numbered when they come
    leaves = [(at_s + stays_s, number) for number, (at_s, *_, stays_s) in enumerate(in_order, 1)]
    two.leaving = sorted(leaves, reverse=True)
    for _, one in two.run(arrivals):
        assert isinstance(one.end, Finished)
    assert two.engine.pages.free == two.engine.pages.num_pages
    for model in two.engine.models.values():
        assert sorted(model.tenants.free) == list(range(model.runner.num_slots)) and not model.tenants.leaving
        assert not model.queue.requests and not model.running and not model.tenants.num_rendering.any()
