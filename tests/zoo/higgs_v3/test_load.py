"""Loading Higgs Audio V3: complete and partial directories, and the errors for directories that cannot be
loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from models import change_json, directory, family
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import zoo
from zoo.higgs_v3 import claims, demo, weights
from zoo.request import Request

TINY = directory("higgs_v3", "tiny")


@pytest.fixture
def copied(tmp_path) -> Path:
    return shutil.copytree(TINY, tmp_path / "model")


def refused(path: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        zoo.load(path, "cpu")
    assert "\n" not in str(error.value)


# loaded models


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tensor_is_loaded(dtype):
    """The LM has the requested dtype, the codec is always float32, and the unused tensors are gone."""
    loaded = family("higgs_v3", dtype)
    for module, expected in ((loaded.backbone, getattr(torch, dtype)), (loaded.codec, torch.float32)):
        tensors = dict(module.named_parameters())
        assert tensors and {tensor.dtype for tensor in tensors.values()} == {expected}
    assert (
        not any(
            tensor.is_meta or tensor.requires_grad for tensor in (*loaded.parameters(), *loaded.buffers())
        )
        and not loaded.training
    )
    with safe_open(TINY / "model.safetensors", framework="pt") as file:
        query = file.get_tensor("body.layers.2.self_attn.q_proj.weight")
        rows = file.get_tensor(f"{weights.CODEC}.quantizer.quantizers.7.codebook.embed")
    assert torch.equal(loaded.backbone.stack.layers[2].qkv.weight[: len(query)], query.to(loaded.dtype))
    assert torch.equal(loaded.codec.quantizer.books[7].rows, rows)
    assert loaded.head.weight is loaded.backbone.codes.weight
    assert sum(p.numel() for p in loaded.parameters()) == zoo.inspect(TINY)["parameters"]


def test_the_spec_describes_the_model():
    spec = family("higgs_v3").spec
    assert (spec.family, spec.variant, spec.frame_shape, spec.frame_samples, spec.sample_rate_hz) == (
        "higgs_v3",
        "tts",
        (8,),
        960,
        24000,
    )
    assert (spec.frame_rate_hz, spec.modes, spec.voices) == (25, ("voice", "clone"), ("default",))
    assert spec.window.lookahead == 10 and spec.reference_s == (0.1, 100.0)


def test_inspect_of_the_published_size_reads_no_weights(tmp_path):
    """The count has the layers, the two embeddings and the codec. It leaves out values that nothing uses, and
    the heads, which are copies."""
    found = zoo.inspect(demo.write_texts(tmp_path / "model", "full"))
    unread = 16_516_608 + 787_200 + 768 + 8 * (1 + 1024 + 1024 * 64)
    assert found["parameters"] == 3_633_511_936 + 388_956_160 + 21_012_480 + 201_401_321 - unread
    assert found["kv_bytes_per_audio_s"] == 147_456 * 25


# other published layouts and older configs


def test_the_heads_are_not_in_the_index_and_may_be_absent(copied):
    indexed = json.loads((copied / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = load_file(copied / "model.safetensors")
    assert tensors.keys() - indexed.keys() == set(weights.HEADS) and indexed.keys() <= tensors.keys()
    save_file({name: tensors[name] for name in indexed}, copied / "model.safetensors")
    again = zoo.load(copied, "cpu")
    spoken = zoo.generate(again, Request(text="a", max_frames=3, temperature=0.0))
    assert torch.equal(
        spoken.frames,
        zoo.generate(family("higgs_v3"), Request(text="a", max_frames=3, temperature=0.0)).frames,
    )


def test_a_directory_without_an_index_loads(copied):
    (copied / "model.safetensors.index.json").unlink()
    assert zoo.load(copied, "cpu").spec == family("higgs_v3").spec


def test_rope_theta_defaults_to_a_million(copied):
    change_json(copied / "config.json", "text_config", rope_parameters=None)
    assert zoo.load(copied, "cpu").config == family("higgs_v3").config


# errors


def test_the_family_claims_only_its_model_type(copied):
    assert claims(copied)
    for model_type in ("qwen3", None):
        change_json(copied / "config.json", model_type=model_type)
        assert not claims(copied)


@pytest.mark.parametrize(
    ("block", "values", "message"),
    [
        (
            None,
            {"model_type": "higgs_audio"},
            r"this is Higgs Audio V2 \(higgs_audio\), .*; only Higgs Audio V3 TTS .* is supported",
        ),
        (None, {"model_type": "higgs_audio_v2"}, r"this is Higgs Audio V2 \(higgs_audio_v2\)"),
        (
            None,
            {"model_type": "higgs_audio_v2_tokenizer"},
            "this directory holds only a codec .*; load Higgs Audio V3 TTS",
        ),
        (
            "audio_encoder_config",
            {"encoder_type": "whisper"},
            "encoder_type='whisper'; that model understands speech",
        ),
        ("audio_encoder_config", {"use_delay_pattern": False}, "use_delay_pattern=False; only True is known"),
        (
            "audio_encoder_config",
            {"tie_word_embeddings": False},
            "tie_word_embeddings=False; only True is known",
        ),
        ("audio_encoder_config", {"out_dim": 128}, "out_dim=128; it must equal the LM's hidden_size, 64"),
        (
            "audio_encoder_config",
            {"vocab_size": 1026},
            "the LM has 1024 codes per codebook, but the codec has 64",
        ),
        ("audio_encoder_config", {"num_codebooks": None}, "audio_encoder_config has no 'num_codebooks'"),
        ("text_config", {"model_type": "llama"}, "text_config has model_type='llama'; only 'qwen3' is known"),
        ("text_config", {"attention_bias": True}, "attention_bias=True; only False is known"),
        ("text_config", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn'"),
        ("text_config", {"num_hidden_layers": 4}, "missing body.layers.3.input_layernorm.weight"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_unsupported_configs_are_refused(block, values, message, copied):
    change_json(copied / "config.json", block, **values)
    refused(copied, message)


def test_a_codec_with_other_strides_is_refused(copied):
    config = json.loads((copied / "config.json").read_text())["audio_encoder_config"]["codec_config"]
    config["acoustic_model_config"]["downsampling_ratios"] = [8, 5, 4, 2]
    change_json(copied / "config.json", "audio_encoder_config", codec_config=config)
    refused(copied, r"downsampling_ratios=\[8, 5, 4, 2\]; only \[8, 5, 4, 2, 3\] is known")


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_errors_name_a_missing_file(name, copied):
    (copied / name).unlink()
    refused(copied, f"{name} does not exist")


def test_a_tokenizer_of_another_model_is_refused(copied):
    content = json.loads((copied / "tokenizer.json").read_text())
    kept = [token for token in content["added_tokens"] if token["content"] != "<|audio|>"]
    change_json(copied / "tokenizer.json", added_tokens=kept)
    refused(copied, r"tokenizer.json lacks tokens of Higgs Audio V3: <\|audio\|>")
    content["added_tokens"][-1]["id"] = 999
    change_json(copied / "tokenizer.json", added_tokens=content["added_tokens"])
    refused(copied, "tokenizer.json has ids up to 999, but the model has 384 text rows")
    change_json(copied / "tokenizer.json", added_tokens=content["added_tokens"], model={"type": "none"})
    refused(copied, "tokenizer.json is not a tokenizer")


@pytest.mark.parametrize("change_of", ["missing", "unknown", "shape"])
def test_loading_is_strict(change_of, copied):
    (copied / "model.safetensors.index.json").unlink()
    tensors = load_file(copied / "model.safetensors")
    name = f"{weights.CODEC}.fc1.weight"  # not used, but still checked
    if change_of == "missing":
        del tensors[name]
    elif change_of == "unknown":
        tensors["tied.head.extra.weight"] = torch.zeros(2)
    else:
        tensors[name] = tensors[name][:1].clone()
    save_file(tensors, copied / "model.safetensors")
    messages = {
        "missing": f"missing {name}",
        "unknown": "unknown tied.head.extra.weight",
        "shape": f"{name} has shape",
    }
    refused(copied, messages[change_of])


def test_the_layout_of_fine_tuning_tools_is_refused(copied):
    (copied / "model.safetensors.index.json").unlink()
    tensors = load_file(copied / "model.safetensors")
    tensors["audio_embedding.weight"] = tensors.pop(demo.CODES)
    save_file(tensors, copied / "model.safetensors")
    refused(
        copied,
        r"has the tensor names of fine-tuning tools .*; use a checkpoint with the published names \(body\.\*, tied\.embedding\.\*\)",
    )


# demo checkpoints


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": "huge"}, "size 'huge' is not known; sizes: tiny, mid, full"),
        (
            {"dtype": torch.int8},
            "dtype torch.int8 cannot be written; possible: torch.float32, torch.bfloat16, torch.float16",
        ),
        ({"model_type": "higgs_audio"}, "this is Higgs Audio V2"),
        ({"text_config": {"layers": 1}}, "text_config has no 'layers'; it has: .*num_hidden_layers"),
    ],
)
def test_invalid_arguments_write_nothing(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        demo.write(tmp_path / "demo", **arguments)
    assert not (tmp_path / "demo").exists()


def test_write_does_not_overwrite_files(tmp_path):
    (tmp_path / "kept").write_text("kept")
    with pytest.raises(ValueError, match="exists and is not an empty directory"):
        demo.write(tmp_path)


def test_a_demo_has_the_requested_seed_dtype_and_layers_and_copied_heads(tmp_path):
    half, other = (
        demo.write(tmp_path / "half"),
        demo.write(tmp_path / "other", seed=1, text_config={"num_hidden_layers": 1}),
    )
    tensors, plain = load_file(half / "model.safetensors"), load_file(TINY / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(torch.equal(tensors[name], plain[name].bfloat16()) for name in plain)
    assert all(torch.equal(tensors[copy], tensors[original]) for copy, original in demo.COPIES.items())
    assert not torch.equal(load_file(other / "model.safetensors")[demo.CODES], tensors[demo.CODES])
    assert len(zoo.load(other, "cpu").backbone.stack.layers) == 1


def test_the_licence_is_shown():
    assert "Non-Commercial" in zoo.inspect(TINY)["licence"]


def test_the_mid_size_has_about_150_million_parameters(tmp_path):
    found = zoo.inspect(demo.write_texts(tmp_path / "mid", "mid"))
    assert 120e6 < found["parameters"] < 200e6
    with pytest.raises(ValueError, match=r"no rule says how to fill 'body\.nothing'"):
        demo.fill("body.nothing", (1,), seed=0)
