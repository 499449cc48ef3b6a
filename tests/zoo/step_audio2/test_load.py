"""Loading Step-Audio 2: the published sizes and names, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from models import directory, family
from mutations import mutations

import zoo
from zoo.checkpoint.loading import published, weight_normed
from zoo.checkpoint.tensor_files import open_file
from zoo.checkpoint.yaml_files import read_yaml
from zoo.request import recording_name
from zoo.step_audio2 import build, claims, demo, describe, survey, weights
from zoo.step_audio2.config import FOLDER, YAML, Config
from zoo.step_audio2.vocabulary import AUDIO_START, SPEECH_START, TOKENS, audio

NAME = "step_audio2"
MANIFESTS = Path(__file__).parents[2] / "manifests"
# The published numbers of values.
LM, LISTENER, FLOW, VOCODER = 7_663_326_720, 636_968_960 + 14_883_584, 155_802_352, 20_821_295
HIFT = f"{FOLDER}/hift.pt"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(directory(NAME, "tiny"), tmp_path / "model"))


def refusal(path: Path) -> str:
    with pytest.raises(ValueError) as caught:
        zoo.load(path, "cpu")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def change(path: Path, block: str, **values: object) -> None:
    content = json.loads(path.read_text())
    content[block] |= values
    path.write_text(json.dumps(content))


def test_a_damaged_default_voice_is_found_when_the_model_is_loaded(copy):
    (copy / "assets" / "default_female.wav").write_bytes(b"RIFF")
    assert "default_female.wav cannot be read" in refusal(copy)


def test_default_voices_are_read_and_named_once():
    voices = family(NAME).voices
    assert [clip.name for clip in voices.values()] == [
        recording_name(clip.samples, clip.sample_rate_hz) for clip in voices.values()
    ]


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Path:
    return demo.write_texts(tmp_path_factory.mktemp("full") / "model", "full")


def test_the_full_size_has_the_published_numbers_of_values(full):
    config, spec = describe(full)
    model, flow, vocoder = build(config)
    assert sum(p.numel() for p in model.lm.parameters()) == LM
    assert sum(p.numel() for p in model.listener.parameters()) == LISTENER
    assert sum(p.numel() for p in flow.parameters()) == FLOW
    normed = weight_normed(published(vocoder, weights.vocoder(config.vocoder)), weights.is_weight_normed)
    assert sum(math.prod(shape) for shape in normed.values()) == VOCODER
    assert (spec.kv.num_layers, spec.kv.num_heads, spec.kv.head_dim) == (28, 4, 128)
    assert (spec.sample_rate_hz, spec.max_positions, spec.voices) == (24_000, 16_384, ())
    assert survey(full)[1] == sum(p.numel() for module in (model, flow, vocoder) for p in module.parameters())


def test_the_full_size_has_the_published_ids(full):
    tokens = {
        token["content"]: token["id"] for token in json.loads((full / TOKENS).read_text())["added_tokens"]
    }
    known = {"<|endoftext|>": 151_643, AUDIO_START: 151_688, SPEECH_START: 151_693, "<tts_end>": 151_694}
    known |= {"<audio_patch>": 151_690, audio(0): 151_696, audio(6561): 158_257}
    assert {token: tokens[token] for token in known} == known


def test_our_modules_have_the_published_tensors(full):
    """The names and shapes that the page of facts about the model lists."""
    config, _ = describe(full)
    model, flow, vocoder = build(config)
    for name, shapes in {
        "": published(model, weights.published(config.lm, config.listener)),
        "_flow": published(flow, weights.flow(config.flow)),
        "_hift": weight_normed(published(vocoder, weights.vocoder(config.vocoder)), weights.is_weight_normed),
    }.items():
        dtype = "F32" if name else "BF16"
        rows = sorted(f"{key}|{dtype}|{'x'.join(map(str, shape))}" for key, shape in shapes.items())
        assert rows == (MANIFESTS / f"{NAME}{name}.txt").read_text().splitlines()


def test_the_vocoder_s_sizes_follow_from_its_file(copy):
    assert Config.read(copy).vocoder.channels == 16
    (copy / HIFT).unlink()
    assert Config.read(copy).vocoder.channels == 512, "the published sizes, for zoo inspect without weights"


@pytest.mark.parametrize("prefix", ["", "generator."])
def test_the_vocoder_s_names_in_both_notations(copy, prefix):
    tensors = torch.load(copy / HIFT, weights_only=True)
    newer = {"weight_g": "parametrizations.weight.original0", "weight_v": "parametrizations.weight.original1"}
    for older, name in newer.items():
        tensors = {key.replace(older, name): value for key, value in tensors.items()}
    torch.save({prefix + name: value for name, value in tensors.items()}, copy / HIFT)
    zoo.load(copy, "cpu")


@pytest.mark.parametrize(
    ("block", "changes", "message"),
    [
        ("text_config", {"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ("text_config", {"num_attention_groups": 3}, "num_attention_heads"),
        ("text_config", {"hidden_size": 40}, "llm_dim"),
        ("text_config", {"num_hidden_layers": 3}, "model.layers.2"),
        ("audio_encoder_config", {"adapter_stride": 3}, "adapter_stride"),
        ("audio_encoder_config", {"n_audio_state": 48}, "encoder."),
    ],
)
def test_wrong_values_are_named(copy, block, changes, message):
    change(copy / "config.json", block, **changes)
    assert message in refusal(copy)


@pytest.mark.slow
def test_every_wrong_value_of_the_yaml_gives_a_one_line_error(copy):
    path, plain = copy / FOLDER / YAML, zoo.families()[NAME].describe(copy)
    content = read_yaml(path)

    def places(value: object, at: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
        if not isinstance(value, dict):
            return [at]
        return [place for key, inner in value.items() for place in places(inner, (*at, key))]

    for at in places(content):
        for what, changed in mutations(content, at):
            path.write_text(json.dumps(changed))
            try:
                assert zoo.families()[NAME].describe(copy)[1] == plain[1] or zoo.load(copy, "cpu")
            except ValueError as error:
                assert "\n" not in str(error), (at, what)


def test_a_damaged_tokenizer_is_named(copy):
    path = copy / TOKENS
    content = json.loads(path.read_text())
    swapped = {audio(3): audio(4), audio(4): audio(3)}
    for token in content["added_tokens"]:
        token["content"] = swapped.get(token["content"], token["content"])
    path.write_text(json.dumps(content))
    assert "not in order" in refusal(copy)
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "<|EOT|>"]
    path.write_text(json.dumps(content))
    assert "lacks tokens of Step-Audio 2: <|EOT|>" in refusal(copy)


def test_unknown_tensors_are_refused(copy):
    path = copy / "model.safetensors"
    file = open_file(path)
    tensors = {name: file.read(name).clone() for name in file.headers}
    from safetensors.torch import save_file

    save_file(tensors | {"encoder.extra": torch.zeros(1)}, path)
    assert "unknown encoder.extra" in refusal(copy)


def test_other_models_are_not_claimed(copy):
    assert claims(copy)
    content = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(content | {"model_type": "step1"}))
    assert not claims(copy)
