"""Loading a model directory, and the errors for directories that cannot be loaded."""

from __future__ import annotations

import json
import shutil
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from models import change_json, directory, family
from safetensors import safe_open

import zoo
from zoo.qwen3_tts import demo
from zoo.request import Request

TINY = directory("qwen3_tts", "tiny")


@pytest.fixture
def copied(tmp_path) -> Path:
    return shutil.copytree(TINY, tmp_path / "model")


# loaded models


def test_every_folder_is_a_family():
    for module in zoo.families().values():
        assert all(callable(verb) for verb in (module.claims, module.load, module.survey, module.write_demo))


@pytest.mark.parametrize(
    ("config", "claimed_by"),
    [
        ({"model_type": "qwen3_tts"}, "qwen3_tts"),
        ({"architectures": ["Qwen3TTSForConditionalGeneration"]}, "qwen3_tts"),
        ({"model_type": "higgs_multimodal_qwen3"}, "higgs_v3"),
        ({"architecture": "voxcpm2"}, "voxcpm2"),
        ({"model_type": "llama"}, None),
        ({}, None),
        (None, None),
    ],
)
def test_at_most_one_family_claims_a_directory(config, claimed_by, tmp_path):
    """The files decide. A directory without config.json is possible."""
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    claims = [name for name, module in zoo.families().items() if module.claims(tmp_path)]
    assert claims == ([claimed_by] if claimed_by else [])


def test_a_family_can_be_found_by_files_other_than_config_json(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "family.yaml").write_text("")
    family = types.ModuleType("by_its_yaml")
    family.claims = lambda directory: (directory / "family.yaml").exists()
    known = zoo.families() | {"by_its_yaml": family}
    monkeypatch.setattr(zoo, "families", lambda: known)
    assert zoo.find(tmp_path) == (family, tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tensor_is_loaded(dtype):
    """The talker has the requested dtype, the codec is always float32, and both have the values of the
    files."""
    loaded = family("qwen3_tts", dtype)
    for module, expected in ((loaded.talker, getattr(torch, dtype)), (loaded.codec, torch.float32)):
        tensors = dict(module.named_parameters())
        assert tensors and not any(tensor.is_meta or tensor.requires_grad for tensor in tensors.values())
        assert {tensor.dtype for tensor in tensors.values()} == {expected}
    assert not any(buffer.is_meta for buffer in loaded.buffers()) and not loaded.training
    with safe_open(TINY / "model.safetensors", framework="pt") as file:
        query = file.get_tensor("talker.model.layers.2.self_attn.q_proj.weight")
        head = file.get_tensor("talker.code_predictor.lm_head.14.weight")
    assert torch.equal(loaded.talker.layers[2].qkv.weight[: len(query)], query.to(loaded.dtype))
    assert torch.equal(loaded.talker.depth.heads[14].weight, head.to(loaded.dtype))
    assert (loaded.dtype, loaded.device.type) == (getattr(torch, dtype), "cpu")


def test_the_spec_describes_the_model():
    spec = family("qwen3_tts").spec
    assert (spec.family, spec.variant, spec.frame_shape, spec.frame_samples, spec.sample_rate_hz) == (
        "qwen3_tts",
        "custom_voice",
        (16,),
        1920,
        24000,
    )
    assert spec.frame_rate_hz == 12.5 and spec.modes == ("voice",)
    assert (
        spec.voices == tuple(sorted(demo.VOICES))
        and spec.languages[0] == "auto"
        and len(spec.languages) == 11
    )
    assert family("qwen3_tts", size="tiny-1.7b").spec.modes == ("voice", "instruct")


@pytest.mark.parametrize(("size", "parameters"), [("0.6b", 905_788_672), ("1.7b", 1_916_676_352)])
def test_inspect_reads_no_weights(size, parameters, tmp_path):
    """The count equals that of the published files, including the codec's 170,557,441 parameters."""
    found = zoo.inspect(demo.write_texts(tmp_path / "model", size))
    assert found["parameters"] == parameters + 170_557_441
    assert (found["family"], found["variant"]) == ("qwen3_tts", "custom_voice")
    assert (found["sample_rate_hz"], found["frame_shape"]) == (24000, [16])
    assert found["kv_bytes_per_audio_s"] == 114_688 * 12.5


@pytest.mark.parametrize("dialect", [False, "sichuan_dialect"])
def test_a_fine_tuned_model_with_one_voice_needs_no_voice_name(dialect, copied):
    """Its config keeps the Base model's speaker_encoder_config, although the tensors are gone."""
    config = json.loads((copied / "config.json").read_text())
    talker = config["talker_config"] | {"spk_id": {"Anna": 100}, "spk_is_dialect": {"Anna": dialect}}
    change_json(
        copied / "config.json",
        talker_config=talker,
        speaker_encoder_config={"enc_dim": 32, "sample_rate": 24000},
    )
    tuned = zoo.load(copied, "cpu")
    assert tuned.spec.voices == ("anna",)
    named, unnamed = (tuned.prompt(Request(text="hello", voice=voice)) for voice in ("ANNA", None))
    assert named.prefix_keys == unnamed.prefix_keys and torch.equal(named.inputs, unnamed.inputs)


# errors


def refused(path: Path | str, message: str, **arguments: Any) -> None:
    with pytest.raises(ValueError, match=message) as error:
        zoo.load(path, **{"device": "cpu", **arguments})
    assert "\n" not in str(error.value)


def test_a_directory_without_a_model_is_refused(tmp_path, copied):
    possible = "a model is a directory, or a repository ORG/NAME or ORG/NAME@REVISION of the Hugging Face Hub"
    refused(tmp_path / "nothing", f"nothing' is not a directory; {possible}")
    refused(TINY / "config.json", f"config.json' is not a directory; {possible}")
    lacking = "it has no config.json, nor the files of a family without one"
    refused(tmp_path, f"is not a model: {lacking}; known families: .*qwen3_tts")
    (copied / "config.json").write_text("{")
    refused(copied, r"config.json cannot be read: Expecting property name")


def test_an_unknown_model_type_is_refused(copied):
    change_json(copied / "config.json", model_type="llama", architectures=["LlamaForCausalLM"])
    refused(copied, "has model_type 'llama'; known families: .*qwen3_tts")
    change_json(copied / "config.json", model_type=None, architectures=None)
    refused(copied, "has model_type None; known families: .*qwen3_tts")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"tokenizer_type": "qwen3_tts_tokenizer_25hz"},
            "_25hz' is not supported; supported: qwen3_tts_tokenizer_12hz",
        ),
        ({"tts_model_type": "singer"}, "tts_model_type 'singer' is not supported; supported: .*custom_voice"),
        ({"tts_pad_token_id": None}, "config.json: the root has no 'tts_pad_token_id'"),
        ({"talker_config": {}}, "config.json: talker_config has no 'code_predictor_config'"),
    ],
    ids=["25 Hz", "variant", "no key", "no block"],
)
def test_unsupported_configs_are_refused(values, message, copied):
    change_json(copied / "config.json", **values)
    refused(copied, message)


@pytest.mark.parametrize(
    "name",
    [
        "generation_config.json",
        "vocab.json",
        "merges.txt",
        "model.safetensors",
        "speech_tokenizer/config.json",
        "speech_tokenizer/model.safetensors",
    ],
)
def test_errors_name_a_missing_file(name, copied):
    (copied / name).unlink()
    refused(copied, f"{name} does not exist")


def test_an_invalid_vocabulary_is_refused(copied):
    (copied / "merges.txt").write_text("#version: 0.2\nnot in the vocabulary at all\n")
    refused(copied, r"vocab.json and merges.txt are not a byte-level BPE: ")


def test_a_config_that_does_not_match_the_tensors_is_refused(copied):
    config = json.loads((copied / "config.json").read_text())
    change_json(copied / "config.json", talker_config=config["talker_config"] | {"num_hidden_layers": 4})
    refused(
        copied,
        r"does not hold the tensors its config promises: missing talker.model.layers.3.*\(and 3 more\)",
    )


@pytest.mark.parametrize(
    ("block", "values", "message"),
    [
        ("config.json", {"assistant_token_id": 768}, "_id=768; an integer from 0 to 767 is possible"),
        ("talker_config", {"num_hidden_layers": 10**9}, "=1000000000; an integer from 1 to 1000 is possible"),
        ("talker_config", {"codec_bos_id": 1088}, "codec_bos_id=1088; an integer from 0 to 1087"),
        ("talker_config", {"spk_id": {"anna": 1088}}, "spk_id has anna=1088; an integer from 0 to 1087"),
        ("talker_config", {"spk_id": {}}, "spk_id={}; a custom_voice model needs at least one voice"),
        ("talker_config", {"codec_language_id": {"thai": True}}, "has thai=True; an integer from 0 to 1087"),
        (
            "talker_config",
            {"spk_is_dialect": {"eric": "wu"}},
            "eric='wu'; use false or a key of codec_language",
        ),
        ("talker_config", {"num_attention_heads": 3}, "_heads=3; a multiple of 2 from 1 to 1024 is possible"),
        ("talker_config", {"head_dim": 7}, "head_dim=7; a multiple of 2 from 2 to 1024 is possible"),
        (
            "generation_config.json",
            {"top_p": 1.5},
            "^generation_config.json: the root has top_p=1.5; a number",
        ),
        ("speech_tokenizer/config.json", {"output_sample_rate": "24000"}, "the root has .*='24000'; an int"),
        (
            "speech_tokenizer/config.json",
            {"encoder_valid_num_quantizers": 15},
            "^speech_tokenizer/config.json: encoder_config has 15 codebooks of 64 codes, but the model has 16:",
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_errors_name_a_value_out_of_range_and_the_possible_values(block, values, message, copied):
    file = block if block.endswith(".json") else "config.json"
    if block == "talker_config":
        values = {block: json.loads((copied / file).read_text())[block] | values}
    change_json(copied / file, **values)
    refused(copied, message)


def test_a_tokenizer_with_more_tokens_than_embedding_rows_is_refused(copied):
    vocab = json.loads((copied / "vocab.json").read_text()) | {"beyond": 768}
    (copied / "vocab.json").write_text(json.dumps(vocab))
    refused(copied, "vocab.json has ids up to 768, but the model has 768 text rows")


@pytest.mark.parametrize("dtype", zoo.DTYPES)
def test_a_dtype_is_a_name_or_a_torch_dtype(dtype):
    expected = getattr(torch, dtype)
    assert {zoo.load(TINY, "cpu", asked).dtype for asked in (dtype, expected)} == {expected}


@pytest.mark.parametrize("dtype", [torch.float16, 32, "", "torch.float32"])
def test_an_unknown_dtype_is_refused(dtype):
    refused(TINY, f"^dtype {dtype!r} is not possible; possible: float32, bfloat16$", dtype=dtype)


def test_an_unavailable_dtype_or_device_is_refused():
    refused(TINY, "dtype 'float16' is not possible; possible: float32, bfloat16", dtype="float16")
    refused(TINY, "device 'tpu' is not available; use cpu or cuda", device="tpu")
    refused(TINY, "device 'cuda:99' is not ", device="cuda:99")
    assert zoo.load(TINY, "cpu").dtype == torch.float32  # the default on a CPU
