"""More requests than the engine can speak in time, next to listeners who have been accepted.

Nothing is computed: the real engine runs on a virtual clock, with the times that launches take.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from serving.engine.device.arena import PAGE_TOKENS, token_bytes
from serving.engine.engine import Finished
from serving.protocol import Listener
from serving.tools.simulate import Cost, Heard, Simulation, Voice
from tests.attack.report import Row
from zoo.request import Request

SENTENCE = "This is a sentence of a long text that goes on for quite a while. "
SLOWER, SLOWER_FROM_S = 1.35, 10.0
NUM_BURST, MAX_TTFA_S = 200, 10.0
NUM_PAGES = 65
SOON_S = 1.0  # until first audio, if a slot and pages are free
QUICK = Cost(step_s=lambda slots: 0.02 + 0.004 * slots, render_s=lambda rows, frames: 0.0005 * rows * frames)
STEADY = Cost(step_s=lambda slots: 0.045 + 0.001 * slots, render_s=lambda rows, frames: 0.001)


def attack(directory: Path) -> Iterator[Row]:
    yield slower_machine()
    yield burst()
    yield flexible_requests()
    yield fast_listener()
    yield sessions_without_text()


def slower_machine() -> Row:
    """Eight long texts, whose later passes begin when the machine has become slower. It still speaks as fast
    as they listen, so nobody hears a pause."""
    voice = Voice(guard=1.0)
    voice.spec = replace(voice.spec, piece_s=6.0)
    times = 1.0
    cost = Cost(
        step_s=lambda slots: times * (0.016 + 0.005 * slots),
        render_s=lambda rows, frames: times * 0.0002 * rows * frames,
    )
    room = Simulation(voice, cost, settings={"max_slots": 8, "max_ttfa_s": MAX_TTFA_S})
    heard = [room.submit(Request(text=12 * SENTENCE, seed=seed)) for seed in range(8)]
    room.run([], until_s=SLOWER_FROM_S)
    times = SLOWER
    room.run([])
    silent = sum(one.late_s > 0.1 or not isinstance(one.end, Finished) for one in heard)
    seen = f"longest silence in mid-speech {max(one.late_s for one in heard):.1f} s"
    return Row(f"8 long texts, machine {SLOWER} times slower", 8, silent, seen)


def burst() -> Row:
    """All come at once to an engine that has not spoken yet."""
    settings = {"max_slots": 8, "max_ttfa_s": MAX_TTFA_S}
    room = Simulation(Voice(guard=1.0), QUICK, settings=settings)
    asked = [(0.002 * seed, Request(text="x" * 60, seed=seed)) for seed in range(NUM_BURST)]
    heard = [one for one in room.run(asked) if isinstance(one.end, Finished)]
    waited_s = [one.ttfa_s or 0.0 for one in heard]
    late = sum(seconds > MAX_TTFA_S for seconds in waited_s)
    seen = f"{len(heard)} are accepted, the last is heard after {max(waited_s):.1f} s"
    return Row(f"{NUM_BURST} requests at a fresh engine", NUM_BURST, late + (not heard), seen)


def flexible_requests() -> Row:
    """They hold the pages when listeners come, who hear the same as without them."""
    alone, crowded = (ttfa_s(three_listeners(num)) for num in (0, 6))
    late = sum(after > before + SOON_S for before, after in zip(alone, crowded, strict=True))
    return Row("6 flexible requests, few pages", len(crowded), late, f"first audio after {told(crowded)}")


def three_listeners(num_flexible: int) -> list[Heard]:
    room = Simulation(Voice(guard=1.0), STEADY, settings=few_pages(NUM_PAGES))
    for seed in range(num_flexible):
        ask(room, 100 + seed, Listener(is_flexible=True), text_bytes=200)
    room.run([], until_s=10.0)
    heard = [ask(room, seed, Listener(), text_bytes=200) for seed in range(3)]
    room.run([])
    return heard


def few_pages(pages: int) -> dict[str, float]:
    page_bytes = PAGE_TOKENS * token_bytes(Voice())
    memory = {"kv_memory_bytes": (1 + pages) * page_bytes, "swap_memory_bytes": 400 * page_bytes}
    return memory | {"max_slots": 8, "max_ttfa_s": 30.0}


def ask(room: Simulation, seed: int, listener: Listener, text_bytes: int, **fields: object) -> Heard:
    """Ask for 300 frames. text_bytes: from which the engine estimates them."""
    heard = Heard(room.clock.now_s)
    hear = partial(room.hear, heard)
    queued = room.engine.accept(f"{seed}", hear, listener=listener, text_bytes=text_bytes)
    request = Request(text="x" * 20, seed=seed, max_frames=300, **fields)  # type: ignore[arg-type]
    room.engine.prepare(queued, lambda: request)
    return heard


def fast_listener() -> Row:
    """Eight streams are made in time. One listener plays twice as fast, so one of the others waits."""
    room = Simulation(Voice(guard=1.0), QUICK, settings={"max_slots": 8, "max_ttfa_s": 60.0})
    room.run([(0.5 * seed, Request(text="x" * 60, seed=1000 + seed)) for seed in range(10)])
    speeds = [2.0] + 7 * [1.0]
    heard = [ask(room, seed, Listener(speed=speed), text_bytes=375) for seed, speed in enumerate(speeds)]
    room.run([])
    waited_s = ttfa_s(heard[1:])
    late = sum(seconds > SOON_S for seconds in waited_s)
    return Row("a listener at double speed", 7, max(late - 1, 0), f"first audio after {told(waited_s)}")


def sessions_without_text() -> Row:
    """They hold no page and no listener's place while they wait for text."""
    room = Simulation(Voice(guard=1.0), STEADY, settings=few_pages(24))
    sessions = [ask(room, 10 + seed, Listener(), 40, is_open=True) for seed in range(3)]
    room.run([], until_s=5.0)
    heard = ask(room, 0, Listener(), text_bytes=400)
    room.run([], until_s=room.clock.now_s + SOON_S)
    is_late = heard.first_s is None
    for session in range(3):
        room.engine.feed(f"{10 + session}", range(100), is_last=True)
    room.run([])
    lost = sum(not isinstance(one.end, Finished) for one in (*sessions, heard))
    seen = f"a listener is heard after {heard.ttfa_s or 0:.1f} s; {lost} of 4 do not end"
    return Row("3 sessions without text, few pages", 4, lost + is_late, seen)


def ttfa_s(heard: Sequence[Heard]) -> list[float]:
    return [one.ttfa_s or float("inf") for one in heard]


def told(seconds: Sequence[float]) -> str:
    return ", ".join(f"{one:.1f}" for one in seconds) + " s"
