"""Text that arrives while Qwen3-TTS speaks: a token a frame, in whatever portions, it says what it says of
the whole text."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from feeding import PORTIONS, Speaking, speak_in_portions
from models import Listener, family

import zoo
from serving.engine.engine import Engine, Failed, Finished
from zoo.contract import AudioClip, Reference, Request, RequestError
from zoo.qwen3_tts.model import Qwen3TTS
from zoo.qwen3_tts.prompt import MAX_TEXT_TOKENS

INTERLEAVED = {"text_mode": "interleaved"}
CLIP = AudioClip(np.sin(np.arange(9600) ** 1.5 / 40).astype(np.float32) / 4, 24000)
VOICE, BASE = family("qwen3_tts"), family("qwen3_tts", size="tiny-base")
NAMED = Request(
    text="Good morning, everybody who is here today.",
    voice="ryan",
    options=INTERLEAVED,
    temperature=0.0,
    max_frames=28,
)
CLONED = replace(
    NAMED, voice=None, references=(Reference(CLIP),), options=INTERLEAVED | {"x_vector_only_mode": True}
)
SAMPLED = replace(
    NAMED, voice="vivian", text="It's 7:45, and my phone rings.", temperature=0.9, seed=3, max_frames=20
)
TRANSCRIBED = replace(
    CLONED, references=(Reference(replace(CLIP, samples=CLIP.samples[:2400]), "Hm."),), options=INTERLEAVED
)


def cut(ours: Qwen3TTS, request: Request) -> tuple[Request, list[int]]:
    """The request open with its first word alone, and the tokens that follow."""
    tokenize = ours.writer.tokenize
    whole, first = tokenize(request.text), request.text.split()[0]
    head = tokenize(first)
    assert whole[: len(head)] == head and len(whole) > len(head) + 4, (
        f"{first!r} is not cut off where tokens meet"
    )
    return replace(request, text=first, is_open=True), whole[len(head) :]


def agrees(ours: Qwen3TTS, listener: Listener, whole: Request) -> None:
    """With the whole text given at once, alone."""
    truth = zoo.generate(ours, whole)
    assert isinstance(listener.end, Finished), listener.end
    assert listener.frames == len(truth.frames) > 4
    np.testing.assert_allclose(
        listener.samples, truth.samples, rtol=0, atol=5e-5
    )  # windows and one launch round otherwise: 2e-5 measured


@pytest.mark.slow
@pytest.mark.parametrize("portions", PORTIONS)
@pytest.mark.parametrize(
    ("ours", "whole"),
    [(VOICE, NAMED), (VOICE, SAMPLED), (BASE, CLONED), (BASE, TRANSCRIBED)],
    ids=["custom_voice", "sampled", "by its sound", "with its words"],
)
def test_fed_equals_the_whole_text_at_once(ours, whole, portions):
    speaking = Speaking(ours)
    tapes: list[torch.Tensor] = []
    release = speaking.model.release

    def released(job: Any) -> None:
        tapes.append(speaking.model.tape(job))
        release(job)

    speaking.model.release = released
    request, rest = cut(ours, whole)
    listener = speak_in_portions(speaking, request, rest, PORTIONS[portions])
    assert tapes[0].tolist() == zoo.generate(ours, whole).frames.tolist()
    agrees(ours, listener, whole)


@pytest.mark.slow
@pytest.mark.parametrize("report_lag", [0, 1])
def test_who_starves_takes_no_step_and_the_others_go_on(report_lag):
    """And is heard to the last of what its text allowed while it waits."""
    speaking = Speaking(VOICE, report_lag=report_lag)
    request, rest = cut(VOICE, NAMED)
    hungry, other = speaking.begin(request, "hungry"), None
    allowed = len(VOICE.writer.tokenize(request.text))
    speaking.turn(10)
    assert [slots for slots in speaking.steps if slots] == [[0]] * allowed
    assert hungry.frames == allowed and hungry.end is None
    before = len(speaking.steps)
    speaking.turn(20)
    assert len(speaking.steps) == before and speaking.model.is_idle  # nobody has anything to do
    other = speaking.begin(SAMPLED, "other")
    while other.end is None:
        speaking.turn()
    assert all(slots == [1] for slots in speaking.steps[before:])
    agrees(VOICE, other, SAMPLED)
    speaking.engine.feed("hungry", rest[:3])
    speaking.turn(10)
    assert hungry.frames == allowed + 3
    speaking.engine.feed("hungry", rest[3:], is_last=True)
    while hungry.end is None:
        speaking.turn()
    agrees(VOICE, hungry, NAMED)


def test_an_engine_with_none_but_starving_slots_sleeps_and_the_next_token_wakes_it():
    engine = Engine(VOICE, max_slots=2, compile=False)
    request, rest = cut(VOICE, NAMED)
    listener, asleep, turn = Listener(), threading.Event(), engine.turn

    def told() -> bool:
        has_more = turn()
        if not has_more:
            asleep.set()
        return has_more

    engine.turn = told
    thread = threading.Thread(target=engine.run)
    engine.speak("a", request, listener)
    thread.start()
    for i, token in enumerate(rest):
        assert asleep.wait(60), "it is busy though there is no text"
        time.sleep(0.01)
        asleep.clear()
        engine.feed("a", [token], is_last=i == len(rest) - 1)
    while listener.end is None:
        time.sleep(0.01)
        assert thread.is_alive()
    engine.stop()
    thread.join(60)
    agrees(VOICE, listener, NAMED)


def test_the_end_may_come_without_a_token():
    """The text is over, and was not known to be: then comes what follows a text."""
    speaking = Speaking(VOICE)
    request, rest = cut(VOICE, NAMED)
    listener = speaking.begin(request)
    speaking.turn(5)
    speaking.engine.feed("a", rest)
    speaking.turn(30)
    assert listener.end is None
    speaking.engine.feed("a", [], is_last=True)
    while listener.end is None:
        speaking.turn()
    agrees(VOICE, listener, NAMED)


def test_a_cancel_while_starving_gives_the_slot_to_who_waits():
    speaking = Speaking(VOICE, max_slots=1)
    request, rest = cut(VOICE, NAMED)
    gone, next_ = speaking.begin(request, "gone"), speaking.begin(SAMPLED, "next")
    speaking.turn(10)
    assert next_.frames == 0 and gone.end is None
    speaking.engine.cancel("gone")
    speaking.engine.feed("gone", rest, is_last=True)  # comes too late, and is no error
    while next_.end is None:
        speaking.turn()
    assert isinstance(gone.end, Finished) and gone.end.reason == "cancelled"
    agrees(VOICE, next_, SAMPLED)
    assert speaking.engine.stats()["models"]["qwen3_tts"]["running"] == 0


def test_text_for_who_has_no_slot_yet_waits_with_it():
    speaking = Speaking(VOICE, max_slots=1)
    request, rest = cut(VOICE, NAMED)
    first, listener = speaking.begin(SAMPLED, "first"), speaking.begin(request, "a")
    speaking.turn(3)
    speaking.engine.feed("a", rest[:2])
    speaking.engine.feed("a", rest[2:], is_last=True)
    while listener.end is None:
        speaking.turn()
    agrees(VOICE, first, SAMPLED)
    agrees(VOICE, listener, NAMED)


@pytest.mark.slow
@pytest.mark.parametrize("is_waiting", [False, True], ids=["speaking", "waiting"])
def test_too_many_tokens_fail_that_request_alone(is_waiting):
    speaking = Speaking(VOICE, max_slots=1 if is_waiting else 2)
    request, rest = cut(VOICE, NAMED)
    other, greedy = speaking.begin(SAMPLED, "other"), speaking.begin(request, "greedy")
    speaking.turn(3)
    speaking.engine.feed("greedy", rest)
    speaking.engine.feed("greedy", [5] * MAX_TEXT_TOKENS)
    while other.end is None or greedy.end is None:
        speaking.turn()
    assert isinstance(greedy.end, Failed) and f"at most {MAX_TEXT_TOKENS} are possible" in greedy.end.message
    agrees(VOICE, other, SAMPLED)
    agrees(
        VOICE, speak_in_portions(speaking, request, rest, [(0, 60)], "again"), NAMED
    )  # the slot is as good as new


def test_tokens_that_are_none_fail_that_request_alone():
    speaking = Speaking(VOICE)
    request, _ = cut(VOICE, NAMED)
    other, wrong = speaking.begin(SAMPLED, "other"), [speaking.begin(request, f"wrong {i}") for i in range(2)]
    speaking.turn(3)
    for i, token in enumerate((-1, VOICE.config.text_vocab)):
        speaking.engine.feed(f"wrong {i}", [token])
    while other.end is None:
        speaking.turn()
    for listener in wrong:
        assert isinstance(listener.end, Failed) and "is no token of the text" in listener.end.message
    agrees(VOICE, other, SAMPLED)


@pytest.mark.parametrize("is_open", [True, False], ids=["after the last", "not open"])
def test_text_behind_the_end_of_the_text_fails_that_request_alone(is_open):
    """It can follow nothing, and to drop it would be silent."""
    speaking = Speaking(VOICE)
    request, rest = cut(VOICE, NAMED)
    other, wrong = speaking.begin(SAMPLED, "other"), speaking.begin(request if is_open else NAMED, "wrong")
    speaking.turn(2)
    if is_open:
        speaking.engine.feed("wrong", rest, is_last=True)
        speaking.turn(2)
        assert wrong.end is None
    speaking.engine.feed("wrong", rest[:1])
    while other.end is None:
        speaking.turn()
    assert isinstance(wrong.end, Failed) and "more text came, but the text was complete" in wrong.end.message
    agrees(VOICE, other, SAMPLED)


def test_who_reaches_its_cap_while_text_comes_ends_there():
    speaking = Speaking(VOICE)
    request, rest = cut(VOICE, replace(NAMED, max_frames=6))
    listener = speak_in_portions(speaking, request, rest, PORTIONS["one by one"])
    assert isinstance(listener.end, Finished) and (listener.end.reason, listener.end.frames) == ("length", 6)


# what is refused


def test_open_text_needs_text_mode_interleaved():
    for options in ({"text_mode": "full"}, {}):  # full is custom_voice's default
        with pytest.raises(
            RequestError, match="text that arrives while the model speaks needs text_mode interleaved"
        ) as error:
            VOICE.prompt(replace(NAMED, options=options, is_open=True))
        assert error.value.param == "text_mode"


def test_a_reference_with_its_words_needs_as_many_tokens_as_frames_at_once():
    """Its frames stand beside text, which is not there yet."""
    long = replace(TRANSCRIBED, text="a", references=(Reference(CLIP, "Hm."),), is_open=True)
    with pytest.raises(
        RequestError,
        match=r"has 5 frames, .* have 4 tokens: give 2 tokens more, or x_vector_only_mode",
    ) as error:
        BASE.prompt(long)
    assert error.value.param == "text"


def test_the_plain_loop_takes_all_of_the_text():
    with pytest.raises(RequestError, match=r"zoo\.generate takes all of it at once") as error:
        zoo.generate(VOICE, replace(NAMED, is_open=True))
    assert error.value.param == "is_open"
