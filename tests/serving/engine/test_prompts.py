"""The scheduler: which positions of prompts are prefilled, and which prompts wait."""

from __future__ import annotations

import pytest
from schedulers import FRAME_S, WINDOW, Timed, heard, report, speaking

from serving.engine.device.launches import Chunk
from serving.engine.schedule.numbers import MAX_PROMPT_DELAY
from serving.engine.schedule.policy import Fifo, Streaming


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


def with_a_newcomer(turn_s: float = 0.04) -> Timed:
    """Two listeners got 320 and 640 ms at time 0, and the prompt of a third is to be filled."""
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
def test_a_prompt_waits_while_a_listener_would_run_dry(left_s, turn_s, prefill_s, is_filled):
    assert bool(with_a_newcomer(turn_s).next_chunks(0.32 - left_s, prefill_s)) == is_filled


def test_a_prompt_waits_for_a_bounded_number_of_iterations():
    scheduler = with_a_newcomer()
    filled = [bool(scheduler.next_chunks(0.3)) for _ in range(MAX_PROMPT_DELAY + 1)]
    assert filled == [False] * MAX_PROMPT_DELAY + [True]


def test_a_flexible_prompt_that_waits_for_long_does_not_hurry_other_prompts():
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
def test_a_prompt_does_not_wait_for_a_listener_without_a_deadline(of):
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


def test_prompts_are_cut_at_equal_lengths_whatever_else_waits():
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
