"""Measure steps alone and next to clips that are being encoded, with a model that listens.

    python -m benchmarks.listening DIR [--streams 4] [--clip-s 30] [--clips 5] [--alone-s 20] [--no-compile]

An engine in this process answers `--streams` texts, one answer after the other on each stream. For `--alone-s` seconds
nothing else runs. Then a thread builds prompts with clips of `--clip-s` seconds, as a server's thread does, and all of
them are different. Two times are measured: that of a step's launch, and that from one step to the next, in which
listeners wait for everything else. On a GPU a launch returns before it is done, so only the second time counts there.
Run it on a quiet machine: the encoder and the steps share its cores, and other programs count.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

import zoo
from compile_cache import threads
from serving.engine.device.prepare_for_host import cached, prepare_for_host
from serving.engine.engine import Engine, Event, Failed, Finished
from zoo.contract import Family
from zoo.request import AudioClip, Request, Turn

TEXT = "Tell me a long story about the river and the house."
MAX_FRAMES = 200
RATE_HZ = 16_000
SETTLED_S = 2.0
MIN_STEPS = 2  # of a measurement, on however slow a machine


@dataclass
class Steps:
    """The times of steps in seconds: of their launches, and since the step before."""

    launch_s: list[float] = field(default_factory=list)
    since_s: list[float] = field(default_factory=list)

    def row(self, name: str) -> str:
        cells = [
            f"{1e3 * np.percentile(times, p):.1f}"
            for times in (self.launch_s, self.since_s)
            for p in (50, 99)
        ]
        return f"| {name} | {len(self.launch_s)} | {' | '.join(cells)} |"


class Talk:
    """Streams of answers, each followed by the next, and the times of their steps."""

    def __init__(self, engine: Engine, streams: int):
        self.engine = engine
        self.steps = Steps()
        self.num_asked = 0
        self.waiting = streams  # streams whose next answer is to be asked for
        self.last_s: float | None = None  # when the last step's launch returned
        [model] = engine.models.values()
        model.runner.observer = self.note

    def note(self, event: str, rows: int, seconds: float) -> None:
        if event != "step":
            return
        now_s = time.perf_counter()
        self.steps.launch_s.append(seconds)
        if self.last_s is not None:
            self.steps.since_s.append(now_s - self.last_s)
        self.last_s = now_s

    def take(self, event: Event) -> None:
        assert not (isinstance(event, Failed) and event.code != "no_audio"), event
        self.waiting += isinstance(event, Finished | Failed)

    def ask(self) -> None:
        for _ in range(self.waiting):
            self.num_asked += 1
            request = Request(
                text=TEXT, seed=self.num_asked, max_frames=MAX_FRAMES, **voice_of(self.engine.family(None))
            )
            self.engine.speak(str(self.num_asked), request, self.take)
            self.last_s = None  # a prompt was built on this thread
        self.waiting = 0

    def run_while(self, goes_on: Callable[[], bool]) -> Steps:
        """Take turns, and return the times of their steps."""
        self.steps, self.last_s = Steps(), None
        while goes_on() or len(self.steps.since_s) < MIN_STEPS:
            self.ask()
            self.engine.turn()
        return self.steps


def voice_of(family: Family[Any]) -> dict[str, Any]:
    """Return the fields of a voice: the model's first one, or a second of hum for a model that only clones."""
    spec = family.spec
    if spec.voices or spec.reference_s is None:
        return {"voice": next(iter(spec.voices), None)}
    return {"references": (zoo.Reference(clip_of(1.0, 0)),)}


def clip_of(seconds: float, seed: int) -> AudioClip:
    """Return a clip of noise and hum, which differs by its seed."""
    t = np.arange(int(seconds * RATE_HZ)) / RATE_HZ
    noise = np.random.default_rng(seed).normal(0, 0.05, len(t))
    return AudioClip((np.sin(2 * np.pi * 200 * t) / 3 + noise).astype(np.float32), RATE_HZ)


def encode_all(family: Family[Any], seconds: float, clips: int) -> list[float]:
    """Build prompts with clips, and return the seconds that each took."""
    took_s = []
    for seed in range(clips):
        turn = Turn("user", clip=clip_of(seconds, seed + 1))
        began_s = time.perf_counter()
        family.prompt(Request(text="", turns=(turn,), **voice_of(family)))
        took_s.append(time.perf_counter() - began_s)
    return took_s


def loaded(directory: str, streams: int, is_compiled: bool) -> Engine:
    family = zoo.load(directory)
    if not family.spec.listens:
        raise ValueError(f"{family.spec.name} does not listen")
    prepare_for_host(family, compile=is_compiled)
    engine = Engine(family, max_slots=streams, compile=is_compiled)
    if is_compiled:
        engine.warm(lambda fraction, stage: None, cached)
    return engine


def measure(engine: Engine, streams: int, alone_s: float, clip_s: float, clips: int) -> list[str]:
    """Return the lines of the report."""
    family, talk = engine.family(None), Talk(engine, streams)
    until_s = time.perf_counter() + SETTLED_S
    talk.run_while(lambda: time.perf_counter() < until_s)
    end_s = time.perf_counter() + alone_s
    alone = talk.run_while(lambda: time.perf_counter() < end_s)
    with ThreadPoolExecutor(1, "prompt", threads.work_in_background) as pool:
        encoding = pool.submit(encode_all, family, clip_s, clips)
        beside = talk.run_while(lambda: not encoding.done())
    took_s = encoding.result()
    return [
        f"| {streams} streams | steps | launch p50, ms | p99 | step to step p50, ms | p99 |",
        "|---|---|---|---|---|---|",
        alone.row("alone"),
        beside.row(f"next to clips of {clip_s:g} s"),
        f"\nA clip took {np.median(took_s):.2f} s next to the steps (median of {clips}).",
    ]


def cpu() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--clip-s", type=float, default=30.0)
    parser.add_argument("--clips", type=int, default=5)
    parser.add_argument("--alone-s", type=float, default=20.0)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument(
        "--any-core",
        action="store_true",
        help="let the system choose the cores of steps, which a server does not",
    )
    options = parser.parse_args()
    engine = loaded(options.directory, options.streams, not options.no_compile)
    if not options.any_core:
        threads.keep_team_on_cores()
    spec = engine.family(None).spec
    print(f"{spec.name} on {engine.arena.device}; the CPU is {cpu()}")
    print("\n".join(measure(engine, options.streams, options.alone_s, options.clip_s, options.clips)))


if __name__ == "__main__":
    main()
