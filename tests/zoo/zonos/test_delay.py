"""The delay pattern of Zonos: which codes are known, to which frames a step's codes go, and where speech
ends."""

from __future__ import annotations

import pytest
import torch
from models import family
from torch import Tensor

from zoo.request import Request
from zoo.zonos.config import BOOKS, DELAY, END, MASK
from zoo.zonos.delay import DelayState, columns, ramp


def state(slots: int = 1, most: int = 40) -> DelayState:
    ours = family("zonos")
    fresh = ours.state(slots, most)
    for slot in range(slots):
        fresh.open(slot, ours.prompt(Request(text="a", max_frames=most)))
    return fresh


def script(frames: int, seed: int = 0) -> Tensor:
    """Return random codes of frames [F, 9]."""
    return torch.randint(1024, (frames, BOOKS), generator=torch.Generator().manual_seed(seed))


def run(there: DelayState, rows: Tensor, slot: int = 0) -> list[Tensor]:
    """Step a slot through drawn rows [R, 9] until it is done. Return what each step feeds back."""
    fed = []
    for row in rows:
        if there.done[slot]:
            break
        there.step(torch.tensor([slot]), row[None])
        fed.append(there.row[slot].clone())
    return fed


def drawn(codes: Tensor) -> Tensor:
    """Return the rows that speak the codes: codebook k of frame f in step f + k, other places random."""
    rows = script(len(codes) + DELAY, seed=9)
    for k in range(BOOKS):
        rows[k : k + len(codes), k] = codes[:, k]
    return rows


def test_codes_return_to_their_frames_and_a_frame_is_whole_after_eight_more_steps():
    there, codes, ready = state(most=12), script(12), []
    for row in drawn(codes):
        there.step(torch.tensor([0]), row[None])
        ready.append(int(there.ready[0]))
    assert ready == [0] * 8 + list(range(1, 13)) and there.done[0]
    assert torch.equal(there.tape[0, :12], codes)


def test_the_first_steps_feed_masks_and_the_columns_are_those_of_a_recording():
    codes = script(20)
    fed = torch.stack(run(state(most=20), drawn(codes)))
    assert torch.equal(fed[:19], columns(codes)[1:20])
    assert fed[0].tolist() == [codes[0, 0], *[MASK] * 8]


@pytest.mark.parametrize("frames", [1, 5, 8, 30])
def test_behind_a_recording_its_last_codes_take_the_place_of_masks(frames):
    """Column P + 1 + t of a longer recording has them, too."""
    codes = script(frames + 12)
    longer, known = columns(codes), ramp(codes[:frames])
    assert torch.equal(columns(codes[:frames]), longer[: frames + 1])
    for step in range(DELAY):
        for k in range(step + 1, BOOKS):
            assert known[step, k] == longer[frames + 1 + step, k]


@pytest.mark.parametrize("step", [1, 2, 7, 8, 20])
def test_an_end_in_step_r_leaves_r_frames_and_is_handed_down_the_codebooks(step):
    there, codes = state(), script(40)
    rows = drawn(codes)
    rows[step, 0] = END
    fed = run(there, rows)
    assert len(fed) == step + DELAY and int(there.ready[0]) == step
    assert torch.equal(there.tape[0, :step], codes[:step])
    for late, row in enumerate(fed[step:]):
        assert row[: late + 1].tolist() == [MASK] * late + [END]


def test_an_end_in_the_first_step_is_no_end():
    there, rows = state(most=5), drawn(script(5))
    rows[0, 0] = END
    fed = run(there, rows)
    assert fed[0][0] == END and int(there.ready[0]) == 5 and there.tape[0, 0, 0] == 0


def test_an_end_behind_the_limit_changes_what_is_fed_but_no_length():
    """The limit's frames are the first frames of the longer speech, whose last codes follow the end."""
    rows = drawn(script(40))
    rows[12, 0] = END
    short, long = state(most=10), state(most=40)
    fed, fed_long = run(short, rows), run(long, rows)
    assert int(short.ready[0]) == 10 and int(long.ready[0]) == 12
    assert torch.equal(torch.stack(fed), torch.stack(fed_long)[: len(fed)])
    assert torch.equal(short.tape[0, :10], long.tape[0, :10])


def test_slots_at_different_steps_do_not_touch_each_other():
    """In the reference, later rows of a batch get the codes of other rows while the first steps run."""
    together, codes = state(3), [script(40, seed) for seed in range(3)]
    rows = [drawn(one) for one in codes]
    for step in range(24):
        slots = [slot for slot in range(3) if step >= 5 * slot]
        given = torch.stack([rows[slot][step - 5 * slot] for slot in slots])
        together.step(torch.tensor(slots), given)
    for slot in range(3):
        alone = state()
        run(alone, rows[slot][: 24 - 5 * slot])
        assert torch.equal(together.tape[slot, :16], alone.tape[0, :16])
        assert torch.equal(together.row[slot], alone.row[0])
