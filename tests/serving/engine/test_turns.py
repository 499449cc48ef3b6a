"""Turns of a conversation, whose model goes on behind what it said."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from grid_engine import LAGS, asked, engine, run
from masquerade import LateStream, masquerade
from models import Listener, family, serve
from toy_grid import HEAD, GridToy

import zoo
from serving.engine.device.arena import PAGE_TOKENS
from zoo.request import RequestError


@LAGS
def test_the_next_turn_prefills_only_what_is_new(report_lag):
    toy = GridToy()
    room = engine(toy, report_lag=report_lag)
    first, second = asked(conversation="one"), asked(text="And then?", seed=5, conversation="one")
    serve(room, {0: [first]})
    assert room.stats()["pages_shared"] == 0
    [listener] = serve(room, {0: [second]})
    assert room.stats()["pages_shared"] == (HEAD + 30) // PAGE_TOKENS

    plain = GridToy()
    zoo.generate(plain, first)
    truth = zoo.generate(plain, second)
    np.testing.assert_allclose(listener.samples, truth.samples, rtol=0, atol=5e-5)
    assert not torch.equal(truth.frames, zoo.generate(GridToy(), replace(second, conversation=None)).frames)


def test_a_turn_is_indexed_as_far_as_reports_say_that_it_is_finite():
    """The step in flight may give NaN."""
    room = engine(GridToy(), report_lag=1)
    room.speak("request", asked(), Listener())
    room.turn()
    [model] = room.models.values()
    [job] = model.running.values()
    while model.runner.kv_lens[job.slot] < 2 * PAGE_TOKENS:
        room.turn()
    assert len(job.prompt.prefix_keys) + model.num_ready(job.slot) == 2 * PAGE_TOKENS
    model.publish_turn(job)
    assert len(room.pages._page_of) == 1


def test_a_turn_that_ends_while_its_stream_is_paused_is_kept():
    """It is paused while the report of its last step is on its way, and others hold all pages."""
    room = engine(GridToy(), report_lag=1)
    first, second = asked(conversation="one"), asked(text="And then?", seed=5, conversation="one")
    room.speak("first", first, Listener())
    room.turn()
    [model] = room.models.values()
    [job] = model.running.values()
    while model.runner.kv_lens[job.slot] < len(job.prompt.inputs) - 1 + job.prompt.max_frames:
        room.turn()
    assert not model.is_done(job.slot)
    room.paging._pause(job)
    others = room.pages.take(room.pages.free)
    run(room)
    room.pages.give_back(others)
    [listener] = serve(room, {0: [second]})
    plain = GridToy()
    zoo.generate(plain, first)
    truth = zoo.generate(plain, second)
    np.testing.assert_allclose(listener.samples, truth.samples, rtol=0, atol=5e-5)


def test_a_turn_is_kept_on_the_stream_of_prompts(monkeypatch):
    """The next turn's prompt reads it there."""
    streams = []
    end_turn = GridToy.end_turn
    monkeypatch.setattr(
        GridToy, "end_turn", lambda *given: streams.append(LateStream.current) or end_turn(*given)
    )
    with masquerade():
        room = engine(GridToy(), report_lag=1)
        room.speak("first", asked(conversation="one"), Listener())
        LateStream.current = None
        run(room)
    assert streams == [room.arena.streams.prompts]


def test_a_model_without_turns_refuses_conversations():
    for field in ({"conversation": "one"}, {"turns": (zoo.Turn("user", "Hello."),)}):
        with pytest.raises(RequestError, match="toy hum takes no") as refused:
            engine(family("toy")).speak("request", asked(**field), Listener())
        assert refused.value.param == next(iter(field))
