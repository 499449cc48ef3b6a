"""What many tests need: every family as a tiny random model, requests that differ in everything, and the
codes of each alone."""

from __future__ import annotations

import copy
import importlib
import itertools
import tempfile
import time
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import zoo
from serving.engine.engine import Audio, Engine, Event, Failed, Finished, Text
from zoo.contract import AudioClip, Family, Option, Reference, Request, Spec, Speech
from zoo.loop import speak_pass
from zoo.nn import kernels
from zoo.request import SAMPLING, check


def toys() -> dict[str, Callable[[], Family[Any]]]:
    """Every family that a file `toy*.py` beside this one makes, under the names of its TOYS."""
    files = sorted(Path(__file__).parent.glob("toy*.py"))
    return {name: make for file in files for name, make in importlib.import_module(file.stem).TOYS.items()}


TOYS = toys()
NAMES = (*TOYS, *zoo.families())
_directories = tempfile.TemporaryDirectory(prefix="zoo-tests-")  # goes with the process

TEXTS = (
    "Good morning.",
    "It's 7:45, and my iPhone isn't ready.",
    "The quick brown fox jumps over the lazy dog, and then some.",
    "a",
    "Good morning, everybody who is here today.",
    "今天天气很好",
    "Once there was a small house near the river.",
    "one two three four five six seven eight nine ten",
)
_CLIP = AudioClip(np.sin(np.arange(3500) ** 1.5 / 30).astype(np.float32) / 4, 16000)


@cache
def directory(name: str, size: str) -> Path:
    """A tiny random checkpoint, written once per process. Not to be changed: copy it first."""
    return zoo.families()[name].write_demo(
        Path(_directories.name) / f"{name}-{size}", size, dtype=torch.float32
    )


def family(name: str, dtype: str = "float32", size: str = "tiny") -> Family:
    """dtype "float64" is for what a family computes from a state alone (`render`): no checkpoint runs in it
    as a whole."""
    return _family(name, dtype, size)


@cache
def _family(name: str, dtype: str, size: str) -> Family:
    if dtype == "float64":
        return copy.deepcopy(family(name, size=size)).double()
    return TOYS[name]() if name in TOYS else zoo.load(directory(name, size), "cpu", dtype)


def requests(name: str, count: int, max_frames: int = 14) -> list[Request]:
    """`count` requests that differ in text, voice, reference, sampling, seed and length, and in every option
    of the family's."""
    spec = family(name).spec
    return [
        Request(
            text=TEXTS[i % len(TEXTS)],
            seed=(i << 40) + i,
            max_frames=1 + (5 * i + 9) % max_frames,
            **settings(spec.options, i),
            **manners(spec)[i % len(manners(spec))],
        )
        for i in range(count)
    ]


def settings(options: tuple[Option, ...], i: int) -> dict[str, Any]:
    """Sampling fields and options of request i: of each, every third request has the model's default."""
    given = {option.name: value_of(option, i + zlib.crc32(option.name.encode())) for option in options}
    given = {param: value for param, value in given.items() if value is not None}
    shared = {param: value for param, value in given.items() if param in SAMPLING}
    return shared | {"options": {param: value for param, value in given.items() if param not in SAMPLING}}


def value_of(option: Option, i: int) -> Any:
    """A value that is possible; None is the default."""
    if i % 3 == 0:
        return None
    if option.type is bool:
        return i % 2 == 0
    if option.choices:
        return option.choices[i % len(option.choices)]
    low, high = option.range
    usual = option.default or min(high, 5)
    return option.type((low, usual, min(high, 1.4 * usual), max(low, 0.7 * usual))[i % 4])


def manners(spec: Spec) -> list[dict[str, Any]]:
    """The ways to ask for a voice, in turn."""
    ways: list[dict[str, Any]] = [{"voice": voice} for voice in spec.voices] or [{}]
    if {"instruct", "design"} & set(spec.modes):
        ways.append({"instructions": "slowly", "voice": next(iter(spec.voices), None)})
    if spec.reference_s is not None:
        ways += [{"references": (Reference(_CLIP, transcript),)} for transcript in (None, "Good evening.")]
    return ways


def write(family: Family, request: Request) -> Any:
    """A request's prompt as ids, by the family's own writer. Raises RequestError."""
    return family.writer(request, check(request, family.spec))


@cache
def alone(name: str, request: Request) -> Speech:
    """What the plain loop makes of a request: the truth to test against."""
    return zoo.generate(family(name), request)


@cache
def first_pass(name: str, request: Request) -> Speech:
    """The same of a request's first pass, which for most is the only one."""
    with torch.inference_mode(), kernels.plain():
        return speak_pass(family(name), next(family(name).prompts(request)), None)


class Listener:
    """A listener: what it heard and read, and how it ended. Nothing may come after the end."""

    def __init__(self) -> None:
        self.chunks: list[np.ndarray] = []
        self.texts: list[str] = []
        self.frames = 0
        self.end: Finished | Failed | None = None

    def __call__(self, event: Event) -> None:
        assert self.end is None, f"{event} after {self.end}"
        if isinstance(event, Audio):
            self.chunks.append(event.samples)
            self.frames += event.frames
        elif isinstance(event, Text):
            self.texts.append(event.text)
        else:
            self.end = event

    @property
    def reason(self) -> str:
        """Why it ended, or which failure it was."""
        assert self.end is not None, "it has not ended"
        return self.end.reason if isinstance(self.end, Finished) else self.end.code

    @property
    def has_ended_well(self) -> bool:
        """Whether it came to an end that the engine meant; speech without a frame is one."""
        return isinstance(self.end, Finished) or self.reason == "no_audio"

    @property
    def samples(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.float32), *self.chunks])


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def serve(engine: Engine, arrivals: dict[int, list[Request]]) -> list[Listener]:
    """Speak each turn's requests, turn by turn, until all have ended -> their listeners, in order of
    arrival."""
    listeners: list[Listener] = []
    turns = itertools.count()
    while True:
        turn = next(turns)
        for request in arrivals.get(turn, ()):
            listeners.append(Listener())
            engine.speak(f"request-{len(listeners)}", request, listeners[-1])
        assert turn < 5000, "the engine does not come to an end"
        is_busy = engine.turn()
        if not engine.num_requests and turn >= max(arrivals):
            return listeners
        if not is_busy and engine.num_requests:
            time.sleep(0.001)  # a next pass is being made
        if isinstance(engine.clock, Clock):
            engine.clock.now_s += 0.03
