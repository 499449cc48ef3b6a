"""Loading Chatterbox: sizes from shapes, the published numbers of tensors, and errors for damaged
directories."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from models import directory, family
from safetensors.torch import load_file, save_file

import zoo
from zoo.chatterbox import demo, weights
from zoo.chatterbox.config import Config
from zoo.request import Request

S3GEN = "s3gen.safetensors"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(directory("chatterbox", "tiny"), tmp_path / "model"))


def refusal(path: Path) -> str:
    with pytest.raises(ValueError) as caught:
        zoo.load(path, "cpu")
    message = str(caught.value)
    assert "\n" not in message
    return message


def changed(path: Path, file: str, **changes: torch.Tensor | None) -> None:
    """Replace tensors of a file; None removes one."""
    tensors = load_file(path / file) | {name: value for name, value in changes.items() if value is not None}
    save_file(
        {name: value for name, value in tensors.items() if changes.get(name, 0) is not None}, path / file
    )


@pytest.mark.parametrize(
    ("size", "file", "num", "values"),
    [
        ("full", "t3_cfg.safetensors", 292, 532_405_248),
        ("full", S3GEN, 2489, 264_041_793),
        ("full", "ve.safetensors", 16, 1_423_618),
        ("full-turbo", "t3_turbo_v1.safetensors", 299, 478_862_755),
        ("full-turbo", "s3gen_meanflow.safetensors", 2491, 266_139_345),
        ("full-nano", "t3_nano_v1.safetensors", 155, 217_471_139),
    ],
)
def test_the_full_sizes_have_the_published_tensors(size, file, num, values):
    known = demo.CONFIGS[size]
    shapes = demo.files(demo.config_of(known), known.t3_file)[file]
    assert (len(shapes), sum(map(math.prod, shapes.values()))) == (num, values)


@pytest.mark.parametrize("size", ["tiny", "tiny-multilingual", "tiny-turbo"])
def test_sizes_are_read_off_names_and_shapes(size):
    read, written = Config.read(directory("chatterbox", size)), demo.config_of(demo.CONFIGS[size])
    assert (read.kind, read.t3, read.flow, read.vocoder, read.tokenizer) == (
        *(written.kind, written.t3, written.flow, written.vocoder),
        written.tokenizer,
    )


def test_inspect_names_the_variant_and_counts_what_is_read():
    facts = zoo.inspect(directory("chatterbox", "tiny-turbo"))
    assert facts["family"] == "chatterbox" and facts["variant"] == "turbo"
    modules = family("chatterbox", size="tiny-turbo")
    parts = (modules.t3, modules.flow, modules.vocoder, modules.cloner.encoders)
    assert facts["parameters"] == sum(p.numel() for part in parts for p in part.parameters())


def test_the_voice_is_optional(copy):
    (copy / "conds.pt").unlink()
    loaded = zoo.load(copy, "cpu")
    assert loaded.spec.voices == () and loaded.spec.modes == ("clone",)
    with pytest.raises(ValueError, match=r"a reference is needed.*; or put the original's conds.pt into"):
        zoo.generate(loaded, Request(text="a", max_frames=1))


def test_a_pack_for_one_language_is_multilingual(tmp_path):
    """Its files have other names, and its voice encoder is that of another repository."""
    pack = Path(shutil.copytree(directory("chatterbox", "tiny-multilingual"), tmp_path / "pack"))
    (pack / "t3_mtl23ls_v2.safetensors").rename(pack / "t3_pt_br.safetensors")
    changed(pack, S3GEN, **{"tokenizer.window": None, "tokenizer._mel_filters": None})
    (pack / S3GEN).rename(pack / "s3gen_v3.safetensors")
    assert zoo.load(pack, "cpu").spec.variant == "multilingual"
    (pack / "ve.safetensors").unlink()
    assert refusal(pack).endswith("ve.safetensors does not exist; take that of ResembleAI/chatterbox")


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_language_model_of_the_first_release_is_a_pickle(copy, wrapped):
    """In fp16, and in some copies within a list under `model`."""
    tensors = {name: value.half() for name, value in load_file(copy / "t3_cfg.safetensors").items()}
    (copy / "t3_cfg.safetensors").unlink()
    torch.save({"model": [tensors]} if wrapped else tensors, copy / "t3_cfg.pt")
    loaded = zoo.load(copy, "cpu", "float32")
    assert loaded.spec.variant == "english"
    assert torch.equal(loaded.t3.codes.weight, tensors["speech_emb.weight"].float())


def test_the_first_multilingual_has_other_files_and_keeps_case_and_accents(tmp_path):
    first = Path(shutil.copytree(directory("chatterbox", "tiny-multilingual"), tmp_path / "first"))
    (first / "t3_mtl23ls_v2.safetensors").rename(first / "t3_23lang.safetensors")
    (first / "grapheme_mtl_merged_expanded_v1.json").rename(first / "mtl_tokenizer.json")
    loaded, later = zoo.load(first, "cpu"), family("chatterbox", size="tiny-multilingual")
    assert (loaded.spec.variant, loaded.spec.name) == ("multilingual", "Chatterbox Multilingual")
    spelled = Request(text="Où, HM.", language="fr")
    assert loaded.writer(spelled) == framed(later, "[fr]Où, HM.") != later.writer(spelled)
    korean = Request(text="한 ó", language="ko")
    assert loaded.writer(korean) == framed(later, "[ko]\u1112\u1161\u11ab ó.")


def framed(model, text: str) -> list[int]:
    return model.writer.tokenize.framed(model.writer.tokenize(text))


def test_a_pickled_language_model_with_more_than_tensors_is_refused(copy):
    (copy / "t3_cfg.safetensors").unlink()
    torch.save({"model": [Path("x")]}, copy / "t3_cfg.pt")
    assert "holds more than tensors" in refusal(copy)


def test_a_missing_tensor_is_named(copy):
    changed(copy, S3GEN, **{"flow.encoder.after_norm.bias": None})
    assert "missing encoder.after_norm.bias" in refusal(copy)


def test_an_unknown_tensor_is_named(copy):
    changed(copy, S3GEN, **{"flow.more": torch.zeros(1)})
    assert "unknown more" in refusal(copy)


def test_a_tensor_of_no_part_is_named(copy):
    changed(copy, S3GEN, more=torch.zeros(1))
    assert "has a tensor more" in refusal(copy)


def test_a_tensor_that_says_a_size_is_needed(copy):
    changed(copy, "t3_cfg.safetensors", **{"speech_emb.weight": None})
    assert "has no tensor speech_emb.weight" in refusal(copy)


def test_a_normalisation_that_cannot_be_folded_is_named(copy):
    changed(copy, S3GEN, **{"speaker_encoder.head.bn1.running_var": None})
    assert "has no tensor head.bn1.running_var" in refusal(copy)


def test_the_flow_of_another_variant_is_refused(copy):
    shutil.copy(directory("chatterbox", "tiny-turbo") / "s3gen_meanflow.safetensors", copy / S3GEN)
    assert "time_embed_mixer" in refusal(copy)


def test_tensors_that_nothing_reads_may_be_missing(copy):
    changed(copy, "t3_cfg.safetensors", **dict.fromkeys(weights.UNREAD[::2]))
    changed(copy, "ve.safetensors", **dict.fromkeys(weights.UNREAD_OF_VOICE))
    changed(copy, S3GEN, **{"tokenizer._mel_filters": None})
    asked = Request(text="Good morning.", max_frames=3)
    expected = zoo.generate(family("chatterbox"), asked)
    assert torch.equal(zoo.generate(zoo.load(copy, "cpu"), asked).samples, expected.samples)


@pytest.mark.parametrize(
    ("part", "key", "value", "said"),
    [
        ("t3", "speaker_emb", torch.zeros(1, 5), r"t3\.speaker_emb is \[1, 5\]"),
        ("t3", "cond_prompt_speech_tokens", torch.tensor([[7000]]), "from 7000 to 7000"),
        ("gen", "prompt_feat", None, r"gen\.prompt_feat is NoneType"),
        ("gen", "embedding", torch.full((1, 192), torch.nan), "NaN or infinity"),
    ],
)
def test_a_damaged_voice_is_refused(copy, part, key, value, said):
    voice = torch.load(copy / "conds.pt", weights_only=True)
    voice[part][key] = value
    torch.save(voice, copy / "conds.pt")
    with pytest.raises(ValueError, match=said):
        zoo.load(copy, "cpu")


def test_a_voice_that_is_one_mel_frame_too_long_is_cut(copy):
    """The reference drops a frame of the answer instead, which is then 20 ms short."""
    voice = torch.load(copy / "conds.pt", weights_only=True)
    voice["gen"]["prompt_feat"] = torch.cat((voice["gen"]["prompt_feat"], torch.ones(1, 1, 80)), 1)
    torch.save(voice, copy / "conds.pt")
    asked = Request(text="Good morning.", max_frames=3)
    expected = zoo.generate(family("chatterbox"), asked)
    assert torch.equal(zoo.generate(zoo.load(copy, "cpu"), asked).samples, expected.samples)
