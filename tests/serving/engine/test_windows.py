"""The scheduler: which windows are due, how large they are, and which share a launch."""

from __future__ import annotations

import numpy as np
import pytest
from schedulers import FRAME_S, deliver, due, heard, playing, report, speaking

from serving.engine.device.launches import Render
from serving.engine.schedule.numbers import GPU_RENDERS_IN_FLIGHT, PACE_STEPS
from serving.engine.schedule.policy import Fifo, Throughput
from serving.engine.schedule.render_times import RenderTimes


def test_the_first_window_is_due_with_the_smallest_shape():
    scheduler = speaking(sizes=(2, 4, 25))
    report(scheduler, {0: 1})
    assert due(scheduler, 0.0) == []
    report(scheduler, {0: 2})
    assert due(scheduler, 0.0) == [({0: (0, 2)}, 2)]
    assert due(scheduler, 0.0) == []


@pytest.mark.parametrize(("turn_s", "frames"), [(0.02, 1), (0.03, 2), (0.04, 3), (0.06, 4), (1.0, 4)])
def test_a_first_window_lasts_for_some_iterations_if_they_are_long(turn_s, frames):
    scheduler = speaking()
    scheduler.timing.iteration_s = turn_s
    for ready in range(1, frames):
        report(scheduler, {0: ready})
        assert due(scheduler, now=0.0) == []
    report(scheduler, {0: frames})
    assert due(scheduler, now=0.0) == [({0: (0, frames)}, 1 if frames == 1 else 4)]
    ends_early = speaking()
    ends_early.timing.iteration_s = turn_s
    report(ends_early, {0: 1}, done=[0])
    assert due(ends_early, now=0.0) == [({0: (0, 1)}, 1)]


def test_a_first_window_counts_the_time_of_other_models_once():
    scheduler = speaking()
    scheduler.timing.iteration_s, scheduler.timing.other_models_s = (
        0.065,
        0.06,
    )  # six turns of its own are 30 ms
    report(scheduler, {0: 1})
    assert due(scheduler, now=0.0) == [({0: (0, 1)}, 1)]


@pytest.mark.parametrize(("turn_s", "joined"), [(0.04, {1: (4, 3)}), (0.02, {})])
def test_a_nearly_full_window_is_batched_with_others_if_iterations_are_long(turn_s, joined):
    """One launch of two rows takes less than two; where turns are short, each waits for a full window."""
    scheduler = heard([4, 4, 4, 4], turn_s)
    report(scheduler, {0: 8, 1: 7, 2: 6, 3: 7})
    scheduler.slots.listener.has_backpressure[3] = True
    assert due(scheduler, 0.1) == [({0: (4, 4)} | joined, 4)]


def test_nothing_is_batched_if_no_window_is_due():
    scheduler = heard([4, 4], 0.04)
    report(scheduler, {0: 7, 1: 7})
    assert due(scheduler, 0.1) == []


def test_fifo_ignores_the_length_of_iterations():
    scheduler = speaking(policy=Fifo())
    for turn_s in (0.0, 1.0):
        scheduler.timing.iteration_s = turn_s
        report(scheduler, {0: 3})
        assert due(scheduler, now=0.0) == []
    report(scheduler, {0: 4})
    assert due(scheduler, now=0.0) == [({0: (0, 4)}, 4)]
    report(scheduler, {0: 7})
    assert due(scheduler, now=9.0) == []  # its listener has heard nothing for long
    report(scheduler, {0: 7}, done=[0])
    assert due(scheduler, now=9.0) == [({0: (4, 3)}, 4)]


@pytest.mark.parametrize(("turn_s", "is_served"), [(0.13, False), (0.15, True)])
def test_a_listener_is_served_an_iteration_earlier_if_iterations_are_long(turn_s, is_served):
    scheduler = playing(ahead_frames=3)
    report(scheduler, {0: 4})
    assert due(scheduler, now=0.1) == []  # 0.14 s are left
    scheduler.timing.iteration_s = turn_s
    assert due(scheduler, now=0.1) == ([({0: (3, 1)}, 1)] if is_served else [])


def test_a_listener_with_time_waits_for_the_largest_shape():
    scheduler = playing(50)
    report(scheduler, {0: 50 + 24})
    assert due(scheduler, 2.9) == []
    report(scheduler, {0: 50 + 26})
    assert due(scheduler, 2.9) == [({0: (50, 25)}, 25)]


def test_a_listener_at_risk_is_served_from_the_middle_shape_on():
    scheduler = playing(50)
    report(scheduler, {0: 50 + 3})
    assert due(scheduler, 3.1) == []
    report(scheduler, {0: 50 + 4})
    assert due(scheduler, 2.9) == []  # 1.1 s left
    assert due(scheduler, 3.1) == [({0: (50, 4)}, 4)]


def test_at_risk_windows_are_full_and_the_rest_waits():
    scheduler = playing(50)
    report(scheduler, {0: 50 + 7})
    assert due(scheduler, 3.1) == [({0: (50, 4)}, 4)]
    assert due(scheduler, 3.1) == []


def test_two_shapes_have_the_larger_one_in_the_middle():
    scheduler = playing(20, sizes=(1, 2))
    report(scheduler, {0: 21})
    assert due(scheduler, 1.0) == []
    report(scheduler, {0: 22})
    assert due(scheduler, 1.0) == [({0: (20, 2)}, 2)]


@pytest.mark.parametrize("now", [4.0 - FRAME_S / 2, 4.0, 9.0])
def test_a_listener_about_to_run_dry_or_dry_gets_any_frame(now):
    scheduler = playing(50)
    report(scheduler, {0: 50})
    assert due(scheduler, now) == []
    report(scheduler, {0: 50 + 3})
    assert due(scheduler, now) == [({0: (50, 3)}, 4)]


def test_a_listener_on_a_gpu_gets_any_frame_while_it_has_two_frames_more():
    scheduler, now = playing(50), 4.0 - 2.5 * FRAME_S
    report(scheduler, {0: 50 + 3})
    assert due(scheduler, now) == []
    scheduler.timing.render_times = SHORT
    assert due(scheduler, now) == [({0: (50, 3)}, 4)]


def test_a_listener_that_is_late_again_waits_for_the_middle_shape_until_it_is_in_time():
    scheduler, ready = playing(1), 1
    for now in (1.0, 2.0):  # one frame a second, so both windows are late
        ready += 1
        report(scheduler, {0: ready})
        assert due(scheduler, now) == [({0: (ready - 1, 1)}, 1)]
        deliver(scheduler, {0: 1}, now)
    report(scheduler, {0: ready + 3})
    assert due(scheduler, 3.0) == []
    report(scheduler, {0: ready + 4})
    assert due(scheduler, 3.0) == [({0: (ready, 4)}, 4)]
    deliver(scheduler, {0: 4}, 2.0)  # in time
    report(scheduler, {0: ready + 5})
    assert due(scheduler, 9.0) == [({0: (ready + 4, 1)}, 1)]


def test_a_late_listener_gets_the_last_frames_at_once():
    scheduler = playing(1)
    scheduler.slots.listener.num_late_in_a_row[0] = 100
    report(scheduler, {0: 3}, done=[0])
    assert due(scheduler, 9.0) == [({0: (1, 2)}, 4)]


def test_windows_in_flight_count_as_heard():
    scheduler = playing(50)
    report(scheduler, {0: 75})
    assert due(scheduler, 3.95) == [({0: (50, 25)}, 25)]
    report(scheduler, {0: 76})
    assert due(scheduler, 3.99) == []  # 2 s are on their way
    deliver(scheduler, {0: 25}, 4.0)
    assert due(scheduler, 5.0) == []
    assert due(scheduler, 5.95) == [({0: (75, 1)}, 1)]


def test_the_latency_of_windows_is_measured():
    scheduler = playing(50)
    report(scheduler, {0: 75})
    scheduler.take_due_windows(0.0)
    # a window takes 0.2 s to its listener, so 0.4 s ahead is the last moment
    deliver(scheduler, {0: 25}, 0.2)
    report(scheduler, {0: 76})
    assert due(scheduler, 6.0 - 0.41) == []
    assert due(scheduler, 6.0 - 0.39) == [({0: (75, 1)}, 1)]
    for i in range(76, 106):  # and then a hundredth of that
        deliver(scheduler, {0: 1}, scheduler.handed_s[0] + 0.002)
        report(scheduler, {0: i + 1})
        assert due(scheduler, scheduler.slots.listener.plays_until_s[0] - FRAME_S / 2) == [({0: (i, 1)}, 1)]
    deliver(scheduler, {0: 1}, scheduler.handed_s[0] + 0.002)
    report(scheduler, {0: 107})
    assert due(scheduler, scheduler.slots.listener.plays_until_s[0] - 1.1 * FRAME_S) == []
    assert due(scheduler, scheduler.slots.listener.plays_until_s[0] - 0.9 * FRAME_S) == [({0: (106, 1)}, 1)]


def test_a_first_window_in_flight_is_followed_up_at_once():
    scheduler = speaking()
    report(scheduler, {0: 1})
    assert due(scheduler, 0.0) == [({0: (0, 1)}, 1)]
    report(scheduler, {0: 2})
    assert due(scheduler, 0.02) == [({0: (1, 1)}, 1)]
    report(scheduler, {0: 5})
    assert due(scheduler, 0.04) == []  # two frames are on their way
    deliver(scheduler, {0: 2}, 0.06)
    assert due(scheduler, 0.06 + 1.5 * FRAME_S) == [({0: (2, 3)}, 4)]


def test_the_last_frames_are_rendered_when_the_slot_is_done():
    scheduler = playing(50)
    report(scheduler, {0: 50 + 57}, done=[0])
    assert due(scheduler, 0.0) == [({0: (50, 25)}, 25)]
    assert due(scheduler, 0.0) == [({0: (75, 25)}, 25)]
    # 7 in a window of 25 would be more than twice the work
    assert due(scheduler, 0.0) == [({0: (100, 4)}, 4)]
    assert due(scheduler, 0.0) == [({0: (104, 3)}, 4)]
    assert due(scheduler, 0.0) == []


@pytest.mark.parametrize(("left", "context", "frames"), [(12, 0, 4), (13, 0, 25), (2, 0, 4), (5, 10, 25)])
def test_the_last_frames_are_padded_if_that_is_little_work(left, context, frames):
    """A renderer that reads ten frames around a window on either side has less to gain from small ones."""
    scheduler = speaking(sizes=(1, 4, 25), context=context)
    report(scheduler, {0: left}, done=[0])
    assert due(scheduler, 0.0) == [({0: (0, min(left, frames))}, frames)]


def test_a_voice_shorter_than_the_smallest_shape_is_heard():
    scheduler = speaking(sizes=(25, 50, 100))
    report(scheduler, {0: 3}, done=[0])
    assert due(scheduler, 0.0) == [({0: (0, 3)}, 25)]


def test_launches_are_grouped_by_shape_and_first_audio_is_the_nearest_deadline():
    scheduler = speaking(num_slots=6)
    for now, slots in ((0.0, (0, 1)), (2.0, (2, 3))):  # dry at 4.0 and at 6.0
        report(scheduler, dict.fromkeys(slots, 50))
        while scheduler.take_due_windows(now):
            pass
        deliver(scheduler, dict.fromkeys(slots, 50), now)
    report(scheduler, {0: 54, 1: 55, 2: 75, 3: 90, 4: 0, 5: 1})
    assert due(scheduler, 5.2) == [
        ({5: (0, 1)}, 1),
        ({0: (50, 4), 1: (50, 4)}, 4),
        ({2: (50, 25), 3: (50, 25)}, 25),
    ]


def test_the_nearest_deadline_goes_first_whatever_its_shape():
    scheduler = speaking(num_slots=3)
    for now, slot in ((0.0, 1), (0.2, 0)):
        report(scheduler, {slot: 50})
        for _ in range(2):
            scheduler.take_due_windows(now)
        deliver(scheduler, {slot: 50}, now)
    report(scheduler, {0: 54, 1: 75, 2: 0})
    assert [frames for _, frames in due(scheduler, 3.8)] == [25, 4]
    report(scheduler, {0: 54, 1: 75, 2: 30}, done=[2])  # a first window of the largest shape
    assert due(scheduler, 3.8) == [({2: (0, 25)}, 25)]


def test_a_first_window_waits_for_its_lookahead():
    scheduler = speaking(sizes=(4, 25), context=10)
    report(scheduler, {0: 13})
    assert due(scheduler, 0.0) == []
    report(scheduler, {0: 14})
    assert due(scheduler, 0.0) == [({0: (0, 4)}, 4)]
    report(scheduler, {0: 14})
    assert due(scheduler, 99.0) == []  # dry, and yet no frame has all that it is rendered from


def test_frames_of_the_lookahead_are_rendered_when_the_slot_is_done():
    scheduler = speaking(num_slots=2, sizes=(4, 25), context=10)
    report(scheduler, {0: 14, 1: 3})
    assert due(scheduler, 0.0) == [({0: (0, 4)}, 4)]
    report(scheduler, {0: 14, 1: 3}, done=[0, 1])
    assert due(scheduler, 0.0) == [({1: (0, 3)}, 4), ({0: (4, 10)}, 25)]
    assert due(scheduler, 0.0) == []
    deliver(scheduler, {0: 14, 1: 3}, 0.0)
    assert scheduler.finished_slots().tolist() == [0, 1]


def test_full_windows_count_behind_the_lookahead():
    scheduler = speaking(policy=Throughput(), sizes=(4, 25), context=10)
    report(scheduler, {0: 34})
    assert due(scheduler, 1e6) == []
    report(scheduler, {0: 36})
    assert due(scheduler, 1e6) == [({0: (0, 25)}, 25)]


def test_a_closed_slot_with_a_lookahead_has_no_windows_and_starts_anew():
    scheduler = speaking(sizes=(4, 25), context=10)
    report(scheduler, {0: 20})
    assert due(scheduler, 0.0) == [({0: (0, 4)}, 4)]
    scheduler.close(0)
    assert due(scheduler, 99.0) == []
    scheduler.open(0, prompt_tokens=1, skip=1)
    report(scheduler, {0: 14})
    assert due(scheduler, 99.0) == [({0: (0, 4)}, 4)]


def test_throughput_renders_full_windows_and_the_rest_at_the_end():
    scheduler = speaking(policy=Throughput())
    report(scheduler, {0: 24})
    assert due(scheduler, 0.0) == []
    report(scheduler, {0: 27})
    assert due(scheduler, 0.0) == [({0: (0, 25)}, 25)]
    deliver(scheduler, {0: 25}, 0.0)
    report(scheduler, {0: 49})
    assert due(scheduler, 1e6) == []
    report(scheduler, {0: 49}, done=[0])
    assert due(scheduler, 1e6) == [({0: (25, 24)}, 25)]


def test_launches_are_grouped_by_the_length_of_the_tape():
    scheduler = speaking(num_slots=3, sizes=(4,), lengths=(8, 64))
    scheduler.slots.tape.num_rendered[:] = scheduler.slots.tape.num_delivered[:] = [4, 8, 40]
    report(scheduler, {0: 8, 1: 12, 2: 44})
    renders = scheduler.take_due_windows(0.0)
    assert [(render.slots.tolist(), render.frames, render.length) for render in renders] == [
        ([0], 4, 8),
        ([1, 2], 4, 64),
    ]


def renders_of(*shapes: tuple[int, int], length: int = 0, is_reproducible: bool = False) -> list[Render]:
    """Return a launch of so many rows for each (rows, frames)."""
    first, made = 0, []
    for rows, frames in shapes:
        slots = np.arange(first, first + rows)[::-1].copy()
        full = np.full(rows, frames)
        made.append(
            Render(slots, 0 * slots, full, slots < 0, frames, 0.0, length, is_reproducible=is_reproducible)
        )
        first += rows
    return made


# Seconds by frames and rows, of renders that take longer than many steps, and of some that do not.
LONG = RenderTimes({25: {2: 0.030, 24: 0.060}, 50: {2: 0.031, 12: 0.046}, 100: {2: 0.028, 6: 0.045}}, 0.0012)
SHORT = RenderTimes({1: {2: 0.001, 64: 0.005}, 4: {2: 0.0014, 64: 0.012}, 25: {2: 0.003, 12: 0.013}}, 0.005)


def test_small_windows_ride_in_the_largest_launch_if_that_takes_less_time():
    [one] = LONG.joined(renders_of((3, 25), (4, 50)))
    assert one.frames == 50 and one.slots.tolist() == list(range(7))
    assert one.count.tolist() == [25] * 3 + [50] * 4
    assert [len(render.slots) for render in LONG.joined(renders_of((20, 25), (4, 100)))] == [20, 4]
    assert len(SHORT.joined(renders_of((30, 1), (2, 25)))) == 2


def test_windows_of_another_length_or_that_are_reproducible_keep_their_launch():
    apart = renders_of((3, 25), length=100) + renders_of((4, 50), length=200)
    assert len(LONG.joined(apart)) == 2
    assert len(LONG.joined(renders_of((3, 25), (4, 50), is_reproducible=True))) == 2


def test_one_render_is_in_flight_and_steps_have_a_pace_if_renders_are_long():
    assert LONG.max_in_flight == 1 and LONG.pace_s == PACE_STEPS * LONG.step_s
    assert SHORT.max_in_flight == GPU_RENDERS_IN_FLIGHT and SHORT.pace_s == 0
    for steps, in_flight, has_pace in ((0.9, GPU_RENDERS_IN_FLIGHT, False), (1.1, 1, False), (4.1, 1, True)):
        times = RenderTimes({25: {2: 0.02, 24: 0.5}}, step_s=0.02 / steps)
        assert (times.max_in_flight, times.pace_s > 0) == (in_flight, has_pace)


def test_rows_beyond_a_launch_take_several():
    assert LONG(13, 50) == pytest.approx(0.046 + 0.031) and LONG(24, 50) == pytest.approx(2 * 0.046)
