"""GLM-4-Voice against transformers and cosyvoice-minicpmo: prompts, greedy tokens, codes of clips, mel and samples.

The fixtures and what they hold: README.md in this folder.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from models import family
from safetensors.torch import load_file

import zoo
from zoo.glm4_voice.config import mel_frames
from zoo.request import AudioClip, Request, Turn

HERE = Path(__file__).parent / "glm4_voice"
FACTS = json.loads((HERE / "answers.json").read_text())
CLIPS = {"short": (16_000, 40_961), "other_rate": (24_000, 30_000), "pieces": (16_000, 30 * 16_000 + 2_560)}
STRIDE, MAX_TOKENS = 7, 130
# The reference adds up a phase in fp32, sample by sample; a few seconds are exact to 1e-4 of full scale.
SAMPLES = {"rtol": 0, "atol": 1e-4}


@pytest.fixture(scope="module")
def model():
    return family("glm4_voice", size="parity")


def clip(name: str) -> AudioClip:
    """Return the clip of the oracle, which follows from its rate and length."""
    rate_hz, num = CLIPS[name]
    t = torch.arange(num, dtype=torch.float64) / rate_hz
    hum = (2 * np.pi * (180 + 40 * torch.sin(3 * t)) * t).sin() * (0.3 + 0.2 * torch.sin(7 * t))
    return AudioClip((hum * 32767).round().div(32768).float().numpy(), rate_hz)


def request_of(name: str) -> Request:
    greedy = {"temperature": 0.0, "seed": FACTS["seed"], "options": {"max_tokens": MAX_TOKENS}}
    if name == "written":
        return Request(text=FACTS["text"], **greedy)
    return Request(text="", turns=(Turn("user", clip=clip("short")),), **greedy)


@pytest.mark.parametrize("name", CLIPS)
def test_codes_of_clips_are_the_reference_s(model, name):
    assert model.writer.ear(clip(name)).tolist() == FACTS["heard"][name]


@pytest.mark.parametrize("name", [pytest.param("written", marks=pytest.mark.slow), "spoken"])
def test_greedy_answers_are_the_reference_s(model, name):
    """Codes and text, token by token, and the samples of the whole answer."""
    request, expected = request_of(name), FACTS["answers"][name]
    assert list(model.writer(request).ids) == expected["ids"]
    said = zoo.generate(model, request)
    first = model.first_code
    assert said.frames[:, 0].tolist() == [token - first for token in expected["said"] if token >= first]
    text = b"".join(model.detokenize(token) for token in expected["said"] if token < first)
    assert said.text == text.decode(errors="replace") and text
    assert len(said.samples) == 256 * mel_frames(len(said.frames))
    found = load_file(HERE / "samples.safetensors")[f"{name}_samples"]
    torch.testing.assert_close(said.samples[::STRIDE], found, **SAMPLES)


@pytest.mark.parametrize(("name", "num_prompt"), [("mel", 0), ("continued", 61)])
def test_mel_of_one_call_of_the_flow(model, name, num_prompt):
    found = load_file(HERE / "samples.safetensors")
    codes = (torch.arange(24) * 7 % model.config.flow.codes)[None]
    prompt = torch.zeros(1, mel_frames(24), 80)
    prompt[0, :num_prompt] = found["mel"][:num_prompt].flip(1)
    with torch.inference_mode():
        mel = model.flow(codes, torch.tensor([24]), prompt, torch.tensor([num_prompt]))[0]
    torch.testing.assert_close(mel, found[name], rtol=0, atol=2e-5)


def test_padding_does_not_change_the_flow(model):
    """The norms run over time, so padding would change every frame if it were not left out."""
    codes, count = torch.arange(60)[None].repeat(2, 1), torch.tensor([24, 60])
    prompt = torch.zeros(2, mel_frames(60), 80)
    with torch.inference_mode():
        padded = model.flow(codes, count, prompt, torch.zeros(2, dtype=torch.int64))[0]
        alone = model.flow(codes[:1, :24], count[:1], prompt[:1, : mel_frames(24)], torch.tensor([0]))[0]
    torch.testing.assert_close(padded[: len(alone)], alone, rtol=0, atol=2e-5)
    assert not padded[len(alone) :].any()
