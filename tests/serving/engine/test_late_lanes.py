"""Second lanes that open while their slot runs, with the toy that has them (tests/toy_late.py). That they keep the
promises is in test_promises.py, which runs over this toy, too."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from masquerade import LateStream, masquerade
from models import Clock, Listener, alone, family, requests, serve
from toy_delay import MAX_TEXT
from toy_late import LateToy

from serving.engine.device.arena import PAGE_TOKENS, token_bytes
from serving.engine.device.streams import AsyncCopy
from serving.engine.engine import Engine, Finished
from zoo.request import Request

LATE = family("toy_late")
PAGE_BYTES = PAGE_TOKENS * token_bytes(LATE)
LAGS = pytest.mark.parametrize("report_lag", [0, 1])


def engine(**settings) -> Engine:
    return Engine(LATE, **{"max_slots": 2, "compile": False, "report_lag": 0, "clock": Clock(), **settings})


def guided(i: int, **fields) -> Request:
    """A request that speaks, with guidance."""
    asked = requests("toy_late", 60, max_frames=50)
    long = (one for one in asked if len(alone("toy_late", one).frames) > 20)
    return replace(next(islice(long, i, None)), options={"cfg_scale": 3.0}, **fields)


def agrees(listener: Listener, request: Request) -> None:
    assert isinstance(listener.end, Finished), listener.end
    speech = alone("toy_late", request)
    assert "".join(listener.texts) == speech.text
    torch.testing.assert_close(torch.from_numpy(listener.samples), speech.samples, rtol=0, atol=5e-5)


def run(served: Engine, request: Request) -> tuple[Listener, list[tuple[int, int]]]:
    """Return the listener of a request, and the pages of its two lanes after each iteration."""
    listener, held = Listener(), list[tuple[int, int]]()
    served.speak(f"request {request.seed}", request, listener)
    for _ in range(3000):
        served.turn()
        if listener.end is not None:
            return listener, held
        [model] = served.models.values()
        held += [tuple(map(len, job.pages.lanes)) for job in model.running.values()]
    raise AssertionError("the request does not end")


@pytest.mark.slow
@LAGS
def test_guidance_changes_the_speech_and_equals_the_plain_loop(report_lag):
    request = guided(0)
    plain = replace(request, options={"cfg_scale": 1.0})
    both = serve(engine(report_lag=report_lag), {0: [request, plain]})
    for listener, asked in zip(both, (request, plain), strict=True):
        agrees(listener, asked)
    assert alone("toy_late", request).frames.tolist() != alone("toy_late", plain).frames.tolist()


@pytest.mark.slow
def test_a_text_has_the_pages_of_one_lane():
    """The second lane has none before it opens, and none at all without guidance."""
    _, held = run(engine(), guided(0))
    first = next(i for i, (_, second) in enumerate(held) if second)
    assert first > 3 and all(second == 0 for _, second in held[:first])
    _, held = run(engine(), replace(guided(0), options={"cfg_scale": 1.0}))
    assert not any(second for _, second in held)


@pytest.mark.slow
def test_steps_before_the_first_frame_are_learned_apart_from_the_length_of_speech():
    """They delay the first audio, and are no audio."""
    served = engine()
    [model] = served.models.values()
    before = model.forecaster.outlook.first_iterations
    for seed in range(3):
        run(served, guided(0, seed=seed))
    model.expectations.refresh()
    words = model.expectations.lead_steps
    assert 0 < words < 2 * MAX_TEXT and model.forecaster.outlook.first_iterations == before + round(words)
    usual = model.pages.num_needed(next(LATE.passes(guided(0))), 16)
    assert usual[1] == 0 and usual[0] < model.pages.num_needed(next(LATE.passes(guided(0))))[0]


@pytest.mark.slow
def test_each_pass_counts_its_own_text(monkeypatch):
    """Otherwise later passes would seem to begin late, and so would new requests."""
    served, counts = engine(), list[int]()
    [model] = served.models.values()
    record = model.expectations.record_lead
    monkeypatch.setattr(
        model.expectations, "record_lead", lambda job: counts.append(len(job.written)) or record(job)
    )
    request = guided(0, text="A sentence of some words. " * 8, max_frames=None)
    [listener] = serve(served, {0: [request]})
    agrees(listener, request)
    assert isinstance(listener.end, Finished)
    assert len(counts) > 1 and sum(counts) == listener.end.usage["text_tokens"]


def test_a_character_does_not_go_on_in_the_next_pass():
    """The frames of the whole answer are made in its first pass, which ends within a character."""
    text = "The quick brown fox jumps over the lazy dog. Another one there. " * 2
    options = {"cfg_scale": 0.7}
    request = Request(text=text, seed=4398046511108, temperature=0.0, max_frames=10, options=options)
    [listener] = serve(engine(), {0: [request]})
    agrees(listener, request)


def test_a_request_begins_with_pages_for_the_steps_before_its_first_frame():
    [model] = engine().models.values()
    [asked] = requests("toy_late", 1)
    prompt = next(LATE.passes(replace(asked, max_frames=50)))
    assert prompt.lead_steps == MAX_TEXT
    frames = 2 * PAGE_TOKENS - len(prompt.inputs) % PAGE_TOKENS  # with the prompt, these fill their pages
    num_pages = (len(prompt.inputs) + frames) // PAGE_TOKENS
    assert model.pages.num_needed(prompt, frames)[0] == num_pages + 1


@pytest.mark.parametrize("swap_memory_bytes", [None, 0])
def test_only_open_lanes_take_steps(swap_memory_bytes, monkeypatch):
    """The rows of a step are the slots, and the second lanes that are open. Without swap memory, a slot has the
    pages of both from the beginning."""
    served, rows = engine(swap_memory_bytes=swap_memory_bytes), []
    [model] = served.models.values()
    step = model.runner.lowered.step
    monkeypatch.setattr(
        model.runner.lowered, "step", lambda batch: rows.append(len(batch.positions)) or step(batch)
    )
    run(served, guided(0))
    opens = rows.index(2)
    assert opens > 3 and set(rows[:opens]) == {1} and set(rows[opens:]) == {2}


def test_the_pages_before_a_lane_opens_are_shared():
    """A second request computes only the positions behind the last whole page."""
    served = engine()
    [model] = served.models.values()
    filled = []
    prefill = model.runner.prefill
    model.runner.prefill = lambda chunks: filled.extend(chunks) or prefill(chunks)
    request = guided(0, text="The quick brown fox jumps over the lazy dog.")
    for seed in (1, 2):
        filled.clear()
        agrees(run(served, replace(request, seed=seed))[0], replace(request, seed=seed))
        second = sum(chunk.stop - chunk.start for chunk in filled if chunk.lane == 1)
        assert (second > PAGE_TOKENS) if seed == 1 else (0 < second < 2 * PAGE_TOKENS)


def test_the_inputs_of_a_second_lane_are_made_on_the_stream_of_steps(monkeypatch):
    """A prefill reads them there."""
    streams = []
    second_lane = LateToy.second_lane
    monkeypatch.setattr(
        LateToy, "second_lane", lambda *given: streams.append(LateStream.current) or second_lane(*given)
    )
    request = guided(0)
    streams.clear()
    with masquerade():
        served = Engine(LateToy(), max_slots=2, compile=False, report_lag=1, clock=Clock())
        served.speak("request", request, Listener())
        LateStream.current = None
        while served.turn():
            pass
    assert streams == [served.arena.streams.lm]


@LAGS
def test_a_lane_waits_for_pages_and_loses_nothing(report_lag):
    """There are pages for less than two whole requests, so lanes open late, and slots are paused."""
    asked = [guided(i % 3, seed=i) for i in range(5)]
    most = max(sum(-(-n // PAGE_TOKENS) for n in next(LATE.passes(one)).max_positions) for one in asked)
    served = engine(
        max_slots=3,
        report_lag=report_lag,
        kv_memory_bytes=(most + 2) * PAGE_BYTES,
        swap_memory_bytes=8 * most * PAGE_BYTES,
    )
    for listener, request in zip(serve(served, {0: asked[:3], 7: asked[3:]}), asked, strict=True):
        agrees(listener, request)
    [model] = served.models.values()
    assert model.pages.pages.free == model.pages.pages.num_pages


@LAGS
@pytest.mark.parametrize("turns", range(1, 18, 2))
def test_a_request_may_be_cancelled_at_any_point(report_lag, turns):
    served, listener = engine(report_lag=report_lag), Listener()
    served.speak("cancelled", guided(0), listener)
    for _ in range(turns):
        served.turn()
    served.cancel("cancelled")
    agrees(run(served, guided(1))[0], guided(1))
    [model] = served.models.values()
    assert not model.running and model.pages.pages.free == model.pages.pages.num_pages


def test_a_lane_that_was_to_open_while_its_slot_was_paused_opens_on_its_return():
    """It gets pages of its own, and then those that an earlier request has filled instead."""
    served, listener = engine(max_slots=1), Listener()
    first, second = (
        guided(0, text="The quick brown fox jumps over the lazy dog.", seed=seed) for seed in (1, 2)
    )
    run(served, first)
    [model] = served.models.values()
    pages = model.pages.pages
    filled = pages.match(model.pages.salt, LATE.second_lane(100).prefix_keys, PAGE_TOKENS)
    served.speak("paused", second, listener)
    served.turn()
    [job] = model.running.values()
    others = pages.take(pages.free)
    while job.pages.saved is None:  # there is none for its second lane
        served.turn()
    assert job.opens_lane_at is not None
    pages.give_back(others)
    shared = pages.shared
    served.turn()
    assert pages.shared > shared and job.opens_lane_at is None
    while listener.end is None:
        served.turn()
    agrees(listener, second)
    pages.give_back(filled)
    assert filled and pages.free == pages.num_pages


@LAGS
@pytest.mark.parametrize("num_letters", range(1, PAGE_TOKENS + 1))
def test_each_lane_has_a_page_for_its_step(report_lag, num_letters):
    """A slot that returned from a pause has pages for one step, so its first lane may be full when the second one
    opens. The second one has no page before, and none too many later."""
    served, listener = engine(report_lag=report_lag), Listener()
    [model] = served.models.values()
    step, steps = model.runner.step, list[tuple[list[int], list[int]]]()

    def counted(slots: np.ndarray) -> AsyncCopy:
        steps.append(
            (
                model.runner.kv_lens[model.runner.sequences(np.array([job.slot]))].tolist(),
                [len(pages) for pages in job.pages.lanes],
            )
        )
        return step(slots)

    model.runner.step = counted
    request = guided(0, text="m" * num_letters, max_frames=3)
    served.speak("paused", request, listener)
    served.lifecycle.take_news()
    served.lifecycle.admit()
    [job] = model.running.values()
    served.paging._pause(job)
    while listener.end is None:
        served.turn()
    agrees(listener, request)
    assert all(first < PAGE_TOKENS * num_pages for (first, _), (num_pages, _) in steps)
    for (_, second), (_, num_pages) in steps:
        assert num_pages == (-(-(second + 1) // PAGE_TOKENS) if second else 0)


@LAGS
def test_a_lane_that_takes_several_launches_opens_behind_all_of_them(report_lag):
    """The report of the step before arrives meanwhile."""
    served = engine(report_lag=report_lag)
    [model] = served.models.values()
    model.scheduler.policy = replace(model.scheduler.policy, prefill_tokens=8)
    request = guided(0, text="The quick brown fox jumps over the lazy dog.")
    agrees(run(served, request)[0], request)


@pytest.mark.parametrize("turns", range(7, 13))
def test_a_report_may_open_a_lane_while_its_slot_is_paused(turns, monkeypatch):
    """It gets no page before its slot has pages again."""
    served, listener = engine(max_slots=1, report_lag=1), Listener()
    request = guided(0)
    served.speak("paused", request, listener)
    for _ in range(turns):
        served.turn()
    [model] = served.models.values()
    [job] = model.running.values()
    pages = model.pages.pages
    served.paging._pause(job)
    with monkeypatch.context() as patched:
        patched.setattr(served.paging, "deal", lambda: None)
        served.turn()
    assert job.pages.num_held == 0
    while listener.end is None:
        served.turn()
    agrees(listener, request)
    assert pages.free == pages.num_pages
