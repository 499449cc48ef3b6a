"""Layers on other devices: which ones, where the weights are read to, and that the speech is the same."""

from __future__ import annotations

import json

import pytest
import torch
from models import directory, family

import zoo
from serving.cli.tools import memory
from serving.engine.loading import placement
from serving.engine.memory.device_map import bytes_by_device, device_map, layers
from serving.engine.memory.memory_plan import plan
from serving.settings import ModelOptions, Settings
from zoo.checkpoint.placement import placing
from zoo.request import Request

OTHERS = ("chatterbox", "cosyvoice2", "csm", "fish_s2", "higgs_v3", "orpheus", "voxcpm2", "zonos")
PLENTY = 1 << 40


def shapes(name="qwen3_tts"):
    return zoo.load(directory(name, "tiny"), "meta", "float32")


def layer_bytes(layer):
    return sum(parameter.nbytes for parameter in layer.parameters())


def test_layers_that_can_lie_elsewhere_are_those_of_the_language_model():
    assert list(layers(shapes())) == ["talker.layers.0", "talker.layers.1", "talker.layers.2"]


def test_layers_fill_one_device_after_the_other():
    """The first device keeps room for one layer, because those of others are copied to it."""
    model = shapes()
    made, found = plan(model, 1), layers(model)
    one = max(map(layer_bytes, found.values()))
    fixed = made.total - sum(map(layer_bytes, found.values()))
    room = {"cuda:0": fixed + 2 * one + 100, "cuda:1": one + 100, "cpu": PLENTY}
    devices = device_map("auto", model, made, room)
    assert devices == {"talker.layers.1": "cuda:1", "talker.layers.2": "cpu"}
    assert bytes_by_device(model, devices) == {"cuda:1": one, "cpu": one}
    assert device_map("auto", model, made, {"cuda:0": PLENTY, "cpu": PLENTY}) == {}
    assert device_map("balanced", model, made, {"cuda:0": PLENTY, "cuda:1": PLENTY, "cpu": PLENTY})


def test_what_does_not_fit_is_refused():
    model = shapes()
    made = plan(model, 1)
    with pytest.raises(ValueError, match="needed besides the layers"):
        device_map("auto", model, made, {"cuda:0": 1000, "cpu": PLENTY})
    with pytest.raises(ValueError, match="do not fit"):
        device_map("auto", model, made, {"cuda:0": made.total - 100, "cpu": 10})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "auto, balanced or a JSON file"),
        ("[]", "an object such as"),
        ('{"talker.norm": "cpu"}', "cannot be placed"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, content, message):
    (tmp_path / "map.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        device_map(str(tmp_path / "map.json"), shapes(), plan(shapes(), 1), {"cpu": PLENTY})


def test_a_device_that_is_missing_is_refused():
    with pytest.raises(ValueError, match=r"the device map puts talker\.layers\.0 on 'cuda:7'"):
        zoo.load(directory("qwen3_tts", "tiny"), "cpu", "float32", device_map={"talker.layers.0": "cuda:7"})


def test_without_a_gpu_a_device_map_is_refused():
    settings = Settings(
        {"a": str(directory("qwen3_tts", "tiny"))}, model=ModelOptions("cpu", device_map="auto")
    )
    with pytest.raises(ValueError, match="needs a GPU"):
        placement(settings, 1, None)


def test_rounded_weights_are_not_spread_over_devices():
    models = {"a": str(directory("qwen3_tts", "tiny"))}
    settings = Settings(models, model=ModelOptions("cuda", device_map="auto", weights="fp8"))
    with pytest.raises(ValueError, match="--weights fp8 needs all on one GPU"):
        placement(settings, 1, None)


def test_weights_are_read_to_where_their_layer_lies():
    """To `meta` here, so that a layer can be told from the others. The depth model has layers of these names
    too."""
    path = directory("qwen3_tts", "tiny")
    with placing(shapes(), {"talker.layers.1": "meta"}):
        model = zoo.load(path, "cpu", "float32")
    assert {name for name, tensor in model.named_parameters() if tensor.is_meta} == {
        name for name, _ in model.named_parameters() if name.startswith("talker.layers.1.")
    }


@pytest.mark.parametrize(
    "name", ["qwen3_tts", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_layers_on_the_host_give_the_same_samples(name):
    """accelerate's hooks bring the tensors of every layer for its runs, and leave nothing in it."""
    path = directory(name, "tiny")
    names = list(layers(zoo.load(path, "meta", "float32")))
    assert len(names) >= 2
    placed = zoo.load(path, "cpu", "float32", device_map=dict.fromkeys(names, "cpu"))
    voice = next(iter(placed.spec.voices), None)
    request = Request(text="Good morning.", seed=3, max_frames=6, voice=voice)
    ours, plain = zoo.generate(placed, request), zoo.generate(family(name), request)
    assert torch.equal(ours.frames, plain.frames) and torch.equal(ours.samples, plain.samples)
    for layer in names:
        assert all(parameter.is_meta for parameter in placed.get_submodule(layer).parameters())


def test_inspect_says_what_lies_where(tmp_path):
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"talker.layers.1": "cuda:1"}))
    shown = memory(str(directory("qwen3_tts", "tiny")), 1, "float32", "cpu", str(path))
    assert shown["layers_on_cuda:1_bytes"] == layer_bytes(layers(shapes())["talker.layers.1"])
