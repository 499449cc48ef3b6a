"""Loading the published layout, and the errors for damaged directories."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from models import directory, family
from mutations import mutations

import zoo
from zoo.checkpoint.yaml_files import read_yaml
from zoo.cosyvoice2 import NAME
from zoo.cosyvoice2.config import Config
from zoo.request import Request

FOLDER = zoo.families()[NAME]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(directory(NAME, "tiny"), tmp_path / "model"))


def refusal(path: Path) -> str:
    with pytest.raises(ValueError) as caught:
        zoo.load(path, "cpu")
    message = str(caught.value)
    assert "\n" not in message
    return message


def rewritten(path: Path, file: str, old: str, new: str) -> None:
    text = (path / file).read_text()
    assert old in text
    (path / file).write_text(text.replace(old, new))


def test_the_yaml_claims_a_directory_with_an_empty_config():
    path = directory(NAME, "tiny")
    assert json.loads((path / "config.json").read_text()) == {} and FOLDER.claims(path)
    assert zoo.inspect(path)["family"] == NAME


@pytest.mark.parametrize(
    ("file", "name"), [("cosyvoice3.yaml", "CosyVoice 3"), ("cosyvoice.yaml", "CosyVoice 1")]
)
def test_relatives_are_refused_by_name(copy, file, name):
    (copy / "cosyvoice2.yaml").rename(copy / file)
    assert name in refusal(copy) and "supported: CosyVoice 2" in refusal(copy)


def test_the_yaml_is_never_executed(tmp_path):
    target = tmp_path / "made"
    text = f"a: !apply:os.mkdir ['{target}']\nb: !new:os.system\n  command: x\nc: !ref <d>\nd: [1, 2]\n"
    (tmp_path / "file.yaml").write_text(text)
    assert read_yaml(tmp_path / "file.yaml") == {
        "a": [str(target)],
        "b": {"command": "x"},
        "c": [1, 2],
        "d": [1, 2],
    }
    assert not target.exists()


@pytest.mark.parametrize(
    "text", ["a: [", "- 1", "", "a: &x [*x]\n? {}", "!!python/object/apply:os.getcwd []", "a: !ref <b"]
)
def test_invalid_yaml_gives_a_one_line_error(tmp_path, text):
    (tmp_path / "file.yaml").write_text(text)
    if text == "a: !ref <b":
        assert read_yaml(tmp_path / "file.yaml") == {"a": "<b"}
        return
    with pytest.raises(ValueError, match=r"^[^\n]*file.yaml[^\n]*$"):
        read_yaml(tmp_path / "file.yaml")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("sample_rate: 24000", "sample_rate: 22050", "sample_rate=22050"),
        ("token_frame_rate: 25", "token_frame_rate: 50", "token_frame_rate=50"),
        ("llm_input_size: 32", "llm_input_size: 64", "llm_input_size=64"),
        ("speech_token_size: 6561", "speech_token_size: 4096", "speech_token_size"),
        ("num_blocks: 2", "num_blocks: 0", "num_blocks=0"),
        ("attention_heads: 2", "attention_heads: 3", "output_size=32"),
        ("channels: [16]", "channels: [16, 16]", "channels"),
        ("upsample_rates: [8, 5, 3]", "upsample_rates: [8, 5, 4]", "upsample_rates"),
        ("upsample_kernel_sizes: [16, 11, 7]", "upsample_kernel_sizes: [16, 12, 7]", "upsample_kernel_sizes"),
        ("top_p: 0.8", "top_p: .nan", "top_p"),
        ("inference_cfg_rate: 0.7", "inference_cfg_rate: much", "inference_cfg_rate"),
        ("estimator: !new", "estimated: !new", "'estimator'"),
        ("t_scheduler: 'cosine'", "t_scheduler: 'linear'", "t_scheduler"),
    ],
)
def test_a_wrong_value_of_the_yaml_is_named(copy, old, new, says):
    rewritten(copy, "cosyvoice2.yaml", old, new)
    assert says in refusal(copy)


@pytest.mark.slow
def test_every_mutation_of_the_lm_config_is_accepted_or_refused_in_one_line(copy):
    file = copy / "CosyVoice-BlankEN" / "config.json"
    config = json.loads(file.read_text())
    for key in config:
        for change, mutant in mutations(config, (key,)):
            file.write_text(json.dumps(mutant))
            try:
                zoo.inspect(copy)
            except ValueError as error:
                message = str(error)
                assert "\n" not in message and ("config.json" in message or "llm_input_size" in message), (
                    change
                )


@pytest.mark.parametrize(
    "file", ["llm.pt", "flow.pt", "hift.pt", "campplus.onnx", "speech_tokenizer_v2.onnx"]
)
def test_missing_and_truncated_files_are_named(copy, file):
    content = (copy / file).read_bytes()
    (copy / file).write_bytes(content[: len(content) // 2])
    assert file in refusal(copy)
    (copy / file).unlink()
    assert file in refusal(copy)


@pytest.mark.parametrize("file", ["llm.pt", "flow.pt", "hift.pt"])
def test_tensors_that_do_not_match_the_config_are_refused(copy, file):
    tensors = torch.load(copy / file, weights_only=True)
    name = next(iter(tensors))
    torch.save({f"{name}.more": torch.zeros(1), **tensors}, copy / file)
    assert f"unknown {name}.more" in refusal(copy)
    torch.save({key: value for key, value in tensors.items() if key != name}, copy / file)
    assert f"missing {name}" in refusal(copy)
    torch.save(tensors | {name: torch.full_like(tensors[name], torch.nan)}, copy / file)
    assert "NaN" in refusal(copy)


def test_optional_parts_of_a_directory(copy):
    """The tied text head and the voices are optional, and the vocoder may carry its trainer's prefix."""
    tensors = torch.load(copy / "llm.pt", weights_only=True)
    del tensors["llm.model.lm_head.weight"]
    torch.save(tensors, copy / "llm.pt")
    tensors = torch.load(copy / "hift.pt", weights_only=True)
    torch.save({f"generator.{name}": value for name, value in tensors.items()}, copy / "hift.pt")
    request = Request(text="Hm.", voice="demo", max_frames=3)
    truth = zoo.generate(family(NAME), request)
    assert torch.equal(zoo.generate(zoo.load(copy, "cpu"), request).samples, truth.samples)
    (copy / "spk2info.pt").unlink()
    loaded = zoo.load(copy, "cpu")
    assert loaded.spec.voices == () and "voice" not in loaded.spec.modes
    with pytest.raises(zoo.RequestError, match="a reference is needed"):
        loaded.prompt(Request(text="Hm."))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"flow_prompt_speech_token": torch.tensor([[6561]])}, "6561 to 6561"),
        ({"prompt_speech_feat": torch.zeros(1, 9, 79)}, "prompt_speech_feat"),
        ({"flow_embedding": torch.full((1, 192), torch.inf)}, "NaN or infinity"),
        ({"prompt_text": [1, 2]}, "prompt_text list"),
    ],
)
def test_a_wrong_voice_is_named(copy, change, says):
    voices = torch.load(copy / "spk2info.pt", weights_only=True)
    torch.save({**voices, "odd": voices["demo"] | change}, copy / "spk2info.pt")
    message = refusal(copy)
    assert "'odd'" in message and says in message


def test_the_published_sizes_have_the_published_number_of_values():
    """The numbers of tensors and of values equal those of the published state dicts."""
    from zoo.checkpoint.loading import published, weight_normed
    from zoo.cosyvoice2 import build, weights
    from zoo.cosyvoice2.demo import write_texts

    with tempfile.TemporaryDirectory() as place:
        config = Config.read(write_texts(Path(place) / "full", "full"))
    lm, flow, vocoder = build(config)

    def count(shapes: dict[str, tuple[int, ...]]) -> tuple[int, int]:
        return len(shapes), sum(torch.Size(shape).numel() for shape in shapes.values())

    assert count(published(lm, weights.lm(config.lm))) == (295, 641_938_468)
    assert count(published(flow, weights.flow(config.flow))) == (1121, 112_549_360)
    shapes = weight_normed(published(vocoder, weights.vocoder(config.vocoder)), weights.is_weight_normed)
    assert count(shapes) == (328, 20_821_295)
