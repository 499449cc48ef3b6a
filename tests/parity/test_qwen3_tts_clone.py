"""Base and VoiceDesign compared with the reference implementation: encoded references, and greedy requests in
float32.

README.md in this folder describes the fixtures.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from agreement import check_prompt, check_speech, request_of
from models import family
from safetensors.torch import load_file
from torch import Tensor

from zoo.nn.mel import slaney_filters
from zoo.request import AudioClip, Request

HERE = Path(__file__).parent / "qwen3_tts"
CASES = sorted(path.stem for pattern in ("clone_*.json", "design*.json") for path in HERE.glob(pattern))
CLIPS = load_file(HERE / "references.safetensors")
FACTS = json.loads((HERE / "references.json").read_text())
CLOSE = {"rtol": 0, "atol": 1e-4}


def clip(name: str) -> AudioClip:
    samples = CLIPS[f"{name}.audio"].numpy().astype("float32") / 32768  # [C, N]
    return AudioClip(samples if len(samples) > 1 else samples[0], FACTS["rates_hz"][name])


def request(facts: dict) -> Request:
    asked = facts["request"]
    return request_of(asked, clip(asked["reference"]) if "reference" in asked else None)


@pytest.fixture(params=CASES)
def case(request):
    return json.loads((HERE / f"{request.param}.json").read_text()), load_file(
        HERE / f"{request.param}.safetensors"
    )


# references


def test_mel_filters_equal_librosas():
    """librosa rounds its filters to float32 twice."""
    torch.testing.assert_close(
        slaney_filters(24000, 1024, 128)[::8].float(), CLIPS["filters"], rtol=0, atol=1e-8
    )


@pytest.mark.parametrize("name", FACTS["rates_hz"])
def test_encoded_references_equal_the_reference(name, monkeypatch):
    """Codes are equal, mel and speaker vector within 1e-4 (measured: 1e-6), for short and long clips."""
    cloner = family("qwen3_tts", size="tiny-base").writer.cloner
    mels: list[Tensor] = []
    hook = cloner.mel.register_forward_hook(lambda module, args, out: mels.append(out[0]))
    made = cloner._encode(b"", clip(name), x_vector_only=False)
    hook.remove()
    torch.testing.assert_close(mels[0][:, :: FACTS["stride"]], CLIPS[f"{name}.mel"], **CLOSE)
    torch.testing.assert_close(made.speaker, CLIPS[f"{name}.speaker"], **CLOSE)
    assert made.codes.tolist() == CLIPS[f"{name}.codes"].tolist()


def test_some_clips_are_shorter_and_some_longer_than_the_encoders_window():
    encoder = family("qwen3_tts", size="tiny-base").codec.encoder.config
    frames = {len(CLIPS[f"{name}.codes"]) for name in FACTS["rates_hz"]}
    assert min(frames) < encoder.window / 2 < max(frames)


# greedy requests, float32


def test_cases_cover_all_voices_and_text_modes():
    facts = [json.loads((HERE / f"{name}.json").read_text()) for name in CASES]
    assert len(facts) == 11
    long = [(f["size"].split("-")[-1], f["request"]) for f in facts if f["frames"] >= 60]
    kinds = {(variant, asked.get("x_vector_only_mode", False), asked["text_mode"]) for variant, asked in long}
    voices = (("base", False), ("base", True), ("design", False))
    assert kinds == {(*voice, mode) for voice in voices for mode in ("full", "interleaved")}
    assert {f.get("early") for f in facts} == {0, 1, None}


def test_prompts_equal_the_reference(case):
    facts, found = case
    check_prompt(family("qwen3_tts", size=facts["size"]), request(facts), found, atol=1e-5)


def test_some_texts_are_shorter_and_some_longer_than_the_codes():
    """In text_mode interleaved the longer side continues: codes with padding, or text with later frames."""
    trailing = {
        name: load_file(HERE / f"clone_{name}.safetensors")["trailing"]
        for name in ("short_text", "long_text")
    }
    assert len(trailing["short_text"]) == 1 < len(trailing["long_text"])


@pytest.mark.slow
def test_greedy_requests_equal_the_reference(case, monkeypatch):
    facts, found = case
    check_speech(family("qwen3_tts", size=facts["size"]), request(facts), facts, found, monkeypatch)
