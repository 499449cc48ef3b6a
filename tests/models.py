"""Helpers for many tests: every family as a tiny random model, requests that differ in every field, and the
plain loop's result for each of them."""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import tempfile
import time
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zoo
from serving.engine.engine import Audio, Engine, Event, Failed, Finished, Text
from zoo import kernels
from zoo.check import check
from zoo.contract import Family, Spec, Speech
from zoo.loop import speak_pass
from zoo.request import SAMPLING, AudioClip, Option, Reference, Request


def toys() -> dict[str, Callable[[], Family[Any]]]:
    """Return the families in the files `toy*.py` next to this one, by their names in TOYS."""
    files = sorted(Path(__file__).parent.glob("toy*.py"))
    return {name: make for file in files for name, make in importlib.import_module(file.stem).TOYS.items()}


TOYS = toys()
NAMES = (*TOYS, *zoo.families())
# Reports come one launch late in every server. Reports without a lag concern the engine alone.
with_and_without_lag = pytest.mark.parametrize(
    ("name", "report_lag"),
    [(name, lag) for name in TOYS for lag in (0, 1)]
    + [pytest.param(name, 1, marks=pytest.mark.slow) for name in NAMES if name not in TOYS],
)
_directories = tempfile.TemporaryDirectory(prefix="zoo-tests-")  # deleted when the process ends

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
    """Return the directory of a tiny random checkpoint, written once per process. Copy it before you change
    it."""
    return zoo.families()[name].write_demo(
        Path(_directories.name) / f"{name}-{size}", size, dtype=torch.float32
    )


def change_json(file: Path, block: str | None = None, **values: Any) -> None:
    """Set keys of a JSON file or of one of its blocks. None removes a key."""
    content = json.loads(file.read_text())
    inner = content if block is None else content[block]
    inner |= values
    for key in [key for key, value in inner.items() if value is None]:
        del inner[key]
    file.write_text(json.dumps(content))


def family(name: str, dtype: str = "float32", size: str = "tiny") -> Family:
    """Return a tiny random model. dtype "float64" is only for `render`; no checkpoint runs in it as a
    whole."""
    return _family(name, dtype, size)


@cache
def _family(name: str, dtype: str, size: str) -> Family:
    if dtype == "float64":
        return copy.deepcopy(family(name, size=size)).double()
    return TOYS[name]() if name in TOYS else zoo.load(directory(name, size), "cpu", dtype)


def requests(name: str, count: int, max_frames: int = 14) -> list[Request]:
    """Return `count` requests that differ in text, voice, reference, sampling, seed, length, and every option
    of the family."""
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
    """Return the sampling fields and options of request i. Each of them keeps its default in every third
    request."""
    given = {option.name: value_of(option, i + zlib.crc32(option.name.encode())) for option in options}
    given = {param: value for param, value in given.items() if value is not None}
    shared = {param: value for param, value in given.items() if param in SAMPLING}
    return shared | {"options": {param: value for param, value in given.items() if param not in SAMPLING}}


def value_of(option: Option, i: int) -> Any:
    """Return a possible value of an option for request i; None is the default."""
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
    """Return the ways to choose a voice."""
    ways: list[dict[str, Any]] = [{"voice": voice} for voice in spec.voices] or [{}]
    if {"instruct", "design"} & set(spec.modes):
        ways.append({"instructions": "slowly", "voice": next(iter(spec.voices), None)})
    if spec.reference_s is not None:
        transcripts = ("Hm.", "Good evening.") if spec.needs_transcript else (None, "Good evening.")
        ways += [{"references": (Reference(_CLIP, transcript),)} for transcript in transcripts]
    return ways


def write(family: Family, request: Request) -> Any:
    """Return a request's prompt as ids, from the family's own writer. Raises RequestError."""
    return family.writer(request, check(request, family.spec))


@cache
def alone(name: str, request: Request) -> Speech:
    """Return the plain loop's speech for a request, the reference for all tests."""
    return zoo.generate(family(name), request)


@cache
def first_pass(name: str, request: Request) -> Speech:
    """Return the plain loop's speech for a request's first pass, which for most requests is the only one."""
    with torch.inference_mode(), kernels.plain():
        return speak_pass(family(name), next(family(name).prompts(request)), None)


class Listener:
    """A listener that records audio, text and end of its stream. No event may follow the end."""

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
        """The reason of the end, or the name of the failure."""
        assert self.end is not None, "the stream has not ended"
        return self.end.reason if isinstance(self.end, Finished) else self.end.code

    @property
    def has_ended_well(self) -> bool:
        """Return whether the request finished, or failed only because its speech has no frame."""
        return isinstance(self.end, Finished) or self.reason == "no_audio"

    @property
    def samples(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.float32), *self.chunks])


class Clock:
    """A clock that only advances when a test sets it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def serve(engine: Engine, arrivals: dict[int, list[Request]]) -> list[Listener]:
    """Run the engine and submit the requests of each step until all have ended -> listeners in order of
    arrival."""
    listeners: list[Listener] = []
    turns = itertools.count()
    while True:
        turn = next(turns)
        for request in arrivals.get(turn, ()):
            listeners.append(Listener())
            engine.speak(f"request-{len(listeners)}", request, listeners[-1])
        assert turn < 5000, "the requests do not end"
        is_busy = engine.turn()
        if not engine.num_requests and turn >= max(arrivals):
            return listeners
        if not is_busy and engine.num_requests:
            time.sleep(0.001)  # another thread is building a next pass
        if isinstance(engine.clock, Clock):
            engine.clock.now_s += 0.03
