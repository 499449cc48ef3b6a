"""Pages by need: which request gives up its pages and when, that it continues bit for bit, and that no
listener hears it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Clock, alone, family, requests, serve, with_and_without_lag
from models import Listener as Speaker

from serving.engine.device.arena import PAGE_TOKENS, token_bytes
from serving.engine.engine import Engine, Finished
from serving.engine.job import Job
from serving.engine.schedule.numbers import MAX_SKIPS
from serving.protocol import Listener
from serving.tools.simulate import Cost, Heard, Simulation, Voice
from zoo.request import Request

FAST = Cost(
    step_s=lambda slots: 0.004 + 0.001 * slots,
    prefill_s=lambda tokens: 0.001 + 2e-5 * tokens,
    render_s=lambda rows, frames: 0.0005 + 1e-4 * rows * frames,
    save_s=1e-5,
)


def simulation(pages: int, slots: int = 4, guard: float = 1.0, **more) -> Simulation:
    """guard: times its frames that a speech may have, as far as its prompt says."""
    voice = Voice(frames_per_byte=0.8, guard=guard)
    kv_memory_bytes = (1 + pages) * PAGE_TOKENS * token_bytes(voice)
    return Simulation(voice, FAST, settings={"max_slots": slots, "kv_memory_bytes": kv_memory_bytes, **more})


def text(size: int, seed: int = 0, **fields) -> Request:
    return Request(text="x" * size, seed=seed, **fields)


def at_rest(simulation: Simulation) -> None:
    """Everybody has ended, and every page and slot is back."""
    engine, model = simulation.engine, simulation.model
    engine.turn()
    assert not engine.num_requests and not model.queue.requests and not model.running
    assert engine.pages.free == engine.pages.num_pages and not engine.paging._paused()
    assert len(model.tenants.free) == model.runner.num_slots


def whole(heard: Heard, frames: int) -> None:
    assert isinstance(heard.end, Finished) and heard.end.frames == frames
    assert heard.audio_s == pytest.approx(frames * 0.08)


def test_three_long_texts_do_not_fill_an_arena_that_has_room_for_their_speech():
    """Each could come to need 27 of its pages, and speaks on twelve."""
    for reserve in (True, False):
        together = simulation(pages=60, guard=4.0, swap_memory_bytes=0 if reserve else None)
        together.model.forecaster.lengths.record(100, 80)
        listeners = [together.submit(text(100, seed)) for seed in range(3)]
        together.turn()
        assert len(together.model.running) == (2 if reserve else 3)
        together.run([])
        for heard in listeners:
            whole(heard, 80)


def test_longer_speeches_grow_and_pauses_are_inaudible():
    """Four speeches of which the arena holds three: they are far ahead of their listeners by the time that it
    is full."""
    room = simulation(pages=4 * 20 + 3)
    room.model.forecaster.lengths.record(40, 20)
    listeners = [room.submit(text(40, seed, max_frames=400)) for seed in range(4)]
    room.run([])
    assert room.engine.paging.num_pauses > 0
    for heard in listeners:
        whole(heard, 400)
        assert heard.late_s == 0
    at_rest(room)


def test_nothing_is_paused_if_all_pages_are_reserved():
    room = simulation(pages=200, swap_memory_bytes=0)
    listeners = [room.submit(text(40, seed, max_frames=100)) for seed in range(8)]
    room.run([])
    assert room.engine.paging.num_pauses == 0 and all(heard.end for heard in listeners)


def test_commitments_fit_the_arena_and_the_host():
    """Each may come to need nine pages; 13, and 31 on the host of which 18 stay free, are there for two."""
    room = simulation(pages=13, swap_memory_bytes=31 * PAGE_TOKENS * token_bytes(Voice()))
    room.model.forecaster.lengths.record(40, 4)
    for seed in range(4):
        room.submit(text(40, seed, max_frames=100))
    room.turn()
    assert len(room.model.running) == 2 and room.engine.pages.free >= 4
    room.run([])
    at_rest(room)


@pytest.mark.parametrize("saved", [5, 13, 31])
def test_paused_streams_stay_within_the_host_memory(saved):
    """A stream that holds nearly all pages would be copied for one page of the next."""
    room = simulation(pages=13, swap_memory_bytes=saved * PAGE_TOKENS * token_bytes(Voice()))
    room.model.forecaster.lengths.record(40, 4)
    model, most = room.model, [0]
    pause = model.pause

    def pause_and_count(job: Job) -> None:
        pause(job)
        paused = [job for job in model.running.values() if job.pages.saved is not None]
        most.append(sum(sum(model.pages.num_written(job)) for job in paused))

    model.pause = pause_and_count
    listeners = []
    for seed in range(4):
        listeners.append(room.submit(text(40, seed, max_frames=100)))
        for _ in range(40):
            room.turn()
    room.run([])
    assert max(most) <= saved and (saved < 31 or max(most) > 0)
    for heard in listeners:
        whole(heard, 100)
    at_rest(room)


def test_smaller_requests_skip_one_that_lacks_pages_a_bounded_number_of_times():
    room = simulation(pages=12, slots=2, swap_memory_bytes=0)
    room.submit(text(40, 0, max_frames=110))  # ten pages
    large = room.submit(text(40, 1, max_frames=110))
    small = [room.submit(text(4, 2 + i, max_frames=2)) for i in range(3 * MAX_SKIPS)]
    room.run([])
    assert sum(one.first_s < large.first_s for one in small) == MAX_SKIPS
    at_rest(room)


def test_a_cancel_of_a_paused_stream_leaves_nothing():
    room = simulation(pages=4 * 20 + 3)
    room.model.forecaster.lengths.record(40, 20)
    for seed in range(4):
        room.submit(text(40, seed, max_frames=400))
    while not room.engine.paging.paused:
        room.turn()
    [job] = room.engine.paging.paused
    room.engine.cancel(job.id)
    room.run([])
    assert sum(one.end.reason == "cancelled" for one in room.heard) == 1
    at_rest(room)


arrivals = st.lists(
    st.tuples(st.floats(0, 5), st.integers(1, 120), st.integers(1, 200), st.booleans()),
    min_size=1,
    max_size=25,
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(arrivals, st.integers(68, 120), st.integers(0, 200), st.integers(1, 6), st.booleans())
def test_every_request_ends_whole_however_few_pages_there_are(asked, pages, saved, slots, is_async):
    """The runner checks that every written position has its own page."""
    swap_memory_bytes = saved * PAGE_TOKENS * token_bytes(Voice())
    room = simulation(pages, slots, guard=4.0, swap_memory_bytes=swap_memory_bytes)
    room.is_async = is_async
    room.__post_init__()
    expected, cancelled = [], set()
    for i, (_, size, frames, leaves) in enumerate(sorted(asked)):
        expected.append((text(size, i, max_frames=frames), frames))
        cancelled |= {i} if leaves else set()
    listeners = []
    for i, ((at_s, *_), (request, _)) in enumerate(zip(sorted(asked), expected, strict=True)):
        while room.clock.now_s < at_s and room.turn():
            pass
        room.clock.now_s = max(room.clock.now_s, at_s)
        listeners.append(room.submit(request))
        if i - 3 in cancelled:
            room.engine.cancel(f"request-{i - 2}")
    for _ in range(200_000):
        if not room.turn() and not room.engine.num_requests:
            break
    for heard, (_, frames) in zip(listeners, expected, strict=True):
        assert isinstance(heard.end, Finished)
        if heard.end.reason != "cancelled":
            whole(heard, frames)
    at_rest(room)


def ask(
    room: Simulation, seed: int, frames: int, listener: Listener, text_bytes: int = 40, **fields
) -> Heard:
    """text_bytes: the length from which the engine estimates the frames."""
    heard = Heard(room.clock.now_s)
    queued = room.engine.accept(
        f"{seed}", partial(room.hear, heard), listener=listener, text_bytes=text_bytes
    )
    room.engine.prepare(queued, lambda: text(20, seed, max_frames=frames, **fields))
    return heard


def run_until(room: Simulation, until_s: float) -> None:
    while room.clock.now_s < until_s and room.turn():
        pass
    room.clock.now_s = max(room.clock.now_s, until_s)


def watch_pauses(room: Simulation) -> list[Job]:
    """Return the list that will have each job that is paused."""
    paused = []
    pause = room.engine.paging._pause
    room.engine.paging._pause = lambda job: (paused.append(job), pause(job))
    return paused


FLEXIBLE = Listener(is_flexible=True)


@pytest.mark.parametrize("text_bytes", [400, 40])
def test_flexible_requests_give_up_their_pages_for_listeners(text_bytes):
    """Whether the engine expects the speech to be as long as it is, and reserves its pages, or shorter, so
    that the listeners grow: they hear the same as without the flexible requests."""
    ttfa_s, pauses = {}, {}
    for num_flexible in (0, 4):
        room = simulation(pages=65, slots=8, swap_memory_bytes=400 * PAGE_TOKENS * token_bytes(Voice()))
        flexible = [ask(room, 100 + i, 300, FLEXIBLE, text_bytes) for i in range(num_flexible)]
        run_until(room, 0.9)
        paused = watch_pauses(room)
        listeners = [ask(room, i, 300, Listener(), text_bytes) for i in range(3)]
        room.run([])
        for heard in (*listeners, *flexible):
            whole(heard, 300)
        assert all(heard.late_s == 0 for heard in listeners)
        ttfa_s[num_flexible] = [heard.ttfa_s for heard in listeners]
        pauses[num_flexible] = sum(not job.listener.is_flexible for job in paused)
        at_rest(room)
    assert ttfa_s[4] == pytest.approx(ttfa_s[0], abs=0.05)
    assert pauses[4] <= pauses[0]


def test_a_flexible_request_whose_prompt_is_not_filled_gives_up_its_pages():
    """It has taken no step yet, and it comes back to all the pages of its prompt."""
    room = simulation(pages=40, slots=8)
    flexible = Heard(0.0)
    queued = room.engine.accept("long", partial(room.hear, flexible), listener=FLEXIBLE, text_bytes=20)
    room.engine.prepare(queued, lambda: text(300, 200, max_frames=20))
    room.turn()
    [slot] = room.model.scheduler.slots.prompt.queue
    listeners = [ask(room, i, 200, Listener(), text_bytes=250) for i in range(2)]
    room.turn()
    assert [job.id for job in room.engine.paging.paused] == ["long"]
    assert slot in room.model.scheduler.slots.prompt.queue and len(room.model.running) == 3
    room.run([])
    for heard, frames in ((flexible, 20), (listeners[0], 200), (listeners[1], 200)):
        whole(heard, frames)
    at_rest(room)


def test_a_client_that_reads_slowly_gives_up_its_pages_before_listeners():
    """They need none before their clients have read."""
    room = simulation(pages=50, max_unread_s=1.0)
    room.model.forecaster.lengths.record(40, 20)
    slow = [ask(room, 10 + i, 200, Listener(is_metered=True)) for i in range(2)]
    run_until(room, 2.0)
    assert room.model.scheduler.slots.listener.has_backpressure.sum() == 2
    paused = watch_pauses(room)
    heard = [ask(room, i, 350, Listener()) for i in range(2)]
    run_until(room, 40.0)
    assert {job.id for job in paused} == {"10", "11"}
    for one in heard:
        whole(one, 350)
        assert one.late_s == 0
    assert not any(one.end for one in slow)
    for _ in range(400):
        for one in (10, 11):
            room.engine.consume(str(one), 1)
        run_until(room, room.clock.now_s + 0.08)
    for one in slow:
        whole(one, 200)
    at_rest(room)


def test_a_session_that_waits_for_text_gives_up_its_pages_and_blocks_nobody():
    """It has played all of its audio. A paused stream with so little audio would keep newcomers out."""
    room = simulation(pages=24)
    session = ask(room, 10, 100, Listener(), is_open=True)
    run_until(room, 5.0)
    assert room.model.scheduler.slots.is_starved.sum() == 1 and session.end is None
    heard = ask(room, 0, 330, Listener(), text_bytes=400)
    run_until(room, 6.0)
    assert [job.id for job in room.engine.paging.paused] == ["10"] and heard.first_s is not None
    run_until(room, 40.0)
    whole(heard, 330)
    late = ask(room, 1, 10, Listener())
    run_until(room, 45.0)
    whole(late, 10)
    room.engine.feed("10", range(100), is_last=True)
    room.run([])
    whole(session, 100)
    at_rest(room)


kinds = st.sampled_from(["plain", "flexible", "slow", "fed", "leaves"])
mixed = st.lists(
    st.tuples(st.floats(0, 5), st.integers(1, 120), st.integers(1, 200), kinds), min_size=1, max_size=20
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(mixed, st.integers(68, 100), st.integers(0, 200), st.integers(1, 6), st.booleans())
def test_listeners_of_every_kind_end_whole_however_few_pages_there_are(asked, pages, saved, slots, is_async):
    saved_bytes = saved * PAGE_TOKENS * token_bytes(Voice())
    room = simulation(pages, slots, guard=4.0, swap_memory_bytes=saved_bytes, max_unread_s=1.0)
    room.is_async = is_async
    room.__post_init__()
    heard = {}
    for i, (at_s, size, frames, kind) in enumerate(sorted(asked)):
        run_until(room, at_s)
        listener = Listener(is_flexible=kind == "flexible", is_metered=kind == "slow")
        heard[i] = ask(room, i, frames, listener, size, is_open=kind == "fed")
    for _ in range(3000):
        if not room.engine.num_requests:
            break
        for i, (*_, kind) in enumerate(sorted(asked)):
            if kind == "slow":
                room.engine.consume(str(i), 3)
            if kind == "fed":
                room.engine.feed(str(i), range(20), is_last=False)
            if kind == "leaves" and heard[i].first_s is not None:
                room.engine.cancel(str(i))
        run_until(room, room.clock.now_s + 0.2)
    for i, (_, _, frames, kind) in enumerate(sorted(asked)):
        assert isinstance(heard[i].end, Finished), (kind, heard[i])
        if kind != "leaves":
            whole(heard[i], frames)
    at_rest(room)


@with_and_without_lag
def test_a_paused_stream_continues_bit_for_bit(name, report_lag, monkeypatch):
    """A speaking request is paused every third turn, and comes back to other pages."""
    engine = Engine(
        family(name),
        max_slots=3,
        swap_memory_bytes=1 << 30,
        compile=False,
        report_lag=report_lag,
        clock=Clock(),
    )
    plain, turns = engine.paging.deal, itertools.count()

    def pause_first() -> None:
        if next(turns) % 3 == 2:
            for job in engine.paging._holders():
                engine.paging._pause(job)
        plain()

    monkeypatch.setattr(engine.paging, "deal", pause_first)
    asked = requests(name, 4, max_frames=20)
    listeners = serve(engine, {0: asked[:2], 4: asked[2:]})
    assert engine.paging.num_pauses >= 4
    for listener, request in zip(listeners, asked, strict=True):
        truth = alone(name, request)
        assert listener.frames == len(truth.frames)
        np.testing.assert_allclose(listener.samples, truth.samples, rtol=0, atol=5e-5)
    assert engine.pages.free == engine.pages.num_pages


def turn_until(engine: Engine, is_so: Callable[[], bool]) -> None:
    for _ in range(3000):
        if is_so():
            return
        if not engine.turn():
            time.sleep(0.001)  # another thread is building the next pass
    raise AssertionError("the engine does not come to that")


def test_a_stream_that_is_over_needs_no_more_pages_than_it_was_promised():
    """Its last step was launched once more before its report was read, and its positions fill their pages."""
    request = Request(text="h" * 12, temperature=0.0, seed=1, max_frames=2 * PAGE_TOKENS - 12)
    engine = Engine(family("toy"), max_slots=1, compile=False, report_lag=1, clock=Clock())
    engine.speak("request", request, Speaker())
    [model] = engine.models.values()
    end_failing, needed = engine.lifecycle.end_failing, []

    def look() -> None:
        over = [job for job in model.running.values() if model.is_done(job.slot)]
        needed.extend((model.needed_to_resume(job), model.pages.num_needed(job.prompt)) for job in over)
        end_failing()

    engine.lifecycle.end_failing = look
    turn_until(engine, lambda: not engine.num_requests)
    assert needed and all(each == ([2], [2]) for each in needed)


def test_a_pass_may_end_while_its_stream_is_paused_and_the_next_one_may_lack_pages():
    """The stream is paused while the report of its last step is on its way, and others hold all pages."""
    request = Request(text="Hmmm hmmm hmmm hmmm. " * 5, temperature=0.0, seed=1)
    engine = Engine(family("toy"), max_slots=1, compile=False, report_lag=1, clock=Clock())
    listener = Speaker()
    engine.speak("long", request, listener)
    engine.turn()
    [model] = engine.models.values()
    [job] = model.running.values()
    last = len(job.prompt.inputs) - 1 + job.prompt.max_frames
    turn_until(engine, lambda: model.runner.kv_lens[job.slot] == last)
    assert not model.is_done(job.slot)
    engine.paging._pause(job)
    others = engine.pages.take(engine.pages.free)
    turn_until(engine, lambda: job.past.frames > 0)
    assert job.pages.saved is not None
    engine.pages.give_back(others)
    turn_until(engine, lambda: not engine.num_requests)
    np.testing.assert_allclose(listener.samples, alone("toy", request).samples, rtol=0, atol=5e-5)
    assert engine.pages.free == engine.pages.num_pages
