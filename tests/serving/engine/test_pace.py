"""Steps while a long render is under way. The real engine on a virtual clock, at the costs of a GPU."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from benchmarks.rules import DEVICES, load_of, simulation_of
from serving.tools.simulate import Copy, Simulation

LONG, SHORT = DEVICES["h200 cosy"], DEVICES["h200"]


def speaking(device: Any) -> tuple[Simulation, list[float], list[tuple[float, float]]]:
    """Return a simulation that served requests, when its steps were launched, and when its renders began and were
    done."""
    simulation, steps, renders = simulation_of(device, device.cost), [], []
    step, render = simulation.model.runner.step, simulation.model.runner.render

    def noted_step(slots: Any) -> Any:
        steps.append(simulation.clock.now_s)
        return step(slots)

    def noted_render(due: Any) -> Any:
        copy = render(due)
        renders.append((simulation.clock.now_s, copy))
        return copy

    simulation.model.runner.step, simulation.model.runner.render = noted_step, noted_render
    simulation.run(load_of(device, device.rates[0], seed=0)[:40])
    return simulation, steps, [(began_s, copy.work.done_s) for began_s, copy in renders]


def test_steps_keep_the_pace_while_a_long_render_is_under_way():
    simulation, steps, renders = speaking(LONG)
    pace_s, turn_s = simulation.model.round.pace_s, LONG.cost.turn_s
    assert pace_s == 3 * LONG.cost.step_s(LONG.slots)
    num_paced = num_woken = num_free = 0
    for earlier_s, later_s in pairwise(steps):
        if any(began_s <= earlier_s and done_s > later_s for began_s, done_s in renders):
            assert later_s - earlier_s >= pace_s - 1e-9
            num_paced += 1
        elif ended_s := [done_s for began_s, done_s in renders if earlier_s < done_s < earlier_s + pace_s]:
            # The end of a render ends the wait: after it, there is at most the host's own time.
            num_woken += later_s <= max(ended_s) + 2 * turn_s
        else:
            num_free += later_s - earlier_s < pace_s
    assert num_paced > 100 and num_woken > 10 and num_free > 100


def test_steps_do_not_wait_for_short_renders(monkeypatch):
    def never(copy: Copy, max_s: float) -> None:
        raise AssertionError("waits for a render")

    monkeypatch.setattr(Copy, "wait", never)
    simulation, steps, renders = speaking(SHORT)
    assert simulation.model.round.pace_s == 0 and steps and renders


def test_audio_is_handed_on_before_the_wait(monkeypatch):
    simulation = simulation_of(LONG, LONG.cost)
    handed: list[int] = []
    wait, num_waits = Copy.wait, 0

    def num_delivered() -> int:
        return sum(one.audio_s > 0 for one in simulation.heard)

    def waits(copy: Copy, max_s: float) -> None:
        nonlocal num_waits
        num_waits += 1
        assert handed[-1] == num_delivered()
        wait(copy, max_s)

    simulation.engine.after_turn = lambda: handed.append(num_delivered())
    monkeypatch.setattr(Copy, "wait", waits)
    simulation.run(load_of(LONG, LONG.rates[0], seed=0)[:40])
    assert num_waits > 100
