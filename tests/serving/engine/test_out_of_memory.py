"""A device that runs out of memory fails one request, and no other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from masquerade import masquerade
from models import TOYS, Clock, Listener, alone, family, requests, serve

import zoo
from serving import protocol
from serving.engine.connections import Bridge
from serving.engine.device.arena import PAGE_TOKENS, token_bytes
from serving.engine.device.launches import Render
from serving.engine.engine import Engine, Failed
from serving.tools.simulate import Cost, Simulation, Voice
from zoo.contract import Prompt
from zoo.request import Request

LARGE = 77  # the seed of requests that the device has no memory for


@pytest.mark.parametrize("report_lag", [0, 1])
def test_a_request_that_does_not_fit_fails_alone(report_lag, monkeypatch):
    made = family("toy")
    admit = made.admit

    def admit_small(state: Any, slot: int, prompt: Prompt) -> None:
        if prompt.slot["seed"] == LARGE:
            raise torch.OutOfMemoryError("CUDA out of memory")
        admit(state, slot, prompt)

    monkeypatch.setattr(made, "admit", admit_small)
    well, other = requests("toy", 2, max_frames=9)
    large = Request(text="hum", seed=LARGE)
    engine = Engine(made, max_slots=2, compile=False, report_lag=report_lag, clock=Clock())
    first, failed, later = serve(engine, {0: [well, large], 1: [other]})
    assert failed.reason == "out_of_memory"
    for listener, request in ((first, well), (later, other)):
        want = alone("toy", request).samples.numpy()
        assert len(listener.samples) == len(want) and np.abs(listener.samples - want).max(initial=0) < 1e-4
    [model] = engine.models.values()
    assert engine.pages.free == engine.pages.num_pages and len(model.tenants.free) == 2


def test_a_later_pass_that_does_not_fit_fails_its_answer(monkeypatch):
    made = family("toy")
    passes = made.passes

    def first_only(request: Request) -> Generator[Prompt, torch.Tensor, None]:
        prompt = next(passes(request))
        prompt.is_final = False
        yield prompt
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(made, "passes", first_only)
    engine = Engine(made, max_slots=2, compile=False, clock=Clock())
    [listener] = serve(engine, {0: [Request(text="hum", max_frames=5)]})
    assert listener.reason == "out_of_memory" and engine.num_requests == 0


def failing_once(
    monkeypatch: pytest.MonkeyPatch, place: Any, verb: str, is_large: Callable[..., bool]
) -> list[int]:
    """Let the first launch for which `is_large` says so run out of memory. The list then has a number."""
    launch, failed = getattr(place, verb), list[int]()

    def launched(*given: Any) -> Any:
        if not failed and is_large(*given):
            failed.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return launch(*given)

    monkeypatch.setattr(place, verb, launched)
    return failed


def is_well(listener: Listener, request: Request, name: str = "toy") -> bool:
    want = alone(name, request).samples.numpy()
    heard = listener.samples
    return listener.has_ended_well and len(heard) == len(want) and np.abs(heard - want).max(initial=0) < 1e-4


@pytest.mark.parametrize("is_emulated", [False, True])
def test_windows_that_do_not_fit_fail_their_requests_only(is_emulated, monkeypatch):
    """Those of the launch fail. Requests before, next to and after them are heard whole."""
    asked = requests("toy", 5, max_frames=12)
    truth = [alone("toy", request) for request in asked]
    assert truth
    with masquerade() if is_emulated else nullcontext():
        made = TOYS["toy"]()
        engine = Engine(made, max_slots=3, compile=False, clock=Clock())
        engine.warm(lambda *_: None)
        [model] = engine.models.values()
        lost: list[int] = []

        def is_large(render: Render) -> bool:
            lost.extend(render.slots.tolist() if render.start.max() > 0 and not lost else [])
            return bool(lost)

        failed = failing_once(monkeypatch, model.runner, "render", is_large)
        heard = serve(engine, {0: asked[:3], 3: asked[3:]})
        assert failed and engine.pages.free == engine.pages.num_pages and len(model.tenants.free) == 3
    reasons = [listener.reason for listener in heard]
    assert reasons.count("out_of_memory") == len(lost) > 0
    for listener, request in zip(heard, asked, strict=True):
        assert listener.reason == "out_of_memory" or is_well(listener, request)


@pytest.mark.parametrize("verb", ["save", "restore"])
@pytest.mark.parametrize("report_lag", [0, 1])
def test_a_pause_or_a_return_that_does_not_fit_fails_one_request(verb, report_lag, monkeypatch):
    """A speaking request is paused every third turn."""
    asked = requests("toy", 4, max_frames=20)
    engine = Engine(
        family("toy"),
        max_slots=3,
        swap_memory_bytes=1 << 30,
        compile=False,
        report_lag=report_lag,
        clock=Clock(),
    )
    deal, turns = engine.paging.deal, itertools.count()

    def pause_first() -> None:
        if next(turns) % 3 == 2:
            for job in engine.paging._holders():
                engine.paging._pause(job)
        deal()

    monkeypatch.setattr(engine.paging, "deal", pause_first)
    [model] = engine.models.values()

    failed = failing_once(monkeypatch, model.runner, verb, lambda pages, *_: len(pages) > 0)
    heard = serve(engine, {0: asked[:2], 4: asked[2:]})
    assert failed and [listener.reason for listener in heard].count("out_of_memory") == 1
    for listener, request in zip(heard, asked, strict=True):
        assert listener.reason == "out_of_memory" or is_well(listener, request)
    assert engine.pages.free == engine.pages.num_pages and len(model.tenants.free) == 3
    assert not engine.paging._paused()


def test_a_growing_stream_whose_own_pause_does_not_fit_fails_alone(monkeypatch):
    """Pages run out, so the engine pauses streams by itself."""
    voice = Voice(guard=1.0)
    page_bytes = PAGE_TOKENS * token_bytes(voice)
    memory = {"kv_memory_bytes": (1 + 83) * page_bytes, "swap_memory_bytes": 300 * page_bytes}
    room = Simulation(voice, Cost(), settings={"max_slots": 4, **memory})
    room.model.forecaster.lengths.record(40, 20)
    failed = failing_once(monkeypatch, room.model.runner, "save", lambda pages: len(pages) > 0)
    heard = [room.submit(Request(text="x" * 40, seed=seed, max_frames=400)) for seed in range(4)]
    room.run([])
    ends = ["out_of_memory" if isinstance(one.end, Failed) else "whole" for one in heard]
    assert failed and sorted(ends) == ["out_of_memory", "whole", "whole", "whole"]
    assert room.engine.pages.free == room.engine.pages.num_pages


@pytest.mark.parametrize("report_lag", [0, 1])
def test_a_stream_whose_second_lane_does_not_fit_fails_alone(report_lag, monkeypatch):
    options = {"cfg_scale": 3.0}
    asked = [Request(text="m" * 38, seed=seed, max_frames=30, options=options) for seed in range(4)]
    engine = Engine(family("toy_late"), max_slots=2, compile=False, report_lag=report_lag, clock=Clock())
    [model] = engine.models.values()
    failed = failing_once(monkeypatch, model.family, "second_lane", lambda length: True)
    heard = serve(engine, {0: asked[:2], 40: asked[2:]})
    assert failed and [listener.reason for listener in heard].count("out_of_memory") == 1
    for listener, request in zip(heard, asked, strict=True):
        assert listener.reason == "out_of_memory" or is_well(listener, request, "toy_late")
    assert engine.pages.free == engine.pages.num_pages and len(model.tenants.free) == 2


def test_a_later_pass_that_does_not_fit_its_slot_fails_its_answer(monkeypatch):
    made = family("toy_echoing")
    text = "One sentence here. Another sentence there. " * 6
    assert len(list(zoo.generate(made, Request(text=text)).frames)) > 0
    admit, seen = made.admit, list[int]()

    def admit_first(state: Any, slot: int, prompt: Prompt) -> None:
        seen.append(slot)
        if len(seen) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        admit(state, slot, prompt)

    monkeypatch.setattr(made, "admit", admit_first)
    engine = Engine(made, max_slots=2, compile=False, clock=Clock())
    [listener] = serve(engine, {0: [Request(text=text)]})
    assert listener.reason == "out_of_memory" and listener.frames > 0 and len(seen) == 2
    assert engine.pages.free == engine.pages.num_pages and engine.num_requests == 0


def test_a_recording_that_does_not_fit_is_refused_for_now():
    class Client:
        def __init__(self) -> None:
            self.open: set[str] = set()
            self.sent: list[protocol.Message] = []

        def send(self, message: protocol.Message) -> None:
            self.sent.append(message)

    bridge, client = Bridge(), Client()
    bridge._refuse(client, "r", torch.OutOfMemoryError("CUDA out of memory"))
    [refused] = client.sent
    assert isinstance(refused, protocol.Rejected)
    assert (refused.status, refused.code, refused.retry_after_s) == (503, "out_of_memory", 1)
    bridge.loop.close()
