"""Scheduler: every rule alone, then whole servers on a simulated clock."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest

from serving.engine.device.launches import Chunk
from serving.engine.schedule.numbers import MAX_PROMPT_DELAY
from serving.engine.schedule.policy import Fifo, Policy, Streaming, Throughput
from serving.engine.schedule.scheduler import Scheduler
from serving.protocol import Listener
from zoo.contract import Window

FRAME_S = 0.08
SIZES = (1, 4, 25)
WINDOW = Window(SIZES)


class Timed(Scheduler):
    """Remembers when each slot's last window was handed out."""

    def __init__(self, num_slots, *args, **settings):
        super().__init__(num_slots, *args, **settings)
        self.handed_s = np.zeros(num_slots)

    def take_due_windows(self, now):
        renders = super().take_due_windows(now)
        for render in renders:
            self.handed_s[render.slots] = render.handed_s
        return renders


STREAMING = Streaming()


def speaking(num_slots=1, policy=STREAMING, sizes=SIZES, slots=None, context=0, **more) -> Timed:
    """A scheduler whose slots (all of them, unless said otherwise) are past their prompts. context: frames
    read on both sides of a window; more: of the Window."""
    scheduler = Timed(num_slots, policy, Window(sizes, lookahead=context, left=context, **more), FRAME_S)
    for slot in range(num_slots) if slots is None else slots:
        scheduler.open(slot, prompt_tokens=1)
        scheduler.record_prefill(Chunk(slot, 0, 1, is_last=True))
    return scheduler


def report(scheduler, ready: dict[int, int], done=()):
    slots = np.array(sorted(ready))
    scheduler.report(slots, np.array([ready[slot] for slot in slots]), np.isin(slots, list(done)))


def due(scheduler, now) -> list[tuple[dict[int, tuple[int, int]], int]]:
    """Launches as ({slot: (start, count)}, frames)."""
    renders = scheduler.take_due_windows(now)
    return [
        ({int(s): (int(a), int(n)) for s, a, n in zip(r.slots, r.start, r.count, strict=True)}, r.frames)
        for r in renders
    ]


def deliver(scheduler, counts: dict[int, int], now):
    slots, frames = np.array(list(counts)), np.array(list(counts.values()))
    handed_s = scheduler.handed_s[slots].min()
    scheduler.record_delivery(slots, frames, frames * FRAME_S, np.zeros(len(frames), bool), handed_s, now)


def playing(ahead_frames: int, sizes=SIZES) -> Scheduler:
    """One slot that at time 0 has delivered `ahead_frames` frames: the listener runs dry at ahead_frames *
    FRAME_S."""
    scheduler = speaking(sizes=sizes)
    report(scheduler, {0: ahead_frames})
    for n in iter(lambda: due(scheduler, 0.0), []):
        deliver(scheduler, {0: n[0][0][0][1]}, 0.0)
    assert scheduler.slots.listener.plays_until_s[0] == pytest.approx(ahead_frames * FRAME_S)
    return scheduler


# prompts


def test_prompts_are_chunked_first_come_first_served():
    scheduler = Timed(4, Fifo(prefill_tokens=256), WINDOW, FRAME_S)
    for slot, tokens in ((2, 600), (0, 50), (3, 100)):
        scheduler.open(slot, tokens)
    turns = []
    while chunks := scheduler.next_chunks():
        turns.append([(c.slot, c.start, c.stop, c.is_last) for c in chunks])
        for chunk in chunks:
            scheduler.record_prefill(chunk)
    assert turns == [
        [(2, 0, 256, False)],
        [(2, 256, 512, False)],
        [(2, 512, 600, True), (0, 0, 50, True), (3, 0, 100, True)],
    ]


def test_shared_positions_are_skipped():
    scheduler = Timed(1, Streaming(), WINDOW, FRAME_S)
    scheduler.open(0, prompt_tokens=100, skip=96)
    assert scheduler.next_chunks() == [Chunk(0, 96, 100, is_last=True)]


def test_a_slot_decodes_after_its_last_chunk_until_it_is_done():
    scheduler = Timed(3, Fifo(prefill_tokens=10), WINDOW, FRAME_S)
    scheduler.open(1, prompt_tokens=15)
    scheduler.open(0, prompt_tokens=5)
    assert scheduler.decoding_slots().tolist() == []
    for chunk in scheduler.next_chunks():
        scheduler.record_prefill(chunk)
    assert scheduler.decoding_slots().tolist() == []
    for chunk in scheduler.next_chunks():
        scheduler.record_prefill(chunk)
    assert scheduler.decoding_slots().tolist() == [0, 1]
    report(scheduler, {0: 1, 1: 1}, done=[1])
    assert scheduler.decoding_slots().tolist() == [0]


def test_a_slot_decodes_once_all_its_lanes_are_filled():
    scheduler = Timed(3, Fifo(prefill_tokens=10), WINDOW, FRAME_S, lanes=2)
    scheduler.open(1, prompt_tokens=[6, 15])
    scheduler.open(0, prompt_tokens=[9, 40], skip=[0, 40])
    turns, decoding = [], []
    while chunks := scheduler.next_chunks():
        turns.append([(c.slot, c.lane, c.start, c.stop, c.is_last) for c in chunks])
        for chunk in chunks:
            scheduler.record_prefill(chunk)
        decoding.append(scheduler.decoding_slots().tolist())
    assert turns == [
        [(1, 0, 0, 6, True), (1, 1, 0, 4, False)],
        [(1, 1, 4, 14, False)],
        [(1, 1, 14, 15, True), (0, 0, 0, 9, True)],
    ]
    assert decoding == [[], [], [0, 1]]


def test_lanes_in_shared_pages():
    scheduler = Timed(2, Streaming(), WINDOW, FRAME_S, lanes=2)
    scheduler.open(1, prompt_tokens=[8, 3], skip=[8, 3])
    assert scheduler.next_chunks() == [] and scheduler.decoding_slots().tolist() == [1]
    with pytest.raises(AssertionError, match=r"\[8, 4\] of \[8, 3\] positions skipped"):
        scheduler.open(0, prompt_tokens=[8, 3], skip=[8, 4])
    scheduler.open(0, prompt_tokens=[8, 3], skip=[0, 3])
    with pytest.raises(AssertionError, match="slot 0 has 3 positions"):
        scheduler.record_prefill(Chunk(0, 0, 3, is_last=True, lane=1))
    scheduler.close(0)
    assert scheduler.next_chunks() == []


def test_speakers_do_not_starve_however_many_prompts_come():
    scheduler = speaking(num_slots=3, slots=[1])
    for _ in range(50):
        for slot in (0, 2):
            if not scheduler.slots.is_occupied[slot]:
                scheduler.open(slot, prompt_tokens=1000)
        chunks = scheduler.next_chunks()
        assert sum(c.stop - c.start for c in chunks) == Streaming().prefill_tokens
        assert 1 in scheduler.decoding_slots()
        for chunk in chunks:
            scheduler.record_prefill(chunk)
            if chunk.is_last:
                scheduler.close(chunk.slot)


def spoken(scheduler: Scheduler) -> list[int]:
    """Slots whose prompts a turn fills."""
    chunks = scheduler.next_chunks()
    for chunk in chunks:
        scheduler.record_prefill(chunk)
    return [chunk.slot for chunk in chunks]


def test_a_gpu_fills_prompts_that_come_behind_each_other_together():
    scheduler = Timed(8, Streaming(), WINDOW, FRAME_S, prefill_interval=3)
    scheduler.open(0, 5)
    assert spoken(scheduler) == [0]
    scheduler.open(1, 5)
    assert spoken(scheduler) == []
    scheduler.open(2, 5)
    assert spoken(scheduler) == []
    assert spoken(scheduler) == [1, 2]
    for _ in range(3):
        assert spoken(scheduler) == []
    scheduler.open(3, 5)  # the last launch is long ago
    assert spoken(scheduler) == [3]
    scheduler.open(4, Streaming().prefill_tokens)  # a launch that is full waits for nobody
    assert spoken(scheduler) == [4]


def test_a_gpu_without_speakers_fills_prompts_at_once():
    scheduler = Timed(2, Streaming(), WINDOW, FRAME_S, prefill_interval=3)
    scheduler.open(0, 5)
    assert spoken(scheduler) == [0]
    scheduler.close(0)
    scheduler.open(1, 5)
    assert spoken(scheduler) == [1]


# windows, streaming


def test_the_first_window_is_due_with_the_smallest_shape():
    scheduler = speaking(sizes=(2, 4, 25))
    report(scheduler, {0: 1})
    assert due(scheduler, 0.0) == []
    report(scheduler, {0: 2})
    assert due(scheduler, 0.0) == [({0: (0, 2)}, 2)]
    assert due(scheduler, 0.0) == []


@pytest.mark.parametrize(("turn_s", "frames"), [(0.02, 1), (0.03, 2), (0.04, 3), (0.06, 4), (1.0, 4)])
def test_where_turns_are_long_the_first_window_lasts_for_some(turn_s, frames):
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


def test_what_other_models_take_of_a_turn_counts_once_for_the_first_window():
    scheduler = speaking()
    scheduler.timing.iteration_s, scheduler.timing.other_models_s = (
        0.065,
        0.06,
    )  # six turns of its own are 30 ms
    report(scheduler, {0: 1})
    assert due(scheduler, now=0.0) == [({0: (0, 1)}, 1)]


def heard(ahead: list[int], turn_s: float) -> Timed:
    """Slots that were given so many frames at time 0."""
    scheduler = speaking(len(ahead))
    report(scheduler, dict(enumerate(ahead)))
    while windows := due(scheduler, 0.0):
        for frames, _ in windows:
            deliver(scheduler, {slot: count for slot, (_, count) in frames.items()}, 0.0)
    scheduler.timing.iteration_s = turn_s
    return scheduler


@pytest.mark.parametrize(("turn_s", "joined"), [(0.04, {1: (4, 3)}), (0.02, {})])
def test_who_has_most_of_a_window_goes_along_where_turns_are_long(turn_s, joined):
    """One launch of two rows takes less than two; where turns are short, each waits for a full window."""
    scheduler = heard([4, 4, 4, 4], turn_s)
    report(scheduler, {0: 8, 1: 7, 2: 6, 3: 7})
    scheduler.slots.listener.has_backpressure[3] = True
    assert due(scheduler, 0.1) == [({0: (4, 4)} | joined, 4)]


def test_nobody_goes_along_where_no_window_is_due():
    scheduler = heard([4, 4], 0.04)
    report(scheduler, {0: 7, 1: 7})
    assert due(scheduler, 0.1) == []


def with_a_newcomer(turn_s: float = 0.04) -> Timed:
    """Two listeners were given 320 and 640 ms at time 0, and somebody's prompt is to be filled."""
    scheduler = heard([4, 8, 0], turn_s)
    scheduler.close(2)
    scheduler.open(2, 10)
    return scheduler


@pytest.mark.parametrize(
    "left_s, turn_s, prefill_s, is_filled",
    [
        (0.17, 0.04, 0, True),  # a frame, and two turns
        (0.15, 0.04, 0, False),
        (0.17, 0.04, 0.06, False),  # the turn of a long prompt takes that longer
        (0.19, 0.04, 0.06, True),
        (0.01, 0.005, 0, True),  # where turns are short, nobody waits
    ],
)
def test_a_prompt_waits_while_those_who_listen_have_next_to_nothing(left_s, turn_s, prefill_s, is_filled):
    assert bool(with_a_newcomer(turn_s).next_chunks(0.32 - left_s, prefill_s)) == is_filled


def test_a_prompt_waits_for_so_many_turns_at_most():
    scheduler = with_a_newcomer()
    filled = [bool(scheduler.next_chunks(0.3)) for _ in range(MAX_PROMPT_DELAY + 1)]
    assert filled == [False] * MAX_PROMPT_DELAY + [True]


def test_a_flexible_prompt_that_waits_for_long_changes_nothing_for_others():
    scheduler = heard([4, 8, 0, 0], 0.04)
    for slot in (2, 3):
        scheduler.close(slot)
    scheduler.open(2, 10)
    scheduler.slots.listener.is_flexible[2] = True
    for _ in range(MAX_PROMPT_DELAY + 5):
        scheduler.next_chunks(0.3)
    scheduler.open(3, 10)
    assert not scheduler.next_chunks(0.3) and scheduler.next_chunks(0.1)


@pytest.mark.parametrize(
    "of", ["rests", "is flexible", "has heard nothing", "a policy without regard to time"]
)
def test_a_prompt_does_not_wait_for_who_has_no_deadline(of):
    scheduler = with_a_newcomer()
    if of == "rests":
        scheduler.slots.listener.has_backpressure[0] = True
    elif of == "is flexible":
        scheduler.slots.listener.is_flexible[0] = True
    elif of == "has heard nothing":
        scheduler.slots.tape.num_rendered[0] = 0
    else:
        scheduler.policy = Fifo()
    assert not with_a_newcomer().next_chunks(0.3) and scheduler.next_chunks(0.3)


def test_fifo_has_no_regard_to_how_long_turns_are():
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
def test_where_turns_are_long_a_listener_is_about_to_run_dry_a_turn_earlier(turn_s, is_served):
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


def test_windows_in_flight_count_as_heard():
    scheduler = playing(50)
    report(scheduler, {0: 75})
    assert due(scheduler, 3.95) == [({0: (50, 25)}, 25)]
    report(scheduler, {0: 76})
    assert due(scheduler, 3.99) == []  # 2 s are on their way
    deliver(scheduler, {0: 25}, 4.0)
    assert due(scheduler, 5.0) == []
    assert due(scheduler, 5.95) == [({0: (75, 1)}, 1)]


def test_how_early_is_early_enough_is_measured():
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


def test_what_is_left_goes_when_the_slot_is_done():
    scheduler = playing(50)
    report(scheduler, {0: 50 + 57}, done=[0])
    assert due(scheduler, 0.0) == [({0: (50, 25)}, 25)]
    assert due(scheduler, 0.0) == [({0: (75, 25)}, 25)]
    # 7 in a window of 25 would be more than twice the work
    assert due(scheduler, 0.0) == [({0: (100, 4)}, 4)]
    assert due(scheduler, 0.0) == [({0: (104, 3)}, 4)]
    assert due(scheduler, 0.0) == []


@pytest.mark.parametrize(("left", "context", "frames"), [(12, 0, 4), (13, 0, 25), (2, 0, 4), (5, 10, 25)])
def test_what_is_left_is_padded_where_that_is_little_work(left, context, frames):
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


# lookahead


def test_a_first_window_waits_for_its_lookahead():
    scheduler = speaking(sizes=(4, 25), context=10)
    report(scheduler, {0: 13})
    assert due(scheduler, 0.0) == []
    report(scheduler, {0: 14})
    assert due(scheduler, 0.0) == [({0: (0, 4)}, 4)]
    report(scheduler, {0: 14})
    assert due(scheduler, 99.0) == []  # dry, and yet no frame has all that it is rendered from


def test_what_the_lookahead_holds_back_goes_when_the_slot_is_done():
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


def test_a_closed_slot_with_a_lookahead_asks_for_nothing_and_starts_anew():
    scheduler = speaking(sizes=(4, 25), context=10)
    report(scheduler, {0: 20})
    assert due(scheduler, 0.0) == [({0: (0, 4)}, 4)]
    scheduler.close(0)
    assert due(scheduler, 99.0) == []
    scheduler.open(0, prompt_tokens=1, skip=1)
    report(scheduler, {0: 14})
    assert due(scheduler, 99.0) == [({0: (0, 4)}, 4)]


# the playback clock


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


# coming and going


def test_a_closed_slot_asks_for_nothing():
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


def test_broken_promises_are_told_with_both_values():
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


# throughput


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


# the cost of a turn


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
    sys.settrace(trace)
    try:
        delivered = turn(ready=4, now=0.0)
    finally:
        sys.settrace(before)
    assert delivered == [4] * num_slots
    return count


def test_a_turn_runs_the_same_python_for_one_slot_and_for_64():
    assert bytecodes_of_a_turn(1) == bytecodes_of_a_turn(64) > 100


# whole servers


class Server:
    """A model on a simulated clock. A turn takes step_s, plus prefill_s for each 256 prompt positions, plus
    render_s per launch; reports come a turn late, and audio reaches its listener a turn after its window was
    launched."""

    def __init__(
        self,
        num_slots,
        policy,
        sizes=SIZES,
        step_s=0.010,
        prefill_s=0.015,
        render_s=0.004,
        context=0,
        prefill_interval=1,
    ):
        window = Window(sizes, lookahead=context, left=context)
        self.scheduler = Timed(num_slots, policy, window, FRAME_S, prefill_interval=prefill_interval)
        self.step_s, self.prefill_s, self.render_s = step_s, prefill_s, render_s
        self.now = 0.0
        self.frames = np.zeros(num_slots, int)  # on the device's tape
        self.total = np.zeros(num_slots, int)
        self.opened_s: dict[int, float] = {}
        self.first_s: dict[int, float] = {}  # time to first audio
        self.heard: dict[int, list[tuple[int, int, int]]] = {}  # windows: start, count, frames
        self.underruns = 0

    def open(self, slot, prompt_tokens, num_frames, skip=0):
        self.scheduler.open(slot, prompt_tokens, skip)
        self.frames[slot], self.total[slot] = 0, num_frames
        self.opened_s[slot], self.heard[slot] = self.now, []
        self.first_s.pop(slot, None)

    def run(self, arrivals):
        """arrivals: (time, slot, prompt positions, frames), by time. Until all have been heard to the end."""
        arrivals = list(arrivals)
        stepped, in_flight = np.zeros(0, int), []
        while arrivals or self.scheduler.slots.is_occupied.any():
            while arrivals and arrivals[0][0] <= self.now:
                _, slot, prompt_tokens, num_frames = arrivals.pop(0)
                self.open(slot, prompt_tokens, num_frames)
            chunks = self.scheduler.next_chunks()
            assert sum(c.stop - c.start for c in chunks) <= self.scheduler.policy.prefill_tokens
            launch = np.concatenate(
                [[c.slot for c in chunks if c.is_last], self.scheduler.decoding_slots()]
            ).astype(int)
            for chunk in chunks:
                self.scheduler.record_prefill(chunk)
            self.scheduler.report(stepped, self.frames[stepped], self.frames[stepped] == self.total[stepped])
            self.frames[launch] = np.minimum(self.frames[launch] + 1, self.total[launch])
            renders = self.scheduler.take_due_windows(self.now)
            self.now += (
                self.step_s
                + self.prefill_s * sum(c.stop - c.start for c in chunks) / 256
                + self.render_s * len(renders)
            )
            for render in in_flight:
                self.hear(render)
            stepped, in_flight = launch, renders
            for slot in self.scheduler.finished_slots():
                self.underruns += self.scheduler.slots.listener.num_underruns[slot]
                self.scheduler.close(slot)
            stepped = stepped[self.scheduler.slots.is_occupied[stepped]]

    def hear(self, render):
        for slot, start, count in zip(render.slots, render.start, render.count, strict=True):
            self.first_s.setdefault(slot, self.now - self.opened_s[slot])
            assert start == sum(n for _, n, _ in self.heard[slot])
            assert 1 <= count <= render.frames
            # of what is heard, and the lookahead behind it is on the tape by now, unless the tape ends before
            end = start + count
            assert self.frames[slot] >= min(end + self.scheduler.shapes.window.lookahead, self.total[slot])
            self.heard[slot].append((int(start), int(count), render.frames))
        given_s = render.count * FRAME_S
        self.scheduler.record_delivery(
            render.slots, render.count, given_s, render.is_last, render.handed_s, self.now
        )


def crowd(num, every_s, rng):
    return [(i * every_s, i, rng.randrange(20, 700), rng.randrange(30, 300)) for i in range(num)]


@pytest.mark.parametrize("window", [(1, 4, 25), (1, 2), (4, 10), (3,)])
@pytest.mark.parametrize("every_s", [0.0, 0.05, 0.4])
def test_sixteen_listeners_hear_no_gap_when_the_model_is_fast_enough(window, every_s):
    server = Server(16, Streaming(), window)
    arrivals = crowd(16, every_s, random.Random(3))
    server.run(arrivals)
    assert server.underruns == 0
    for _, slot, _, num_frames in arrivals:
        assert sum(count for _, count, _ in server.heard[slot]) == num_frames


@pytest.mark.parametrize("policy", [Streaming(), Throughput()], ids=lambda policy: policy.name)
def test_sixteen_listeners_of_a_renderer_that_looks_ahead(policy):
    """Whoever is shorter than the lookahead is heard whole too."""
    server, rng = Server(16, policy, (4, 25), context=10), random.Random(3)
    arrivals = [
        (0.05 * slot, slot, rng.randrange(20, 700), rng.choice((1, 9, 10, 11, 14, 15, 120)))
        for slot in range(16)
    ]
    server.run(arrivals)
    assert server.underruns == 0
    for _, slot, _, num_frames in arrivals:
        assert sum(count for _, count, _ in server.heard[slot]) == num_frames


def test_a_model_slower_than_time_is_told_by_the_underruns():
    server = Server(16, Streaming(), step_s=0.1)
    server.run(crowd(16, 0.05, random.Random(3)))
    assert server.underruns > 16


def test_first_audio_comes_soon_while_fifteen_others_play():
    server = Server(16, Streaming())
    server.run([(0.0, slot, 300, 400) for slot in range(15)] + [(3.0, 15, 300, 20)])
    assert server.underruns == 0
    assert server.first_s[15] < 0.12  # two turns of prefill, one of report, one of the renderer
    assert server.heard[15][0] == (0, 1, 1)


def test_a_fast_model_reaches_the_largest_window():
    server = Server(1, Streaming())
    server.run([(0.0, 0, 10, 400)])
    shapes = [frames for _, _, frames in server.heard[0]]
    assert shapes[0] == 1 and shapes.count(25) > 10
    assert all(count == frames for _, count, frames in server.heard[0][2:-1])


def test_a_throughput_server_renders_full_windows_until_the_end():
    server = Server(16, Throughput())
    arrivals = crowd(16, 0.05, random.Random(5))
    server.run(arrivals)
    for _, slot, _, num_frames in arrivals:
        full, rest = divmod(num_frames, 25)
        heard = server.heard[slot]
        assert heard[:full] == [(i * 25, 25, 25) for i in range(full)]
        assert sum(count for _, count, _ in heard[full:]) == rest and all(
            frames < 25 for _, _, frames in heard[full:] if rest < 13
        )


@pytest.mark.parametrize("policy", [Streaming(), Throughput()], ids=lambda policy: policy.name)
@pytest.mark.parametrize("prefill_interval", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_any_mix_of_requests_in_reused_slots_is_heard_whole(policy, seed, prefill_interval):
    rng = random.Random(seed)
    sizes, step_s = rng.choice([(1, 4, 25), (2, 7), (5,)]), rng.choice([0.005, 0.05, 0.09])
    server = Server(4, policy, sizes, step_s, prefill_interval=prefill_interval)
    for _ in range(3):
        arrivals = [
            (server.now + rng.random(), slot, rng.randrange(1, 900), rng.randrange(1, 120))
            for slot in range(4)
        ]
        server.run(sorted(arrivals))
        for _, slot, _, num_frames in arrivals:
            assert sum(count for _, count, _ in server.heard[slot]) == num_frames
    assert not server.scheduler.slots.is_occupied.any() and not server.scheduler.slots.prompt.queue


# grids, held samples, growing pasts


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
def test_a_first_stretch_that_is_played_before_the_next_is_there_waits_for_it(
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


def test_what_the_renderer_keeps_back_goes_with_a_window_of_no_frames():
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


def test_a_renderer_that_keeps_nothing_back_needs_no_such_window():
    scheduler = speaking(sizes=(1, 4))
    report(scheduler, {0: 1})
    due(scheduler, 0.0)
    deliver(scheduler, {0: 1}, 0.0)
    report(scheduler, {0: 1}, done=[0])
    assert scheduler.take_due_windows(0.0) == [] and scheduler.finished_slots().tolist() == [0]


def test_the_listener_plays_seconds_not_frames():
    """A window of 4 frames gave the sound of 3, since the rest is held back."""
    scheduler = speaking(sizes=(4,), hold_samples=100)
    report(scheduler, {0: 4})
    due(scheduler, 0.0)
    given_s, is_last = np.array([3 * FRAME_S]), np.array([False])
    scheduler.record_delivery(np.array([0]), np.array([4]), given_s, is_last, 0.0, 1.0)
    assert scheduler.slots.listener.plays_until_s[0] == pytest.approx(1.0 + 3 * FRAME_S)


def test_launches_are_grouped_by_the_length_of_what_was_spoken():
    scheduler = speaking(num_slots=3, sizes=(4,), lengths=(8, 64))
    scheduler.slots.tape.num_rendered[:] = scheduler.slots.tape.num_delivered[:] = [4, 8, 40]
    report(scheduler, {0: 8, 1: 12, 2: 44})
    renders = scheduler.take_due_windows(0.0)
    assert [(render.slots.tolist(), render.frames, render.length) for render in renders] == [
        ([0], 4, 8),
        ([1, 2], 4, 64),
    ]


# windows that follow from frame numbers alone


@pytest.mark.parametrize("policy", [Streaming(), Throughput()], ids=lambda policy: policy.name)
def test_pinned_windows_do_not_depend_on_the_clock(policy):
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


@pytest.mark.parametrize(("speed", "heard_frames"), [(1.0, 25.0), (2.0, 12.5), (0.5, 50.0)])
def test_a_fast_listener_has_played_it_sooner(speed, heard_frames):
    """And a slow one later, so that others go first; a slot's next tenant has a speed of its own."""
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


# text that arrives while the model speaks


def test_a_slot_without_text_is_in_no_launch_and_what_it_has_spoken_is_heard():
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


def test_nothing_is_to_be_done_while_all_wait_for_text():
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


def test_prompts_may_be_cut_at_equal_lengths_whoever_else_waits():
    def cuts(*prompts: int) -> list[tuple[int, int]]:
        scheduler = Timed(3, Streaming(prefill_tokens=50), WINDOW, FRAME_S, chunk_tokens=32)
        for slot, tokens in enumerate(prompts):
            scheduler.open(slot, tokens, skip=32 if slot == 0 else 0)
        last = []
        while chunks := scheduler.next_chunks():
            last += [(chunk.start, chunk.stop) for chunk in chunks if chunk.slot == len(prompts) - 1]
            for chunk in chunks:
                scheduler.record_prefill(chunk)
        return last

    assert cuts(100) == [(32, 64), (64, 96), (96, 100)]
    assert cuts(100, 70) == cuts(40, 33, 70) == [(0, 32), (32, 64), (64, 70)]
