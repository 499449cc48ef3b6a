"""OpusLM against ESPnet's own code: checkpoint, prompts, greedy requests, probabilities and codec.

The fixtures and what they hold: README.md in this folder.
"""

from __future__ import annotations

import hashlib
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from models import directory
from safetensors.torch import load_file
from torch import Tensor

import zoo
from zoo.checkpoint.loading import published, weight_normed
from zoo.contract import Said
from zoo.loop import speak_pass
from zoo.nn.sampling import keep_likely
from zoo.opuslm import build, demo, weights
from zoo.opuslm.config import CodecConfig, Config
from zoo.opuslm.model import OpusLM
from zoo.opuslm.prompt import TEMPERATURE, TOP_K
from zoo.request import Request

HERE = Path(__file__).parent / "opuslm"
MANIFESTS = HERE.parent.parent / "manifests"
FACTS = json.loads((HERE / "checkpoint.json").read_text())
CASES = [(size, name) for size, cases in FACTS["cases"].items() for name in cases]
CLOSE: dict[str, float] = {"rtol": 0, "atol": 1e-5}
STRIDE = 11


@cache
def found(name: str) -> dict[str, Tensor]:
    return load_file(HERE / f"{name}.safetensors")


@cache
def family(size: str) -> OpusLM:
    loaded = zoo.load(directory("opuslm", size), "cpu", "float32")
    assert isinstance(loaded, OpusLM)
    return loaded


@pytest.mark.parametrize(
    ("size", "name", "values"),
    [("full", "opuslm", 7_409_405_952), ("full_smollm", "opuslm_smollm", 1_867_433_984)],
)
def test_the_full_sizes_have_the_tensors_of_the_reference(size, name, values):
    """356 tensors with 7,409,405,952 values, 220 with 1,867,433,984, and 171 of the codec that are read."""
    model, body, codec = demo.CONFIGS[size]()
    config, codec_config = Config.read(model, body), CodecConfig.read(codec, "codec")
    backbone, decoder = build(config, codec_config)
    shapes = weights.shapes(config, published(backbone, weights.lm(config)))
    rows = sorted(f"{theirs}|BF16|{'x'.join(map(str, shape))}" for theirs, shape in shapes.items())
    assert rows == (MANIFESTS / f"{name}.txt").read_text().splitlines()
    assert sum(map(math.prod, shapes.values())) == values
    shapes = weight_normed(published(decoder, weights.codec(codec_config)), weights.is_normed)
    ours = {f"{demo.renamed(theirs)}|F32|{'x'.join(map(str, shape))}" for theirs, shape in shapes.items()}
    theirs = set((MANIFESTS / "opuslm_codec.txt").read_text().splitlines())
    assert ours <= theirs
    assert {row.partition("|")[0].rpartition(".")[2] for row in theirs - ours} == set(weights.CODEBOOK_LEAVES)


@pytest.mark.parametrize("size", FACTS["sha256"])
def test_the_demo_is_the_checkpoint_of_the_reference(size):
    digest = hashlib.sha256()
    for file in ("model.pth", f"codec/{demo.MODEL_FILE}"):
        for name, value in sorted(torch.load(directory("opuslm", size) / file, weights_only=True).items()):
            digest.update(name.encode() + value.numpy().tobytes())
    assert digest.hexdigest() == FACTS["sha256"][size]


def spoken(ours: OpusLM, case: dict[str, Any], long: Tensor) -> tuple[Tensor, Any]:
    """Return the rows of the prompt [T, 9], and the greedy speech."""
    voice = case.get("voice")
    request = Request(text=case["text"], temperature=0.0, max_frames=case["max_frames"])
    if voice != "long":
        request = Request(
            text=case["text"], temperature=0.0, max_frames=case["max_frames"], voice=voice or "default"
        )
        return ours.writer(request).rows, zoo.generate(ours, request)
    request = Request(text=case["text"], temperature=0.0, max_frames=case["max_frames"], voice="default")
    said = Said("", long.long())
    with torch.inference_mode():
        return ours.writer(request, said).rows, speak_pass(ours, ours.later_prompt(request, said), None)


@pytest.mark.parametrize(("size", "name"), CASES)
def test_greedy_requests_equal_the_reference(size, name, monkeypatch):
    """The prompt's ids, the logits of the first three steps, every code, the end, and the samples."""
    expected = {
        key.partition(".")[2]: value for key, value in found(size).items() if key.startswith(f"{name}.")
    }
    case, ours, seen = FACTS["cases"][size][name], family(size), []

    def scores(h: Tensor) -> Tensor:
        seen.append(real(h)[0].clone())
        return real(h)

    real = ours.backbone.scores
    monkeypatch.setattr(ours.backbone, "scores", scores)
    rows, speech = spoken(ours, case, found(size)["long"])
    assert rows.tolist() == expected["rows"].tolist()
    assert speech.frames.tolist() == expected["codes"].tolist()
    assert len(speech.frames) == min(case["max_frames"], case.get("ended", 1000))
    logits = torch.stack([in_order(ours, step) for step in seen[:3]])
    torch.testing.assert_close(logits, expected["logits"][: len(logits)], rtol=0, atol=1e-4)  # up to 15
    torch.testing.assert_close(speech.samples[::STRIDE], expected["samples"], **CLOSE)


def in_order(ours: OpusLM, scores: Tensor) -> Tensor:
    """Return the scores [9, V] without the end, in the order of the ids, with zeros behind them."""
    known = ours.config.vocabulary
    rows = torch.zeros(9, max(known.num_clusters, known.num_codes) + 1)
    rows[0, 0], rows[0, 1 : 1 + known.num_clusters] = (
        scores[0, known.num_clusters + 1],
        scores[0, : known.num_clusters],
    )
    rows[1:, 0], rows[1:, 1 : 1 + known.num_codes] = (
        scores[1:, known.num_codes],
        scores[1:, : known.num_codes],
    )
    return rows


@pytest.mark.parametrize("size", FACTS["cases"])
def test_the_probabilities_equal_the_reference(size):
    """The reference takes the likeliest ids before it divides by the temperature, in the same order."""
    ours, expected = family(size), found(size)["probabilities"]
    # the first step's logits, the marker of audio and the pad included; the end is not yet possible
    scores = found(size)["plain.logits"][0]
    scores = torch.where(scores == 0, -torch.inf, scores)
    kept = keep_likely(scores / TEMPERATURE, torch.full((9,), TOP_K), torch.ones(9))
    likely = kept.softmax(-1).sort(-1, descending=True).values[:, : expected.shape[1]]
    torch.testing.assert_close(likely, expected, rtol=0, atol=1e-6)
    options = {option.name: option.default for option in ours.spec.options}
    assert (options["temperature"], options["top_k"], options["top_p"]) == (TEMPERATURE, TOP_K, 1.0)


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 11, 60])
def test_the_codec_equals_the_reference(frames):
    """Speech of three frames or less is padded in another way."""
    decoder, expected = family("tiny").codec, found("codec")
    codes = expected[f"{frames}.codes"].long()[None, :, 1:]
    edge = torch.zeros(1, decoder.context, 8, dtype=torch.int64)
    start, count = torch.zeros(1, dtype=torch.int64), torch.tensor([frames])
    state = torch.zeros(1, *decoder.state_shape)
    samples, _ = decoder(torch.cat((edge, codes, edge), 1), start, count, count, state)
    stride = 1 if frames < 5 else STRIDE
    torch.testing.assert_close(samples[0, ::stride], expected[f"{frames}.samples"], **CLOSE)


def test_the_stream_vectors_and_the_pad_count():
    """Otherwise the fixtures would not notice one that is left out."""
    ours = family("tiny")
    assert ours.backbone.streams.weight[:9].abs().amin(1).gt(0).all()
    assert ours.backbone.ids.weight[0].abs().max() > 0.01
