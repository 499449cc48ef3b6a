"""Every decision of the engine over a seeded load is the recorded one: prompts, steps, windows, pauses and
ends.

The real engine runs on the simulator's clock. `decisions.json` holds, for each scenario, a hash of all
decisions, a short hash after each hundredth one, and the first ones in clear. After a wanted change of
policy, write it anew: PYTHONPATH=. python FILE.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.launch_costs import CPU, H200, SLOW_CPU
from compile_cache.strategy import Strategy
from serving.engine.device.arena import PAGE_TOKENS, token_bytes
from serving.engine.device.launches import Chunk
from serving.engine.engine import Audio, Engine, Event, Failed, Finished, Full
from serving.protocol import Listener
from serving.tools.simulate import AtOnce, Clock, Cost, SimulatedRunner, Voice, use_gpu_rules
from serving.tools.simulated_device import SimulatedDevice
from zoo.contract import Window
from zoo.request import Request

RECORDED = Path(__file__).parent / "decisions.json"
NUM_IN_CLEAR, NUM_PER_MARK = 12, 100
FRAME_S = 0.08


@dataclass
class Asked:
    """A request, and how its listener behaves. reads: of the audio a second, how much it takes (None: it does
    not say)."""

    at_s: float
    model: str
    request: Request
    leaves_s: float | None = None
    reads: float | None = None
    feeds: int = 0
    how: dict[str, Any] = field(default_factory=dict)
    first_s: float | None = None
    num_given: int = 0
    num_read: int = 0
    num_fed: int = 0
    end: Event | None = None


class Trace:
    """An engine, its listeners, and everything that it decides."""

    def __init__(
        self, voices: dict[str, Voice], costs: dict[str, Cost], is_async: bool, settings: dict[str, Any]
    ):
        self.clock, self.lines = Clock(), []
        self.costs = costs
        device = SimulatedDevice()  # of all models

        def make(family: Voice, num_slots: int, arena: Any, *_: object) -> SimulatedRunner:
            name = next(name for name, voice in voices.items() if voice is family)
            runner = SimulatedRunner(self.clock, costs[name], is_async, family, num_slots, arena)
            runner.device = device
            self.watch(name, runner)
            return runner

        self.engine = Engine(
            voices, clock=self.clock, make_runner=make, compile=False, report_lag=int(is_async), **settings
        )
        for name, model in self.engine.models.items():
            model.forecaster.seed(costs[name], model.family.spec.window.sizes)  # as a warm-up does
        self.engine.composer.executor = AtOnce()
        if is_async:
            for name, model in self.engine.models.items():
                use_gpu_rules(model, costs[name], lambda frames: (2, 8))

    def note(self, what: str) -> None:
        self.lines.append(f"{self.clock.now_s * 1e6:.0f} {what}")

    def watch(self, name: str, runner: SimulatedRunner) -> None:
        def watched(verb: str, told: Callable[..., str]) -> None:
            work = getattr(runner, verb)

            def watching(*args: Any) -> Any:
                self.note(f"{name} {verb} {told(*args)}")
                return work(*args)

            setattr(runner, verb, watching)

        watched("open", lambda slot, prompt, pages, skips: f"{slot} {list(map(len, pages))} {list(skips)}")
        watched("close", str)
        watched("prefill", chunks_of)
        watched("step", slots_of)
        watched("mixed", lambda slots, chunks: f"{chunks_of(chunks)} {slots_of(slots)}")
        watched("render", windows_of)
        watched("feed", lambda slot, tokens, is_last: f"{slot} {len(tokens)} {is_last}")
        watched("save", lambda pages: f"{len(pages)}")
        watched("restore", lambda pages, saved: f"{len(pages)}")

    def submit(self, index: int, one: Asked) -> None:
        def deliver(event: Event) -> None:
            match event:
                case Audio():
                    one.first_s = self.clock.now_s if one.first_s is None else one.first_s
                    one.num_given += event.frames
                case Finished() | Failed():
                    one.end = event
                    self.note(f"end {index} {getattr(event, 'reason', None) or event.code}")

        try:
            speak(self.engine, str(index), one, deliver)
        except Full as full:
            one.end = full
            self.note(f"full {index} {full.retry_after_s:.3f}")

    def listen(self, index: int, one: Asked) -> None:
        now_s = self.clock.now_s
        if one.leaves_s is not None and now_s >= one.at_s + one.leaves_s:
            self.engine.cancel(str(index))
        if one.feeds and now_s >= one.at_s + 0.3 * (one.num_fed + 1) and one.num_fed < one.feeds:
            one.num_fed += 1
            self.engine.feed(str(index), range(9), is_last=one.num_fed == one.feeds)
        if one.reads is not None and one.first_s is not None:
            taken = min(one.num_given, int(one.reads * (now_s - one.first_s) / FRAME_S))
            if taken > one.num_read:
                self.engine.consume(str(index), taken - one.num_read)
                one.num_read = taken

    def run(self, load: Sequence[Asked]) -> list[str]:
        waiting = sorted(enumerate(load), key=lambda pair: pair[1].at_s)
        here: dict[int, Asked] = {}
        for _ in range(20_000):
            while waiting and waiting[0][1].at_s <= self.clock.now_s:
                index, one = waiting.pop(0)
                self.submit(index, one)
                here[index] = one
            for index, one in list(here.items()):
                self.listen(index, one)
                if one.end is not None:
                    del here[index]
            running = sum(len(model.running) for model in self.engine.models.values())
            cost = next(iter(self.costs.values()))
            self.clock.now_s += cost.turn_s + cost.turn_slot_s * running
            is_busy = self.engine.turn()
            if is_busy or self.engine.num_requests or here:
                self.clock.now_s += 0.0 if is_busy else 0.02
                continue
            if not waiting:
                return self.lines
            self.clock.now_s = max(self.clock.now_s, waiting[0][1].at_s)
        raise AssertionError(f"{self.engine.num_requests} requests have not ended")


def slots_of(slots: np.ndarray) -> str:
    return " ".join(map(str, slots.tolist()))


def chunks_of(chunks: Sequence[Chunk]) -> str:
    return " ".join(f"{c.slot}.{c.lane}:{c.start}-{c.stop}" for c in chunks)


def windows_of(due: Any) -> str:
    rows = zip(due.slots.tolist(), due.start.tolist(), due.count.tolist(), due.is_last.tolist(), strict=True)
    windows = " ".join(
        f"{slot}:{start}+{count}{'.' if is_last else ''}" for slot, start, count, is_last in rows
    )
    return f"{due.frames} {due.length} {int(due.is_reproducible)} {windows}"


def speak(engine: Engine, id: str, one: Asked, deliver: Callable[[Event], None]) -> None:
    text_bytes = len(one.request.text.encode())
    listener = Listener(is_metered=one.reads is not None, **one.how)
    queued = engine.accept(id, deliver, one.model, listener, text_bytes=text_bytes)
    engine.prepare(queued, lambda: one.request)


def load_of(
    seed: int, rate: float, count: int, frames: int, kinds: str = "", models: Sequence[str] = ("voice",)
) -> list[Asked]:
    """kinds: "all" for listeners of every kind, "" for plain ones."""
    chance = np.random.default_rng(seed)
    at_s, load = 0.0, []
    for index in range(count):
        at_s += float(chance.exponential(1 / rate))
        size, length = int(chance.integers(20, 120)), int(chance.integers(frames // 2, 3 * frames // 2))
        one = Asked(
            at_s,
            models[int(chance.integers(len(models)))],
            Request(text="x" * size, seed=index % 7, max_frames=length),
        )
        kind = chance.choice(["plain", "flex", "pinned", "slow", "leaves", "fed", "fast", "reads"])
        if kinds == "all":
            become(one, str(kind))
        load.append(one)
    return load


def become(one: Asked, kind: str) -> None:
    match kind:
        case "flex":
            one.how = {"is_flexible": True}
        case "pinned":
            one.how = {"is_reproducible": True}
        case "slow":
            one.reads = 0.3
        case "reads":
            one.reads = 1.0
        case "leaves":
            one.leaves_s = 1.5
        case "fast":
            one.how = {"speed": 1.5}
        case "fed":
            one.request = replace(one.request, text=one.request.text[:12], is_open=True)
            one.feeds = 6


def grid_voice(is_one_by_one: bool) -> Voice:
    voice = Voice(Window((25, 50, 100), lookahead=3, grid=25, hold_samples=160), frame_s=0.04, guard=1.0)
    voice.strategy = Strategy(cuts_renders=is_one_by_one)
    return voice


def long_reader() -> Voice:
    voice = Voice(guard=1.0)
    voice.spec = replace(voice.spec, piece_s=3.0)
    return voice


GRID_COST = Cost(
    step_s=lambda slots: 0.004 + 0.0003 * slots,
    prefill_s=lambda tokens: 0.007 + 0.0002 * tokens,
    render_s=lambda rows, frames: rows * (0.065 + 0.005 * frames),
    turn_s=0.001,
)
GRID_H200 = replace(H200, render_s=lambda rows, frames: 0.028 + 0.002 * rows + 1e-5 * rows * frames)
SENTENCES = "This is a sentence of a long text that goes on for quite a while. " * 4


def one_voice(
    voice: Voice, cost: Cost, load: list[Asked], is_async: bool = False, **settings: Any
) -> list[str]:
    usual = {"max_slots": 8, "max_ttfa_s": 10.0, "max_unread_s": 2.0, "max_stall_s": 5.0}
    return Trace({"voice": voice}, {"voice": cost}, is_async, usual | settings).run(load)


def few_pages(voice: Voice, pages: int) -> dict[str, int]:
    page_bytes = PAGE_TOKENS * token_bytes(voice)
    return {"kv_memory_bytes": (1 + pages) * page_bytes, "swap_memory_bytes": 5 * pages * page_bytes}


def several(is_async: bool, policy: str) -> list[str]:
    voices = {
        "small": Voice(guard=1.0),
        "grid": grid_voice(True),
        "guided": Voice((Window((1, 2, 6))), lanes=2),
    }
    costs = {"small": CPU, "grid": GRID_COST, "guided": SLOW_CPU}
    if is_async:
        costs = {
            "small": H200,
            "grid": GRID_H200,
            "guided": replace(H200, render_s=lambda rows, frames: 0.004),
        }
    settings = {"max_slots": 6, "max_ttfa_s": 10.0, "policy": policy, "max_unread_s": 2.0, "max_stall_s": 5.0}
    load = load_of(5, 8.0 if is_async else 0.9, 40 if is_async else 24, 30, "all", tuple(voices))
    return Trace(voices, costs, is_async, settings).run(load)


def of_passes(policy: str) -> list[str]:
    load = [Asked(0.3 * i, "voice", Request(text=SENTENCES, seed=i)) for i in range(4)]
    return one_voice(long_reader(), CPU, load, policy=policy)


POLICIES = ("streaming", "throughput", "fifo")
SCENARIOS: dict[str, Callable[[], list[str]]] = {}
for policy in POLICIES:
    more: dict[str, Any] = {"policy": policy}
    SCENARIOS |= {
        f"cpu, {policy}": lambda more=more: one_voice(Voice(guard=1.0), CPU, load_of(0, 1.4, 40, 25), **more),
        f"slow cpu, {policy}": lambda more=more: one_voice(
            Voice(guard=1.0), SLOW_CPU, load_of(1, 1.1, 40, 25), **more
        ),
        f"cpu, listeners of all kinds, {policy}": lambda more=more: one_voice(
            Voice(guard=1.0), CPU, load_of(2, 1.2, 60, 30, "all"), **more
        ),
        f"cpu, grid, listeners of all kinds, {policy}": lambda more=more: one_voice(
            grid_voice(False), GRID_COST, load_of(3, 0.9, 40, 100, "all"), **more
        ),
        f"cpu, grid, one window at a time, {policy}": lambda more=more: one_voice(
            grid_voice(True), GRID_COST, load_of(4, 0.9, 40, 100, "all"), **more
        ),
        f"cpu, two lanes, few pages, {policy}": lambda more=more: one_voice(
            guided := Voice(guard=2.0, lanes=2),
            CPU,
            load_of(6, 2.5, 40, 40, "all"),
            **few_pages(guided, 34),
            **more,
        ),
        f"h200, {policy}": lambda more=more: one_voice(
            Voice(guard=1.0), H200, load_of(7, 90.0, 150, 52), True, max_slots=64, **more
        ),
        f"h200, listeners of all kinds, {policy}": lambda more=more: one_voice(
            Voice(guard=1.0), H200, load_of(8, 60.0, 120, 52, "all"), True, max_slots=48, **more
        ),
        f"h200, few pages, {policy}": lambda more=more: one_voice(
            voice := Voice(), H200, load_of(9, 60.0, 80, 52, "all"), True, **few_pages(voice, 40), **more
        ),
        f"h200, grid, {policy}": lambda more=more: one_voice(
            grid_voice(True), GRID_H200, load_of(10, 15.0, 60, 100, "all"), True, max_slots=16, **more
        ),
        f"cpu, several models, {policy}": lambda policy=policy: several(False, policy),
        f"h200, several models, {policy}": lambda policy=policy: several(True, policy),
        f"cpu, long texts in passes, {policy}": lambda policy=policy: of_passes(policy),
    }
SCENARIOS |= {
    "h200, reproducible": lambda: one_voice(
        Voice(guard=1.0), H200, load_of(11, 40.0, 50, 52, "all"), True, max_slots=32, is_deterministic=True
    ),
    "cpu, more than there is": lambda: one_voice(
        Voice(guard=1.0), CPU, load_of(12, 4.0, 60, 25, "all"), max_ttfa_s=2.0
    ),
    "cpu, all at once": lambda: one_voice(
        Voice(guard=1.0), CPU, load_of(13, 1e4, 40, 25), max_ttfa_s=None, max_waiting=30
    ),
}


def told(lines: list[str]) -> dict[str, Any]:
    marks = [
        sha256("\n".join(lines[:stop]).encode()).hexdigest()[:6]
        for stop in range(NUM_PER_MARK, len(lines), NUM_PER_MARK)
    ]
    return {
        "num_decisions": len(lines),
        "sha256": sha256("\n".join(lines).encode()).hexdigest(),
        "first": lines[:NUM_IN_CLEAR],
        "marks": " ".join(marks),
    }


# A baseline and full windows change rarely.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name.endswith(("fifo", "throughput")) else name
        for name in SCENARIOS
    ],
)
def test_decisions_are_those_that_were_recorded(name):
    assert told(SCENARIOS[name]()) == json.loads(RECORDED.read_text())[name]


if __name__ == "__main__":
    found = {name: told(run()) for name, run in SCENARIOS.items()}
    RECORDED.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{sum(one['num_decisions'] for one in found.values())} decisions of {len(found)} scenarios")
