"""The function behind `zoo parity`: its results, and that it detects errors."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from models import directory, family
from toy import Toy
from toy_grid import GridToy

import zoo
from compile_cache.strategy import Whole
from serving.engine.engine import Engine
from serving.tools import reference
from serving.tools.parity import compare, difference, follow, parity
from serving.tools.requests import every_request
from zoo.contract import Prompt
from zoo.request import Option, Request

pytestmark = pytest.mark.slow


def tiny(name: str) -> str:
    return str(directory(name, "tiny"))


def followed(plain: zoo.Family, served: zoo.Family, request: Request) -> dict:
    [worker] = Engine(served, max_slots=2, compile=False).models.values()
    run = follow(plain, worker, request)
    # All slots were released.
    assert not worker.running and not worker.queue.jobs and len(worker.tenants.free) == 2
    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.families())
def test_the_served_form_equals_the_plain_form(name):
    result = parity(tiny(name), device="cpu", dtype="float32", compile=False, frames=6)
    assert result["family"] == name and result["dtype"] == "float32" and result["reference"] is None
    assert result["compiles_after_warmup"] == 0 and result["graphs"] == 0
    asked = every_request(family(name), 6)[0]
    assert set(result["served"]) == set(asked)
    for request, run in result["served"].items():
        assert run["steps"] >= 3 and run["largest_frame_difference"] < 1e-5
        assert run["equal_s"] == run["expected_s"] == run["audio_s"]
        assert (run["audio_s"] > 0) == (asked[request].output in ("speech", "continuation"))
        assert run["largest_sample_difference"] < 5e-5 and (run["snr_db"] is None or run["snr_db"] > 80)
    json.dumps(result, allow_nan=False)


def test_codes_are_equal_at_every_step():
    run = followed(family("qwen3_tts"), zoo.load(tiny("qwen3_tts"), "cpu", "float32"), greedy(6))
    assert (run["steps"], run["steps_equal"], run["largest_frame_difference"]) == (6, 6, 0.0)
    assert run["audio_s"] == 6 * 0.08


def test_several_passes_are_compared_through_windows_that_hold_samples_back(with_end):
    grid = with_end(GridToy(), -1e9)
    text = "Good morning, everybody who is here."
    request = Request(text=text, max_frames=17, temperature=0.0, options={"echoes": 3})
    run = followed(grid, grid, request)
    assert run["steps_equal"] == run["steps"] == 3 * 17
    assert run["equal_s"] == run["expected_s"] == run["audio_s"] == 3 * 17 * 4 / 50


@pytest.mark.parametrize("name", ["toy_guided", "toy_delay"])
def test_lanes_and_written_text_are_compared(name):
    request = Request(text="Good morning.", max_frames=9, temperature=0.0)
    run = followed(family(name), family(name), request)
    assert run["steps_equal"] == run["steps"] > 1 and run["snr_db"] is None


def greedy(frames: int) -> Request:
    return Request(text="hello", voice="vivian", temperature=0.0, max_frames=frames)


def test_a_speech_that_outgrows_its_pages_gets_more():
    """Without them, its later steps would read and write a page that is nobody's."""
    plain, served = family("voxcpm2"), zoo.load(tiny("voxcpm2"), "cpu", "float32")
    run = followed(plain, served, Request(text="Hi.", max_frames=60, options={"cfg_scale": 1.0}))
    assert run["steps"] == 60 and run["largest_frame_difference"] < 1e-5
    assert run["equal_s"] == run["expected_s"]


def test_a_form_that_speaks_other_codes_is_detected():
    """The wrong form errs from its first step on, but each step starts from the state of the right form."""
    wrong = zoo.load(tiny("qwen3_tts"), "cpu", "float32")
    head = wrong.talker.codec_head
    head.weight = torch.nn.Parameter(head.weight.roll(1, 0), requires_grad=False)
    run = followed(family("qwen3_tts"), wrong, greedy(5))
    assert run["steps"] == 5 and run["steps_equal"] == 0 and run["largest_frame_difference"] >= 1
    assert run["equal_s"] == run["expected_s"]  # the renders read the right form's tapes


def test_a_form_that_ends_elsewhere_is_detected():
    wrong = zoo.load(tiny("qwen3_tts"), "cpu", "float32")
    wrong.never[:] = True
    wrong.never[wrong.config.control.eos] = False  # it can only end
    run = followed(family("qwen3_tts"), wrong, greedy(5))
    assert run["steps"] == 5 and run["steps_equal"] < 5 and run["largest_frame_difference"] is None
    assert run["equal_s"] == run["expected_s"] == 5 * 0.08


def test_a_form_that_returns_nan_is_detected():
    wrong = zoo.load(tiny("qwen3_tts"), "cpu", "float32")
    render = wrong.render
    wrong.render = lambda state, view: (torch.full_like(render(state, view)[0], torch.nan), view.count * 1920)
    run = followed(family("qwen3_tts"), wrong, greedy(5))
    assert run["equal_s"] == 0 and run["snr_db"] == pytest.approx(0.0)
    json.dumps(run, allow_nan=False)


def test_frames_are_compared_as_codes_or_as_latents():
    codes = torch.tensor([[1, 2], [3, 4]])
    assert difference(codes, codes) == 0 and difference(codes, torch.tensor([[1, 5], [6, 4]])) == 2
    latents = torch.tensor([4.0, -2.0])
    assert difference(latents, torch.tensor([4.0, -1.0])) == 0.25
    assert difference(latents, torch.tensor([4.0, torch.nan])) == float("inf")


def test_two_renderings_are_compared_sample_by_sample():
    sound = np.sin(np.arange(1000) / 7).astype(np.float32)
    other = sound.copy()
    other[600] += 0.1
    same, differs = compare(sound, sound, 1000), compare(other, sound, 1000)
    assert (same["equal_s"], same["largest_sample_difference"], same["snr_db"]) == (1.0, 0.0, None)
    assert differs["equal_s"] == 0.6 and differs["largest_sample_difference"] == pytest.approx(0.1, abs=1e-6)
    assert differs["snr_db"] == pytest.approx(10 * np.log10(np.square(sound).sum() / 0.01), abs=0.01)
    assert compare(other, np.zeros(1000, np.float32), 1000)["snr_db"] < -100
    assert compare(sound[:0], sound[:0], 1000)["snr_db"] is None


def test_audio_that_only_one_form_has_differs():
    """Otherwise a form that speaks on where the other one ends would seem equal."""
    sound = np.sin(np.arange(1000) / 7).astype(np.float32)
    for ours, theirs in ((sound, sound[:400]), (sound[:400], sound), (sound, sound[:0])):
        found = compare(ours, theirs, 1000)
        both_s = min(len(ours), len(theirs)) / 1000
        assert (found["audio_s"], found["expected_s"]) == (len(ours) / 1000, len(theirs) / 1000)
        assert found["equal_s"] == both_s and found["largest_sample_difference"] > 0.9
        assert found["snr_db"] < 10


def test_the_reference_gets_the_same_requests_and_is_compared(monkeypatch):
    """The fake reference equals ours except for one sample of one request."""
    plain = family("qwen3_tts")
    work, _ = every_request(plain, 4)

    def run(name: str, python: str, order: dict) -> dict:
        assert name == "qwen3_tts" and python == "a python" and order["directory"] == tiny("qwen3_tts")
        assert set(order["requests"]) == set(work) and "noise" not in order
        assert {asked["max_frames"] for asked in order["requests"].values()} == {4}
        assert {asked["temperature"] for asked in order["requests"].values()} == {0.0}
        spoken = {name: zoo.generate(plain, request).samples.numpy().copy() for name, request in work.items()}
        spoken["voice dylan"][1920] += 0.5
        np.savez(order["out"], **spoken)
        return {"name": "a reference"}

    monkeypatch.setattr(reference, "run", run)
    how = {"device": "cpu", "compile": False, "reference_python": "a python"}
    found = parity(tiny("qwen3_tts"), frames=4, **how)["reference"]
    assert found["name"] == "a reference" and set(found["runs"]) == set(work)
    assert found["runs"].pop("voice dylan")["equal_s"] == pytest.approx(1920 / 24000)
    assert all(run["snr_db"] is None for run in found["runs"].values())
    assert all(run["equal_s"] == run["expected_s"] > 0 for run in found["runs"].values())


def test_the_reference_gets_the_same_noise(monkeypatch):
    plain = family("voxcpm2")

    def run(name: str, python: str, order: dict) -> dict:
        noise = torch.from_numpy(np.load(order["noise"]))
        assert noise.shape == (3, *plain.spec.noise_shape)
        request = replace(every_request(plain, 3)[0]["voice"])
        np.savez(order["out"], voice=zoo.generate(plain, request, noise=noise).samples.numpy())
        return {"name": "a reference"}

    monkeypatch.setattr(reference, "run", run)
    how = {"device": "cpu", "compile": False, "reference_python": "a python"}
    found = parity(tiny("voxcpm2"), frames=3, **how)["reference"]
    assert found["runs"]["voice"]["snr_db"] is None


class Accented(Toy):
    """A toy with an option that has choices."""

    def __init__(self) -> None:
        super().__init__()
        accent = Option("accent", str, "where it comes from", "north", choices=("north", "south"))
        self.spec = replace(self.spec, options=(*self.spec.options, accent))

    def prompt(self, request: Request) -> Prompt:
        accent = request.options.get("accent", "north")
        prompt = super().prompt(replace(request, text=f"{accent} {request.text}"))
        del prompt.slot["accent"]
        return prompt


@pytest.mark.compile
def test_the_served_form_is_compiled_once(monkeypatch):
    """One warm-up serves all requests, and nothing is compiled after it."""
    monkeypatch.setattr(
        "serving.engine.device.lowered.lower",
        lambda verb, how: torch.compile(verb, backend="eager", fullgraph=True) if how == Whole() else verb,
    )
    torch._dynamo.reset()
    monkeypatch.setattr(zoo, "load", lambda model, device, dtype: Accented())
    result = parity("toy", device="cpu", compile=True, frames=40)
    assert result["compiled"] and result["graphs"] == 1 and result["compiles_after_warmup"] == 0
    assert set(result["served"]) == {"voice", "voice accent=south"}
