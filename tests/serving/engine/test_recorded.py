"""The engine as on a GPU, on a CPU that calls itself one (tests/masquerade.py): recorded launches, padded to
a bucket and replayed with new numbers, on streams that are late. Requests come and go at any moment, and each
gives the same audio as alone.

ZOO_RECORDED_REQUESTS=500 asks more of every family.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from masquerade import CUDA, LateStream, masquerade
from models import NAMES, TOYS, Clock, Listener, alone, directory, requests
from torch import Tensor

import zoo
from compile_cache.graphs import Graphs, Launch
from serving import protocol
from serving.engine import model_worker
from serving.engine.device import warmup
from serving.engine.device.staging import REPRODUCIBLE_ROWS
from serving.engine.engine import Engine
from serving.engine.schedule import render_times
from serving.engine.schedule.numbers import GPU_RENDERS_IN_FLIGHT
from zoo.contract import Family
from zoo.nn import flashinfer_attention
from zoo.request import Request

NUM_REQUESTS = int(os.environ.get("ZOO_RECORDED_REQUESTS", 0))  # 0: few
TOLERANCE = 1e-4


def on_gpu(name: str) -> Family[Any]:
    made = TOYS[name]() if name in TOYS else zoo.load(directory(name, "tiny"), "cuda", "float32")
    assert made.device == CUDA, f"{name} is on {made.device}"
    return made


def test_a_warm_up_times_each_launch_once(monkeypatch):
    """Admission and rendering ask for the same launches."""
    run, launched = Graphs.run, Counter[Any]()

    def counted(graphs: Graphs, key: Any, launch: Launch) -> tuple[Tensor, ...]:
        launched[key] += 1
        return run(graphs, key, launch)

    monkeypatch.setattr(Graphs, "run", counted)
    with masquerade():
        Engine(on_gpu("toy"), max_slots=4, compile=False, clock=Clock()).warm(lambda *_: None)
    assert {key[0] for key in launched} == {"step", "mixed", "render"}
    assert set(launched.values()) == {warmup.TIMED_LAUNCHES}


@pytest.mark.parametrize(
    ("name", "under_way"),
    [(name, GPU_RENDERS_IN_FLIGHT) for name in TOYS]
    + [pytest.param(name, 1, marks=pytest.mark.slow) for name in TOYS]
    + [
        pytest.param(name, GPU_RENDERS_IN_FLIGHT, marks=pytest.mark.slow)
        for name in NAMES
        if name not in TOYS
    ],
)
def test_recorded_graphs_with_late_reports_equal_the_plain_loop(name, under_way, monkeypatch):
    for module in (model_worker, render_times):
        monkeypatch.setattr(module, "GPU_RENDERS_IN_FLIGHT", under_way)
    monkeypatch.setattr(warmup, "TIMED_LAUNCHES", 1)  # replays of a pretended GPU are slow
    chance = random.Random(len(name))
    LateStream.chance = random.Random(7)
    num = NUM_REQUESTS or (30 if name in TOYS else 8)
    kinds = requests(name, 12, max_frames=9)
    said = [chance.choice(kinds) for _ in range(num)]
    truth = {request: alone(name, request) for request in set(said)}
    cancelled = {i for i in range(num) if chance.random() < 0.4}
    listeners = [Listener() for _ in said]
    with masquerade():
        engine = Engine(on_gpu(name), max_slots=2, compile=False, clock=Clock())
        engine.warm(lambda *_: None)
        [model] = engine.models.values()
        assert model.runner.lowered.step_graphs.recorded and model.runner.lowered.render_graphs.recorded
        free, turn, asked, leaving = engine.pages.free, 0, 0, dict[int, list[int]]()
        while asked < num or engine.num_requests:
            if asked < num and engine.num_requests < 6 and chance.random() < 0.6:
                engine.speak(str(asked), said[asked], listeners[asked])
                if asked in cancelled:
                    leaving.setdefault(turn + chance.choice((0, 1, 2, 4, 7)), []).append(asked)
                asked += 1
            for i in leaving.pop(turn, ()):
                engine.cancel(str(i))
            engine.turn()
            engine.clock.now_s += 0.03
            turn += 1
            assert turn < 400 * num, "the engine does not come to an end"
            window = model.family.spec.window
            assert len(model.round.renders) < under_way + len(window.sizes) * len(window.lengths or (0,))
        while engine.turn():
            pass
        assert engine.pages.free == free and len(model.tenants.free) == 2
        assert model.runner.graph_misses == 0
    ended = [i for i in range(num) if listeners[i].reason in ("stop", "length")]
    assert len(ended) > num // 3
    for i in ended:
        want = truth[said[i]].samples.numpy()
        heard = listeners[i].samples
        assert len(heard) == len(want), f"request {i}, {said[i]}"
        assert np.abs(heard - want).max(initial=0) < TOLERANCE, f"request {i}, {said[i]}"


@pytest.mark.parametrize("name", ["toy", "toy_guided", pytest.param("voxcpm2", marks=pytest.mark.slow)])
def test_recorded_steps_by_flashinfer_equal_the_plain_loop(name, monkeypatch):
    """By the plain twin of its kernel, from the tables in int32 that the host stages."""
    decoded = []

    def plain(*given):
        decoded.append(given[3].dtype)
        return plain_decode(*given)

    plain_decode = flashinfer_attention.plain_decode
    monkeypatch.setattr(flashinfer_attention, "plain_decode", plain)
    monkeypatch.setattr(flashinfer_attention, "why_not", lambda kv, page_tokens: None)
    monkeypatch.setattr(flashinfer_attention, "takes_over", lambda attention, *_: attention == "flashinfer")
    said = requests(name, 5, max_frames=9)
    truth = [alone(name, request).samples.numpy() for request in said]
    listeners = [Listener() for _ in said]
    decoded.clear()
    LateStream.chance = random.Random(11)
    with masquerade():
        engine = Engine(on_gpu(name), max_slots=3, compile=False, attention="flashinfer", clock=Clock())
        engine.warm(lambda *_: None)
        [model] = engine.models.values()
        for i, request in enumerate(said):
            engine.speak(str(i), request, listeners[i])
        while engine.turn() or engine.num_requests:
            engine.clock.now_s += 0.03
        assert model.runner.graph_misses == 0
    assert set(decoded) == {torch.int32}
    for want, listener in zip(truth, listeners, strict=True):
        assert len(listener.samples) == len(want)
        assert np.abs(listener.samples - want).max(initial=0) < TOLERANCE


def test_a_cpu_refuses_an_attention_for_gpus():
    with pytest.raises(
        ValueError, match="attention flashinfer is for GPUs, and the model is on cpu: use auto"
    ):
        Engine(TOYS["toy"](), attention="flashinfer")


def test_several_models_are_recorded_on_common_streams():
    """One pool for each stream, which tests/masquerade.py checks; pages are common, too."""
    names = ("toy", "toy_guided", "toy_delay")
    said = [(name, request) for name in names for request in requests(name, 5, max_frames=9)]
    random.Random(3).shuffle(said)
    truth = {(name, request): alone(name, request).samples.numpy() for name, request in said}
    listeners = [Listener() for _ in said]
    LateStream.chance = random.Random(5)
    with masquerade():
        engine = Engine({name: on_gpu(name) for name in names}, max_slots=2, compile=False, clock=Clock())
        engine.warm(lambda *_: None)
        for i, (name, request) in enumerate(said):
            engine.speak(str(i), request, listeners[i], model=name)
            engine.turn()
        for _ in range(2000):
            engine.turn()
            engine.clock.now_s += 0.03
        models = engine.models.values()
        assert all(model.runner.graph_misses == 0 for model in models)
        lowered = [model.runner.lowered for model in models]
        assert (
            len({id(graphs.pool) for each in lowered for graphs in (each.step_graphs, each.render_graphs)})
            == 2
        )
    for asked, listener in zip(said, listeners, strict=True):
        want = truth[asked]
        assert len(listener.samples) == len(want), asked
        assert np.abs(listener.samples - want).max(initial=0) < TOLERANCE, asked


@pytest.mark.slow
def test_reproducible_windows_share_launches_of_one_size():
    """Files of equal requests have equal bytes, whatever else is rendered."""
    asked = requests("toy", 6, max_frames=30)
    sizes: set[int] = set()
    num_rows: list[int] = []

    def files(together: list[Request]) -> list[np.ndarray]:
        listeners = [Listener() for _ in together]
        with masquerade():
            engine = Engine(on_gpu("toy"), max_slots=16, compile=False, clock=Clock())
            engine.warm(lambda *_: None)
            [model] = engine.models.values()
            run = model.runner.lowered.render_graphs.run

            def launch(key: tuple[str, int, int, int], launch: Launch) -> tuple[Tensor, ...]:
                sizes.add(key[1])
                return run(key, launch)

            model.runner.lowered.render_graphs.run = launch
            model.runner.observer = lambda event, rows, _: (
                num_rows.append(rows) if event == "render" else None
            )
            for i, request in enumerate(together):
                engine.speak(str(i), request, listeners[i], listener=protocol.Listener(is_reproducible=True))
            for _ in range(300):
                engine.turn()
                engine.clock.now_s += 0.03
            assert model.runner.graph_misses == 0
        return [listener.samples for listener in listeners]

    company = files(asked)
    assert max(num_rows) > 1, "rows share no launch"
    for request, heard in zip(asked, company, strict=True):
        [want] = files([request])
        assert heard.tobytes() == want.tobytes()
    assert sizes == {REPRODUCIBLE_ROWS}


@pytest.mark.parametrize(("codec", "is_tf32"), [("float32", False), ("tf32", True)])
def test_renders_alone_are_recorded_in_the_codec_s_precision(codec, is_tf32):
    seen: dict[str, set[bool]] = {}

    def tell(verb, function):
        def told(*args):
            seen.setdefault(verb, set()).add(torch.backends.cudnn.allow_tf32)
            return function(*args)

        return told

    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        with masquerade():
            made = on_gpu("toy")
            made.render, made.hidden = tell("render", made.render), tell("hidden", made.hidden)
            Engine(made, max_slots=2, compile=False, codec=codec).warm(lambda *_: None)
        assert not torch.backends.cudnn.allow_tf32
    finally:
        torch.backends.cudnn.allow_tf32 = before
    assert seen == {"render": {is_tf32}, "hidden": {False}}


def test_an_unknown_codec_precision_is_refused():
    with pytest.raises(ValueError, match="codec 'int4' is no precision; possible: float32, tf32"):
        Engine(TOYS["toy"](), codec="int4")
    with pytest.raises(ValueError, match="codec tf32 is for GPUs, and the model is on cpu"):
        Engine(TOYS["toy"](), codec="tf32")
