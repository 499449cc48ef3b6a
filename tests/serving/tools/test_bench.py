"""The function behind `zoo bench`, and the hook that times every launch."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter

import numpy as np
import pytest
import torch
from models import Listener, directory, family
from torch import nn
from toy import Guided, Toy

import zoo
from compile_cache import choices
from serving.engine.engine import Audio, Engine, Finished
from serving.tools import bench as measured
from serving.tools import reference
from serving.tools.bench import (
    LaunchTimes,
    Work,
    bench,
    instructions,
    min_ms_per_frame,
    products,
    request_of,
    work,
)
from serving.tools.requests import first_request
from zoo.kernels import cpu
from zoo.nn import fp8
from zoo.nn.pack import pack
from zoo.request import Request


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    def machine(family, dtypes):
        return {"bytes_per_s": 1e9, "flops_per_s": dict.fromkeys(dtypes, 1e10)}

    monkeypatch.setattr(measured, "machine", machine)


def test_a_model_is_measured(monkeypatch, with_end):
    monkeypatch.setattr(zoo, "load", lambda model, device, dtype: with_end(Toy(), -1e9))
    lines: list[str] = []
    result = bench("toy", streams=(1, 3), frames=5, rounds=2, compile=False, log_line=lines.append)
    assert result["family"] == "toy" and result["compiles_after_warmup"] == 0 and not result["compiled"]
    for streams, run in zip((1, 3), result["runs"], strict=True):
        assert run["streams"] == streams and run["requests"] == 2 * streams
        assert run["frames"] == 5 * run["requests"] and run["audio_s"] == run["frames"] * 4 / 50
        assert run["rtf"] == pytest.approx(run["wall_s"] * streams / run["audio_s"])
        assert 0 < run["ttfa_ms"] <= run["ttfa_p90_ms"] < 1e3 * run["wall_s"]
        assert run["step_ms"] > 0 and run["render_ms"] > 0 and run["host_ms_per_step"] > 0
        floor_s = run["floor_ms_per_frame"] * run["frames"] / streams / 1e3
        assert run["floor_fraction"] == pytest.approx(floor_s / run["wall_s"])
    assert sum(line.startswith("streams ") and ": RTF" in line for line in lines) == 2
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize("name, size", [("qwen3_tts", "tiny-base"), ("qwen3_tts", "tiny-1.7b-design")])
def test_models_without_preset_voices_are_measured_too(name, size):
    result = bench(str(directory(name, size)), streams=(1,), frames=3, rounds=1, device="cpu", compile=False)
    assert result["runs"][0]["frames"] == 3


@pytest.mark.slow
def test_the_requests_have_the_given_options(monkeypatch):
    asked: list[Request] = []
    monkeypatch.setattr(measured, "drive", lambda *args: asked.append(args[3]) or [])
    path = str(directory("orpheus", "tiny"))
    bench(path, device="cpu", compile=False, options=lambda spec: {"valid_only": spec.family == "orpheus"})
    assert asked[0].options == {"valid_only": True}


@pytest.mark.parametrize("name", ["glm4_voice", "step_audio2", "bagpiper"])
def test_answers_are_bounded_and_greedy_if_the_reference_is_to_take_as_many_steps(name):
    model = family(name)
    request = request_of(model, 5, {"options": {}}, is_compared=True)
    assert request.temperature == 0 and request.max_frames == 5
    assert request.options == {"max_tokens": 5 * model.spec.steps_per_frame}
    asked = request_of(model, 5, {"options": {"max_tokens": 7}}, is_compared=False)
    assert asked.options == {"max_tokens": 7} and asked.temperature is None


def test_the_bound_on_an_answer_is_one_that_the_model_takes():
    assert request_of(family("bagpiper"), 50, {"options": {}}, is_compared=False).options == {
        "max_tokens": 24
    }


def test_texts_are_spoken_with_the_usual_temperature():
    request = request_of(family("orpheus"), 5, {"options": {}}, is_compared=True)
    assert request.temperature is None and request.options == {}


def test_an_answer_without_audio_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(reference, "check", lambda name, python: None)
    with pytest.raises(ValueError, match="glm4_voice answered without audio"):
        bench(
            str(directory("glm4_voice", "tiny")),
            streams=(1,),
            device="cpu",
            compile=False,
            reference_python="python",
        )


def test_first_audio_ends_with_the_first_samples(monkeypatch):
    """A renderer may hold back all samples of its first window."""
    now_s = [0.0]
    monkeypatch.setattr(measured.time, "perf_counter", lambda: now_s[0])

    class Speaker:
        def speak(self, name, request, deliver):
            for now_s[0], num in ((1.0, 0), (3.0, 4), (4.0, 4)):
                deliver(Audio(np.zeros(num, np.float32), 1))
            deliver(Finished("stop", 3, {}))

    listeners = measured.Load(Speaker(), 1, Request(text="a"))
    assert listeners.run(1) == 4.0 and listeners.first_audio_s == [3.0]
    assert listeners.num_samples == 8 and listeners.num_frames == 3


def test_a_request_that_fails_ends_the_run(monkeypatch, with_end):
    monkeypatch.setattr(zoo, "load", lambda model, device, dtype: with_end(Toy(), 1e9))
    with pytest.raises(RuntimeError, match="the model ended before its first frame"):
        bench("toy", streams=(2,), frames=5, compile=False)


def test_a_voice_that_the_model_lacks_is_refused(monkeypatch):
    monkeypatch.setattr(zoo, "load", lambda model, device, dtype: Toy())
    with pytest.raises(ValueError, match="no voice 'vivian'"):
        bench("toy", voice="vivian")


def test_an_unknown_policy_is_refused_before_anything_is_loaded_or_measured(monkeypatch):
    monkeypatch.setattr(zoo, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    monkeypatch.setattr(measured, "machine", lambda *_: pytest.fail("the machine was measured"))
    with pytest.raises(ValueError, match="policy 'fast' is unknown; there are: streaming, throughput, fifo"):
        bench("toy", policy="fast", compile=False)


def test_the_reference_does_the_same_work(monkeypatch):
    plain = family("qwen3_tts")

    def run(name: str, python: str, order: dict) -> dict:
        assert (name, python, order["dtype"], order["rounds"]) == ("qwen3_tts", sys.executable, "float32", 1)
        assert order["streams"] == (1,) and order["request"]["voice"] == plain.spec.voices[0]
        assert order["request"]["max_frames"] == 3 and order["request"]["text"] == measured.TEXT
        return {"name": "a reference", "runs": [{"streams": 1, "rtf": 4.0, "audio_s_per_s": 0.25}]}

    monkeypatch.setattr(reference, "run", run)
    how = {"device": "cpu", "compile": False, "reference_python": sys.executable}
    result = bench(str(directory("qwen3_tts", "tiny")), streams=(1,), frames=3, rounds=1, **how)
    assert result["reference"]["name"] == "a reference"
    assert result["runs"][0]["speedup"] == result["runs"][0]["audio_s_per_s"] / 0.25


def test_a_family_without_a_reference_is_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(zoo, "load", lambda model, device, dtype: Toy())
    monkeypatch.setattr(measured, "work", None)  # not reached
    with pytest.raises(ValueError, match="toy has no reference implementation"):
        bench("toy", reference_python="a python")


def test_a_python_that_does_not_exist_is_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(measured, "work", None)  # not reached
    with pytest.raises(
        ValueError, match="the reference of qwen3_tts needs /nowhere/python, which does not exist"
    ):
        bench(str(directory("qwen3_tts", "tiny")), device="cpu", reference_python="/nowhere/python")


def test_work_counts_the_weights_that_products_read():
    """The toy's step reads each weight once, except the embeddings. Guidance reads no weight twice, but
    doubles the arithmetic."""
    toy, guided = Toy(), Guided()
    plain, twice = work(toy, first_request(toy)), work(guided, first_request(guided))
    read = [module.weight for module in toy.modules() if isinstance(module, torch.nn.Linear)]
    assert plain["step"]["bytes"] == twice["step"]["bytes"] >= 4 * sum(weight.numel() for weight in read)
    assert set(plain["step"]["flops"]) == {"float32"}
    assert twice["step"]["flops"]["float32"] > 1.5 * plain["step"]["flops"]["float32"] > 0
    assert plain["render"]["bytes"] == 0  # the toy's renderer is an oscillator without weights


def test_a_render_is_counted_over_a_tape_that_has_its_frames():
    """Step-Audio 2 renders no further than its tape, and a cell of 50 codes needs the flow's products."""
    model = family("step_audio2")
    counted = work(model, first_request(model))
    flow = sum(
        weight.numel()
        for name, weight in model.flow.named_parameters()
        if name.startswith("estimator.blocks")
    )
    assert counted["render"]["flops"]["float32"] > 2 * flow > 0


def test_arithmetic_is_counted_by_its_dtype():
    class Mixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.narrow = torch.nn.Linear(8, 16, bias=False, dtype=torch.bfloat16)
            self.conv = torch.nn.Conv1d(16, 4, 3)

    module = Mixed()
    with torch.no_grad(), Work(module) as done:
        module.conv(module.narrow(torch.ones(5, 8, dtype=torch.bfloat16)).float().mT[None])
    assert done.flops == {"bfloat16": 2 * 5 * 8 * 16, "float32": 2 * 3 * 3 * 16 * 4}
    assert done.bytes == 2 * 8 * 16 + 4 * (3 * 16 * 4 + 4)


def test_the_floor_is_the_longer_of_reading_and_arithmetic():
    step, render = {"bfloat16": 400_000, "float32": 400_000}, {"float32": 100_000}
    counted = {"step": {"bytes": 4_000_000, "flops": step}, "render": {"bytes": 25_000_000, "flops": render}}
    limits = {"bytes_per_s": 1e9, "flops_per_s": {"bfloat16": 8e8, "float32": 1e9}}
    assert min_ms_per_frame(counted, limits, streams=1, window=25) == pytest.approx(5.0)
    assert min_ms_per_frame(counted, limits, streams=8, window=25) == pytest.approx(8.0)
    assert min_ms_per_frame(counted, limits, 1, 25, steps_per_frame=7) == pytest.approx(29.0)


def test_the_observer_sees_every_launch(with_end):
    engine = Engine(with_end(Toy(), -1e9), max_slots=2, compile=False)
    [model] = engine.models.values()
    times, rows = LaunchTimes(), Counter()

    def observe(event: str, count: int, seconds: float) -> None:
        times(event, count, seconds)
        rows[event] += count

    model.runner.observer = observe
    listeners = [Listener(), Listener()]
    began_s = time.perf_counter()
    for i, listener in enumerate(listeners):
        engine.speak(str(i), Request(text="Good morning.", max_frames=6, seed=i), listener)
    while engine.turn():
        pass
    took_s = time.perf_counter() - began_s
    assert set(times.launches) == {"prefill", "step", "render"}  # the engine never waits for a CPU
    assert rows["prefill"] == 2 and times.launches["prefill"] == 1
    assert rows["step"] == 12 == sum(listener.frames for listener in listeners)
    assert times.launches["step"] == 6
    assert all(seconds > 0 for seconds in times.seconds.values()) and sum(times.seconds.values()) < took_s


def test_launches_are_timed_by_the_runners_timer():
    engine = Engine(Toy(), max_slots=1, compile=False)
    [model] = engine.models.values()
    ticks, seconds = iter(np.arange(1000.0)), []
    model.runner.timer = lambda: float(next(ticks))
    model.runner.observer = lambda event, rows, took_s: seconds.append(took_s)
    engine.speak("a", Request(text="Good morning.", max_frames=3), Listener())
    while engine.turn():
        pass
    assert seconds and set(seconds) == {1.0}


def rounded_linear() -> nn.Linear:
    """Return a layer whose weight has 16 bits, as float32."""
    linear = nn.Linear(64, 64, bias=False)
    linear.weight.data = linear.weight.data.bfloat16().float()
    return linear


def test_weights_count_with_the_bits_that_the_checkpoint_gives_them():
    for linear, num_bytes in ((rounded_linear(), 2), (nn.Linear(64, 64, bias=False), 4)):
        with torch.no_grad(), Work(linear) as done:
            linear(torch.ones(1, 64))
        assert done.bytes == num_bytes * 64 * 64


@pytest.mark.slow
def test_the_run_names_what_its_products_read():
    cpu.build()
    module = nn.ModuleDict({"out": rounded_linear(), "head": rounded_linear(), "fp32": nn.Linear(64, 64)})
    with choices.assumed("blocks"):
        pack(module, 0, is_int8=True)
    assert products(module) == {"int8, 64 a scale": 1, "bf16": 1, "float32": 1}
    gpus = nn.ModuleDict({"up": nn.Linear(64, 64, dtype=torch.bfloat16), "head": nn.Linear(64, 64)})
    fp8.round_weights(gpus, 0)
    assert products(gpus) == {"fp8, a scale a row": 1, "float32": 1}
    assert instructions(torch.device("cpu")).startswith(torch.backends.cpu.get_cpu_capability())


def test_work_is_counted_where_a_slot_keeps_what_its_prompt_left():
    """A slot of CosyVoice 2 takes rows that were made in inference mode, and a render writes to them."""
    model = family("cosyvoice2")
    counted = work(model, first_request(model))
    assert counted["step"]["bytes"] > 0 and sum(counted["render"]["flops"].values()) > 0
