"""The scheduler: slots that come and go, the playback clock, text that arrives, and the cost of an
iteration."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from schedulers import FRAME_S, SIZES, WINDOW, Timed, deliver, due, playing, report, speaking

from serving.engine.device.launches import Chunk
from serving.engine.schedule.policy import Fifo, Policy, Streaming, Throughput
from serving.protocol import Listener
from zoo.contract import Window


def test_a_delivery_after_the_end_is_an_underrun_and_playback_goes_on_from_there():
    scheduler = playing(50)
    report(scheduler, {0: 52}, done=[0])
    scheduler.take_due_windows(5.0)
    deliver(scheduler, {0: 1}, 4.0)
    assert scheduler.slots.listener.num_underruns[0] == 0
    deliver(scheduler, {0: 1}, 5.0)
    assert scheduler.slots.listener.num_underruns[0] == 1
    assert scheduler.slots.listener.plays_until_s[0] == pytest.approx(5.0 + FRAME_S)


def test_finished_is_done_and_wholly_delivered():
    scheduler = speaking(num_slots=3)
    report(scheduler, {0: 2, 1: 2, 2: 0}, done=[0, 2])
    scheduler.take_due_windows(0.0)
    assert scheduler.finished_slots().tolist() == [2]
    deliver(scheduler, {0: 1, 1: 1}, 0.0)
    assert scheduler.finished_slots().tolist() == [2]
    deliver(scheduler, {0: 1}, 0.0)
    assert scheduler.finished_slots().tolist() == [0, 2]


def test_a_closed_slot_has_no_windows_and_no_steps():
    scheduler = speaking(num_slots=2)
    report(scheduler, {0: 30, 1: 30}, done=[0])
    scheduler.take_due_windows(0.0)
    deliver(scheduler, {0: 25, 1: 25}, 0.0)
    scheduler.close(0)
    scheduler.close(1)
    assert due(scheduler, 99.0) == []
    assert scheduler.finished_slots().tolist() == []
    assert scheduler.decoding_slots().tolist() == []
    assert scheduler.next_chunks() == []


def test_a_reused_slot_starts_anew():
    scheduler = playing(50)
    report(scheduler, {0: 60}, done=[0])
    scheduler.take_due_windows(9.0)
    deliver(scheduler, {0: 4}, 9.0)
    assert scheduler.slots.listener.num_underruns[0] == 1
    scheduler.close(0)
    scheduler.open(0, prompt_tokens=3)
    assert scheduler.slots.listener.num_underruns[0] == 0
    assert scheduler.next_chunks() == [Chunk(0, 0, 3, is_last=True)]
    scheduler.record_prefill(Chunk(0, 0, 3, is_last=True))
    assert scheduler.decoding_slots().tolist() == [0]
    report(scheduler, {0: 1})
    assert due(scheduler, 9.1) == [({0: (0, 1)}, 1)]
    deliver(scheduler, {0: 1}, 9.1)
    assert (
        scheduler.slots.listener.num_underruns[0] == 0 and scheduler.num_underruns == 1
    )  # of everybody since the start
    assert scheduler.slots.listener.plays_until_s[0] == pytest.approx(9.1 + FRAME_S)


def test_a_slot_closed_while_it_waits_leaves_the_queue():
    scheduler = Timed(2, Fifo(), WINDOW, FRAME_S)
    scheduler.open(0, prompt_tokens=1000)
    scheduler.open(1, prompt_tokens=5)
    for chunk in scheduler.next_chunks():
        scheduler.record_prefill(chunk)
    scheduler.close(0)
    assert [chunk.slot for chunk in scheduler.next_chunks()] == [1]


def test_broken_promises_are_reported_with_both_values():
    scheduler = Timed(2, Streaming(), WINDOW, FRAME_S)
    scheduler.open(0, prompt_tokens=8)
    with pytest.raises(AssertionError, match="slot 0 is opened, but it is in use"):
        scheduler.open(0, prompt_tokens=8)
    with pytest.raises(AssertionError, match="slot 1 is closed, but it is not in use"):
        scheduler.close(1)
    with pytest.raises(AssertionError, match="9 of 8 positions skipped"):
        scheduler.open(1, prompt_tokens=8, skip=9)
    with pytest.raises(AssertionError, match="slot 0 has 0 positions"):
        scheduler.record_prefill(Chunk(0, 4, 8, is_last=True))
    with pytest.raises(AssertionError, match=r"slots \[0\] report, but only \[\] decode"):
        report(scheduler, {0: 1})
    scheduler.record_prefill(Chunk(0, 0, 8, is_last=True))
    with pytest.raises(AssertionError, match=r"slots \[0\]: \[1\] frames delivered, \[0\] rendered"):
        deliver(scheduler, {0: 1}, 0.0)
    with pytest.raises(AssertionError, match="ascending frame counts expected"):
        Timed(1, Streaming(), Window((4, 1)), FRAME_S)
    with pytest.raises(AssertionError, match="a lookahead of -1 frames"):
        Timed(1, Streaming(), Window(SIZES, lookahead=-1), FRAME_S)


def test_a_prompt_that_shared_pages_hold_wholly_speaks_at_once():
    scheduler = Timed(2, Streaming(), WINDOW, FRAME_S)
    scheduler.open(1, prompt_tokens=8, skip=8)
    assert scheduler.next_chunks() == []
    assert scheduler.decoding_slots().tolist() == [1]


def test_policies_have_names():
    assert Policy.named("streaming") == Streaming()
    assert Policy.named("throughput") == Throughput()
    with pytest.raises(ValueError, match="policy 'fast' is unknown; there are: streaming, throughput, fifo"):
        Policy.named("fast")


def bytecodes_of_a_turn(num_slots: int) -> int:
    """Bytecodes run by a steady turn in which all slots step, report, render and deliver: a count, so that no
    timer can be lucky."""
    scheduler = speaking(num_slots)
    slots = np.arange(num_slots)
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    def turn(ready, now):
        scheduler.decoding_slots()
        scheduler.report(slots, np.full(num_slots, ready), np.zeros(num_slots, bool))
        for render in scheduler.take_due_windows(now):
            given_s = render.count * FRAME_S
            scheduler.record_delivery(
                render.slots, render.count, given_s, render.is_last, render.handed_s, now
            )
        scheduler.finished_slots()
        return scheduler.slots.tape.num_delivered.tolist()

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 counts none if no frame asks for it before
    sys.settrace(trace)
    try:
        delivered = turn(ready=4, now=0.0)
    finally:
        sys.settrace(before)
    assert delivered == [4] * num_slots
    return count


def test_an_iteration_runs_the_same_python_for_one_slot_and_for_64():
    assert bytecodes_of_a_turn(1) == bytecodes_of_a_turn(64) > 100


def test_the_listener_plays_seconds_not_frames():
    """A window of 4 frames gave the sound of 3, since the rest is held back."""
    scheduler = speaking(sizes=(4,), hold_samples=100)
    report(scheduler, {0: 4})
    due(scheduler, 0.0)
    given_s, is_last = np.array([3 * FRAME_S]), np.array([False])
    scheduler.record_delivery(np.array([0]), np.array([4]), given_s, is_last, 0.0, 1.0)
    assert scheduler.slots.listener.plays_until_s[0] == pytest.approx(1.0 + 3 * FRAME_S)


@pytest.mark.parametrize(("speed", "heard_frames"), [(1.0, 25.0), (2.0, 12.5), (0.5, 50.0)])
def test_a_fast_listener_runs_dry_sooner(speed, heard_frames):
    """A slow one runs dry later, so that others go first. The slot's next request has its own speed."""
    scheduler = speaking(slots=())
    scheduler.open(0, prompt_tokens=0, listener=Listener(is_metered=True, speed=speed))
    report(scheduler, {0: 25})
    for launch in iter(lambda: due(scheduler, 0.0), []):
        deliver(scheduler, {0: launch[0][0][0][1]}, 0.0)
    assert scheduler.slots.listener.plays_until_s[0] == pytest.approx(heard_frames * FRAME_S)
    assert scheduler.buffered_s(0.0)[0] == pytest.approx(heard_frames * FRAME_S)
    assert scheduler.buffered_s(100.0)[0] == pytest.approx(heard_frames * FRAME_S)  # it was not taken
    scheduler.consume(0, 25, 100.0)
    assert scheduler.buffered_s(100.0)[0] <= 0
    scheduler.close(0)
    scheduler.open(0, prompt_tokens=0)
    report(scheduler, {0: 1})
    deliver(scheduler, {0: due(scheduler, 0.0)[0][0][0][1]}, 0.0)
    assert scheduler.slots.listener.plays_until_s[0] == pytest.approx(FRAME_S)


def test_a_starved_slot_takes_no_step_and_its_frames_are_rendered():
    scheduler = speaking(num_slots=2, slots=[1], sizes=(4, 25))
    scheduler.open(0, prompt_tokens=0, steps=2)
    for _ in range(2):
        assert scheduler.decoding_slots().tolist() == [0, 1]
        scheduler.record_step(np.array([0, 1]))
    assert scheduler.decoding_slots().tolist() == [1] and scheduler.slots.is_starved.tolist() == [True, False]
    report(scheduler, {0: 2, 1: 2})
    assert due(scheduler, 0.0) == [({0: (0, 2)}, 4)]  # the other one waits for the smallest shape
    scheduler.feed(0, 1)
    assert scheduler.decoding_slots().tolist() == [0, 1]
    scheduler.record_step(np.array([0, 1]))
    assert scheduler.decoding_slots().tolist() == [1]
    scheduler.feed(0, None)
    for _ in range(9):
        scheduler.record_step(np.array([0]))
    assert scheduler.decoding_slots().tolist() == [0, 1]


def test_the_scheduler_is_idle_while_all_slots_wait_for_text():
    scheduler = speaking(num_slots=2, slots=())
    assert scheduler.is_idle
    scheduler.open(0, prompt_tokens=0, steps=1)
    assert not scheduler.is_idle
    scheduler.record_step(np.array([0]))
    assert scheduler.is_idle  # as far as reports have come
    report(scheduler, {0: 1})
    assert not scheduler.is_idle
    due(scheduler, 0.0)
    assert scheduler.is_idle
