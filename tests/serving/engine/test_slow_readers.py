"""Listeners that report how much audio they take, and take it slowly or not at all."""

from __future__ import annotations

import pytest

from serving.engine.engine import Failed, Finished
from serving.protocol import Listener
from serving.tools.simulate import Cost, Heard, Simulation, Voice
from zoo.request import Request

UNREAD_S, STALL_S = 10.0, 20.0
LARGEST_S = 25 * 0.08  # of a window
FAST = Cost(step_s=lambda slots: 0.004 + 0.001 * slots, turn_s=0.001)


@pytest.fixture
def room() -> Simulation:
    settings = {"max_slots": 4, "max_unread_s": UNREAD_S, "max_stall_s": STALL_S}
    return Simulation(Voice(), FAST, settings=settings)


def submit(room: Simulation, seed: int, frames: int = 600, is_metered: bool = True) -> Heard:
    request = Request(text="x" * 20, seed=seed, max_frames=frames)
    heard = Heard(room.clock.now_s)
    room.heard.append(heard)
    place = room.engine.accept(
        f"{seed}", lambda event: room.hear(heard, event), listener=Listener(is_metered=is_metered)
    )
    room.engine.prepare(place, lambda: request)
    return heard


def run(room: Simulation, until_s: float) -> None:
    while room.clock.now_s < until_s:
        if not room.turn():
            room.clock.now_s += 0.05


def test_a_client_that_does_not_read_is_paused_and_then_fails(room):
    heard = submit(room, 0)
    run(room, 15.0)
    assert UNREAD_S <= heard.audio_s < UNREAD_S + 2 * LARGEST_S and heard.end is None
    assert room.engine.stats()["models"]["simulated"]["held"] == 1
    held_s = float(room.model.scheduler.slots.listener.backpressure_since_s.min())
    assert room.engine.lifecycle.stalls_in_s() == pytest.approx(held_s + STALL_S - room.clock.now_s, abs=0.01)
    run(room, held_s + STALL_S - 0.5)
    assert heard.end is None
    run(room, held_s + STALL_S + 0.5)
    assert heard.end == Failed("the client has not taken what was spoken for 20 s", "stalled")
    assert room.engine.lifecycle.stalls_in_s() is None and not room.model.running
    assert room.engine.pages.free == room.engine.pages.num_pages


def test_a_client_that_reads_on_continues_and_hears_all(room):
    heard, taken = submit(room, 0), 0
    while heard.end is None:
        run(room, room.clock.now_s + 8.0)
        made = round(heard.audio_s / 0.08)
        room.engine.consume("0", made - taken)  # every eight seconds, all there is
        taken = made
        assert room.clock.now_s < 200
    assert isinstance(heard.end, Finished) and heard.audio_s == pytest.approx(48)
    assert room.model.scheduler.num_underruns == 0  # the delay was the listener's own


def test_a_slow_reader_is_served_at_its_own_pace(room):
    """Half as fast as the speech is: it is held most of the time, and never for so long that it is left."""
    heard, taken = submit(room, 0), 0
    for second in range(1, 200):
        run(room, float(second))
        frames = min(round(heard.audio_s / 0.08) - taken, 6)
        room.engine.consume("0", frames)
        taken += frames
        assert (heard.audio_s / 0.08 - taken) * 0.08 < UNREAD_S + 2 * LARGEST_S
    assert isinstance(heard.end, Finished)


def test_slow_readers_do_not_slow_others(room):
    alone = Simulation(Voice(), FAST, settings={"max_slots": 4})
    [expected] = alone.run([(0.0, Request(text="x" * 20, seed=9, max_frames=100))])
    for seed in range(3):
        submit(room, seed)
    run(room, 10.0)
    assert room.model.scheduler.slots.listener.has_backpressure.sum() == 3
    before_s = room.clock.now_s
    heard = submit(room, 9, frames=100, is_metered=False)
    run(room, before_s + 5.0)
    assert isinstance(heard.end, Finished)
    assert heard.ttfa_s == pytest.approx(expected.ttfa_s, abs=0.05)
    assert heard.ended_s - before_s == pytest.approx(expected.ended_s, abs=0.05)


def test_a_listener_that_is_not_metered_is_never_paused(room):
    heard = submit(room, 0, is_metered=False)
    room.run([])
    assert isinstance(heard.end, Finished) and heard.audio_s == pytest.approx(48)
