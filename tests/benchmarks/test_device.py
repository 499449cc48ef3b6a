"""What device.py counts of the audio that listeners receive."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks import device
from serving.engine.engine import Audio, Failed, Finished
from zoo.request import Request


class Scripted:
    """An engine that delivers the same events to each request, each at its time of a fake clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, events: Sequence[tuple[float, object]]):
        self.now_s, self.events = 0.0, events
        monkeypatch.setattr(device.time, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(device.time, "sleep", lambda seconds: None)

    def speak(self, name, request, deliver) -> None:
        for at_s, event in self.events:
            self.now_s = at_s
            deliver(event)

    def stats(self) -> dict:
        return {"models": {"toy": {"underruns": 0}}}


def audio(num_samples: int) -> Audio:
    return Audio(np.zeros(num_samples, np.float32), 1)


def test_samples_count_only_within_the_measured_time(monkeypatch):
    """First audio counts from when the request was due, and ends with the first samples."""
    times = ((1.0, 0), (1.5, 1), (2.0, 10), (5.5, 100), (6.0, 1000))
    events = [*((at_s, audio(num)) for at_s, num in times), (6.5, Finished("stop", 5, {}))]
    hearing = device.Hearing(2.0, 6.0)
    hearing.ask(Scripted(monkeypatch, events), Request(text="a"), 0.5)
    hearing.wait(1)
    assert hearing.num_samples == 110
    assert hearing.first_s == [1.0] and hearing.first_ms(50, 95) == {"p50": 1000.0, "p95": 1000.0}


def test_failures_are_reported_if_no_request_has_audio(monkeypatch):
    engine = Scripted(monkeypatch, [(0.5, Failed("no room"))])
    found = device.arrivals(engine, Request(text="a"), 10.0, 0.3)
    assert found == {"requests": 3, "ttfa_ms": {}, "underruns": 0, "failed": ["no room"] * 3}
