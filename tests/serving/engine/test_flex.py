"""Flexible requests next to requests with listeners, and the order of prompts. On a virtual clock."""

from __future__ import annotations

import numpy as np
import pytest

from serving.engine.engine import Finished, Full
from serving.engine.schedule.policy import Fifo, Policy, Streaming
from serving.engine.schedule.scheduler import Scheduler
from serving.protocol import Listener
from serving.tools.simulate import Cost, Heard, Simulation, Voice
from zoo.contract import Window
from zoo.request import Request

SLOW = Cost(step_s=lambda slots: 0.01 + 0.006 * slots, turn_s=0.001)


def room(**more) -> Simulation:
    return Simulation(Voice(), SLOW, settings={"max_slots": 8, "max_waiting": 20, **more})


def submit(simulation: Simulation, seed: int, is_flex: bool, frames: int = 100) -> Heard:
    """Raises Full."""
    heard = Heard(simulation.clock.now_s)
    engine = simulation.engine
    place = engine.accept(
        f"{seed}",
        lambda event: simulation.hear(heard, event),
        listener=Listener(is_flexible=is_flex),
        text_bytes=20,
    )
    engine.prepare(place, lambda: Request(text="x" * 20, seed=seed, max_frames=frames))
    return heard


def run(simulation: Simulation, seconds: float = 100.0) -> None:
    until_s = simulation.clock.now_s + seconds
    while simulation.clock.now_s < until_s and simulation.turn():
        pass


def test_flexible_requests_do_not_delay_listeners():
    """With 20 flexible requests next to it, a request gets its first audio as early as alone, without a
    gap."""
    ttfa_s = {}
    for num_flex in (0, 20):
        simulation = room()
        batch = [submit(simulation, 100 + i, True, 200) for i in range(num_flex)]
        run(simulation, 3.0)
        live = submit(simulation, 0, False)
        run(simulation)
        assert isinstance(live.end, Finished) and live.late_s == 0
        assert all(isinstance(one.end, Finished) for one in batch)
        ttfa_s[num_flex] = live.ttfa_s
    assert ttfa_s[20] == pytest.approx(ttfa_s[0], abs=2 * SLOW.step_s(8))


def test_a_quarter_of_the_slots_is_kept_from_flexible_requests():
    simulation = room()
    for i in range(20):
        submit(simulation, 100 + i, True)
    run(simulation, 1.0)
    assert len(simulation.model.running) == 6
    for i in range(2):
        submit(simulation, i, False)
    simulation.turn()
    assert len(simulation.model.running) == 8


@pytest.mark.parametrize(("slots", "kept"), [(1, 0), (2, 1), (3, 1), (4, 1), (6, 2), (8, 2), (64, 16)])
def test_a_slot_is_kept_from_flexible_requests_where_there_are_several(slots, kept):
    simulation = Simulation(Voice(), SLOW, settings={"max_slots": slots, "max_waiting": 100})
    for i in range(slots + 1):
        submit(simulation, 100 + i, True)
    simulation.turn()
    assert len(simulation.model.running) == slots - kept


def test_flexible_requests_are_taken_however_long_the_wait_up_to_a_bound_of_their_own():
    simulation = room(max_ttfa_s=0.5)
    run(simulation, 1.0)
    batch = [submit(simulation, 100 + i, True) for i in range(20)]
    with pytest.raises(Full, match="20 requests are waiting already"):
        submit(simulation, 99, True)
    assert submit(simulation, 0, False).end is None
    run(simulation)
    assert all(isinstance(one.end, Finished) for one in batch)


def scheduler(policy: Policy, num_slots: int = 4) -> Scheduler:
    return Scheduler(num_slots, policy, Window((1, 4, 25)), 0.08)


def turns_until_filled(order: Scheduler, newcomers: int) -> list[int]:
    """A long prompt in slot 0, and a short one in slot 1 every turn -> in which turns positions of the long
    one are filled."""
    order.open(0, 3000)
    filled = []
    for turn in range(newcomers):
        if not order.slots.is_occupied[1]:
            order.open(1, 256)
        for chunk in order.next_chunks():
            order.record_prefill(chunk)
            if chunk.slot == 0:
                filled.append(turn)
            elif chunk.is_last:
                order.close(1)
        if not order.slots.prompt.queue:
            break
    return filled


def test_prompts_are_filled_in_order_of_arrival():
    filled = turns_until_filled(scheduler(Streaming()), 400)
    assert filled == list(range(len(filled)))


def test_fifo_fills_prompts_and_windows_in_order():
    order = scheduler(Fifo())
    assert turns_until_filled(order, 20)[:5] == [0, 1, 2, 3, 4]
    assert Policy.named("fifo") == Fifo()
    order = scheduler(Fifo())
    order.open(2, 0)
    for ready, expected in ((1, []), (4, [4]), (7, []), (8, [4]), (13, [4])):  # one shape, the first included
        order.report(np.array([2]), np.array([ready]), np.array([False]))
        assert [int(render.count[0]) for render in order.take_due_windows(100.0)][:1] == expected
