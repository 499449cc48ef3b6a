"""Loading CSM: two published layouts, strict tables, copies that must agree, and a codec that may lie
elsewhere."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from models import directory, family
from safetensors.torch import load_file, save_file

import zoo
from zoo.csm import demo
from zoo.csm.layouts import find_codec
from zoo.csm.weights import COPIES, INDEX_KEY
from zoo.request import AudioClip, Reference, Request

CLIP = AudioClip(np.sin(np.arange(4000) ** 1.5 / 30).astype(np.float32) / 4, 24_000)
ASKED = Request(text="Good morning.", max_frames=5, references=(Reference(CLIP, "Hm."),))


@pytest.fixture
def copy(tmp_path):
    """A checkpoint in transformers' layout that a test may change."""
    return shutil.copytree(directory("csm", "tiny"), tmp_path / "model")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return demo.write(tmp_path_factory.mktemp("csm") / "original", layout="original")


def tensors_of(path):
    return {name: value for shard in demo.SHARDS for name, value in load_file(path / shard).items()}


def in_one_file(path, tensors):
    """Write the tensors as transformers saves them: one model.safetensors, without an index."""
    for file in (*demo.SHARDS, demo.INDEX):
        (path / file).unlink()
    config = json.loads((path / "config.json").read_text())
    del config[INDEX_KEY]
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def agree(one, other):
    """Both models have equal tensors and encode and speak alike."""
    for mine, theirs in ((one.lm, other.lm), (one.decoder, other.decoder)):
        assert all(torch.equal(mine.state_dict()[name], value) for name, value in theirs.state_dict().items())
    assert torch.equal(zoo.generate(one, ASKED).samples, zoo.generate(other, ASKED).samples)


def test_both_layouts_load_to_equal_tensors(original):
    """The original one has pairs of RoPE side by side, and the codec in a folder of its own."""
    agree(zoo.load(original, "cpu", "float32"), family("csm"))


def test_without_the_permutation_the_original_layout_speaks_otherwise(original, monkeypatch):
    monkeypatch.setattr("zoo.csm.weights.in_halves", lambda config, name, value: value)
    wrong = zoo.load(original, "cpu", "float32")
    assert not torch.equal(
        wrong.lm.backbone.layers[0].qkv.weight, family("csm").lm.backbone.layers[0].qkv.weight
    )


@pytest.mark.parametrize("left_out", [None, *COPIES])
def test_the_embeddings_of_codes_may_be_there_once_or_twice(copy, left_out):
    tensors = tensors_of(copy)
    tensors.pop(left_out, None)
    agree(zoo.load(in_one_file(copy, tensors), "cpu", "float32"), family("csm"))


def test_copies_that_differ_are_refused(copy):
    tensors = tensors_of(copy)
    tensors[COPIES[0]][3] += 1
    with pytest.raises(ValueError, match=r"embed_audio_tokens\.weight differ; they must be equal"):
        zoo.load(in_one_file(copy, tensors), "cpu", "float32")


def test_a_directory_with_both_layouts_is_read_by_its_index(copy, original):
    shutil.copy(original / "model.safetensors", copy / "model.safetensors")
    agree(zoo.load(copy, "cpu", "float32"), family("csm"))


def test_the_original_file_alone_is_found_though_the_config_names_an_index(copy, original):
    for file in (*demo.SHARDS, demo.INDEX):
        (copy / file).unlink()
    torch.save(load_file(original / "model.safetensors"), copy / "ckpt.pt")
    shutil.copytree(original / "mimi", copy / "mimi")
    agree(zoo.load(copy, "cpu", "float32"), family("csm"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("lm_head.weight"), "missing lm_head.weight"),
        (
            lambda tensors: tensors.pop("codec_model.encoder.layers.0.conv.bias"),
            "missing codec_model.encoder",
        ),
        (lambda tensors: tensors.update(extra=torch.zeros(2)), "unknown extra"),
        (
            lambda tensors: tensors.update({"codec_model.encoder.layers.0.conv.bias": torch.zeros(3)}),
            r"encoder.layers.0.conv.bias has shape \[3\], expected \[4\]",
        ),
        (lambda tensors: tensors.pop("backbone_model.layers.0.self_attn.q_proj.weight"), "holds no CSM"),
    ],
)
def test_every_tensor_is_checked_those_of_the_encoder_too(copy, change, message):
    tensors = tensors_of(copy)
    change(tensors)
    with pytest.raises(ValueError, match=message):
        zoo.load(in_one_file(copy, tensors), "cpu", "float32")


def test_a_directory_without_weights_names_the_files(copy):
    for file in (*demo.SHARDS, demo.INDEX):
        (copy / file).unlink()
    with pytest.raises(
        ValueError, match=r"transformers.safetensors.index.json does not exist, nor.*ckpt\.pt"
    ):
        zoo.load(copy, "cpu", "float32")
    assert zoo.inspect(copy)["family"] == "csm"


def test_the_original_layout_without_its_codec_says_where_to_put_it(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"kyutai/mimi, is missing: put it into .*mimi or .*mimi"):
        find_codec(tmp_path / "model")


def test_the_encoder_is_loaded_when_the_first_clip_comes():
    loaded = zoo.load(directory("csm", "tiny"), "cpu", "float32")
    zoo.generate(loaded, Request(text="a", max_frames=1))
    assert loaded.writer.cloner.encoder._model is None
    loaded.prompt(ASKED)
    assert loaded.writer.cloner.encoder._model is not None
