"""Loading Fish Audio S2: the published layout, and the errors for directories that cannot be loaded."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from models import change_json, directory, family
from safetensors.torch import load_file

import zoo
from zoo.checkpoint.loading import published
from zoo.fish_s2 import build, claims, demo, weights
from zoo.fish_s2.config import CodecConfig, Config
from zoo.request import Request

TINY = directory("fish_s2", "tiny")
# SHA-256 of the sorted rows name|BF16|shape of the published shards' headers, from kadirnar/voicehub
# (models/fishtts/native/metadata.py)
FINGERPRINT = "7080b1c9b5d5e95589a1efa18db19616170d7e35664e2e4e7f744bbf7180adad"


@pytest.fixture
def copied(tmp_path) -> Path:
    return shutil.copytree(TINY, tmp_path / "model")


def change_codec(path: Path, drop: str = "", **values: torch.Tensor) -> None:
    tensors = torch.load(path / "codec.pth", weights_only=True) | {
        name.replace("__", "."): value for name, value in values.items()
    }
    torch.save(
        {name: value for name, value in tensors.items() if not drop or drop not in name}, path / "codec.pth"
    )


def refused(path: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        zoo.load(path, "cpu")
    assert "\n" not in str(error.value)


# the published tensors


def test_our_table_has_the_tensors_of_the_published_shards():
    config = Config.read(demo.CONFIGS["full"][0])
    lm, _ = build(config, demo.CODEC)
    shapes = published(lm, weights.lm(config))
    rows = sorted(f"{name}|BF16|{'x'.join(map(str, shape))}" for name, shape in shapes.items())
    assert len(rows) == 358
    assert hashlib.sha256("\n".join(rows).encode()).hexdigest() == FINGERPRINT


def test_our_table_has_the_tensors_of_the_published_codec():
    """The published codec.pth has 535 parameters with 391,430,530 values, and six buffers with 305,135,616
    bytes."""
    _, codec = build(Config.read(demo.CONFIGS["full"][0]), demo.CODEC)
    shapes = weights.as_saved(published(codec, weights.codec(demo.CODEC)))
    assert len(shapes) == 535
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 391_430_530
    with torch.device("meta"):
        tables = [(16384, 32, 2), (4096, 32, 2), (4096, 32, 2)]
    assert sum(2 * torch.Size(shape).numel() + shape[0] ** 2 for shape in tables) == 305_135_616


def test_the_codecs_sizes_are_read_from_its_shapes():
    for size in ("tiny", "mid", "full"):
        config, codec_config = demo.CONFIGS[size]
        _, codec = build(Config.read(config), codec_config)
        shapes = weights.as_saved(published(codec, weights.codec(codec_config)))
        heads = {
            "encoder.block.4.block.5": codec_config.hear,
            "quantizer.pre_module": codec_config.pre,
            "quantizer.post_module": codec_config.post,
        }
        tables = {f"{name}.freqs_cis": (16, part.head_dim // 2, 2) for name, part in heads.items()}
        assert CodecConfig.read(shapes | tables) == codec_config


def test_a_full_demo_has_the_published_ids():
    config = demo.CONFIGS["full"][0]
    ids = {key: value for key, value in config.items() if key.endswith("_id")}
    assert ids == {
        "audio_pad_token_id": 151677,
        "eos_token_id": 151645,
        "pad_token_id": 151669,
        "semantic_start_token_id": 151678,
        "semantic_end_token_id": 155773,
    }
    assert config["text_config"]["vocab_size"] == 155776


# loaded models


def test_a_demo_has_the_published_files(copied):
    names = {path.name for path in copied.iterdir()}
    shards = {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    }
    assert names == shards | {"config.json", "codec.pth", "tokenizer.json", "tokenizer_config.json"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tensor_is_loaded(dtype):
    """The LM has the requested dtype. The codec is always float32, with its weight norm folded."""
    loaded = family("fish_s2", dtype)
    for module, expected in ((loaded.lm, getattr(torch, dtype)), (loaded.codec, torch.float32)):
        assert {tensor.dtype for tensor in module.parameters()} == {expected}
    assert (
        not any(
            tensor.is_meta or tensor.requires_grad for tensor in (*loaded.parameters(), *loaded.buffers())
        )
        and not loaded.training
    )
    lm = {}
    for shard in TINY.glob("*.safetensors"):
        lm |= load_file(shard)
    gate = lm["audio_decoder.layers.1.feed_forward.w1.weight"]
    assert torch.equal(loaded.lm.fast.layers[1].mlp.gate_up.weight[: len(gate)], gate.to(loaded.dtype))
    start, end = loaded.config.semantic_start, loaded.config.end
    rows = lm["text_model.model.embeddings.weight"].to(loaded.dtype)
    assert torch.equal(loaded.lm.head.weight, torch.cat((rows[start : start + 64], rows[end : end + 1])))
    codec = torch.load(TINY / "codec.pth", weights_only=True)
    size, direction = (
        codec[f"decoder.model.1.block.1.conv.parametrizations.weight.original{i}"] for i in (0, 1)
    )
    weight = direction * size / direction.square().sum((1, 2), keepdim=True).sqrt()
    torch.testing.assert_close(loaded.codec.decoder.blocks[0].up.weight, weight)
    assert torch.equal(
        loaded.codec.decoder.upsample[0].up.weight, codec["quantizer.upsample.0.0.conv.weight"]
    )
    assert sum(p.numel() for p in loaded.parameters()) == zoo.inspect(TINY)["parameters"]


def test_the_codec_file_may_have_a_wrapper_and_lack_unused_buffers(copied):
    request = Request(text="Good morning.", max_frames=4)
    tensors = torch.load(copied / "codec.pth", weights_only=True)
    torch.save(
        {"state_dict": {name: value for name, value in tensors.items() if "causal_mask" not in name}},
        copied / "codec.pth",
    )
    expected = zoo.generate(family("fish_s2"), request)
    assert torch.equal(zoo.generate(zoo.load(copied, "cpu"), request).samples, expected.samples)


def test_a_model_speaks():
    speech = zoo.generate(family("fish_s2"), Request(text="[whisper] Good morning.", max_frames=9))
    assert len(speech.frames) <= 9 and speech.frames.shape[1] == 4
    assert len(speech.samples) == 2048 * len(speech.frames) and speech.sample_rate_hz == 44100
    assert 0.01 < speech.samples.std() < 0.5


def test_the_licence_is_shown_and_logged(caplog):
    assert "non-commercial" in zoo.inspect(TINY)["licence"]
    with caplog.at_level(logging.INFO):
        zoo.load(TINY, "cpu")
    assert "Fish Audio Research License" in caplog.text


# refused directories


def test_fish_audio_drama_is_claimed_and_refused(copied):
    change_json(copied / "config.json", model_type="fish_omni")
    assert claims(copied)
    refused(
        copied, "is Fish Audio Drama, which has another architecture; supported: 'fish_qwen3_omni'.*'dual_ar'"
    )


def test_a_conversion_is_refused(copied):
    (copied / "codec.pth").rename(copied / "codec.safetensors")
    refused(copied, r"is a conversion with codec\.safetensors; use the published files with codec\.pth")


@pytest.mark.parametrize(
    "name",
    ["codec.pth", "model-00002-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json"],
)
def test_errors_name_a_missing_file(copied, name):
    (copied / name).unlink()
    refused(copied, r"model\.safetensors does not exist" if "index" in name else f"{name} does not exist")


@pytest.mark.parametrize("name", ["codec.pth", "model-00001-of-00002.safetensors"])
def test_errors_name_a_truncated_file(copied, name):
    content = (copied / name).read_bytes()
    (copied / name).write_bytes(content[: len(content) // 2])
    refused(copied, f"{name} is not a whole .* file")


def test_a_pickle_with_other_objects_is_refused(copied):
    torch.save({"decoder": Path("x")}, copied / "codec.pth")
    refused(copied, r"codec\.pth holds more than tensors")


def test_another_codec_is_refused(copied):
    change_codec(copied, drop="quantizer.pre_module.layers")
    refused(copied, r"codec\.pth is not the codec of Fish Audio S2: quantizer\.pre_module\.layers is missing")
    shutil.copy(TINY / "codec.pth", copied / "codec.pth")
    change_codec(copied, drop="quantizer.quantizer.quantizers.2")
    refused(copied, r"config\.json has 4 codebooks of 64, but codec\.pth has 3 of \(64, 32, 32\)")
    shutil.copy(TINY / "codec.pth", copied / "codec.pth")
    change_codec(copied, drop="downsample.1.1.pwconv1", decoder__more=torch.zeros(3))
    refused(
        copied,
        r"missing quantizer\.downsample\.1\.1\.pwconv1\.weight \[128, 32\]; .* unknown decoder\.more \[3\]",
    )


@pytest.mark.parametrize(
    ("block", "values", "message"),
    [
        (
            "text_config",
            {"attention_qk_norm": False},
            "text_config has attention_qk_norm=False; only True is known",
        ),
        (
            "audio_decoder_config",
            {"rope_base": 10000},
            "audio_decoder_config has rope_base=10000; only 1000000 is known",
        ),
        ("audio_decoder_config", {"text_dim": 32}, "audio_decoder_config has text_dim=32; only 64 is known"),
        (
            "text_config",
            {"n_local_heads": 3},
            "text_config has n_local_heads=3; use a divisor of n_head, 4",
        ),
        (None, {"semantic_end_token_id": 5}, "semantic_end_token_id=5; 64 codes from .* on must end at"),
        (
            None,
            {"eos_token_id": 1},
            r"tokenizer\.json gives <\|im_end\|> the id \d+, but config\.json has 1",
        ),
        ("text_config", {"n_layer": 2}, r"unknown text_model\.model\.layers\.2\."),
    ],
)
def test_a_config_that_does_not_fit_is_refused(copied, block, values, message):
    change_json(copied / "config.json", block, **values)
    refused(copied, message)


def test_a_tokenizer_of_another_model_is_refused(copied):
    content = json.loads((copied / "tokenizer.json").read_text())
    content["added_tokens"] = content["added_tokens"][:3]
    (copied / "tokenizer.json").write_text(json.dumps(content))
    refused(copied, r"lacks tokens of Fish Audio S2: <\|voice\|>, <\|semantic:0\|>")
