"""Answers of GLM-4-Voice that a later turn continues, that end at a stop string, or that are interrupted."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from models import Clock, Listener, alone, family, serve

from serving.engine.engine import Engine, Finished
from zoo.request import AudioClip, Request, RequestError, Turn

NAME = "glm4_voice"
PAGE = 16
HELLO = Request(text="Good morning.", temperature=1.0, seed=0, max_frames=20)
LAGS = pytest.mark.parametrize("report_lag", [0, 1])


def engine(report_lag: int = 0) -> Engine:
    return Engine(family(NAME), max_slots=2, compile=False, report_lag=report_lag, clock=Clock())


def answered(engine: Engine, request: Request) -> Finished:
    [listener] = serve(engine, {0: [request]})
    assert isinstance(listener.end, Finished), listener.end
    return listener.end


def next_turn(tokens: tuple[int, ...]) -> Request:
    turns = (Turn("user", HELLO.text), Turn("assistant", tokens=tokens))
    return Request(text="And then?", turns=turns, temperature=1.0, seed=4, max_frames=5)


@LAGS
def test_an_answer_has_all_its_tokens_in_order(report_lag):
    end, truth = answered(engine(report_lag), HELLO), alone(NAME, HELLO)
    first = family(NAME).first_code
    assert tuple(end.answer.tokens) == truth.tokens
    codes = [token - first for token in truth.tokens if token >= first]
    assert codes == truth.frames[:, 0].tolist() and 0 < len(codes) < len(truth.tokens)
    assert [truth.tokens[stop - 1] - first for stop in end.answer.ends] == codes


@LAGS
def test_the_next_turn_prefills_only_what_is_new(report_lag):
    running = engine(report_lag)
    first = answered(running, HELLO)
    request = next_turn(tuple(first.answer.tokens))
    second = answered(running, request)
    known = first.usage["input_tokens"] + len(first.answer.tokens)
    assert known - PAGE <= second.usage["cached_tokens"] <= known
    assert tuple(second.answer.tokens) == alone(NAME, request).tokens


@LAGS
def test_an_interrupted_answer_goes_on_from_what_was_heard(report_lag):
    running, listener = engine(report_lag), Listener()
    running.speak("a", HELLO, listener)
    [model] = running.models.values()
    running.turn()
    while next(iter(model.running.values())).num_frames < 3:
        running.turn()
    running.cancel("a")
    running.turn()
    assert not model.running and isinstance(listener.end, Finished) and listener.end.reason == "cancelled"
    answer, whole = listener.end.answer, alone(NAME, HELLO).tokens
    assert (
        tuple(answer.tokens) == whole[: len(answer.tokens)] and len(answer.ends) == listener.end.frames >= 3
    )
    request = next_turn(whole[: answer.ends[1]])
    second = answered(running, request)
    known = listener.end.usage["input_tokens"] + answer.ends[1]
    assert known - PAGE <= second.usage["cached_tokens"] <= known
    assert tuple(second.answer.tokens) == alone(NAME, request).tokens


@LAGS
def test_an_answer_ends_at_a_stop_string(report_lag):
    """Steps that were launched before the report was read make a few more tokens, which nobody reads."""
    text = alone(NAME, HELLO).text
    stop = text[len(text) // 2 :][:2]
    request = Request(**{**vars(HELLO), "stop": (stop,)})
    [listener] = serve(engine(report_lag), {0: [request]})
    truth = alone(NAME, request)
    assert "".join(listener.texts) == truth.text == text[: text.index(stop)]
    assert listener.end.reason == "stop" and len(truth.tokens) < len(alone(NAME, HELLO).tokens)
    made = tuple(listener.end.answer.tokens)
    assert made[: len(truth.tokens)] == truth.tokens and len(made) <= len(truth.tokens) + report_lag
    assert listener.end.frames == len(listener.end.answer.ends)


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (Turn("assistant", tokens=(10**6,)), "tokens that are not this model's"),
        (Turn("assistant", "Hm.", tokens=(1,)), "only answers have"),
        (Turn("user", tokens=(1,)), "only answers have"),
    ],
)
def test_tokens_of_others_are_refused(turn, message):
    turns = [Turn("user", "Hm."), Turn("assistant", "Hm.")]
    turns[turn.role == "assistant"] = turn
    with pytest.raises(RequestError, match=message):
        family(NAME).prompt(Request(text="And then?", turns=tuple(turns)))


def test_a_model_that_speaks_texts_takes_no_stop_strings():
    with pytest.raises(RequestError, match="takes no stop strings"):
        family("toy").prompt(Request(text="Hm.", stop=("m",)))


@LAGS
def test_an_answer_goes_on_while_a_long_clip_is_encoded(report_lag):
    """The clip of 30 s, which no test encoded before, is held in the encoder until the other answer is complete."""
    running, listeners = engine(report_lag), [Listener(), Listener()]
    ear, may_end, has_begun = family(NAME).writer.ear, threading.Event(), threading.Event()
    noise = np.random.default_rng(report_lag).normal(0, 0.1, 30 * 16_000).astype(np.float32)
    heard = Request(text="", turns=(Turn("user", clip=AudioClip(noise, 16_000)),), max_frames=3)

    def encode(clip):
        has_begun.set()
        assert may_end.wait(60)
        return type(ear).encode(ear, clip)

    ear.encode = encode
    try:
        running.speak("a", HELLO, listeners[0])
        waiting = threading.Thread(target=running.speak, args=("b", heard, listeners[1]))
        waiting.start()
        assert has_begun.wait(60)
        num_turns = 0
        while listeners[0].end is None:
            running.turn()
            num_turns += 1
        assert listeners[1].end is None and tuple(listeners[0].end.answer.tokens) == alone(NAME, HELLO).tokens
        assert num_turns <= len(listeners[0].end.answer.tokens) + 4  # no turn is lost to the encoder
        may_end.set()
        waiting.join(60)
    finally:
        may_end.set()
        del ear.encode
    while listeners[1].end is None:
        running.turn()
    assert tuple(listeners[1].end.answer.tokens) == alone(NAME, heard).tokens
