"""Bagpiper against ESPnet's own code: checkpoint, prompts, greedy answers, probabilities, codec and audio encoder.

The fixtures and what they hold: README.md in this folder.
"""

from __future__ import annotations

import hashlib
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import directory
from safetensors.torch import load_file
from torch import Tensor

import zoo
from zoo.bagpiper import demo
from zoo.bagpiper.config import CODEC, TOWER
from zoo.bagpiper.model import Bagpiper
from zoo.nn.sampling import keep_likely
from zoo.request import AudioClip, Request, Turn

HERE = Path(__file__).parent / "bagpiper"
MANIFEST = HERE.parent.parent / "manifests" / "bagpiper_audio.txt"
FACTS = json.loads((HERE / "checkpoint.json").read_text())
CASES = [(size, name) for size, cases in FACTS["cases"].items() for name in cases]
CLOSE: dict[str, float] = {"rtol": 0, "atol": 1e-5}
STRIDE = 11


@cache
def found(name: str) -> dict[str, Tensor]:
    return load_file(HERE / f"{name}.safetensors")


@cache
def family(size: str) -> Bagpiper:
    loaded = zoo.load(directory("bagpiper", size), "cpu", "float32")
    assert isinstance(loaded, Bagpiper)
    return loaded


def clip(num_samples: int) -> AudioClip:
    at = np.arange(num_samples)
    noise = np.random.default_rng(num_samples).uniform(-0.1, 0.1, num_samples)
    return AudioClip((0.4 * np.sin(at**1.3 / 40) + noise).astype(np.float32), 16_000)


def test_the_full_size_has_the_tensors_of_the_reference():
    """1,381 tensors and vocab_weight; 9,093,843,593 values without it."""
    shapes = demo.shapes_of(demo.CONFIGS["full"])
    audio = {name: shape for name, shape in shapes.items() if name.startswith((CODEC, TOWER))}
    rows = sorted(f"{name}|{'x'.join(map(str, shape))}" for name, shape in audio.items())
    assert rows == MANIFEST.read_text().splitlines()
    assert shapes.pop("vocab_weight") == (160_392,)
    assert len(shapes) == 1381
    assert sum(map(math.prod, shapes.values())) == 9_093_843_593


@pytest.mark.parametrize("size", FACTS["sha256"])
def test_the_demo_is_the_checkpoint_of_the_reference(size):
    digest = hashlib.sha256()
    tensors = torch.load(directory("bagpiper", size) / "model.pt", weights_only=True)["module"]
    for name, value in sorted(tensors.items()):
        digest.update(name.encode() + value.numpy().tobytes())
    assert digest.hexdigest() == FACTS["sha256"][size]


def request_of(case: dict[str, Any]) -> Request:
    turns = [Turn("system", case["system"])] if "system" in case else []
    turns += [Turn("user", clip=clip(case["clip"]))] if "clip" in case else []
    options = {"guidance": float(case.get("guidance", 3))}
    options |= {"max_tokens": case["max_tokens"]} if "max_tokens" in case else {}
    output = case.get("output", "speech")
    frames = case.get("max_frames")
    return Request(
        text=case["text"],
        turns=tuple(turns),
        temperature=0.0,
        max_frames=frames,
        options=options,
        output=output,
    )


@pytest.mark.parametrize(("size", "name"), CASES)
def test_greedy_answers_equal_the_reference(size, name):
    """The prompt's ids, every word, every code, the end, and the samples."""
    expected = {
        key.partition(".")[2]: value for key, value in found(size).items() if key.startswith(f"{name}.")
    }
    case, ours = FACTS["cases"][size][name], family(size)
    request = request_of(case)
    rows = ours.writer(request).rows
    assert rows[:-2, 0].tolist() == expected["rows"].tolist()  # the reference forces the last two
    assert rows[:, 1:].eq(0).all()
    speech = zoo.generate(ours, request)
    assert speech.text == b"".join(map(ours.detokenize, expected["words"].tolist())).decode(errors="replace")
    if request.output == "text":
        assert len(speech.frames) == 0
        return
    assert speech.frames.tolist() == expected["codes"].tolist()
    if "ended" in case:
        assert len(speech.frames) == min(case["max_frames"], case["ended"])
    torch.testing.assert_close(speech.samples[::STRIDE], expected["samples"], **CLOSE)


@pytest.mark.parametrize("size", FACTS["cases"])
def test_the_probabilities_equal_the_reference(size, monkeypatch):
    """The reference takes the likeliest ids before it divides by the temperature, in the same order; and guidance
    comes before both."""
    ours, seen = family(size), []
    phases = ours.config.sampling

    def keep(logits: Tensor, temperature: Tensor, *others: Tensor) -> Tensor:
        seen.append(logits.clone())
        return logits.argmax(-1)

    for name in ("draw", "draw_inline"):
        monkeypatch.setattr(f"zoo.bagpiper.model.{name}", keep)
    options = {"max_tokens": 1, "guidance": 3.0}
    zoo.generate(
        ours, Request(text='Say hello! in a warm voice: "good morning!"', max_frames=1, options=options)
    )
    # a step draws a word, then codes; the first codes that count are those of the fourth step
    for name, logits, phase in (("text", seen[0], phases.text), ("audio", seen[7], phases.audio)):
        kept = keep_likely(
            logits / phase.temperature, torch.full((len(logits),), phase.top_k), torch.ones(len(logits))
        )
        expected = found(size)[f"probabilities.{name}"]
        likely = kept.softmax(-1).sort(-1, descending=True).values[:, : expected.shape[1]]
        torch.testing.assert_close(likely, expected[: len(logits)], rtol=0, atol=1e-5)
    assert (phases.text.temperature, phases.audio.temperature, phases.guidance) == (0.6, 0.8, 3)


@pytest.mark.parametrize("frames", [1, 2, 12, 60])
def test_the_codec_equals_the_reference(frames):
    decoder, expected = family("tiny").codec, found("codec")
    codes = expected[f"{frames}.codes"].long()[None]
    edge = torch.zeros(1, decoder.context, 8, dtype=torch.int64)
    start, end = torch.zeros(1, dtype=torch.int64), torch.tensor([frames])
    samples = decoder(torch.cat((edge, codes, edge), 1), start, end)
    stride = 1 if frames < 5 else STRIDE
    torch.testing.assert_close(samples[0, ::stride], expected[f"{frames}.samples"], **CLOSE)


@pytest.mark.parametrize("num_samples", [3000, 32_077])
def test_what_is_heard_equals_the_reference(num_samples):
    ours = family("tiny")
    assert ours.listener is not None
    vectors = ours.listener(clip(num_samples))
    torch.testing.assert_close(vectors, found("tiny")[f"ear.{num_samples}"], rtol=0, atol=1e-4)


def test_the_pad_and_the_stream_vectors_count():
    """Otherwise the fixtures would not notice one that is left out, or the first vector, which does not count."""
    ours = family("tiny")
    assert ours.backbone.streams.weight.abs().amin(1).gt(0).all()
    assert ours.backbone.ids.weight[0].abs().max() > 0.1
