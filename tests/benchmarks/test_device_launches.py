"""Recorded launches are timed with inputs of their own."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import chain, repeat
from types import SimpleNamespace

import torch
from masquerade import masquerade
from models import TOYS, Clock

from benchmarks import device_compilers, device_launches
from serving.engine.engine import Audio, Engine
from serving.tools.requests import first_request


def test_each_launch_is_staged_before_it_is_timed(monkeypatch):
    """All launches read the same places: those of the largest size leave slots where a smaller one has counts."""
    with masquerade():
        engine = Engine(TOYS["toy"](), max_slots=16, compile=False, clock=Clock())
        engine.warm(lambda *_: None)
        [model] = engine.models.values()
        runner, known = model.runner, {}
        before = {name: value.clone() for name, value in runner.state.tensors().items()}

        graphs = runner.lowered.step_graphs.recorded | runner.lowered.render_graphs.recorded
        keys = {id(graph): key for key, (graph, _) in graphs.items()}
        staged = [None]
        stage = device_launches.stage

        def replayed(graph) -> float:
            assert staged[-1] == keys[id(graph)], "another launch was staged last"
            graph.replay()
            return 1.0

        def noted(runner, key) -> None:
            staged.append(key)
            stage(runner, key)

        monkeypatch.setattr(device_launches, "stage", noted)

        monkeypatch.setattr(device_launches, "replay_ms", replayed)
        monkeypatch.setattr(device_launches, "longest", lambda graph: {})
        with torch.inference_mode():
            device_launches.times(runner, lambda name, value: known.update({name: value}))
        assert {name.split()[0] for name in known} >= {"step", "mixed", "prefill", "render"}
        for name, value in runner.state.tensors().items():  # no slot of a request has changed
            assert torch.equal(value[: runner.num_slots], before[name][: runner.num_slots]), name


def test_launches_recorded_again_do_the_same():
    with masquerade():
        engine = Engine(TOYS["toy"](), max_slots=4, compile=False, clock=Clock())
        engine.warm(lambda *_: None)
        [model] = engine.models.values()
        lowered = model.runner.lowered
        before = spoken(engine)
        steps, renders = device_launches.recorded_again(model.runner, "renders first")
        assert {*steps, *renders} == {
            key
            for graphs in (lowered.step_graphs, lowered.render_graphs)
            for key in graphs.recorded
            if key[0] not in ("prefill", "mixed")
        }
        lowered.step_graphs.recorded |= steps
        lowered.render_graphs.recorded |= renders
        assert before and spoken(engine) == before


def spoken(engine) -> bytes:
    heard = []
    [model] = engine.models.values()
    request = first_request(model.family, max_frames=20)
    engine.speak("one", request, lambda event: heard.append(event) if isinstance(event, Audio) else None)
    while engine.turn():
        pass
    return b"".join(event.samples.tobytes() for event in heard)


class Event:
    """An event of a stream with a clock of its own, in ms."""

    def __init__(self, enable_timing: bool):
        self.at_ms = 0.0

    def record(self, stream) -> None:
        self.at_ms = stream.now_ms

    def elapsed_time(self, other) -> float:
        return other.at_ms - self.at_ms


def test_launches_beside_each_other_count_until_one_kind_has_ended(monkeypatch):
    streams = [SimpleNamespace(now_ms=0.0) for _ in range(2)]
    here = [streams[0]]

    @contextmanager
    def on(stream):
        here[0] = stream
        yield

    def graph(took_ms):
        def replay():
            here[0].now_ms += next(took_ms)

        return SimpleNamespace(replay=replay)

    steps = graph(repeat(1.0))  # 200 of them
    renders = graph(chain(repeat(50.0, 4), repeat(9.0)))  # slow while there are steps
    monkeypatch.setattr(device_launches, "replay_ms", lambda graph: 1.0 if graph is steps else 25.0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = device_launches.overlapped_ms((steps, renders), tuple(streams))
    assert found == {"step alone": 1.0, "step beside": 1.0, "render alone": 25.0, "render beside": 50.0}


def test_a_compiler_warms_one_stage():
    with masquerade():
        engine = Engine(TOYS["toy"](), max_slots=16, compile=False, clock=Clock())
        [model] = engine.models.values()
        runner, known = model.runner, []
        while (name := device_compilers.compile_stage(runner, len(known))) is not None:
            known.append(name)
        renders = [f"render {n}" for n in reversed(runner.family.spec.window.sizes)]
        assert known == ["mixed step", "prefill", *renders]
        assert {key[0] for key in runner.lowered.step_graphs.recorded} == {"mixed", "prefill"}
