"""Zonos: loading, options, prompts, guidance, windows of the codec, and what is missing."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from models import directory, family
from safetensors.torch import load_file, save_file

import zoo
from serving.engine.engine import Engine
from zoo.check import check
from zoo.contract import View
from zoo.request import AudioClip, Reference, Request, RequestError
from zoo.zonos import demo, japanese, speaker
from zoo.zonos.config import CODEC_FOLDER, EMOTIONS
from zoo.zonos.japanese import readings
from zoo.zonos.phonemes import Phonemizer
from zoo.zonos.prompt import EMOTION
from zoo.zonos.sampling import Settings, unify
from zoo.zonos.spelling import spell

CLIP = AudioClip(np.sin(np.arange(8000) ** 1.5 / 30).astype(np.float32) / 4, 16_000)


@pytest.fixture
def copy(tmp_path):
    """A checkpoint that a test may change."""
    return shutil.copytree(directory("zonos", "tiny"), tmp_path / "model")


def changed(path, **values):
    """Change config.json: `block__key=value`."""
    content = json.loads((path / "config.json").read_text())
    for key, value in values.items():
        *blocks, last = key.split("__")
        place = content
        for block in blocks:
            place = place[block]
        place[last] = value
    (path / "config.json").write_text(json.dumps(content))
    return path


def test_the_hybrid_is_refused_by_name(copy):
    changed(copy, backbone__ssm_cfg={"layer": "Mamba2"})
    with pytest.raises(ValueError, match="only the transformer is supported, not the hybrid"):
        zoo.inspect(copy)


def test_a_missing_codec_names_its_repository(copy, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.rmtree(copy / CODEC_FOLDER)
    with pytest.raises(ValueError, match=r"the codec of Zonos, descript/dac_44khz, is missing: put it into"):
        zoo.inspect(copy)


def test_the_codec_and_the_speaker_encoder_may_lie_next_to_the_model(copy):
    for folder in (CODEC_FOLDER, speaker.FOLDER):
        shutil.move(copy / folder, copy.parent / folder)
    assert zoo.load(copy, "cpu").spec == family("zonos").spec


def test_without_the_speaker_encoder_the_model_speaks_and_refuses_references(copy):
    shutil.rmtree(copy / speaker.FOLDER)
    ours = zoo.load(copy, "cpu")
    assert len(zoo.generate(ours, Request(text="a", max_frames=2)).frames) == 2
    with pytest.raises(RequestError, match=r"clones need Zyphra/Zonos-v0\.1-speaker-embedding; put it into"):
        ours.prompt(Request(text="a", references=(Reference(CLIP),)))


def test_a_killed_process_leaves_no_copy_of_the_library(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    reader = Phonemizer()
    assert reader.read("Good morning.", "en-us") == reader.read("Good morning.", "en-us") != ""
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("package", ["espeakng_loader", "phonemizer.backend"])
def test_without_phonemizer_one_line_names_the_extra(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ValueError, match=r"Zonos reads phonemes, .* is not installed: pip install -e '.\[phonemes\]'"
    ):
        zoo.load(directory("zonos", "tiny"), "cpu")


def test_an_unknown_tensor_is_refused(copy):
    tensors = load_file(copy / "model.safetensors")
    save_file(tensors | {"heads.9.weight": torch.zeros(2)}, copy / "model.safetensors")
    with pytest.raises(ValueError, match=r"unknown heads\.9\.weight \[2\]"):
        zoo.load(copy, "cpu")


def test_the_sizes_of_the_speaker_encoder_are_those_of_its_file(tmp_path):
    sizes = speaker.Sizes(planes=2, blocks=(1, 1, 3, 2), attention=3, middle=5)
    demo.write_speaker(tmp_path / "other", sizes, 0)
    assert speaker.Sizes.read(tmp_path / "other" / speaker.NET_FILE) == sizes
    encoder = speaker.load(speaker.build(tmp_path / "other", 128), tmp_path / "other", torch.device("cpu"))
    assert encoder(torch.from_numpy(CLIP.samples), 16_000).shape == (128,)


def test_every_condition_is_an_option_with_a_range_and_a_default():
    options = {option.name: option for option in family("zonos").spec.options}
    for name, default in zip(EMOTIONS, EMOTION, strict=True):
        assert (options[f"emotion_{name}"].range, options[f"emotion_{name}"].default) == ((0, 1), default)
    ranges = {
        name: (options[name].range, options[name].default) for name in ("fmax", "pitch_std", "speaking_rate")
    }
    assert ranges == {
        "fmax": ((0, 24000), 22050),
        "pitch_std": ((0, 400), 20),
        "speaking_rate": ((0, 40), 15),
    }


def test_ranges_come_from_the_checkpoint(copy):
    content = json.loads((copy / "config.json").read_text())
    content["prefix_conditioner"]["conditioners"][5]["max_val"] = 12
    (copy / "config.json").write_text(json.dumps(content))
    option = next(option for option in zoo.load(copy, "cpu").spec.options if option.name == "speaking_rate")
    assert (option.range, option.default) == ((0, 12), 12)


def test_emotions_without_any_weight_are_refused():
    options = {f"emotion_{name}": 0.0 for name in EMOTIONS}
    with pytest.raises(RequestError, match="all emotions are 0; set one above 0, or unconditional_emotion"):
        family("zonos").prompt(Request(text="a", options=options))


def test_silence_comes_first_if_no_recording_is_continued():
    ours, silent = family("zonos"), {"silence_first": True}
    codes = ours.codec.encode(torch.zeros(1, 5120))[0]
    plain, sound = Request(text="a", options=silent), Reference(CLIP)
    assert torch.equal(script_of(plain).codes, codes)
    assert torch.equal(script_of(replace(plain, references=(sound,))).codes, codes)
    continued = replace(plain, references=(Reference(CLIP, "b"),))
    assert torch.equal(script_of(continued).codes, ours.writer.cloner(CLIP).codes)


def script_of(request):
    ours = family("zonos")
    return ours.writer(request, check(request, ours.spec))


def test_only_the_proportions_of_the_emotions_count():
    ours = family("zonos")
    half = {f"emotion_{name}": value / 2 for name, value in zip(EMOTIONS, (0.5,) * 8, strict=True)}
    full = {f"emotion_{name}": 1.0 for name in EMOTIONS}
    one, other = (ours.prompt(Request(text="a", options=options)) for options in (half, full))
    assert one.prefix_keys == other.prefix_keys and torch.equal(one.inputs, other.inputs)


@pytest.mark.parametrize(("text", "language"), [("你好", "cmn"), ("おはよう", "ja")])
def test_without_a_language_the_script_decides(text, language):
    plain, named = (family("zonos").prompt(Request(text=text, language=name)) for name in (None, language))
    assert plain.prefix_keys == named.prefix_keys


def test_numbers_of_any_length_are_read_in_japanese():
    assert readings("2024") == "ニセンニジュウヨン"
    assert readings("9" * 72).startswith("キュウセンキュウヒャクキュウジュウキュウ")
    assert readings("1" * 80).startswith("イチイチ")


def test_japanese_without_its_packages_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sudachipy", None)
    japanese.packages.cache_clear()
    with pytest.raises(RequestError, match=r"sudachipy is not installed: pip install -e '.\[japanese\]'"):
        family("zonos").prompt(Request(text="おはよう"))


def test_japanese_that_sudachi_cannot_hold_is_refused():
    with pytest.raises(RequestError, match="Sudachi reads 49149 at once"):
        readings("あ" * 17_000)


def test_both_lanes_and_all_voices_share_the_phonemes_of_a_text():
    """The keys are equal up to the first condition, and so are the inputs."""
    ours = family("zonos")
    plain = ours.prompt(Request(text="Good morning."))
    cloned = ours.prompt(Request(text="Good morning.", references=(Reference(CLIP),)))
    shared = len(Phonemizer()("Good morning.", "en-us"))
    lanes = [*plain.lanes, *cloned.lanes]
    assert len({lane.prefix_keys[:shared] for lane in lanes}) == 1
    assert len({lane.prefix_keys[shared:] for lane in lanes}) == 3  # the lanes without conditions are equal
    assert all(torch.equal(lane.inputs[:shared], plain.inputs[:shared]) for lane in lanes)


def test_both_lanes_of_a_text_share_its_pages_whatever_the_conditions_are():
    engine = Engine(family("zonos"), max_slots=1, compile=False)
    text = "The quick brown fox jumps over the lazy dog."
    for name, fear in (("a", 0.0), ("b", 1.0)):
        asked = Request(text=text, max_frames=2, options={"emotion_fear": fear})
        engine.speak(name, asked, lambda event: None)
        while engine.turn():
            pass
    assert engine.stats()["pages_shared"] >= 2 * (len(Phonemizer()(text, "en-us")) // 16) >= 6


def test_guidance_of_one_is_the_conditional_lane():
    ours = family("zonos")
    state = ours.state(1, 4)
    ours.admit(state, 0, ours.prompt(Request(text="a", max_frames=4, options={"cfg_scale": 1.0})))
    h = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ours.guided(state, torch.tensor([0]), h)[0], ours.logits(h)[0])


@pytest.mark.parametrize("sizes", [(1,), (8,), (3, 1, 7)], ids=str)
def test_windows_behind_a_recording_equal_the_whole(sizes):
    """In fp64, with the recording as left context: 10 frames of it, or as many as there are."""
    ours = family("zonos", "float64")
    random = torch.Generator().manual_seed(1)
    codes = torch.randint(1024, (45, 9), generator=random)
    for num_before in (0, 4, 10):
        whole = state_of(ours, codes, 0)
        exact = rendered(ours, whole, [(0, 45)])[512 * num_before :]
        state, start, cuts = state_of(ours, codes, num_before), 0, []
        while start < 45 - num_before:
            size = min(sizes[len(cuts) % len(sizes)], 45 - num_before - start)
            cuts.append((start, size))
            start += size
        torch.testing.assert_close(rendered(ours, state, cuts), exact, rtol=0, atol=1e-6)


def state_of(ours, codes, num_before):
    """Return a state whose slot 0 has the codes behind the first `num_before` ones."""
    state = ours.state(1, len(codes))
    tape = codes[num_before:]
    state.tape[0, : len(tape)], state.ready[0] = tape, len(tape)
    state.before[0, 10 - num_before :], state.num_before[0] = codes[:num_before], num_before
    return state


def rendered(ours, state, cuts):
    parts = []
    for start, count in cuts:
        view = View(
            torch.tensor([0]), torch.tensor([start]), torch.tensor([count]), torch.tensor([False]), count
        )
        samples, valid = ours.render(state, view)
        parts.append(samples[0, : int(valid[0])])
    return torch.cat(parts)


def test_numbers_that_have_no_name_are_read_by_digit():
    assert spell("1" * 37) == " ".join(["one"] * 37)
    assert spell("$" + "9" * 5000).endswith("nine dollars")


def test_the_unified_sampler_leaves_out_codes_that_may_not_follow():
    """With a negative `quad` the reference makes them the likeliest."""
    each = torch.ones(1)
    how = Settings(each, 0 * each.long(), each, 0 * each, 0.5 * each, 0 * each, -0.5 * each)
    logits, _ = unify(torch.tensor([[0.0, 1.0, -torch.inf]]), how)
    assert logits.isfinite().tolist() == [[True, True, False]]


def test_the_unified_sampler_is_off_without_linear_and_in_greedy_requests():
    each, logits = torch.ones(2), torch.randn(2, 5)
    how = Settings(
        torch.tensor([0.7, 0.0]), 0 * each.long(), each, 0 * each, torch.tensor([0.0, 0.5]), each, each
    )
    same, temperature = unify(logits, how)
    assert torch.equal(same, logits) and torch.equal(temperature, how.temperature)
