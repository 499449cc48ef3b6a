"""Chatterbox compared with chatterbox-tts 0.1.7, in float32 with the same noise.

README.md in this folder describes the fixtures.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

import pytest
import torch
from agreement import noise
from models import directory, family
from safetensors.torch import load_file
from torch import Tensor

import zoo
from zoo.chatterbox import model
from zoo.chatterbox.model import Chatterbox
from zoo.request import AudioClip, Reference, Request

HERE = Path(__file__).parent / "chatterbox"
FACTS = json.loads((HERE / "facts.json").read_text())
CASES = sorted(FACTS["cases"])
NOISE = (2, 80 + 480 * 9)
SAMPLES = {"rtol": 0, "atol": 3e-4}


@cache
def loaded(size: str) -> Chatterbox:
    return family("chatterbox", size=size)


@cache
def voices(size: str) -> dict[str, Tensor]:
    return load_file(HERE / f"voices_{size}.safetensors")


RATES_HZ = {"short": 24000, "stereo": 44100, "long": 8000, "quiet": 16000}


def clip(name: str) -> AudioClip:
    return AudioClip(voices("parity")[f"{name}.clip"].numpy().astype("float32") / 32768, RATES_HZ[name])


def request_of(case: dict) -> Request:
    """Return the greedy request of a fixture."""
    known = ("text", "max_frames", "language", "clip", "repetition_penalty")
    references = (Reference(clip(case["clip"])),) if "clip" in case else ()
    options = {name: value for name, value in case.items() if name not in known}
    fields = {name: case.get(name) for name in ("text", "language", "max_frames", "repetition_penalty")}
    return Request(temperature=0.0, references=references, options=options, split_text=False, **fields)


@pytest.mark.slow
def test_the_demos_are_the_checkpoints_of_the_reference():
    for name, digest in FACTS["sha256"].items():
        size, file = name.split("/")
        content = (directory("chatterbox", size) / file).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest, name


def test_text_ids_equal_the_reference():
    writer = loaded("parity").writer
    for case in FACTS["tokens"]:
        ids = writer(Request(text=case["text"]))
        assert ids[1:-1] == case["ids"], case["text"]


@pytest.mark.parametrize("name", CASES)
def test_greedy_requests_equal_the_reference(name, monkeypatch):
    """The ids of the text, the guided logits, every code, the end, and the samples."""
    facts, expected = FACTS["cases"][name], load_file(HERE / f"{name}.safetensors")
    ours, request, drawn = loaded(facts["size"]), request_of(facts["request"]), []
    kind = "draw_before_penalty" if ours.config.is_turbo else "draw_after_penalty"
    real = getattr(model, kind)

    def draw(logits: Tensor, *how: Tensor) -> Tensor:
        drawn.append(logits[0])
        return real(logits, *how)

    monkeypatch.setattr(model, kind, draw)
    assert ours.writer(request) == expected["ids"].tolist()
    speech = zoo.generate(ours, request, noise=noise("flow", 64, *NOISE))
    codes = expected["codes"].tolist()
    silent = [4299] * 3 if ours.config.is_turbo else []
    assert [*speech.frames[:, 0].tolist(), *silent] == codes
    logits = expected["logits"]  # [steps, lanes, V]
    if not ours.config.is_turbo:
        weight = request.options.get("cfg_weight", 0.5)
        logits = logits[:, 0] + weight * (logits[:, 0] - logits[:, 1])
    ours_drawn = torch.stack(drawn[::8])[:, ::9]  # the reference runs the head once more behind the last id
    logits = logits.view(-1, logits.shape[-1])[: len(ours_drawn)]
    torch.testing.assert_close(ours_drawn, logits, rtol=0, atol=2e-4)
    torch.testing.assert_close(speech.samples[::7], expected["samples"], **SAMPLES)


def test_multilingual_has_the_penalty_of_the_release_without_an_analyser():
    options = {option.name: option.default for option in loaded("parity-multilingual").spec.options}
    assert options["repetition_penalty"] == 1.2


@pytest.mark.parametrize(
    ("size", "name"), [("parity", name) for name in RATES_HZ] + [("parity-turbo", "long")]
)
def test_a_clip_is_the_voice_of_the_reference(size, name):
    """At four rates and lengths: longer than the flow and the language model read, with silence at both
    ends."""
    made, expected = loaded(size).cloner(clip(name)), voices(size)
    num = len(made.flow_codes)
    assert len(made.mel) == 2 * num
    assert made.codes.tolist() == expected[f"{name}.codes"].tolist()
    assert made.flow_codes.tolist() == expected[f"{name}.flow_codes"].tolist()[:num]
    assert num == len(expected[f"{name}.flow_codes"])
    mel = made.mel[::5]
    torch.testing.assert_close(mel, expected[f"{name}.mel"][: len(mel)], rtol=0, atol=1e-3)
    torch.testing.assert_close(made.speaker, expected[f"{name}.speaker"], rtol=0, atol=1e-5)
    torch.testing.assert_close(made.timbre, expected[f"{name}.timbre"], rtol=0, atol=1e-3)
