"""Recorded launches are timed with inputs of their own."""

from __future__ import annotations

import torch
from masquerade import masquerade
from models import TOYS, Clock

from benchmarks import device_launches
from serving.engine.engine import Engine


def test_each_launch_is_staged_before_it_is_timed(monkeypatch):
    """All launches read the same places: those of the largest size leave slots where a smaller one has counts."""
    with masquerade():
        engine = Engine(TOYS["toy"](), max_slots=16, compile=False, clock=Clock())
        engine.warm(lambda *_: None)
        [model] = engine.models.values()
        runner, known = model.runner, {}
        before = {name: value.clone() for name, value in runner.state.tensors().items()}

        def replayed(graph) -> float:
            graph.replay()
            return 1.0

        monkeypatch.setattr(device_launches, "replay_ms", replayed)
        monkeypatch.setattr(device_launches, "longest", lambda graph: {})
        with torch.inference_mode():
            device_launches.times(runner, lambda name, value: known.update({name: value}))
        assert {name.split()[0] for name in known} >= {"step", "prefill", "render"}
        for name, value in runner.state.tensors().items():  # no slot of a request has changed
            assert torch.equal(value[: runner.num_slots], before[name][: runner.num_slots]), name
