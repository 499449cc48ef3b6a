"""Tests of the roofline, and of the scheduler on a virtual clock."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import zoo
from benchmarks.predict import COUNTS, STREAMS, Prediction, apart, in_the_way, table
from benchmarks.rehearsal.cards import CARDS
from benchmarks.rehearsal.costs import APART, Counts, Part, Row, merged
from benchmarks.rehearsal.simulation import simulation
from benchmarks.simulated_loads import Experience, arrivals, conversations, followed, together
from compile_cache.strategy import Strategy
from serving.engine.engine import CODECS
from serving.tools.simulate import RATE_HZ, Simulation
from zoo.contract import Window

H100 = CARDS["h100"]
FRAME_S = 0.1


def counts(step_mb: int = 2680, window: Window | None = None) -> Counts:
    """Return the counts of a toy: a step of `step_mb` megabytes, with one more launch for prompts, a prefill of
    one eager kernel, a render of two.

    2,680 megabytes take 1 ms plus the start on an H100."""
    window = window or Window(sizes=(1, 4))
    step = [Part(slots, 0, 0, (Row(1, "extern", "", step_mb * 1_000_000, 0, "bf16"),)) for slots in (1, 64)]
    render = [
        Part(slots, size, 0, (Row(2, "eager", "", 0, 0, "fp32"),))
        for slots in (1, 64)
        for size in window.sizes
    ]
    prefill = [Part(slots, 0, 0, (Row(1, "eager", "", 0, 0, "bf16"),)) for slots in (1, 3)]
    mixed = [Part(1, 0, 0, (*step[-1].rows, Row(1, "extern", "", 0, 0, "bf16")))]
    parts = {"step": step, "mixed": mixed, "render": render, "prefill": prefill}
    return Counts("toy", "tiny", FRAME_S, RATE_HZ, window, parts)


def served(known: Counts, slots: int) -> Simulation:
    return simulation(known, H100, slots, Strategy())


@pytest.mark.parametrize(
    ("row", "us"),
    [
        ((0, 0, "bf16"), 2.0),  # the start
        ((26_800_000, 0, "bf16"), 12.0),  # 0.8 of 3,350 GB/s
        ((0, 494_700_000 * 10, "bf16"), 12.0),  # half of 989.4 TFLOP/s
        ((0, 33_450_000 * 10, "fp32"), 12.0),  # half of 66.9
        ((26_800_000, 33_450_000 * 20, "fp32"), 22.0),  # the longer of both
    ],
)
def test_a_launch_takes_its_start_and_the_longer_of_its_bytes_and_its_arithmetic(row, us):
    assert H100.launch_us(*row, 2.0) == pytest.approx(us)


def test_merging_rows_hardly_changes_the_time_on_any_card():
    random = np.random.default_rng(0)
    rows = [
        (int(n), "extern", within, int(num_bytes), int(flops), arithmetic, int(num_bytes) // 3)
        for n, num_bytes, flops in zip(*random.integers(1, (9, 4 << 20, 9 << 28), (300, 3)).T, strict=True)
        for within, arithmetic in (("", "bf16"), ("attention", "fp32"))
    ]
    rows += [(3, "eager", "", size, 1000, "fp32", size // 2) for size in range(1000)]
    small = merged(rows)
    assert len(small) < len(rows) - 900
    for card in CARDS.values():
        before, after = (Part(1, 0, 0, tuple(Row(*row) for row in some)) for some in (rows, small))
        assert after.device_ms(card) == pytest.approx(before.device_ms(card), rel=0.01)
        assert (after.num_launches, after.host_ms()) == (before.num_launches, before.host_ms())
        assert after.num_memory_bytes() == pytest.approx(before.num_memory_bytes(), rel=0.01)


def test_a_cost_does_not_depend_on_the_order_in_which_slots_were_counted():
    """`rehearse.py --slots` may name them in any order."""
    steps = [Part(slots, 0, 0, (Row(1, "extern", "", slots << 20, 0, "bf16"),)) for slots in (1, 16, 64)]
    known, turned = (replace(counts(), parts={"step": parts}) for parts in (steps, steps[::-1]))
    for slots in (1, 8, 40, 64):
        assert turned.cost(H100, "step", slots) == known.cost(H100, "step", slots)


@pytest.mark.parametrize("path", sorted(COUNTS.glob("*.json")), ids=lambda path: path.stem)
def test_the_committed_counts_give_consistent_predictions(path: Path):
    known = [Counts.read(path, codec) for codec in CODECS]
    family, _, _ = path.stem.partition("-")  # a second size of a family has a name behind the dash
    assert known[0].family == family and family in zoo.families()
    pairs = [tuple(map(Prediction, known, (card, card), CODECS)) for card in CARDS.values()]
    for one, fast in pairs:
        assert 0 < one.step_ms(1) <= one.step_ms(16) <= one.step_ms(64)
        assert 1 < one.audio_s_per_s() <= fast.audio_s_per_s()
        steps_ms = one.counts.steps_per_frame * one.step_ms(64)
        assert max(steps_ms, one.render_ms()) <= one.frame_ms() <= steps_ms + one.render_ms()
        assert one.counts.at("step", 64).num_bytes() >= one.counts.at("step", 1).num_bytes()
        assert one.read_ratio() >= 1
        beyond_l2 = one.counts.at("step", 64).num_memory_bytes()
        assert beyond_l2 is None or 0 < beyond_l2 <= one.counts.at("step", 64).num_bytes()
        assert sum(ms for ms, _ in one.obstacles()) == pytest.approx(steps_ms + one.render_ms())
        assert one.counts.family in in_the_way(one)
    rows = list(table(pairs))
    assert Counter(row.count("|") for row in rows) == {rows[0].count("|"): len(rows)}


def test_a_step_with_unfused_products_is_printed_separately():
    known = counts()
    one = Prediction(known, CARDS["h200"])
    assert list(apart(one)) == []
    more = Row(1, "extern", "", 2_680_000_000, 0, "bf16", 0)
    known.parts[APART] = [Part(slots, 0, 0, (*known.at("step", slots).rows, more)) for slots in (1, 64)]
    (line,) = apart(one)
    assert "toy on NVIDIA H200: 2 launches, 5.4 GB (2.00)" in line


def test_a_family_is_compared_with_its_floor():
    one = Prediction(counts(step_mb=4800), CARDS["h200"])
    assert one.floor_ms(1) == one.floor_ms(STREAMS) == pytest.approx(1.0)
    assert one.floor_of_frame_ms() == pytest.approx(1.0)
    assert "of 6400 audio-s/s at the floor" in in_the_way(one)


def test_a_frame_of_several_steps_takes_as_many_times_as_long():
    """A listener's first audio and the audio per second follow from frames, not from steps."""
    one, seven = counts(), replace(counts(), steps_per_frame=7)
    single, sevenfold = Prediction(one, H100), Prediction(seven, H100)
    assert sevenfold.frame_ms() == pytest.approx(7 * single.frame_ms())
    assert sevenfold.audio_s_per_s() == pytest.approx(single.audio_s_per_s() / 7)
    slow, fast = (together(served(each, 4), streams=4, frames=20) for each in (seven, one))
    assert (
        [each.audio_s for each in slow]
        == [each.audio_s for each in fast]
        == pytest.approx([20 * FRAME_S] * 4)
    )
    assert all(late.ttfa_s > 2 * early.ttfa_s for late, early in zip(slow, fast, strict=True))
    assert all(late.ended_s > 5 * early.ended_s for late, early in zip(slow, fast, strict=True))


def test_text_is_written_between_frames():
    """A frame is made by each step that writes no text: two of text and four of audio here, in turn."""
    mixed = replace(counts(), steps_per_frame=1.5, pattern=(2, 4))
    assert mixed.frames(np.arange(13)).tolist() == [0, 0, 0, 1, 2, 3, 4, 4, 4, 5, 6, 7, 8]
    assert counts().frames(np.arange(3)).tolist() == [0, 1, 2]
    assert replace(counts(), steps_per_frame=7).frames(np.array([6, 7, 13, 14])).tolist() == [0, 1, 1, 2]


def test_a_turn_follows_when_the_answer_was_heard_and_the_user_has_spoken():
    """The encoder of what the user said comes before each answer."""
    known = counts()
    encoder = Part(1, 0, 0, (Row(1, "eager", "", 2_680_000_000, 0, "fp32"),))  # 1 ms and its start
    slower = replace(known, parts=known.parts | {"listen": [encoder]})
    assert slower.listen_s(H100) == pytest.approx(1e-3, rel=0.01) and known.listen_s(H100) == 0
    heard, later = (
        conversations(served(each, 4), 1, turns=4, frames=20, pause_s=2.0, listen_s=each.listen_s(H100))
        for each in (known, slower)
    )
    assert len(heard) == len(later) == 4
    for before, after in pairwise(heard):
        assert 1.0 <= after.submitted_s - max(before.plays_until_s, before.ended_s) <= 3.0
    for one, other in zip(heard, later, strict=True):
        assert 1e3 * (other.ttfa_s - one.ttfa_s) == pytest.approx(1, abs=0.5)


def test_every_conversation_has_all_of_its_turns():
    heard = conversations(served(counts(), 4), 6, turns=3, frames=20, pause_s=2.0, listen_s=0.0)
    assert len(heard) == 18 and all(one.end is not None and one.audio_s > 0 for one in heard)


@pytest.mark.slow
def test_a_step_that_takes_twice_as_long_halves_the_audio():
    fast, slow = (
        followed(served(counts(megabytes), 4), streams=4, frames=100, seconds=20, ramp_s=2)[0]
        for megabytes in (26_800, 53_600)
    )
    assert fast / slow == pytest.approx(2, rel=0.2)


def test_too_many_requests_wait_and_a_slow_device_leaves_gaps():
    calm, crowd = (
        Experience.of(arrivals(served(counts(), 2), rate, frames=10, seconds=1, seed=0)) for rate in (10, 400)
    )
    assert calm.p95_ms < 25 < crowd.p50_ms and calm.viable == 1
    # 0.2 s for a frame of 0.1 s
    late = together(served(counts(step_mb=2 * 268_000), 2), streams=2, frames=40)
    assert Experience.of(late).viable == 0
