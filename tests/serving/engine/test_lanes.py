"""Guidance as a second lane of every slot, and text that a model writes: the engine with two toys that have
them. That lanes keep the promises is in test_promises.py, which runs over these toys too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from models import Clock, Listener, alone, family, requests, serve
from test_promises import at_rest
from toy import NULL

import zoo
from serving.engine.device.arena import PAGE_TOKENS, token_bytes
from serving.engine.engine import Audio, Engine, Event, Finished, Text
from serving.engine.memory.memory_plan import usual_kv_bytes
from zoo.loop import SoloBatches
from zoo.request import Request

GUIDED, SCRIBE = family("toy_guided"), family("toy_delay")
PAGE_BYTES = PAGE_TOKENS * token_bytes(GUIDED)
NULL_PAGES = (len(NULL) - 1) // PAGE_TOKENS
LAGS = pytest.mark.parametrize("report_lag", [0, 1])


def engine(family: zoo.Family = GUIDED, **settings) -> Engine:
    return Engine(family, **{"max_slots": 2, "compile": False, "report_lag": 0, "clock": Clock(), **settings})


def long(**fields) -> Request:
    """One that speaks until its cap."""
    return Request(**{"text": "hmmmmmmmmmm", "temperature": 0.0, **fields})


@cache
@torch.inference_mode()
def written(request: Request) -> list[tuple[str, int]]:
    """Step by step, what the toy writes alone: ("text" before its audio phase or "audio", a token or -1)."""
    prompt = SCRIBE.prompt(request)
    state, whole = SCRIBE.state(1), SoloBatches(SCRIBE, prompt)
    SCRIBE.admit(state, 0, prompt)
    for i, lane in enumerate(prompt.lanes):
        SCRIBE.hidden(lane.inputs[:-1], whole.prefill(i))
    steps = []
    while not state.done[0]:
        phase = "audio" if state.steps[0] >= state.begins[0] else "text"
        SCRIBE.step(state, whole.step())
        steps.append((phase, int(state.written[0])))
    assert len(steps) <= prompt.max_steps
    return steps


def tokens(request: Request, *phases: str) -> list[int]:
    return [
        token for phase, token in written(request) if token >= 0 and phase in (phases or ("text", "audio"))
    ]


def one(that: Callable[[Request], bool]) -> Request:
    """A request to the delay toy that is as wanted."""
    return next(request for request in requests("toy_delay", 80, max_frames=60) if that(request))


# what guidance is


def test_the_two_lanes_are_the_two_ends_of_guidance():
    """At 1 the guided toy is the plain one; at 0 it has not read the text; and beyond it is neither."""
    asked, plain = Request(text="Good morning.", seed=3, max_frames=20), family("toy")
    text, null = (
        zoo.generate(plain, asked).frames,
        zoo.generate(plain, replace(asked, text=bytes(NULL).decode())).frames,
    )
    assert torch.equal(zoo.generate(GUIDED, asked).frames, text)
    assert torch.equal(zoo.generate(GUIDED, replace(asked, options={"cfg_scale": 1.0})).frames, text)
    assert torch.equal(zoo.generate(GUIDED, replace(asked, options={"cfg_scale": 0.0})).frames, null)
    far = zoo.generate(GUIDED, replace(asked, options={"cfg_scale": 4.0})).frames
    assert not torch.equal(far, text) and not torch.equal(far, null)


def test_a_model_without_guidance_refuses_it_by_name():
    with pytest.raises(ValueError, match="toy hum takes no cfg_scale") as refused:
        engine(family("toy")).speak("request", long(options={"cfg_scale": 2.0}), Listener())
    assert refused.value.param == "cfg_scale"


@pytest.mark.slow
def test_only_what_is_spoken_is_guided():
    """Until the audio phase the model writes what it would write unguided."""
    differ = 0
    for seed in range(8):
        asked = Request(text="Good morning.", seed=seed, max_frames=12)
        plain, guided = (replace(asked, options={"cfg_scale": weight}) for weight in (1.0, 5.0))
        assert tokens(plain, "text") == tokens(guided, "text")
        differ += not torch.equal(zoo.generate(SCRIBE, plain).frames, zoo.generate(SCRIBE, guided).frames)
    assert differ > 5


def test_a_prompt_must_have_the_lanes_of_its_model():
    prompt = GUIDED.prompt(long())
    prompt.null = None
    with pytest.raises(AssertionError, match="a prompt of 1 lanes for a model of 2"):
        GUIDED.admit(GUIDED.state(1), 0, prompt)


# pages


@LAGS
def test_the_pages_of_equal_null_prompts_are_shared_by_all(report_lag):
    both = engine(report_lag=report_lag, max_slots=3)
    asked = [
        long(text=text * 20, options={"cfg_scale": 2.0}, seed=seed, max_frames=20)
        for seed, text in enumerate("abcd")
    ]
    listeners = serve(both, {0: asked[:1], 2: asked[1:3], 30: asked[3:]})
    for listener, request in zip(listeners, asked, strict=True):
        assert listener.samples == pytest.approx(alone("toy_guided", request).samples.numpy(), abs=5e-5)
    assert both.stats()["pages_shared"] == 3 * NULL_PAGES


def test_lanes_that_begin_alike_share_within_a_slot_too():
    """The text is the null prompt, and then some."""
    both, asked = engine(), long(text=bytes(NULL).decode() + "hum", max_frames=5)
    serve(both, {0: [long(max_frames=1)]})
    [listener] = serve(both, {0: [asked]})
    assert both.stats()["pages_shared"] == 2 * NULL_PAGES
    assert listener.samples == pytest.approx(alone("toy_guided", asked).samples.numpy(), abs=5e-5)


def test_a_slot_has_the_pages_of_all_its_lanes_or_none():
    """11 positions and 38, and 30 frames: 3 pages and 5, of which the null prompt's 2 can be shared."""
    asked = long(max_frames=30)
    # 13 to be had: the other request lacks one, or has enough once it shares
    small = engine(kv_memory_bytes=(1 + 13) * PAGE_BYTES, swap_memory_bytes=0)
    everything = at_rest(small)
    first, second = Listener(), Listener()
    small.speak("first", asked, first)
    small.speak("second", replace(asked, text="mmmmmmmmmmh"), second)
    assert not small.models["toy"].runner.prompts
    small.turn()
    assert small.pages.free == 5 and small.pages.shared == 0
    small.turn()
    # it matches two, lacks one of six, and holds none while it waits
    assert small.pages.free == 5 and small.pages.shared == 0
    small.cancel("first")
    small.turn()
    assert small.pages.free == 13 - 8 and small.pages.shared == NULL_PAGES
    while small.turn():
        pass
    assert isinstance(second.end, Finished) and second.frames == 30
    assert at_rest(small) == everything


def test_a_request_that_can_never_fit_counts_all_its_lanes():
    with pytest.raises(
        ValueError,
        match="49 prompt positions and 30 frames need 8 pages of KV memory; this server has 7: ask for fewer",
    ):
        engine(kv_memory_bytes=8 * PAGE_BYTES).speak("large", long(max_frames=30), Listener())


def test_memory_is_for_all_lanes():
    assert usual_kv_bytes(GUIDED, 3) == 2 * usual_kv_bytes(family("toy"), 3)


def test_steps_that_write_have_positions_too():
    """11 positions, 30 frames, a delay of 2 and 10 steps of text: 4 pages; the null prompt's lane: 5."""
    with pytest.raises(ValueError, match="49 prompt positions and 30 frames need 9 pages"):
        engine(SCRIBE, kv_memory_bytes=2 * PAGE_BYTES).speak("large", long(max_frames=30), Listener())


# text


def spelt(monkeypatch, text: str) -> None:
    """Make each token that the toy writes detokenize to the next byte of this text."""
    each = iter(text.encode())
    monkeypatch.setattr(SCRIBE, "detokenize", lambda token: bytes((next(each),)))


@LAGS
def test_text_comes_in_whole_characters_and_is_complete(report_lag, monkeypatch):
    asked = one(lambda request: len(tokens(request)) > 15)
    said, count = "größer als 天 und 😀 " * 9, len(tokens(asked))
    whole = said.encode()[:count].decode(errors="replace")
    spelt(monkeypatch, said)
    [listener] = serve(engine(SCRIBE, report_lag=report_lag), {0: [asked]})
    assert "".join(listener.texts) == whole
    assert not any("\ufffd" in text for text in listener.texts[:-1])
    assert listener.end.usage["text_tokens"] == count


def test_a_character_that_is_never_finished_is_told_as_such(monkeypatch):
    asked = one(lambda request: len(tokens(request)) > 2 and written(request)[-1][1] < 0)
    before = "a" * (len(tokens(asked)) - 2)
    spelt(monkeypatch, before + "天")
    [listener] = serve(engine(SCRIBE), {0: [asked]})
    assert "".join(listener.texts) == before + "\ufffd"


@LAGS
def test_every_token_is_told_once_however_late_reports_are(report_lag):
    """In company, with requests that write in their very last step: its report comes twice when there is a
    launch in flight."""
    asked = requests("toy_delay", 12, max_frames=40)
    assert sum(written(request)[-1][1] >= 0 for request in asked) > 2
    listeners = serve(engine(SCRIBE, report_lag=report_lag, max_slots=5), {0: asked[:7], 9: asked[7:]})
    for listener, request in zip(listeners, asked, strict=True):
        assert (
            "".join(listener.texts)
            == alone("toy_delay", request).text
            == b"".join(map(SCRIBE.detokenize, tokens(request))).decode(errors="replace")
        )
        assert listener.end.usage.get("text_tokens", 0) == len(tokens(request))


@LAGS
def test_text_begins_before_the_audio_and_goes_on_among_it(report_lag):
    single, events = engine(SCRIBE, report_lag=report_lag), list[Event]()
    single.speak(
        "request",
        one(lambda request: bool(tokens(request, "text")) and len(tokens(request, "audio")) > 5),
        events.append,
    )
    while single.turn():
        single.clock.now_s += 0.03
    kinds = [type(event) for event in events]
    first_audio = kinds.index(Audio)
    assert Text in kinds[:first_audio] and Text in kinds[first_audio:] and kinds[-1] is Finished


def test_a_cancelled_request_has_the_text_written_so_far():
    single, listener = engine(SCRIBE), Listener()
    asked = one(lambda request: len(tokens(request, "text")) > 3)
    single.speak("request", asked, listener)
    while not listener.texts:
        single.turn()
    single.cancel("request")
    single.turn()
    assert listener.end.reason == "cancelled" and 0 < listener.end.usage["text_tokens"] <= 4
    assert alone("toy_delay", asked).text.startswith("".join(listener.texts))


def test_a_family_without_detokenize_cannot_write_text():
    with pytest.raises(AssertionError, match="toy wrote the text token 3, and cannot detokenize it"):
        family("toy").detokenize(3)
