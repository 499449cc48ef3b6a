"""Answers of Step-Audio 2 that a later turn continues, that end at a stop string, or that are interrupted."""

from __future__ import annotations

import pytest
from models import Clock, Listener, alone, family, serve

from serving.engine.engine import Engine, Finished
from zoo.request import Request, Turn

NAME = "step_audio2"
PAGE = 16
VOICE = "default_female"
HELLO = Request(text="Good morning.", voice=VOICE, temperature=1.0, seed=0, max_frames=30)
LAGS = pytest.mark.parametrize("report_lag", [0, 1])


def engine(report_lag: int = 0) -> Engine:
    return Engine(family(NAME), max_slots=2, compile=False, report_lag=report_lag, clock=Clock())


def answered(engine: Engine, request: Request) -> Finished:
    [listener] = serve(engine, {0: [request]})
    assert isinstance(listener.end, Finished), listener.end
    return listener.end


def next_turn(tokens: tuple[int, ...]) -> Request:
    turns = (Turn("user", HELLO.text), Turn("assistant", tokens=tokens))
    return Request(text="And then?", voice=VOICE, turns=turns, temperature=1.0, seed=4, max_frames=5)


@LAGS
def test_the_next_turn_prefills_only_what_is_new(report_lag):
    """Text, codes and padding: the next prompt continues behind the answer's own tokens."""
    running = engine(report_lag)
    first = answered(running, HELLO)
    assert tuple(first.answer.tokens) == alone(NAME, HELLO).tokens
    request = next_turn(tuple(first.answer.tokens))
    second = answered(running, request)
    known = first.usage["input_tokens"] + len(first.answer.tokens)
    assert known - PAGE <= second.usage["cached_tokens"] <= known
    assert tuple(second.answer.tokens) == alone(NAME, request).tokens


def test_a_third_turn_prefills_only_what_is_new():
    running = engine()
    first = answered(running, HELLO)
    second = answered(running, next_turn(tuple(first.answer.tokens)))
    turns = (*next_turn(tuple(first.answer.tokens)).turns, Turn("user", "And then?"))
    turns += (Turn("assistant", tokens=tuple(second.answer.tokens)),)
    third = Request(text="Hm.", voice=VOICE, turns=turns, temperature=1.0, max_frames=3)
    end = answered(running, third)
    known = second.usage["input_tokens"] + len(second.answer.tokens)
    assert known - PAGE <= end.usage["cached_tokens"] <= known


def test_an_interrupted_answer_goes_on_from_what_was_heard():
    running, listener = engine(), Listener()
    running.speak("a", HELLO, listener)
    [model] = running.models.values()
    running.turn()
    while next(iter(model.running.values())).num_frames < 6:
        running.turn()
    running.cancel("a")
    running.turn()
    assert not model.running and isinstance(listener.end, Finished) and listener.end.reason == "cancelled"
    answer, whole = listener.end.answer, alone(NAME, HELLO).tokens
    assert tuple(answer.tokens) == whole[: len(answer.tokens)]
    request = next_turn(whole[: answer.ends[3]])
    second = answered(running, request)
    known = listener.end.usage["input_tokens"] + answer.ends[3]
    assert known - PAGE <= second.usage["cached_tokens"] <= known
    assert tuple(second.answer.tokens) == alone(NAME, request).tokens


def test_an_answer_ends_at_a_stop_string():
    request = Request(text="Hm?", output="text", temperature=1.0, seed=1, options={"max_tokens": 60})
    text = alone(NAME, request).text
    stop = text[len(text) // 2 :][:2]
    asked = Request(**{**vars(request), "stop": (stop,)})
    [listener] = serve(engine(), {0: [asked]})
    assert "".join(listener.texts) == alone(NAME, asked).text == text[: text.index(stop)]
    assert listener.end.reason == "stop"
