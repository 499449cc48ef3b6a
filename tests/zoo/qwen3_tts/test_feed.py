"""Text that arrives while Qwen3-TTS speaks. The model reads one token per frame, and the speech equals that
of the whole text however the tokens are portioned."""

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
from zoo.qwen3_tts.model import Qwen3TTS
from zoo.qwen3_tts.prompt import MAX_TEXT_TOKENS
from zoo.request import AudioClip, Reference, Request, RequestError

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
    """Return the request with only its first word and open text, and the tokens that follow."""
    tokenize = ours.writer.tokenize
    whole, first = tokenize(request.text), request.text.split()[0]
    head = tokenize(first)
    assert whole[: len(head)] == head and len(whole) > len(head) + 4, f"{first!r} does not end at a token"
    return replace(request, text=first, is_open=True), whole[len(head) :]


def agrees(ours: Qwen3TTS, listener: Listener, whole: Request) -> None:
    """Assert that the listener got the speech of the whole text, generated alone."""
    truth = zoo.generate(ours, whole)
    assert isinstance(listener.end, Finished), listener.end
    assert listener.frames == len(truth.frames) > 4
    # Windows and a single launch round differently; the measured difference is 2e-5.
    np.testing.assert_allclose(listener.samples, truth.samples, rtol=0, atol=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("portions", PORTIONS)
@pytest.mark.parametrize(
    ("ours", "whole"),
    [(VOICE, NAMED), (VOICE, SAMPLED), (BASE, CLONED), (BASE, TRANSCRIBED)],
    ids=["custom_voice", "sampled", "clone without transcript", "clone with transcript"],
)
def test_fed_text_equals_the_whole_text_at_once(ours, whole, portions):
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
def test_a_slot_without_text_waits_while_others_go_on(report_lag):
    """While the slot waits, its listener already has every frame that the text allowed."""
    speaking = Speaking(VOICE, report_lag=report_lag)
    request, rest = cut(VOICE, NAMED)
    hungry, other = speaking.begin(request, "hungry"), None
    allowed = len(VOICE.writer.tokenize(request.text))
    speaking.turn(10)
    assert [slots for slots in speaking.steps if slots] == [[0]] * allowed
    assert hungry.frames == allowed and hungry.end is None
    before = len(speaking.steps)
    speaking.turn(20)
    assert len(speaking.steps) == before and speaking.model.is_idle  # no slot has work
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


@pytest.mark.slow
def test_an_engine_whose_slots_all_wait_for_text_sleeps_until_the_next_token():
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
        assert asleep.wait(60), "the engine is busy although no text is left"
        time.sleep(0.01)
        asleep.clear()
        engine.feed("a", [token], is_last=i == len(rest) - 1)
    while listener.end is None:
        time.sleep(0.01)
        assert thread.is_alive()
    engine.stop()
    thread.join(60)
    agrees(VOICE, listener, NAMED)


@pytest.mark.slow
def test_the_end_of_the_text_may_come_without_a_token():
    """The slot waits after its last token. When the client ends the text, the slot speaks its last frames."""
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


def test_cancelling_a_waiting_slot_frees_it_for_the_next_request():
    speaking = Speaking(VOICE, max_slots=1)
    request, rest = cut(VOICE, NAMED)
    gone, next_ = speaking.begin(request, "gone"), speaking.begin(SAMPLED, "next")
    speaking.turn(10)
    assert next_.frames == 0 and gone.end is None
    speaking.engine.cancel("gone")
    speaking.engine.feed("gone", rest, is_last=True)  # too late, but not an error
    while next_.end is None:
        speaking.turn()
    assert isinstance(gone.end, Finished) and gone.end.reason == "cancelled"
    agrees(VOICE, next_, SAMPLED)
    assert speaking.engine.stats()["models"]["qwen3_tts"]["running"] == 0


@pytest.mark.slow
def test_text_for_a_queued_request_waits_with_it():
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
def test_too_many_tokens_fail_only_that_request(is_waiting):
    speaking = Speaking(VOICE, max_slots=1 if is_waiting else 2)
    request, rest = cut(VOICE, NAMED)
    other, greedy = speaking.begin(SAMPLED, "other"), speaking.begin(request, "greedy")
    speaking.turn(3)
    speaking.engine.feed("greedy", rest)
    speaking.engine.feed("greedy", [5] * MAX_TEXT_TOKENS)
    while other.end is None or greedy.end is None:
        speaking.turn()
    assert isinstance(greedy.end, Failed) and f"the limit is {MAX_TEXT_TOKENS}" in greedy.end.message
    agrees(VOICE, other, SAMPLED)
    # The slot can be used again.
    agrees(VOICE, speak_in_portions(speaking, request, rest, [(0, 60)], "again"), NAMED)


def test_invalid_tokens_fail_only_that_request():
    speaking = Speaking(VOICE)
    request, _ = cut(VOICE, NAMED)
    other, wrong = speaking.begin(SAMPLED, "other"), [speaking.begin(request, f"wrong {i}") for i in range(2)]
    speaking.turn(3)
    for i, token in enumerate((-1, VOICE.config.text_vocab)):
        speaking.engine.feed(f"wrong {i}", [token])
    while other.end is None:
        speaking.turn()
    for listener in wrong:
        assert isinstance(listener.end, Failed) and "is not a text token" in listener.end.message
    agrees(VOICE, other, SAMPLED)


@pytest.mark.parametrize("is_open", [True, False], ids=["after the last", "not open"])
def test_text_after_its_end_fails_only_that_request(is_open):
    """Dropping the text silently would hide the client's mistake."""
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


def test_a_request_ends_at_its_frame_cap_while_text_still_arrives():
    speaking = Speaking(VOICE)
    request, rest = cut(VOICE, replace(NAMED, max_frames=6))
    listener = speak_in_portions(speaking, request, rest, PORTIONS["one by one"])
    assert isinstance(listener.end, Finished) and (listener.end.reason, listener.end.frames) == ("length", 6)


# refused requests


def test_open_text_needs_text_mode_interleaved():
    for options in ({"text_mode": "full"}, {}):  # full is custom_voice's default
        with pytest.raises(
            RequestError, match="text that arrives while the model speaks needs text_mode interleaved"
        ) as error:
            VOICE.prompt(replace(NAMED, options=options, is_open=True))
        assert error.value.param == "text_mode"


def test_a_clone_with_transcript_needs_one_token_per_reference_frame_at_the_start():
    """The prompt adds each reference frame to a text token."""
    long = replace(TRANSCRIBED, text="a", references=(Reference(CLIP, "Hm."),), is_open=True)
    with pytest.raises(
        RequestError,
        match=r"has 5 frames, .* have 4 tokens; send 2 more tokens or set x_vector_only_mode",
    ) as error:
        BASE.prompt(long)
    assert error.value.param == "text"


def test_the_plain_loop_refuses_open_text():
    with pytest.raises(RequestError, match=r"zoo\.generate takes all of it at once") as error:
        zoo.generate(VOICE, replace(NAMED, is_open=True))
    assert error.value.param == "is_open"
