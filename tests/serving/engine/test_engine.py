"""The engine with the toy family: who is let in, who waits, how each request ends, and what happens when
something breaks."""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from models import Clock, Listener, alone, family, requests, serve

from compile_cache.strategy import Strategy, Whole
from serving.engine.device.arena import PAGE_TOKENS, token_bytes
from serving.engine.engine import STOPPED, Audio, Engine, Failed, Finished, Full
from serving.engine.job import NO_AUDIO
from serving.engine.model_worker import ModelWorker
from zoo.contract import Prompt
from zoo.request import Request, RequestError

TOY = family("toy")
PAGE_BYTES = PAGE_TOKENS * token_bytes(TOY)
LAGS = pytest.mark.parametrize("report_lag", [0, 1])


def engine(**settings) -> Engine:
    return Engine(TOY, **{"max_slots": 2, "compile": False, "report_lag": 0, "clock": Clock(), **settings})


def long(seed: int = 0, **fields) -> Request:
    """One that speaks until its cap."""
    return Request(**{"text": "hmmmmmmmmmm", "seed": seed, "temperature": 0.0, **fields})


def toy(engine: Engine) -> ModelWorker:
    return engine.models["toy"]


def numbers(engine: Engine) -> dict[str, int]:
    """What the engine tells of itself and of its only model."""
    stats = engine.stats()
    return stats | stats.pop("models")["toy"]


def speak(engine: Engine, *asked: Request) -> list[Listener]:
    listeners = [Listener() for _ in asked]
    for i, (request, listener) in enumerate(zip(asked, listeners, strict=True)):
        engine.speak(f"request-{i}", request, listener)
    return listeners


def of_length(frames: int) -> Request:
    """Return a request that the model itself ends after `frames` frames."""
    tries = (
        Request(text=letter, seed=seed, max_frames=20) for seed in range(30) for letter in "abcdefghijklmnop"
    )
    return next(request for request in tries if len(alone("toy", request).frames) == frames)


# being let in


def test_a_full_engine_refuses_immediately():
    small = engine(max_waiting=2)
    speak(small, long(), long())
    with pytest.raises(Full, match="2 requests are waiting already; try again in 1 s") as refused:
        small.speak("third", long(), Listener())
    assert refused.value.retry_after_s == 1.0
    small.turn()  # both have slots now
    listener = Listener()
    small.speak("third", long(), listener)
    small.speak("fourth", long(), Listener())
    with pytest.raises(Full):
        small.speak("fifth", long(), Listener())
    while small.turn():
        pass
    assert isinstance(listener.end, Finished)


def test_a_request_that_can_never_fit_is_refused():
    small = engine(kv_memory_bytes=4 * PAGE_BYTES)
    with pytest.raises(
        ValueError,
        match="11 prompt positions and 60 frames need 5 pages of KV memory; this server has 3: ask for fewer",
    ):
        small.speak("large", long(), Listener())
    assert not small.turn()
    [listener] = serve(small, {0: [long(max_frames=3 * PAGE_TOKENS - 11)]})
    assert listener.frames == 37


def test_delayed_codes_have_positions_too(monkeypatch):
    plain = TOY.prompt

    def late(request: Request) -> Prompt:
        prompt = plain(request)
        prompt.max_steps = prompt.max_frames + 10
        return prompt

    monkeypatch.setattr(TOY, "prompt", late)
    with pytest.raises(ValueError, match="11 prompt positions and 60 frames need 6 pages"):
        engine(kv_memory_bytes=6 * PAGE_BYTES).speak("large", long(), Listener())


def test_a_bad_request_is_refused_by_the_family_and_leaves_nothing():
    fresh = engine()
    with pytest.raises(ValueError, match="text is empty"):
        fresh.speak("empty", long(text=""), Listener())
    assert not fresh.turn() and numbers(fresh)["waiting"] == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_slots": 0}, "max_slots is 0; at least 1 is needed"),
        ({"kv_memory_bytes": PAGE_BYTES}, "hold no page: a page of this model takes"),
        ({"policy": "quickly"}, "policy 'quickly' is unknown; there are: streaming, throughput"),
    ],
)
def test_settings_that_leave_no_room_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        engine(**settings)


# waiting


@LAGS
def test_first_come_first_served(report_lag):
    """Three requests, one slot: each begins when the one before has ended."""
    single = engine(max_slots=1, report_lag=report_lag)
    log: list[tuple[int, str]] = []
    for i in range(3):
        single.speak(
            f"request-{i}",
            long(seed=i, max_frames=6),
            lambda event, i=i: log.append((i, type(event).__name__)),
        )
    while single.turn():
        pass
    assert [i for i, _ in log] == sorted(i for i, _ in log)
    assert [kind for i, kind in log if i == 1][-1] == "Finished"
    assert Counter(log)[1, "Finished"] == 1 and Counter(log)[1, "Audio"] >= 1


def test_a_smaller_request_may_skip_one_that_lacks_pages():
    # five pages, and the one that is nobody's
    scarce = engine(max_slots=3, kv_memory_bytes=6 * PAGE_BYTES, swap_memory_bytes=0)
    # four pages, one page
    large, small = long(text="0123456789", max_frames=50), long(text="b", max_frames=1)
    listeners = speak(scarce, large, replace(large, text="abcdefghij"), small)
    scarce.turn()
    assert (numbers(scarce)["running"], numbers(scarce)["waiting"]) == (1, 1) and listeners[2].end
    while scarce.turn():
        pass
    for listener in listeners:
        assert isinstance(listener.end, Finished)


def test_a_request_that_lacks_pages_keeps_no_shared_ones():
    """Its prompt is in two of the five pages, of which the other one takes four."""
    scarce = engine(kv_memory_bytes=6 * PAGE_BYTES, swap_memory_bytes=1 << 30)
    asked = long(text="x" * (2 * PAGE_TOKENS + 1), max_frames=20)
    [first], second = speak(scarce, asked), Listener()
    scarce.turn()
    scarce.speak("second", replace(asked, seed=1), second)
    while scarce.turn():
        assert numbers(scarce)["running"] <= 1
    assert isinstance(first.end, Finished) and isinstance(second.end, Finished)
    assert numbers(scarce)["pages_shared"] == 2 and scarce.pages.free == scarce.pages.num_pages


@LAGS
def test_a_prompt_that_is_all_in_shared_pages_begins_with_its_first_step(report_lag):
    asked = Request(text="x" * (2 * PAGE_TOKENS + 1), seed=1)
    again = replace(asked, seed=2)
    both = engine(report_lag=report_lag)
    [listener] = serve(both, {0: [asked]})
    [other] = serve(both, {0: [again]})
    assert numbers(both)["pages_shared"] == 2
    for heard, request in ((listener, asked), (other, again)):
        np.testing.assert_array_equal(heard.samples, alone("toy", request).samples)


# ending


@pytest.mark.slow
@LAGS
@pytest.mark.parametrize("frames", [0, 1, 2, 9])
def test_the_model_ends_or_the_cap_does(frames, report_lag):
    ended = of_length(frames)
    capped = long(max_frames=max(frames, 1))
    listeners = serve(engine(report_lag=report_lag), {0: [ended, capped]})
    stopped = (
        Finished("stop", frames, {"input_tokens": len(ended.text)})
        if frames
        else Failed(NO_AUDIO, "no_audio")
    )
    assert listeners[0].end == stopped and listeners[0].frames == frames
    assert listeners[1].end == Finished("length", max(frames, 1), {"input_tokens": 11}) and listeners[
        1
    ].frames == max(frames, 1)


def test_audio_comes_in_order_and_the_end_comes_last():
    """The chunks joined are the speech, each is as long as its frames say, and the first comes as soon as
    there is a frame."""
    fresh, events = engine(), []
    fresh.speak("request", long(max_frames=30), events.append)
    while fresh.turn():
        fresh.clock.now_s += 0.03
    *audio, end = events
    assert isinstance(end, Finished) and all(isinstance(event, Audio) for event in audio)
    assert [event.frames * TOY.spec.frame_samples for event in audio] == [
        len(event.samples) for event in audio
    ]
    assert audio[0].frames == 1 and sum(event.frames for event in audio) == 30
    np.testing.assert_array_equal(
        np.concatenate([event.samples for event in audio]), alone("toy", long(max_frames=30)).samples
    )


# being cancelled


@LAGS
def test_cancel_frees_the_slot_within_one_iteration(report_lag):
    single = engine(max_slots=1, report_lag=report_lag)
    first, second = speak(single, long(), long(seed=1))
    free = numbers(single)["pages_free"]
    for _ in range(5):
        single.turn()
    assert numbers(single)["running"] == numbers(single)["waiting"] == 1
    single.cancel("request-0")
    single.turn()
    assert (
        isinstance(first.end, Finished)
        and first.end.reason == "cancelled"
        and first.end.frames >= first.frames > 0
    )
    # the second has the slot already
    assert (numbers(single)["running"], numbers(single)["waiting"]) == (1, 0)
    single.cancel("request-1")
    single.cancel("request-1")
    single.cancel("nobody")
    assert not single.turn()
    assert second.end.reason == "cancelled"
    assert numbers(single)["pages_free"] == free and numbers(single)["running"] == 0


def test_a_listener_may_cancel_from_within_a_delivery():
    fresh, listener = engine(), Listener()

    def hear(event):
        listener(event)
        fresh.cancel("request")

    fresh.speak("request", long(), hear)
    while fresh.turn():
        pass
    assert listener.end.reason == "cancelled" and len(listener.chunks) == 1


# breaking


@pytest.mark.parametrize("place", ["open", "prefill", "step", "render"])
def test_an_error_in_an_iteration_fails_every_request_and_reaches_the_caller(place, monkeypatch):
    """Two speak, one waits for a slot, one is still in the inbox; then something breaks while a newcomer is
    served."""
    broken = engine(report_lag=1)
    listeners = speak(broken, long(), long(seed=1))
    for _ in range(4):
        broken.turn()
    listeners += [Listener() for _ in range(3)]
    for i in (2, 3, 4):
        broken.speak(f"late-{i}", long(seed=i), listeners[i])
    broken.cancel("request-0")  # so that there is a slot to open

    def breaks(*args, **kwargs):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(toy(broken).runner, place, breaks)
    with pytest.raises(RuntimeError, match="the device is gone"):
        broken.run()
    assert listeners[0].end.reason == "cancelled"
    for listener in listeners[1:]:
        assert listener.end == Failed("the engine stopped: the device is gone")


# threads


class Running:
    """An engine in a separate thread."""

    def __init__(self, engine: Engine):
        self.engine, self.thread = engine, threading.Thread(target=engine.run)

    def __enter__(self) -> Engine:
        self.thread.start()
        return self.engine

    def __exit__(self, *error: object) -> None:
        self.engine.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()


class Listener(Listener):
    """An listener on another thread, which can wait for the end."""

    def __init__(self) -> None:
        super().__init__()
        self.ended, self.began = threading.Event(), threading.Event()

    def __call__(self, event) -> None:
        super().__call__(event)
        self.began.set()
        if self.end is not None:
            self.ended.set()


def test_requests_may_come_from_many_threads():
    asked = requests("toy", 24)
    listeners = [Listener() for _ in asked]
    problems: list[BaseException] = []

    def client(which: int) -> None:
        try:
            for i in range(which, len(asked), 4):
                shared.speak(f"request-{i}", asked[i], listeners[i])
                if i % 3 == 0:
                    shared.cancel(f"request-{i}")
                assert listeners[i].ended.wait(60)
        except BaseException as error:
            problems.append(error)

    with Running(engine(max_slots=3)) as shared:
        clients = [threading.Thread(target=client, args=(which,)) for which in range(4)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join(60)
    assert not problems
    for i, (request, heard) in enumerate(zip(asked, listeners, strict=True)):
        whole = alone("toy", request).samples.numpy()
        if heard.end.reason == "cancelled":
            assert i % 3 == 0
            whole = whole[: len(heard.samples)]
        np.testing.assert_allclose(heard.samples, whole, rtol=0, atol=1e-6)


def test_stop_fails_all_requests():
    """One speaks, one waits for the slot."""
    speaking, waiting = Listener(), Listener()
    with Running(engine(max_slots=1)) as single:
        hold = threading.Event()

        def hear(event) -> None:
            speaking(event)
            hold.wait(60)  # the engine's thread: it does not go on before `stop` was said

        single.speak("speaking", long(), hear)
        assert speaking.began.wait(60)
        single.speak("waiting", long(), waiting)
        single.stop()
        hold.set()
        assert speaking.ended.wait(60) and waiting.ended.wait(60)
    assert speaking.end == waiting.end == Failed(STOPPED, code="engine_stopped")
    assert waiting.frames == 0 and speaking.frames > 0
    assert numbers(single)["running"] == numbers(single)["waiting"] == 0


# counting


def held(engine):
    """Return the engine's numbers, without the counts of its work and the facts of its process."""
    return {name: value for name, value in numbers(engine).items() if name not in WORK}


COUNTS = ("short_passes", "long_passes", "audio_s")
TIMES = ("turn_times", "queue_times")
WORK = (*COUNTS, *TIMES, "first_audio_s", "expected_first_audio_s", "resident_bytes")


def test_work_is_counted():
    ticks = itertools.count()
    fresh = engine(clock=lambda: float(next(ticks)))
    assert [numbers(fresh)[name] for name in COUNTS] == [0] * len(COUNTS)
    assert [numbers(fresh)[name].num for name in TIMES] == [0, 0]
    assert numbers(fresh)["first_audio_s"] is None
    speak(fresh, *(long(seed=seed, max_frames=3) for seed in range(3)))
    while fresh.turn():
        pass
    counted, frame_s = numbers(fresh), TOY.spec.frame_samples / TOY.spec.sample_rate_hz
    turns, waits = (counted[name] for name in TIMES)
    assert waits.num == 3 and waits.sum_s > 3 and turns.sum_s >= turns.num > 3
    assert counted["audio_s"] == pytest.approx(3 * 3 * frame_s) and counted["first_audio_s"] > 0
    assert counted["resident_bytes"] > 1 << 20


def test_stats():
    fresh = engine(kv_memory_bytes=11 * PAGE_BYTES)
    rest = {
        "slots": 2,
        "running": 0,
        "waiting": 0,
        "pages": 10,
        "pages_free": 10,
        "pages_shared": 0,
        "pages_evicted": 0,
        "compiles_after_warmup": 0,
        "underruns": 0,
        "graph_misses": 0,
        "preparing": 0,
        "refused": 0,
        "left_early": 0,
        "places": 2,
        "not_finite": 0,
        "paused": 0,
        "held": 0,
        "pauses": 0,
        "predicted_turn_s": 0,
        "reference_bytes": 0,
    }
    assert held(fresh) == rest
    speak(fresh, *(long(text="abcdefghij" * 2, seed=seed, max_frames=12) for seed in range(3)))
    assert held(fresh) == rest | {"waiting": 3}
    fresh.turn()
    assert held(fresh) == rest | {"running": 2, "waiting": 1, "pages_free": 6}
    while fresh.turn():
        pass
    assert held(fresh) == rest | {"pages_shared": 1}  # the third read the first one's whole page


@pytest.mark.parametrize("samples", [1, 2 * TOY.spec.frame_samples])
def test_a_launch_of_the_renderer_that_is_too_large_is_cut_by_rows(samples, monkeypatch):
    monkeypatch.setattr("serving.engine.device.staging.CACHED_SAMPLES", samples)
    asked = requests("toy", 5)
    for listener, request in zip(serve(engine(max_slots=5), {0: asked}), asked, strict=True):
        np.testing.assert_array_equal(listener.samples, alone("toy", request).samples)


def test_a_family_that_cuts_its_renders_itself_is_given_all_rows(monkeypatch):
    monkeypatch.setattr("serving.engine.device.staging.CACHED_SAMPLES", 1)
    whole = engine(max_slots=5)
    [model] = whole.models.values()
    monkeypatch.setattr(model.family, "strategy", replace(model.family.strategy, cuts_renders=True))
    rows = []
    model.runner.observer = lambda event, num, seconds: rows.append(num) if event == "render" else None
    asked = requests("toy", 5)
    for listener, request in zip(serve(whole, {0: asked}), asked, strict=True):
        np.testing.assert_array_equal(listener.samples, alone("toy", request).samples)
    assert max(rows) > 1


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("is_prepared", [True, False])
def test_nothing_compiles_after_the_models_are_warm(is_prepared, monkeypatch):
    """For any number and length of requests. Without the marks that make one graph serve every size, the same
    requests do compile."""
    torch._dynamo.reset()
    monkeypatch.setattr(
        "serving.engine.device.lowered.lower",
        lambda verb, how: torch.compile(verb, backend="eager") if how == Whole() else verb,
    )
    monkeypatch.setattr(TOY, "strategy", Strategy(Whole(), Whole(), Whole()))
    if not is_prepared:
        monkeypatch.setattr("serving.engine.device.warmup.any_size", lambda tensors, dim, name: None)
    ready = engine(compile=True, max_slots=5)
    assert numbers(ready)["compiles_after_warmup"] == 0
    ready.warm(lambda progress, stage: None)
    serve(ready, {0: requests("toy", 1), 3: requests("toy", 7, max_frames=40), 60: requests("toy", 2)})
    assert (numbers(ready)["compiles_after_warmup"] == 0) == is_prepared
    assert numbers(ready)["graph_misses"] == 0


@pytest.mark.parametrize("warm_s", [3600.0, 0.0])
def test_warm_up_renders_every_number_of_rows(warm_s, monkeypatch):
    """As far as there is time for it before."""
    monkeypatch.setattr("serving.engine.device.warmup.WARM_S", warm_s)
    window, frame_samples = TOY.spec.window, TOY.spec.frame_samples
    monkeypatch.setattr("serving.engine.device.staging.CACHED_SAMPLES", 3 * window.sizes[-1] * frame_samples)
    ready, launched = engine(max_slots=5), []
    runner = toy(ready).runner
    launch = runner.lowered.render
    monkeypatch.setattr(
        runner.lowered, "render", lambda view: launched.append((len(view.slots), view.frames)) or launch(view)
    )
    ready.warm(lambda progress, stage: None)
    first = {(2, frames) for frames in window.sizes}
    rest = {
        (rows, frames)
        for frames in window.sizes
        for rows in range(1, min(5, runner.sizes.rows_of_launch(frames)) + 1)
    }
    # One and all slots are timed for the estimates, with a frame of each.
    timed = {
        (min(math.ceil(slots / n), runner.sizes.rows_of_launch(n)), n)
        for slots in (1, 5)
        for n in window.sizes
    }
    assert first | timed <= set(launched) and (set(launched) == first | rest) == (warm_s > 0)
    assert (4, window.sizes[-1]) not in rest and (5, window.sizes[0]) in rest
    launched.clear()
    serve(ready, {0: requests("toy", 5, max_frames=40)})
    assert warm_s == 0 or set(launched) <= first | rest


def test_a_late_delivery_is_an_underrun():
    slow = engine()
    speak(slow, long())
    while slow.turn():
        slow.clock.now_s += 1.0
    assert numbers(slow)["underruns"] > 0


@pytest.mark.parametrize("speakers", [1, 8])
def test_an_iteration_is_one_launch_for_any_number_of_slots(speakers, monkeypatch):
    """And one report comes back of it."""
    many = engine(max_slots=8)
    speak(many, *(long(seed=seed) for seed in range(speakers)))
    many.turn()
    calls: Counter[str] = Counter()
    monkeypatch.setattr(toy(many).runner, "step", count(toy(many).runner.step, calls, "step"))
    monkeypatch.setattr(toy(many).runner, "render", count(toy(many).runner.render, calls, "render"))
    monkeypatch.setattr(toy(many).scheduler, "report", count(toy(many).scheduler.report, calls, "report"))
    for _ in range(4):
        many.turn()
    assert calls["step"] == calls["report"] == 4 and calls["render"] <= 4


def count(function, calls, name):
    def counted(*args):
        calls[name] += 1
        return function(*args)

    return counted


def test_an_id_is_taken_once():
    room = engine()
    room.speak("a", long(), Listener())
    with pytest.raises(ValueError, match="'a' is under way already"):
        room.speak("a", long(), Listener())
    room.turn()
    with pytest.raises(ValueError, match="'a' is under way already"):
        room.speak("a", long(), Listener())


def test_a_stopped_engine_accepts_no_request():
    room = engine()
    room.stop()
    room.run()
    with pytest.raises(Full, match="stopped"):
        room.speak("a", long(), Listener())


@pytest.mark.parametrize("field", [{"seed": 2**63}, {"max_frames": 0}])
def test_a_request_that_no_model_can_take_is_refused(field):
    with pytest.raises(RequestError, match=f"{next(iter(field))} is .* is possible") as error:
        Request(text="a", **field)
    assert error.value.param == next(iter(field))


@pytest.mark.parametrize(
    "field",
    [
        {"top_k": 2**70},
        {"top_k": -1},
        {"top_p": 0.0},
        {"temperature": float("nan")},
        {"temperature": -1.0},
        {"top_k": 0.5},
    ],
)
def test_a_request_that_this_model_cannot_take_never_reaches_a_slot(field):
    fresh = engine()
    with pytest.raises(RequestError, match=f"{next(iter(field))} is .*; possible: ") as error:
        fresh.speak("request", Request(text="a", **field), Listener())
    assert error.value.param == next(iter(field)) and not fresh.num_requests


def test_more_kv_memory_than_there_is_is_one_line():
    with pytest.raises(ValueError, match="more than this machine's cpu has"):
        engine(kv_memory_bytes=1 << 49)
