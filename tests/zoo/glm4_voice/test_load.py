"""Loading GLM-4-Voice: three directories, the published sizes, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from models import directory

import zoo
from zoo.checkpoint.loading import published, weight_normed
from zoo.checkpoint.tensor_files import open_file
from zoo.glm4_voice import build, claims, demo, describe, survey, weights
from zoo.glm4_voice.config import DECODER, TOKENIZER

NAME = "glm4_voice"
# The published numbers of values. The tokenizer's file also has those that nothing reads: averages for training, and
# positions of layers that are not published.
LM, FLOW, VOCODER, LISTENER = 9_542_557_696, 111_166_208, 20_460_591, 343_599_360
AVERAGES = 16_384 * 1280 + 16_384
ANGLES = 32


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(directory(NAME, "tiny"), tmp_path / "model"))


def refusal(path: Path) -> str:
    with pytest.raises(ValueError) as caught:
        zoo.load(path, "cpu")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_the_full_size_has_the_published_numbers_of_values(tmp_path):
    path = demo.write_texts(tmp_path / "full", "full")
    config, spec = describe(path)
    sizes = [sum(p.numel() for p in module.parameters()) for module in build(config)]
    lm, flow, _, listener = sizes
    assert (lm, flow, listener) == (LM + ANGLES, FLOW, LISTENER + AVERAGES)
    shapes = published(build(config)[2], weights.vocoder(config.vocoder))
    normed = weight_normed(shapes, weights.is_weight_normed)
    assert sum(math.prod(shape) for shape in normed.values()) == VOCODER
    assert (spec.kv.num_layers, spec.kv.num_heads, spec.kv.head_dim, spec.sample_rate_hz) == (
        40,
        2,
        128,
        22_050,
    )
    assert survey(path)[1] == sum(sizes)


def test_tokenizer_and_decoder_may_lie_next_to_the_model(copy):
    for folder in (TOKENIZER, DECODER):
        (copy / folder).rename(copy.parent / folder)
    assert zoo.load(copy, "cpu").spec.answers


def test_a_missing_decoder_is_named(copy, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.rmtree(copy / DECODER)
    assert f"put it into {copy / DECODER}" in refusal(copy)


def test_a_glm_4_without_audio_tokens_is_not_claimed(copy):
    path = copy / "tokenizer_config.json"
    assert claims(copy)
    path.write_text(path.read_text().replace("<|audio_0|>", "<|image_0|>"))
    assert not claims(copy)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config.json", {"add_qkv_bias": False}, "add_qkv_bias"),
        ("config.json", {"kv_channels": 6}, "kv_channels"),
        (f"{TOKENIZER}/config.json", {"encoder_causal_convolution": False}, "encoder_causal_convolution"),
        (f"{TOKENIZER}/config.json", {"quantize_vocab_size": 65}, "vocab_size"),
        (f"{TOKENIZER}/preprocessor_config.json", {"feature_size": 80}, "feature_size"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"1": {"content": "<|audio_0|>"}}},
            "lacks tokens",
        ),
        ("tokenizer_config.json", {"added_tokens_decoder": ["<|audio_0|>"]}, "added_tokens_decoder"),
    ],
)
def test_wrong_values_are_named(copy, file, changes, message):
    change(copy / file, **changes)
    assert message in refusal(copy)


def test_the_published_angles_are_optional(copy):
    """Some checkpoints hold them; they follow from the config."""
    path = copy / "model.safetensors"
    file = open_file(path)
    tensors = {name: file.read(name).clone() for name in file.headers if not name.endswith("inv_freq")}
    assert len(tensors) == len(file.headers) - 1
    from safetensors.torch import save_file

    save_file(tensors, path)
    zoo.load(copy, "cpu")
    save_file(tensors | {"transformer.extra": torch.zeros(1)}, path)
    assert "unknown transformer.extra" in refusal(copy)
