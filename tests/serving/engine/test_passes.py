"""Answers of several passes, long text, and text that arrives while the model speaks."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from grid_engine import LAGS, TEXT, TOY, asked, engine, run
from models import Listener, alone, family, manners, serve
from toy_grid import HEAD, MAX_TRAILING, GridToy

import zoo
from serving import protocol as settings
from serving.engine.device.arena import PAGE_TOKENS, token_bytes
from serving.engine.device.streams import AsyncCopy
from serving.engine.engine import Audio, Engine, Failed, Finished, Spoken
from serving.tools.simulate import Cost, Heard, Simulation, Voice
from zoo.contract import following
from zoo.contract.family import pieces_of
from zoo.loop import speak_pass
from zoo.request import Request, RequestError


def close(listener: Listener, request: Request) -> None:
    np.testing.assert_allclose(listener.samples, alone("toy_grid", request).samples, rtol=0, atol=5e-5)


# passes


@LAGS
def test_passes_follow_each_other_in_one_stream(report_lag):
    request = asked(options={"echoes": 3})
    [listener] = serve(engine(report_lag=report_lag), {0: [request]})
    frames = alone("toy_grid", request).frames
    once = len(alone("toy_grid", asked()).frames)
    assert listener.frames == len(frames) > once
    close(listener, request)
    assert isinstance(listener.end, Finished) and listener.end.frames == len(frames)
    assert listener.end.usage["input_tokens"] > 3 * len(TEXT)  # what was said is read again by every pass


def test_a_later_pass_goes_on_from_what_was_spoken():
    """Its frames differ if the pass before spoke otherwise, although the text is the same."""
    [text, once], twice = ["123 " + TEXT, asked()], alone("toy_grid", asked(options={"echoes": 2})).frames
    spoken = alone("toy_grid", once).frames
    assert torch.equal(twice[: len(spoken)], spoken)
    assert torch.equal(
        twice[len(spoken) :], alone("toy_grid", asked(text=f"{int(spoken.sum())} {TEXT}")).frames
    )
    assert not torch.equal(twice[len(spoken) :], alone("toy_grid", asked(text=text)).frames)


def test_a_next_pass_goes_before_waiting_requests():
    room = engine(max_slots=1)
    listeners = [Listener(), Listener()]
    room.speak("first", asked(options={"echoes": 2}), listeners[0])
    room.speak("second", asked(seed=9), listeners[1])
    while listeners[1].frames == 0:
        if not room.turn():
            time.sleep(0.001)
    assert isinstance(listeners[0].end, Finished)
    run(room)
    close(listeners[1], asked(seed=9))


def test_a_prompt_is_handed_over_when_the_device_has_made_it(monkeypatch):
    """Otherwise the steps of all listeners would wait for an encoder that other threads have launched."""
    room = engine()
    made: list[int] = []
    news = room.inbox.news
    monkeypatch.setattr(room.arena.streams.prompts, "finish", lambda: made.append(len(news.jobs)))
    listener = Listener()
    room.speak("first", asked(options={"echoes": 3}), listener)
    assert made == [0]
    run(room)
    assert isinstance(listener.end, Finished) and len(made) == 3  # once a pass


def long_texts(num: int, max_ttfa_s: float | None, slower: float = 1.0, **more) -> list[Heard]:
    """Texts of 29 s in five passes on as many slots; from second 8 on launches take `slower` times as
    long."""
    voice = Voice(guard=1.0)
    voice.spec = replace(voice.spec, piece_s=6.0)
    times = 1.0
    cost = Cost(
        step_s=lambda slots: times * (0.016 + 0.005 * slots),
        render_s=lambda rows, frames: times * 0.0002 * rows * frames,
    )
    room = Simulation(voice, cost, settings={"max_slots": num, "max_ttfa_s": max_ttfa_s, **more})
    sentences = "This is a sentence of a long text that goes on for quite a while. " * 7
    heard = [room.submit(Request(text=sentences, seed=seed)) for seed in range(num)]
    room.run([], until_s=8.0)
    times = slower
    room.run([])
    assert all(isinstance(one.end, Finished) for one in heard)
    assert not room.model.running and room.engine.pages.free == room.engine.pages.num_pages
    assert room.model.counters.queue_times.num == num
    return heard


def test_who_speaks_needs_no_place_for_a_next_pass():
    """When turns become slower than estimated, fewer may speak at once; those who do speak on."""
    assert max(one.late_s for one in long_texts(8, 10.0, slower=1.3)) == 0
    timed, untimed = (long_texts(8, max_ttfa_s, slower=1.8) for max_ttfa_s in (10.0, None))
    assert 0 < max(one.late_s for one in timed) <= 1.2 * max(one.late_s for one in untimed)


@pytest.mark.parametrize("saved_pages", [0, 400])
def test_next_passes_get_their_pages_before_newcomers_and_while_their_audio_lasts(saved_pages):
    page_bytes = PAGE_TOKENS * token_bytes(Voice())
    pages = {"kv_memory_bytes": 41 * page_bytes, "swap_memory_bytes": saved_pages * page_bytes}
    heard = long_texts(4, 60.0, **pages)
    assert saved_pages == 0 or max(one.late_s for one in heard) == 0


def test_the_engine_does_not_wait_for_the_frames_of_a_pass(monkeypatch):
    """The thread that builds the next prompt does."""
    waiting = []
    tensors = AsyncCopy.tensors

    def waits(copy: AsyncCopy) -> tuple[torch.Tensor, ...]:
        waiting.append(threading.current_thread().name)
        return tensors(copy)

    room, listener = engine(family("toy_echoing")), Listener()
    [model] = room.models.values()
    copy_tape = model.copy_tape
    model.copy_tape = lambda job: Watched(copy_tape(job).tensors())
    monkeypatch.setattr(Watched, "tensors", waits)
    room.speak("request", Request(text=LONG, seed=4), listener)
    run(room)
    assert isinstance(listener.end, Finished)
    assert waiting and all(name.startswith("compose") for name in waiting)


class Watched(AsyncCopy):
    """The copy of a tape."""


def test_a_listener_between_two_passes_is_counted():
    """Its slot is not free for a newcomer, whose prediction follows from the frames that are left."""
    room, listener = engine(), Listener()
    [model] = room.models.values()
    room.speak("request", asked(options={"echoes": 2}), listener)
    while not any(job.is_composing for job in model.running.values()):
        room.turn()
    assert len(model.forecaster.outlook.left) == 1
    run(room)
    assert model.forecaster.outlook.left == ()


@pytest.mark.parametrize("echoes", [1, 2])
def test_a_request_is_free_once_its_last_prompt_is_made(echoes):
    """Its recordings may take megabytes, and its speech minutes."""
    room, listener, made = engine(), Listener(), []

    def request() -> Request:
        one = asked(options={"echoes": echoes})
        made.append(weakref.ref(one))
        return one

    room.prepare(room.accept("request", listener), request)
    room.turn()
    [model] = room.models.values()
    [job] = model.running.values()
    assert (made[0]() is None) == (echoes == 1)
    while not job.prompt.is_final:
        room.turn()
    assert made[0]() is None and listener.end is None


def test_the_listener_s_time_goes_on_from_pass_to_pass():
    """A gap between two passes is an underrun, as any other."""
    room, listener = engine(), Listener()
    [model] = room.models.values()
    room.speak("request", asked(options={"echoes": 2}), listener)
    while not any(job.is_composing for job in model.running.values()):
        room.turn()
    room.clock.now_s += 1000
    run(room)
    assert model.scheduler.num_underruns == 1


def test_a_cancel_between_two_passes_leaves_nothing_behind(monkeypatch):
    room, listener = engine(), Listener()
    free = room.pages.free
    room.speak("request", asked(options={"echoes": 2}), listener)
    queued = []
    monkeypatch.setattr(room.inbox, "compose", lambda job, future: queued.append((job, future)))
    while not queued:
        room.turn()
    assert room.turn() is False  # there is nothing to do until the prompt is made
    room.cancel("request")
    room.turn()
    assert listener.end.reason == "cancelled" and listener.frames > 0 and not room.num_requests
    room.inbox.news.composed.append(queued[0])
    room.turn()
    [model] = room.models.values()
    assert room.pages.free == free and not model.queue.jobs and not model.running


def test_a_next_pass_that_cannot_be_made_ends_the_answer_as_a_failure(monkeypatch):
    def passes(self, request):
        frames = yield replace_final(self._pass(request, {}, b"a" * 30, is_final=False))
        raise RequestError("text", f"no more after {len(frames)} frames")

    def replace_final(prompt):
        prompt.slot |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
        return prompt

    monkeypatch.setattr(GridToy, "prompts", passes)
    room, listener = engine(GridToy()), Listener()
    room.speak("request", asked(), listener)
    run(room)
    message = f"no more after {listener.frames} frames"
    assert listener.end == Failed(message, code="cannot_continue") and listener.frames > 0


# text while speaking


def feed_in(room: Engine, pieces: list[bytes], turns: int) -> Listener:
    """Feed the text piece by piece, with `turns` turns between two pieces."""
    listener = Listener()
    room.speak("request", asked(text=pieces[0].decode(), is_open=True), listener)
    for i, piece in enumerate(pieces[1:], 2):
        for _ in range(turns):
            room.turn()
        room.feed("request", list(piece), is_last=i == len(pieces))
    run(room)
    return listener


@LAGS
@pytest.mark.parametrize("turns", [0, 1, 7])
@pytest.mark.parametrize("size", [1, 5, 100])
def test_text_that_arrives_equals_the_text_given_at_once(size, turns, report_lag):
    text = TEXT.encode()
    pieces = [text[:HEAD], *(text[at : at + size] for at in range(HEAD, len(text), size))]
    listener = feed_in(engine(report_lag=report_lag), pieces, turns)
    close(listener, asked(text=pieces[0].decode() + b"".join(pieces[1:]).decode()))


def test_a_slot_that_waits_for_text_costs_nothing():
    """The engine rests, another request continues alone, and the spoken audio is heard before the engine
    rests."""
    room, waiting, other = engine(), Listener(), Listener()
    [model] = room.models.values()
    room.speak("waiting", asked(text=TEXT[: HEAD + 20], is_open=True), waiting)
    for _ in range(50):
        room.turn()
    assert room.turn() is False and waiting.end is None
    assert waiting.frames == 15  # of 21, three of which are looked ahead at, in steps of the grid
    launched = []
    step = model.runner.step
    model.runner.step = lambda slots: launched.append(slots.tolist()) or step(slots)
    room.speak("other", asked(seed=8), other)
    while other.end is None:
        room.turn()
    assert launched and all(len(slots) == 1 for slots in launched)
    close(other, asked(seed=8))
    room.feed("waiting", list(TEXT[HEAD + 20 :].encode()), is_last=True)
    run(room)
    close(waiting, asked())


def test_text_may_come_before_the_request_has_a_slot():
    room, listener = engine(max_slots=1), Listener()
    room.speak("first", asked(), Listener())
    room.turn()
    room.speak("second", asked(text=TEXT[:HEAD], is_open=True), listener)
    room.feed("second", list(TEXT[HEAD:].encode()), is_last=True)
    run(room)
    close(listener, asked())


def test_more_text_than_a_slot_holds_fails_that_request_alone():
    room, fed, other = engine(), Listener(), Listener()
    room.speak("fed", asked(text=TEXT[:HEAD], is_open=True), fed)
    room.speak("other", asked(seed=8), other)
    room.turn()
    room.feed("fed", [65] * (MAX_TRAILING + 1))
    room.feed("nobody", [65])
    run(room)
    assert isinstance(fed.end, Failed) and "at most 64 are possible" in fed.end.message
    assert fed.end.code == "cannot_continue"
    close(other, asked(seed=8))


def test_a_request_that_waits_for_text_can_be_cancelled():
    room, listener = engine(), Listener()
    free = room.pages.free
    room.speak("request", asked(text=TEXT[:HEAD], is_open=True), listener)
    while room.turn():
        pass
    room.cancel("request")
    run(room)
    assert listener.end.reason == "cancelled" and room.pages.free == free


def test_a_model_without_open_text_refuses_it():
    with pytest.raises(
        RequestError, match="toy hum takes no text while it speaks: give all of it at once"
    ) as refused:
        engine(family("toy")).speak("request", asked(is_open=True), Listener())
    assert refused.value.param == "is_open"
    with pytest.raises(RequestError, match=r"zoo\.generate takes all of it at once"):
        zoo.generate(TOY, asked(is_open=True))


def test_an_idle_engine_wakes_for_text():
    """In a thread, as in a server: nothing turns until text comes."""
    import threading

    room, listener = engine(clock=time.monotonic), Listener()
    turns = []
    turn = room.turn
    room.turn = lambda: turns.append(1) or turn()
    thread = threading.Thread(target=room.run, daemon=True)
    thread.start()
    room.speak("request", asked(text=TEXT[: HEAD + 20], is_open=True), listener)
    deadline, before = time.monotonic() + 10, -1
    while len(turns) > before and time.monotonic() < deadline:
        before = len(turns) if listener.frames else -1
        time.sleep(0.2)
    assert len(turns) == before
    room.feed("request", list(TEXT[HEAD + 20 :].encode()), is_last=True)
    while listener.end is None and time.monotonic() < deadline:
        time.sleep(0.01)
    room.stop()
    thread.join(10)
    close(listener, asked())


def test_tokens_of_an_earlier_pass_that_were_cached_count_once():
    toy = GridToy()
    toy.spec = replace(toy.spec, answers=True)
    room, request = engine(toy), asked(options={"echoes": 2})
    [first], [second] = serve(room, {0: [request]}), serve(room, {0: [request]})
    assert "cached_tokens" not in first.end.usage
    assert second.end.usage["cached_tokens"] == 2 * PAGE_TOKENS  # one page of each pass


# long text


LONG = " ".join(
    (
        TEXT,
        "Good morning, everybody who is here today.",
        "The quick brown fox jumps over the lazy dog.",
        "And then?",
    )
)


@pytest.fixture(
    params=[
        "toy",
        "toy_guided",
        "toy_echoing",
        *(pytest.param(name, marks=pytest.mark.slow) for name in zoo.families()),
    ]
)
def speaker(request, monkeypatch) -> zoo.Family:
    """A family that speaks LONG in pieces, of few frames each: random weights find no end."""
    model = family(request.param)
    if model.spec.piece_s is None:
        pytest.skip("its texts stay whole")
    monkeypatch.setattr(model, "spec", replace(model.spec, piece_s=4.0))
    shorten_passes(model, monkeypatch)
    return model


def shorten_passes(model: zoo.Family, monkeypatch) -> None:
    passes = model.passes

    def short(request: Request):
        answer = passes(request)
        prompt = next(answer)
        while prompt is not None:
            prompt.max_frames = min(prompt.max_frames, 7)
            prompt = following(answer, (yield prompt))

    monkeypatch.setattr(model, "passes", short)


def spoken_in(model: zoo.Family, **fields) -> Request:
    return Request(**{"text": LONG, "seed": 3, "voice": next(iter(model.spec.voices), None), **fields})


@LAGS
def test_a_long_text_is_one_answer_that_equals_the_plain_loop_s(speaker, report_lag):
    requests = [spoken_in(speaker), spoken_in(speaker, text=TEXT, seed=4), spoken_in(speaker, seed=7)]
    room = engine(speaker, report_lag=report_lag)
    free = room.pages.free
    for request, listener in zip(requests, serve(room, {0: requests[:1], 2: requests[1:]}), strict=True):
        truth = zoo.generate(speaker, request)
        assert listener.frames == listener.end.frames == len(truth.frames)
        np.testing.assert_allclose(listener.samples, truth.samples, rtol=0, atol=5e-5)
    [model] = room.models.values()
    pieces = len(pieces_of(requests[0], speaker.spec))
    assert pieces == 3 and model.counters.queue_times.num == len(requests)
    assert room.pages.free == free
    texts = pieces_of(requests[0], speaker.spec)
    prompts = [next(speaker.passes(replace(requests[0], text=text))) for text in texts]
    words = sum(prompt.usage["input_tokens"] for prompt in prompts)
    assert listener.end.usage["input_tokens"] == words


@LAGS
def test_timestamps_say_which_samples_each_piece_took(speaker, report_lag):
    room, events, others = engine(speaker, report_lag=report_lag), [], []
    request = spoken_in(speaker)
    place = room.accept("timed", events.append, listener=settings.Listener(wants_timestamps=True))
    room.prepare(place, lambda: request)
    room.speak("untimed", spoken_in(speaker, seed=5), others.append)
    while room.num_requests:
        room.turn()
    spoken = [event for event in events if isinstance(event, Spoken)]
    assert [event.text for event in spoken] == pieces_of(request, speaker.spec) and len(spoken) == 3
    num_samples = 0
    for event in events:
        if isinstance(event, Audio):
            num_samples += len(event.samples)
        elif isinstance(event, Spoken):
            assert event.stop == num_samples  # it follows its audio
    assert [event.start for event in spoken] == [0, *(event.stop for event in spoken[:-1])]
    assert spoken[-1].stop == num_samples and isinstance(events[-1], Finished)
    lengths = []
    passes = speaker.passes(request)
    prompt = next(passes)
    while prompt is not None:
        speech = speak_pass(speaker, prompt, None)
        lengths.append(len(speech.samples))
        prompt = following(passes, speech.frames)
    assert [event.stop - event.start for event in spoken] == lengths
    assert not any(isinstance(event, Spoken) for event in others)


# pauses


@pytest.mark.parametrize(
    "name",
    ["toy", "toy_guided", *(pytest.param(name, marks=pytest.mark.slow) for name in zoo.families())],
)
def test_a_pause_is_silence_of_exactly_its_length(name, monkeypatch):
    model, events = family(name), []
    if model.spec.answers:
        pytest.skip("a model that answers reads no text aloud")
    shorten_passes(model, monkeypatch)
    rate_hz = model.spec.sample_rate_hz
    way = manners(model.spec)[-1] | {"seed": 3}
    request = Request(text="[pause:0.25s] One two. <break time='100ms'/> Three four. [pause:.5s]", **way)
    room = engine(model)
    place = room.accept("timed", events.append, listener=settings.Listener(wants_timestamps=True))
    room.prepare(place, lambda: request)
    run(room)
    samples = np.concatenate([event.samples for event in events if isinstance(event, Audio)])
    truth = zoo.generate(model, request)
    np.testing.assert_allclose(samples, truth.samples, rtol=0, atol=5e-5)
    spoken = [event for event in events if isinstance(event, Spoken)]
    ends = [0, *(at for event in spoken for at in (event.start, event.stop)), len(samples)]
    silences = list(zip(ends[::2], ends[1::2], strict=True))
    assert [stop - start for start, stop in silences] == [rate_hz // 4, rate_hz // 10, rate_hz // 2]
    assert not any(samples[start:stop].any() for start, stop in silences)
    speech = sum(event.stop - event.start for event in spoken)
    assert speech == sum(len(event.samples) for event in events if isinstance(event, Audio) and event.frames)


def test_a_listener_plays_the_silence_between_two_passes():
    """At speed 2 in half the time. Then it has nothing left, and the next audio comes too late."""
    text = "[pause:5s] Once. [pause:10s] Twice."
    for waited_s, num_underruns in ((7.0, 0), (10.0, 1)):
        room, listener = engine(family("toy")), Listener()
        [model] = room.models.values()
        place = room.accept("request", listener, listener=settings.Listener(speed=2.0))
        room.prepare(place, lambda: Request(text=text, seed=5))
        while not any(job.is_composing for job in model.running.values()):
            room.turn()
        room.clock.now_s += waited_s
        run(room)
        assert isinstance(listener.end, Finished) and listener.frames == 23
        assert model.scheduler.num_underruns == num_underruns


def test_a_turn_of_a_conversation_makes_no_pause():
    with pytest.raises(RequestError, match="turn of a conversation"):
        engine().speak("request", asked(text="One. [pause:1s] Two.", conversation="one"), Listener())


def test_a_text_that_stays_whole_is_one_pass(speaker):
    room = engine(speaker)
    serve(room, {0: [spoken_in(speaker, split_text=False)]})
    [model] = room.models.values()
    assert model.counters.queue_times.num == 1


def test_the_most_frames_end_an_answer_between_its_pieces():
    room = engine(family("toy"))
    request = Request(text=LONG * 3, seed=3, max_frames=20)
    [listener] = serve(room, {0: [request]})
    truth = zoo.generate(family("toy"), request)
    assert listener.end == Finished("length", 20, listener.end.usage) and len(truth.frames) == 20
    np.testing.assert_allclose(listener.samples, truth.samples, rtol=0, atol=5e-5)
    [model] = room.models.values()
    assert not model.running and not room.num_requests


def test_the_most_frames_limit_whatever_a_family_derives_from_them(monkeypatch):
    """This one keeps the number of its last frame in the slot."""
    model = family("toy_delay")
    monkeypatch.setattr(model, "spec", replace(model.spec, piece_s=4.0))
    request = Request(text=LONG * 3, seed=3, max_frames=19)
    assert len(pieces_of(request, model.spec)) > 1
    [listener] = serve(engine(model), {0: [request]})
    assert listener.frames == listener.end.frames == 19


@pytest.mark.parametrize("turns", range(0, 40, 3))
def test_a_cancel_anywhere_in_a_long_text_leaves_nothing_behind(turns):
    room, listener = engine(family("toy_echoing")), Listener()
    free = room.pages.free
    room.speak("request", Request(text=LONG, seed=4), listener)
    for _ in range(turns):
        room.turn()
    room.cancel("request")
    run(room)
    room.turn()
    [model] = room.models.values()
    assert (
        room.pages.free == free
        and not model.queue.jobs
        and not model.running
        and len(model.tenants.free) == 2
    )


def test_speech_of_an_odd_length_is_counted(monkeypatch):
    """A toy is at its end at once, or hums for as long as it may."""
    toy, room = family("toy"), engine(family("toy"))
    monkeypatch.setattr(toy, "passes", lambda request: iter_of(toy.prompt(request), *lengths[request.text]))
    lengths = {"short": (60.0, 60), "long": (0.5, 60), "cut": (60.0, 1), "unknown": (0.0, 60)}

    def iter_of(prompt, expected_s, max_frames):
        prompt.expected_s, prompt.max_frames = expected_s, max_frames
        yield prompt

    monkeypatch.setattr(toy, "spec", replace(toy.spec, sample_rate_hz=4))  # a frame a second
    listeners = serve(room, {0: [Request(text=text, seed=3, temperature=0.0) for text in lengths]})
    heard = {text: listener.frames for text, listener in zip(lengths, listeners, strict=True)}
    [stats] = room.stats()["models"].values()
    assert stats["long_passes"] == (heard["long"] > 6) == 1 and stats["short_passes"] == (
        heard["short"] < 14.5
    )
