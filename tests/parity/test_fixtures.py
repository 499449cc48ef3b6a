"""The demo checkpoint equals the reference's, and the manifests equal those of the published files."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from agreement import rows
from safetensors import safe_open

from zoo.checkpoint.loading import published
from zoo.qwen3_tts import build, claims, demo, describe, weights

HERE = Path(__file__).parent
FIXTURES = HERE / "qwen3_tts"
MANIFESTS = HERE.parent / "manifests"

# sha256 of the rows, joined with line feeds. kadirnar/voicehub took them from the headers of the published
# files (voicehub/models/qwen3tts/native/metadata.py).
FINGERPRINTS = {
    "0.6b_base": "3889c5131670e5b82d9cca8f7e14164e69572b3820c26db7c68a486a458f6c4e",
    "0.6b_custom_voice": "e19ec7ba43585e1a5992503f4401083394eb97b62c7eb53aff79b45889927b14",
    "1.7b_base": "63672482f432aaff94ddb90de517e72da262d1ba4c880903cb4a016cadca33b4",
    "1.7b_custom_voice": "80b46c9ea2158e0a7b1f44756f5658859dd157663b004ec607aa1db2be0239d5",
    "codec": "b0493e243c89bbf06ef06ecf80e2a06152fcf2802add4da2915992db4de3542e",
}


def manifest(name: str) -> list[str]:
    return (MANIFESTS / f"qwen3_tts_{name}.txt").read_text().splitlines()


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_manifests_equal_those_of_the_published_files(name):
    assert hashlib.sha256("\n".join(manifest(name)).encode()).hexdigest() == FINGERPRINTS[name]


# VoiceDesign has the tensors of CustomVoice, according to its published header.
PUBLISHED = {
    "0.6b": "0.6b_custom_voice",
    "full": "0.6b_custom_voice",
    "0.6b-base": "0.6b_base",
    "1.7b": "1.7b_custom_voice",
    "1.7b-base": "1.7b_base",
    "1.7b-design": "1.7b_custom_voice",
}


@pytest.mark.slow
@pytest.mark.parametrize("size", PUBLISHED)
def test_our_modules_have_the_published_tensors(size, tmp_path):
    config, _, codec_configs, spec = describe(demo.write_texts(tmp_path / "demo", size))
    talker, codec = build(config, codec_configs)
    assert rows(published(talker, weights.root(config)), "BF16") == manifest(PUBLISHED[size])
    assert rows(published(codec, weights.codec(*codec_configs)), "F32") == manifest("codec")
    assert (spec.kv.num_layers, spec.kv.num_heads, spec.kv.head_dim) == (28, 8, 128)


@pytest.mark.parametrize("size", ["tiny", "tiny-1.7b", "tiny-base", "tiny-1.7b-base"])
def test_the_demo_equals_the_reference_checkpoint(size, tmp_path):
    expected = json.loads((FIXTURES / f"checkpoint_{size}.json").read_text())
    directory = demo.write(tmp_path / "demo", size, seed=expected["seed"], dtype=torch.float32)
    files = {path.relative_to(directory).as_posix() for path in directory.rglob("*.*")}
    assert files == expected["texts"].keys() | expected["tensors"].keys()
    for name, digest in expected["texts"].items():
        assert hashlib.sha256((directory / name).read_bytes()).hexdigest() == digest, name
    for name, tensors in expected["tensors"].items():
        with safe_open(directory / name, framework="pt") as file:
            values = {key: file.get_tensor(key) for key in sorted(file.keys())}
        assert rows({key: tuple(value.shape) for key, value in values.items()}, "F32") == tensors["rows"]
        assert (
            hashlib.sha256(b"".join(value.numpy().tobytes() for value in values.values())).hexdigest()
            == tensors["sha256"]
        )


def test_the_demo_follows_its_seed_and_dtype(tmp_path):
    name = "talker.codec_head.weight"
    full, half, other = (tmp_path / part for part in ("full", "half", "other"))
    demo.write(full, dtype=torch.float32)
    demo.write(half)
    demo.write(other, seed=1)
    tensors = {
        path: safe_open(path / "model.safetensors", framework="pt").get_tensor(name)
        for path in (full, half, other)
    }
    assert tensors[half].dtype == torch.bfloat16
    assert torch.equal(tensors[half], tensors[full].bfloat16())
    assert not torch.equal(tensors[half], tensors[other])


def test_values_are_the_same_on_every_machine_and_scaled_by_their_name():
    assert demo.fill("talker.codec_head.weight", (1, 4), seed=0).tolist() == [
        [-0.1889408975839615, 0.6007839441299438, -0.7461963295936584, 2.1704814434051514]
    ]
    wide = demo.fill("talker.model.layers.0.mlp.down_proj.weight", (64, 400), seed=3)
    assert abs(wide.std() * 20 - 1) < 0.02
    assert abs(wide.mean()) < 0.001
    usage = demo.fill("decoder.quantizer.rvq_first.vq.layers.0._codebook.cluster_usage", (2048,), seed=0)
    assert 0.5 < usage.min() < 1.2 < usage.max() < 2.5
    with pytest.raises(ValueError, match=r"no rule says how to fill 'talker\.nothing'"):
        demo.fill("talker.nothing", (1,), seed=0)


def test_changes_to_the_config_are_merged_in(tmp_path):
    directory = demo.write(tmp_path / "demo", talker_config={"num_hidden_layers": 1})
    config, *_ = describe(directory)
    assert (config.talker.layers, config.talker.hidden) == (1, 32)
    assert claims(directory)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"size": "huge"},
            "size 'huge' is not known; sizes: tiny, tiny-1.7b, mid, 0.6b, 1.7b, tiny-base, .*, full",
        ),
        (
            {"dtype": torch.int8},
            "dtype torch.int8 cannot be written; possible: torch.float32, torch.bfloat16, torch.float16",
        ),
        (
            {"tts_model_type": "singer"},
            "tts_model_type 'singer' is not supported; supported: base, custom_voice, voice_design",
        ),
        ({"talker_config": {"layers": 1}}, "talker_config has no 'layers'; it has: .*num_hidden_layers"),
    ],
)
def test_a_failed_write_names_the_cause_and_leaves_no_files(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        demo.write(tmp_path / "demo", **arguments)
    assert not (tmp_path / "demo").exists()


def test_write_never_overwrites_files(tmp_path):
    (tmp_path / "kept").write_text("kept")
    with pytest.raises(ValueError, match="exists and is not an empty directory"):
        demo.write(tmp_path)
    with pytest.raises(ValueError, match="exists and is not an empty directory"):
        demo.write(tmp_path / "kept")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_the_vocabulary_of_the_published_size():
    words = demo.vocabulary(full=True)
    assert sorted(words.values()) == list(range(151643))
    assert {word: words[word] for word in ("assistant", "user", "system", "Ċ")} == {
        "assistant": 77091,
        "user": 872,
        "system": 8948,
        "Ċ": 198,
    }
    assert all(left + right in words for left, right in demo.merges())
    config = demo.CONFIGS["0.6b"]["config.json"]
    assert (config["im_start_token_id"], config["im_end_token_id"]) == (151644, 151645)
    assert (config["tts_pad_token_id"], config["tts_bos_token_id"], config["tts_eos_token_id"]) == (
        151671,
        151672,
        151673,
    )


def test_files_with_known_published_bytes_are_equal(tmp_path):
    directory = demo.write_texts(tmp_path / "demo", "0.6b")
    # the published file has no line feed at its end
    generation = (directory / "generation_config.json").read_bytes().rstrip()
    features = (directory / "speech_tokenizer" / "preprocessor_config.json").read_bytes()
    assert hashlib.sha256(generation).hexdigest().startswith("f1b90b45")
    assert hashlib.sha256(features).hexdigest().startswith("fcb3805e")
