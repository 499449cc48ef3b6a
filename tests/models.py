"""What many tests need: every family as a tiny random model, requests that differ in everything, and the codes of each alone."""

from __future__ import annotations

import copy
import importlib
import itertools
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from toy import Guided, Toy
from toy_delay import Scribe

import zoo
from serving.engine import Audio, Engine, Event, Failed, Finished, Text
from zoo.contract import Clip, Family, Request, Speech

TOYS: dict[str, Callable[[], Family]] = {"toy": Toy, "toy_guided": Guided, "toy_delay": Scribe}
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
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5, "guidance": 1.3, "solver_steps": 4},
    {"top_p": 0.8, "repetition_penalty": 1.3},
    {"temperature": 1.5, "top_k": 0, "top_p": 0.95, "layout": "streaming"},
    {"temperature": 0.0, "depth_temperature": 1.0, "guidance": 2.5},
    {"top_k": 1, "depth_top_k": 3},
    {"depth_top_p": 0.5, "repetition_penalty": 1.0, "layout": "streaming"},
)
# What a family has no use for and so refuses; its requests go without.
_CODES = ("guidance", "solver_steps")
_DEPTH = ("repetition_penalty", "depth_temperature", "depth_top_k", "depth_top_p", "layout")
REFUSES: dict[str, tuple[str, ...]] = {
    "higgs_v3": (*_DEPTH, *_CODES),
    "qwen3_tts": _CODES,
    "toy": ("guidance",),
    "voxcpm2": ("temperature", "top_k", "top_p", *_DEPTH),
}
_CLIP = Clip(np.sin(np.arange(3500) ** 1.5 / 30).astype(np.float32) / 4, 16000)
# What else some families' requests ask for, in turn.
EXTRAS: dict[str, tuple[dict[str, Any], ...]] = {
    "higgs_v3": ({}, {"reference": _CLIP}, {"reference": _CLIP, "reference_text": "Hm."}),
    "voxcpm2": ({}, {"instructions": "slowly"}, {"reference": _CLIP}, {"reference": _CLIP, "reference_text": "Good evening."}),
}


@cache
def directory(name: str, size: str) -> Path:
    """A tiny random checkpoint, written once per process. Not to be changed: copy it first."""
    demo = importlib.import_module(f"zoo.{name}.demo")
    return demo.write(Path(_directories.name) / f"{name}-{size}", size, dtype=torch.float32)


def family(name: str, dtype: str = "float32", size: str = "tiny") -> Family:
    """dtype "float64" is for what a family computes from a state alone (`render`): no checkpoint runs in it as a whole."""
    return _family(name, dtype, size)


@cache
def _family(name: str, dtype: str, size: str) -> Family:
    if dtype == "float64":
        return copy.deepcopy(family(name, size=size)).double()
    return TOYS[name]() if name in TOYS else zoo.load(directory(name, size), "cpu", dtype)


def requests(name: str, count: int, most_frames: int = 14) -> list[Request]:
    """`count` requests that differ in text, voice, sampling, seed and length."""
    voices, extras = family(name).spec.voices or (None,), EXTRAS.get(name, ({},))
    return [
        Request(
            text=TEXTS[i % len(TEXTS)],
            voice=voices[i % len(voices)],
            seed=(i << 40) + i,
            max_frames=1 + (5 * i + 9) % most_frames,
            **{key: value for key, value in SAMPLING[i % len(SAMPLING)].items() if key not in REFUSES.get(name, ())},
            **extras[i % len(extras)],
        )
        for i in range(count)
    ]


@cache
def alone(name: str, request: Request) -> Speech:
    """What the plain loop makes of a request: the truth to test against."""
    return zoo.generate(family(name), request)


class Ear:
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
    def samples(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.float32), *self.chunks])


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def serve(engine: Engine, arrivals: dict[int, list[Request]]) -> list[Ear]:
    """Speak each turn's requests, turn by turn, until all have ended -> their ears, in order of arrival."""
    ears: list[Ear] = []
    turns = itertools.count()
    while True:
        turn = next(turns)
        for request in arrivals.get(turn, ()):
            ears.append(Ear())
            engine.speak(f"request-{len(ears)}", request, ears[-1])
        assert turn < 5000, "the engine does not come to an end"
        if not engine.turn() and turn >= max(arrivals):
            return ears
        if isinstance(engine.clock, Clock):
            engine.clock.now_s += 0.03
