"""CosyVoice 2 compared with the reference implementations, in float32 with the same noise.

README.md in this folder describes the fixtures.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from agreement import noise
from models import family
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

import zoo
from zoo.checkpoint import synthetic
from zoo.contract import View
from zoo.cosyvoice2 import demo, weights
from zoo.cosyvoice2.flow import FlowCache, fixed_noise
from zoo.cosyvoice2.model import CosyVoice2
from zoo.cosyvoice2.voices import Voice
from zoo.nn.conv import CodecState
from zoo.nn.resample import resampled
from zoo.nn.s3.campplus import CamPlus
from zoo.nn.s3.hift import Place
from zoo.nn.s3.sizes import GRID, LOOKAHEAD
from zoo.nn.s3.stretch import Stretch
from zoo.request import AudioClip, Request

HERE = Path(__file__).parent / "cosyvoice2"
LM_CASES = sorted(path.stem for path in HERE.glob("lm_*.json"))
FLOW = load_file(HERE / "flow.safetensors")
VOCODER = load_file(HERE / "vocoder.safetensors")
VOICES = load_file(HERE / "voices.safetensors")
RATES_HZ = json.loads((HERE / "voices.json").read_text())["rates_hz"]
MEL = {"rtol": 0, "atol": 1e-4}
# Rounding of the pitch shifts the phase, and a random net shows it: see README.md in this folder.
SAMPLES = {"rtol": 0, "atol": 6e-4}


@cache
def model() -> CosyVoice2:
    loaded = family("cosyvoice2", size="parity")
    assert isinstance(loaded, CosyVoice2)
    return loaded


def packed(start: Tensor, source: Tensor) -> Tensor:
    """Pack noise of flow [2F, MELS] and vocoder [960 F, H] in the shape of `spec.noise_shape`."""
    return torch.cat((start.unflatten(0, (-1, 2)), source.unflatten(0, (-1, 2, 480)).flatten(2)), -1)


def start_noise(voice: str, num_frames: int) -> Tensor:
    """Return the flow's fixed noise after the prompt [2 num_frames, MELS]."""
    first = len(model().voices[voice].mel)
    return model().flow.noise[first : first + 2 * num_frames]


# text and language model


def test_text_ids_equal_the_reference():
    for case in json.loads((HERE / "tokens.json").read_text()):
        assert model().writer.tokenize(case["text"]) == case["ids"], case["text"]


def test_chinese_is_read_character_by_character():
    """The words are in the vocabulary, but the directory's file lacks the merges that produce them."""
    known = json.loads((demo_directory() / "CosyVoice-BlankEN" / "vocab.json").read_text())
    words = {"你好": "ä½łå¥½", "今天": "ä»Ĭå¤©"}
    for word, symbols in words.items():
        assert symbols in known and len(model().writer.tokenize(word)) == 2


def demo_directory() -> Path:
    from models import directory

    return directory("cosyvoice2", "parity")


@pytest.mark.slow
@pytest.mark.parametrize("name", LM_CASES)
@torch.inference_mode()
def test_codes_and_hidden_states_equal_the_reference(name, monkeypatch):
    facts, made = json.loads((HERE / f"{name}.json").read_text()), load_file(HERE / f"{name}.safetensors")
    request = Request(**facts["request"])
    voice = model()._voice(request)
    script = model().writer(request, voice.transcript)
    assert [*script.before, *script.text] == facts["text_ids"]
    torch.testing.assert_close(model().prompt(request).inputs[-1], made["inputs"], rtol=0, atol=0)
    emitted, emit = [], model().emit

    def listen(state, slots, h):
        emitted.append(h[0].clone())
        emit(state, slots, h)

    monkeypatch.setattr(model(), "emit", listen)
    speech = zoo.generate(model(), request)
    assert speech.frames[:, 0].tolist() == made["codes"].tolist()
    kept = torch.stack(emitted)[::8][: len(made["hidden"])]
    torch.testing.assert_close(kept, made["hidden"], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "rest", "whole"])
def test_interleaved_codes_equal_the_reference(name, monkeypatch):
    """There is no prompt, or its codes end inside a group of fifteen, or they end with a group."""
    facts, made = (
        json.loads((HERE / "interleaved.json").read_text()),
        load_file(HERE / "interleaved.safetensors"),
    )
    voice, num = model().voices["demo" if facts["num_codes"][name] else "sound"], facts["num_codes"][name]
    cut = replace(voice, name=name.encode(), codes=voice.codes[:num], mel=voice.mel[: 2 * num])
    monkeypatch.setitem(model().voices, "sound", cut)
    mode = {"text_mode": "interleaved"}
    request = Request(text=facts["text"], voice="sound", temperature=0.0, max_frames=90, options=mode)
    speech = zoo.generate(model(), request)
    assert speech.frames[:, 0].tolist() == made[name].tolist() and len(made[name]) > 75


def test_repetition_aware_sampling_changes_the_codes():
    codes = {name: load_file(HERE / f"{name}.safetensors")["codes"].tolist() for name in LM_CASES}
    assert any(
        codes[name] != codes[name.removesuffix("_10") + "_0"] for name in codes if name.endswith("_10")
    )


# flow


def test_the_fixed_noise_equals_the_reference():
    torch.testing.assert_close(fixed_noise(15_000).mT[:, ::101], FLOW["noise"], rtol=0, atol=0)
    torch.testing.assert_close(fixed_noise(16_000)[:15_000], fixed_noise(15_000), rtol=0, atol=0)


@torch.inference_mode()
def mel_of(voice: Voice, num_there: int, num: int, chunk: int) -> Tensor:
    """Return the flow's mel of `num` codes after the prompt, in one stretch. num_there codes are known."""
    codes = torch.cat((voice.codes, FLOW["codes"], torch.zeros(LOOKAHEAD, dtype=torch.int64)))
    total = len(voice.codes) + num
    one = torch.ones(1, dtype=torch.int64)
    cache = FlowCache(model().flow, 1, 500)
    stretch = Stretch(0 * one, 0 * one, total * one, 0 * one, total, 500, chunk)
    prompt = torch.nn.functional.pad(voice.mel, (0, 0, 0, 2 * num))[None]
    there = (len(voice.codes) + num_there) * one
    return model().flow(codes[None, : total + LOOKAHEAD], there, prompt, voice.speaker[None], stretch, cache)[
        0, len(voice.mel) :
    ]


@pytest.mark.parametrize("name", ["demo", "sound"])
def test_mel_with_chunk_masks_equals_the_reference(name):
    voice, num = model().voices[name], len(FLOW["codes"])
    torch.testing.assert_close(mel_of(voice, num, num, GRID), FLOW[f"{name}_chunks"], **MEL)
    torch.testing.assert_close(mel_of(voice, num, num - LOOKAHEAD, GRID), FLOW[f"{name}_chunks_open"], **MEL)


@pytest.mark.parametrize("name", ["demo", "sound"])
def test_mel_without_chunk_masks_equals_the_reference(name):
    """The reference computes this when it does not stream.

    We offer no such mode, but the network is the same.
    """
    num = len(FLOW["codes"])
    whole = mel_of(model().voices[name], num, num, chunk=1000)
    torch.testing.assert_close(whole, FLOW[f"{name}_whole"], **MEL)
    assert (whole - FLOW[f"{name}_chunks"]).abs().max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["demo", "sound"])
@pytest.mark.parametrize("sizes", [(57,), (25,), (50, 25)], ids=str)
@torch.inference_mode()
def test_streamed_speech_equals_the_reference(name, sizes):
    """A tape is rendered in windows: the prompt comes from the cache, then its rest, then the speech."""
    state = model().state(1)
    prompt = model().prompt(Request(text="Hm.", voice=name))
    model().admit(state, 0, prompt)
    num = len(FLOW["codes"])
    state.tape[0, :num, 0] = FLOW["codes"]
    state.ready[0] = num
    state.noise = packed(start_noise(name, num), noise("source", num * 960, 9))
    start, heard, window = 0, [], model().spec.window
    for size in (*sizes, *sizes, *sizes):
        stop = min(num, start + size - (prompt.grid_offset and (start - prompt.grid_offset) % GRID))
        if stop == num or size == num:
            stop = num
        if stop <= start:
            break
        frames = max(window.bucket(stop - start), stop - start)
        view = View(
            torch.tensor([0]),
            torch.tensor([start]),
            torch.tensor([stop - start]),
            torch.tensor([stop == num]),
            frames,
            window.length_bucket(stop),
        )
        samples, valid = model().render(state, view)
        heard.append(samples[0, : int(valid)])
        start = stop
    joined = torch.cat(heard)
    assert len(joined) == num * 960
    torch.testing.assert_close(joined[::7], VOCODER[f"{name}_chunks_samples"], **SAMPLES)


@torch.inference_mode()
def test_speech_from_given_noise_equals_the_reference():
    """The noise of the flow and that of the vocoder's source are both given by frame."""
    made, num = load_file(HERE / "noise.safetensors"), len(FLOW["codes"])
    state = model().state(1)
    model().admit(state, 0, model().prompt(Request(text="Hm.", voice="demo")))
    state.tape[0, :num, 0], state.ready[0] = FLOW["codes"], num
    state.noise = packed(noise("start", 2 * num, 80), noise("source", num * 960, 9))
    one, length = torch.ones(1, dtype=torch.int64), model().spec.window.length_bucket(num)
    samples, _ = model().render(state, View(0 * one, 0 * one, num * one, one > 0, num, length))
    torch.testing.assert_close(samples[0, : 960 * num : 7], made["samples"], **SAMPLES)
    assert (made["samples"] - VOCODER["demo_chunks_samples"]).abs().max() > 0.01


# vocoder


@pytest.mark.parametrize("name", ["demo", "sound"])
@torch.inference_mode()
def test_pitch_source_and_samples_equal_the_reference(name):
    vocoder, mel = model().vocoder, FLOW[f"{name}_chunks"][None]
    plan, num = vocoder.plan, mel.shape[1]
    frames = num + plan.flush
    place = Place(torch.tensor([0]), torch.tensor([num]), frames)
    state = CodecState(vocoder.layout, torch.zeros(1, vocoder.layout.size), frames, torch.tensor([frames]))
    mel = vocoder.mel_tail(F.pad(mel.mT, (0, plan.flush)), state)
    first = plan.f0_lag + 1  # frames before the window
    f0 = vocoder.pitch(mel, place)[:, first : first + num]
    torch.testing.assert_close(f0[0], VOCODER[f"{name}_chunks_f0"], rtol=1e-5, atol=1e-3)
    given = F.pad(VOCODER[f"{name}_chunks_f0"][None], (first, frames - num - first + 1))
    values = noise("source", num * 480, 9).view(1, -1, 480, 9)
    values = F.pad(values, (0, 0, 0, 0, first, frames - num - first + 1))
    source, _ = vocoder.source(given, place, torch.zeros(1, 9, dtype=torch.float64), values)
    late = 480 * plan.f0_lag + 240
    heard = source[0, late : late + 480 * num : 7]
    # the phase of this one is a sum in fp32
    torch.testing.assert_close(heard, VOCODER[f"{name}_chunks_source"], rtol=0, atol=1e-3)
    torch.testing.assert_close(heard, VOCODER[f"{name}_chunks_source_exact"], rtol=0, atol=1e-5)
    samples = vocoder.filter(mel, source, place, state)[:, plan.lag : plan.lag + 480 * num]
    torch.testing.assert_close(samples[0, ::7], VOCODER[f"{name}_chunks_samples_exact"], rtol=0, atol=1e-5)
    assert VOCODER[f"{name}_chunks_samples"].std() > 0.01


# voices from clips


@pytest.mark.parametrize("name", sorted(RATES_HZ))
def test_codes_and_mel_of_a_clip_equal_the_reference(name):
    samples = VOICES[f"{name}_clip"].numpy().astype("float32") / 32768
    clip = AudioClip(samples if len(samples) > 1 else samples[0], RATES_HZ[name])
    voice = model().cloner(clip)
    num = len(voice.codes)
    assert num == min(len(VOICES[f"{name}_codes"]), len(VOICES[f"{name}_mel"]) // 2)
    assert voice.codes.tolist() == VOICES[f"{name}_codes"][:num].tolist()
    torch.testing.assert_close(voice.mel, VOICES[f"{name}_mel"][: 2 * num], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", sorted(RATES_HZ))
@torch.inference_mode()
def test_speaker_vector_of_a_clip_equals_the_reference(name):
    samples = torch.from_numpy(VOICES[f"{name}_clip"].numpy().astype("float32") / 32768).mean(0)
    cloner = model().cloner
    features = cloner.fbank(resampled(samples, RATES_HZ[name], 16_000))
    torch.testing.assert_close(features[::3], VOICES[f"{name}_features"], rtol=0, atol=2e-3)
    given = VOICES[f"{name}_speaker"]
    speaker = folded_campplus()(features[None])[0]
    assert (speaker - given).abs().max() < 1e-4 * given.abs().max()


@cache
def folded_campplus() -> CamPlus:
    """Return CAM++ with the oracle's weights, and batch normalisations folded as in the published file."""
    module = CamPlus().eval()
    ours = dict(module.named_parameters())
    for name, mine in weights.campplus().items():
        ours[mine].data.copy_(_folded(name, tuple(ours[mine].shape)))
    return module


def _folded(name: str, shape: tuple[int, ...]) -> Tensor:
    owner, _, kind = name.rpartition(".")
    norm = weights.folded_norm(owner)

    def value(of: str, size: tuple[int, ...] = shape) -> Tensor:
        return torch.from_numpy(synthetic.fill(of, size, "cosyvoice2:campplus", demo.RULES))

    if norm is None:
        return value(name)
    size = shape[:1]
    scale = value(f"{norm}.weight", size) / (value(f"{norm}.running_var", size) + 1e-5).sqrt()
    if kind == "bias":
        return value(f"{norm}.bias", size) - value(f"{norm}.running_mean", size) * scale
    return value(name) * scale.view(-1, *(1,) * (len(shape) - 1))
