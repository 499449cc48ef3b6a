"""Code that one server compiled serves every other server of the same models, with any slots, memory and
neighbours."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from models import Clock, Listener
from toy import Toy

import zoo
from compile_cache.artifacts import write_manifest
from compile_cache.counts import Counts, counts
from serving.engine.device.prepare_for_host import cached
from serving.engine.engine import Engine
from zoo.contract import KV
from zoo.request import Request

pytestmark = pytest.mark.compile
BUZZ = KV(num_layers=3, num_heads=1, head_dim=20)  # a position takes 480 bytes beside the other's 256


def models() -> dict[str, Toy]:
    return {"hum": Toy(), "buzz": Toy(kv=BUZZ)}


def start(monkeypatch, root: Path, *names: str, **settings) -> tuple[Engine, Counts]:
    """A server of these as a new process starts it, once it is warm."""
    monkeypatch.setenv("ZOO_CACHE_DIR", str(root))
    torch._dynamo.reset()
    before, there = counts(), models()
    engine = Engine({name: there[name] for name in names}, report_lag=0, clock=Clock(), **settings)
    engine.warm(lambda *_: None, cached)
    return engine, counts() - before


def test_any_two_settings_share_what_was_compiled(monkeypatch, tmp_path, capfd):
    _, made = start(monkeypatch, tmp_path, "hum", "buzz", max_slots=2)
    assert (made.found, made.compiled) == (0, 2)
    pages = Counter[int]()
    for names, settings in [
        (["hum"], {"max_slots": 5, "kv_memory_bytes": 1 << 20}),
        (["buzz", "hum"], {"max_slots": 3, "kv_memory_bytes": 1 << 19, "policy": "throughput"}),
        (["hum"], {"max_slots": 1, "is_deterministic": True}),
    ]:
        engine, made = start(monkeypatch, tmp_path, *names, **settings)
        assert made == Counts(graphs=0, found=len(names), compiled=0), (names, settings)
        pages.update(model.runner.page_tokens for model in engine.models.values())
        listeners = {}
        for i, name in enumerate(names * 3):
            request = Request(text="hm" * (i + 1), temperature=0.0)
            listeners[f"{i}"] = Listener(), request, name
            engine.speak(f"{i}", request, listeners[f"{i}"][0], name)
        while engine.turn():
            engine.clock.now_s += 0.03
        for listener, request, name in listeners.values():
            alone = zoo.generate(models()[name], request)
            np.testing.assert_allclose(listener.samples, alone.samples, rtol=0, atol=5e-5)
        assert engine.stats()["compiles_after_warmup"] == 0
    assert len(pages) > 1
    assert capfd.readouterr().err == ""
    [step, *_] = tmp_path.rglob("step.saved")
    step.write_bytes(b"nonsense")
    _, made = start(monkeypatch, tmp_path, "hum", "buzz")
    assert (made.found, made.compiled) == (1, 1) and "step.saved has changed" in capfd.readouterr().err


def test_a_step_that_is_missing_or_cannot_be_loaded_is_made_again(monkeypatch, tmp_path):
    start(monkeypatch, tmp_path, "hum", max_slots=2)
    [step] = tmp_path.rglob("step.saved")
    for spoil in (partial(step.write_bytes, b"of another version"), step.unlink):
        spoil()
        write_manifest(step.parent)
        _, made = start(monkeypatch, tmp_path, "hum", max_slots=2)
        assert (made.found, made.compiled) == (0, 1)
    _, made = start(monkeypatch, tmp_path, "hum", max_slots=2)
    assert (made.found, made.compiled) == (1, 0)
