"""Text that arrives while CosyVoice 2 speaks: five text tokens, then fifteen codes.

The speech must not depend on the portions in which the text arrives.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from feeding import PORTIONS, Speaking, speak_in_portions
from models import Listener, family

import zoo
from serving.engine.engine import Failed, Finished
from zoo.cosyvoice2.model import CosyVoice2
from zoo.cosyvoice2.order import CODE_GROUP, DRAWN, TEXT_GROUP, Interleaved, keys
from zoo.cosyvoice2.prompt import MAX_TEXT_TOKENS
from zoo.request import AudioClip, Reference, Request, RequestError

INTERLEAVED = {"text_mode": "interleaved"}
CLIP = AudioClip(np.sin(np.arange(40_000) ** 1.4 / 30).astype(np.float32) / 4, 16000)  # 2.5 s
MODEL: Any = family("cosyvoice2")
assert isinstance(MODEL, CosyVoice2)
TEXT = "Good morning, everybody who is here today: my phone rings."
SOUND = Request(text=TEXT, voice="sound", options=INTERLEAVED, temperature=0.0, max_frames=90)
PROMPTED = replace(SOUND, voice="demo")
SAMPLED = replace(SOUND, text="It's 7:45, and my phone rings.", temperature=None, seed=3, max_frames=64)
CLONED = replace(SOUND, voice=None, references=(Reference(CLIP, "Hm, hm."),))
HURRIED = replace(CLONED, text="It's 7:45.", max_frames=30)  # the text ends before the prompt's codes do
CASES = {"sound": SOUND, "prompted": PROMPTED, "sampled": SAMPLED, "cloned": CLONED, "hurried": HURRIED}


def cut(request: Request) -> tuple[Request, list[int]]:
    """Return the request with only its first word and open for more text, and the tokens that follow."""
    whole, first = MODEL.writer.tokenize(request.text), request.text.split()[0]
    head = MODEL.writer.tokenize(first)
    assert whole[: len(head)] == head and len(whole) > len(head) + 4, (
        f"{first!r} does not end at a token boundary"
    )
    return replace(request, text=first, is_open=True), whole[len(head) :]


def agrees(listener: Listener, whole: Request) -> None:
    """Check that the samples equal those of the same text given at once to a request that runs alone."""
    truth = zoo.generate(MODEL, whole)
    assert isinstance(listener.end, Finished), listener.end
    assert listener.frames == len(truth.frames) > 4
    # several windows round differently from one launch
    np.testing.assert_allclose(listener.samples, truth.samples, rtol=0, atol=5e-5)


# the order


@pytest.mark.parametrize("num_codes", [0, 1, 14, 15, 40])
@pytest.mark.parametrize("num_text", [0, 4, 5, 23])
def test_interleaved_order_does_not_depend_on_portions(num_codes, num_text):
    """The expected keys are written out position by position."""
    text, codes = range(100, 100 + num_text), tuple(range(num_codes))
    order, whole = Interleaved(codes).fed(text)
    places = num_text // TEXT_GROUP * CODE_GROUP
    is_code = [i % (TEXT_GROUP + CODE_GROUP) >= TEXT_GROUP for i in range(num_text + places)]
    expected_text, expected_codes = iter(keys(0, text)), iter(keys(2, codes) + [DRAWN] * places)
    assert whole == [next(expected_codes if is_one else expected_text) for is_one in is_code]
    assert order.end() == [3 * 1 + 1, *keys(2, codes[places:])]
    piecewise, heard = Interleaved(codes), []
    for token in text:
        piecewise, more = piecewise.fed([token])
        heard += more
    assert (piecewise, heard) == (order, whole)


def test_given_keys_never_exceed_their_bound():
    for num_codes in range(0, 50, 7):
        for num_text in range(0, 80, 3):
            order, whole = Interleaved(tuple(range(num_codes))).fed(range(num_text))
            num_frames = whole.count(DRAWN)
            assert 1 + len(whole) - num_frames + len(order.end()) <= order.max_given(num_frames)


# the speech


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "portions"),
    [("prompted", portions) for portions in PORTIONS]
    + [(name, "one by one") for name in CASES if name != "prompted"],
)
def test_fed_equals_the_whole_text_at_once(name, portions):
    speaking = Speaking(MODEL)
    tapes: list[torch.Tensor] = []
    release = speaking.model.release

    def released(job: Any) -> None:
        tapes.append(speaking.model.tape(job))
        release(job)

    speaking.model.release = released
    request, rest = cut(CASES[name])
    listener = speak_in_portions(speaking, request, rest, PORTIONS[portions])
    assert tapes[0].tolist() == zoo.generate(MODEL, CASES[name]).frames.tolist()
    agrees(listener, CASES[name])


def test_full_and_interleaved_orders_give_different_codes():
    full = replace(PROMPTED, options={})
    assert zoo.generate(MODEL, PROMPTED).frames.tolist() != zoo.generate(MODEL, full).frames.tolist()


def test_speech_does_not_end_before_the_text_does():
    """Ids that are not codes are masked until then: a model that always wants to end speaks all groups of the
    text and ends after them."""
    hasty = copy.deepcopy(MODEL)
    hasty.lm.head.bias[MODEL.config.lm.num_codes :] += 1e4
    num_groups = len(MODEL.writer.tokenize(TEXT)) // TEXT_GROUP
    assert len(zoo.generate(hasty, SOUND).frames) == CODE_GROUP * num_groups > 15


def test_a_text_shorter_than_a_group_is_read_as_in_the_full_order():
    """All of its tokens are read before the first code is sampled."""
    short = replace(SOUND, text="Hm.", max_frames=10)
    assert len(MODEL.writer.tokenize("Hm.")) < TEXT_GROUP
    full = replace(short, options={})
    assert zoo.generate(MODEL, short).frames.tolist() == zoo.generate(MODEL, full).frames.tolist()


# the engine


@pytest.mark.slow
@pytest.mark.parametrize("report_lag", [0, 1])
def test_a_slot_without_text_takes_no_step_and_the_others_continue(report_lag):
    """Its listener receives as much as the grid and the lookahead allow."""
    speaking = Speaking(MODEL, report_lag=report_lag)
    request, rest = cut(SOUND)
    hungry = speaking.begin(request, "hungry")
    num_first = len(MODEL.writer.tokenize(request.text))
    speaking.turn(10)
    # only the prompt's last input, because there is no more text
    assert num_first < TEXT_GROUP and [slots for slots in speaking.steps if slots] == [[0]]
    speaking.engine.feed("hungry", rest[: 2 * TEXT_GROUP - num_first])
    speaking.turn(60)
    num_steps = 2 * (TEXT_GROUP + CODE_GROUP) - num_first + 1
    assert [slots for slots in speaking.steps if slots] == [[0]] * num_steps
    assert hungry.frames == 25 and hungry.end is None  # of 30 codes: the grid is 25 and the lookahead 3
    before = len(speaking.steps)
    speaking.turn(20)
    assert len(speaking.steps) == before and speaking.model.is_idle  # no slot has work
    other = speaking.begin(SAMPLED, "other")
    while other.end is None:
        speaking.turn()
    assert all(slots == [1] for slots in speaking.steps[before:])
    agrees(other, SAMPLED)
    speaking.engine.feed("hungry", rest[2 * TEXT_GROUP - num_first :], is_last=True)
    while hungry.end is None:
        speaking.turn()
    agrees(hungry, SOUND)


@pytest.mark.slow
def test_the_codes_of_a_prompt_wait_for_text_too():
    """A recording of 2.5 s is interleaved with 21 tokens. No speech comes before all of them are read."""
    speaking = Speaking(MODEL)
    request, rest = cut(CLONED)
    listener = speaking.begin(request)
    speaking.engine.feed("a", rest[:8])
    speaking.turn(60)
    assert speaking.model.is_idle and listener.frames == 0
    speaking.engine.feed("a", rest[8:], is_last=True)
    while listener.end is None:
        speaking.turn()
    agrees(listener, CLONED)


@pytest.mark.slow
def test_the_end_may_come_without_a_token():
    speaking = Speaking(MODEL)
    request, rest = cut(PROMPTED)
    listener = speaking.begin(request)
    speaking.turn(5)
    speaking.engine.feed("a", rest)
    speaking.turn(150)
    assert listener.end is None and speaking.model.is_idle
    speaking.engine.feed("a", [], is_last=True)
    while listener.end is None:
        speaking.turn()
    agrees(listener, PROMPTED)


@pytest.mark.slow
def test_a_request_cancelled_while_it_waits_for_text_leaves_no_state_behind():
    speaking = Speaking(MODEL, max_slots=1)
    request, rest = cut(PROMPTED)
    gone, plain = speaking.begin(request, "gone"), replace(SAMPLED, options={})
    again, last = speaking.begin(request, "again"), speaking.begin(plain, "last")
    speaking.engine.feed("gone", rest[:7])
    speaking.turn(40)
    assert again.frames == 0 and gone.end is None
    speaking.engine.cancel("gone")
    speaking.engine.feed("gone", rest[7:], is_last=True)  # too late, but not an error
    speaking.engine.feed("again", rest, is_last=True)
    while last.end is None:
        speaking.turn()
    assert isinstance(gone.end, Finished) and gone.end.reason == "cancelled"
    agrees(again, PROMPTED)
    agrees(last, plain)
    stats = speaking.engine.stats()
    assert stats["models"]["cosyvoice2"]["running"] == 0 and not speaking.model.runner.state.texts
    assert stats["pages_free"] == stats["pages"]


@pytest.mark.slow
def test_too_much_text_fails_only_that_request():
    speaking = Speaking(MODEL)
    request, rest = cut(SOUND)
    other, greedy = speaking.begin(SAMPLED, "other"), speaking.begin(request, "greedy")
    wrong = speaking.begin(request, "wrong")
    speaking.turn(3)
    speaking.engine.feed("greedy", rest)
    speaking.engine.feed("greedy", [5] * MAX_TEXT_TOKENS)
    speaking.engine.feed("wrong", [MODEL.config.lm.text_vocab])
    while other.end is None:
        speaking.turn()
    assert isinstance(greedy.end, Failed) and f"at most {MAX_TEXT_TOKENS} are possible" in greedy.end.message
    assert isinstance(wrong.end, Failed) and "is not a text token" in wrong.end.message
    agrees(other, SAMPLED)
    agrees(speak_in_portions(speaking, request, rest, [(0, 60)], "again"), SOUND)  # the slot works again


def test_a_request_that_reaches_its_cap_ends_while_text_arrives():
    request, rest = cut(replace(SOUND, max_frames=20))
    listener = speak_in_portions(Speaking(MODEL), request, rest, PORTIONS["one by one"])
    assert isinstance(listener.end, Finished) and (listener.end.reason, listener.end.frames) == ("length", 20)


# invalid requests


def test_options_that_conflict_with_arriving_text_are_refused():
    with pytest.raises(RequestError, match="needs text_mode interleaved") as error:
        MODEL.prompt(replace(SOUND, is_open=True, options={"text_mode": "full"}))
    assert error.value.param == "text_mode"
    for asked in ({"is_open": True, "options": {}}, {"options": INTERLEAVED}):
        with pytest.raises(RequestError, match="instructions would be spoken between the codes") as error:
            MODEL.prompt(replace(SOUND, instructions="slowly", **asked))
        assert error.value.param == "instructions"
    with pytest.raises(RequestError, match=rf"at most {MAX_TEXT_TOKENS} are possible"):
        MODEL.prompt(replace(PROMPTED, text="a " * (MAX_TEXT_TOKENS - 1)))
