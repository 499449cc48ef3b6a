"""A device that runs out of memory fails one request, and no other."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
import torch
from models import Clock, alone, family, requests, serve

from serving import protocol
from serving.engine.connections import Bridge
from serving.engine.engine import Engine
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
