"""Zonos against its own code: checkpoint, phonemes, prefix, greedy requests, sampling, codec and speaker
encoder.

The fixtures and what they hold: README.md in this folder.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import directory, family
from safetensors.torch import load_file
from torch import Tensor

import zoo
from zoo.check import check
from zoo.checkpoint.loading import published
from zoo.nn.sampling import keep_likely
from zoo.request import AudioClip, Reference, Request
from zoo.zonos import build, demo, speaker, weights
from zoo.zonos.config import read_configs
from zoo.zonos.phonemes import LANGUAGES, Phonemizer
from zoo.zonos.sampling import Settings, penalise_recent, weigh
from zoo.zonos.spelling import spell

HERE = Path(__file__).parent / "zonos"
MANIFESTS = HERE.parent.parent / "manifests"
CASES = sorted(path.stem for path in HERE.glob("generate_*.json"))
CLIP_HZ = 16_000
CLOSE: dict[str, float] = {"rtol": 0, "atol": 1e-5}


def found(name: str) -> dict[str, Tensor]:
    return load_file(HERE / f"{name}.safetensors")


def facts(name: str) -> Any:
    return json.loads((HERE / f"{name}.json").read_text())


def clip() -> AudioClip:
    return AudioClip(found("codec")["clip"].numpy().astype(np.float32) / 32768, CLIP_HZ)


def request_of(case: dict[str, Any]) -> Request:
    """Return the greedy request of a fixture."""
    references = (Reference(clip(), case["clip"]),) if "clip" in case else ()
    fields = {name: case[name] for name in ("text", "language", "max_frames") if name in case}
    return Request(temperature=0.0, references=references, options=case.get("options", {}), **fields)


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return demo.write_texts(tmp_path_factory.mktemp("zonos") / "full", "full")


def test_the_full_size_has_the_published_tensors(full):
    """246 tensors with 1,624,411,136 values, and 223 of the codec with 76,620,777."""
    config, codec_config = read_configs(full)
    backbone, codec = build(config, codec_config)
    for module, table, name, dtype, count in (
        (backbone, weights.model(config), "zonos", "BF16", 1_624_411_136),
        (codec, weights.codec(codec_config), "zonos_dac", "F32", 76_620_777),
    ):
        shapes = published(module, table)
        rows = sorted(f"{theirs}|{dtype}|{'x'.join(map(str, shape))}" for theirs, shape in shapes.items())
        assert rows == (MANIFESTS / f"{name}.txt").read_text().splitlines()
        assert sum(map(math.prod, shapes.values())) == count


def test_the_speaker_encoder_has_the_published_tensors():
    with torch.device("meta"):
        encoder = speaker.SpeakerEncoder(demo.SPEAKER, 128)
    tensors = encoder.net.state_dict()
    rows = sorted(
        f"{name}|{str(value.dtype)[6:]}|{'x'.join(map(str, value.shape))}" for name, value in tensors.items()
    )
    assert rows == (MANIFESTS / "zonos_speaker.txt").read_text().splitlines()


def test_the_demo_is_the_checkpoint_of_the_reference():
    for file, digest in facts("checkpoint")["sha256"].items():
        content = (directory("zonos", "tiny") / file).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest, file


def test_phonemes_and_their_ids_equal_the_reference():
    """By espeak-ng 1.52; another version may write other phonemes."""
    phonemize, texts = Phonemizer(), facts("texts")
    assert list(LANGUAGES) == texts["languages"]
    for read in texts["phonemes"]:
        assert phonemize.read(read["text"], read["language"]) == read["phonemes"]
        assert list(phonemize(read["text"], read["language"])) == read["ids"]
    for text, spelled in texts["numbers"].items():
        assert spell(text) == spelled, text


@pytest.mark.parametrize("case", CASES)
def test_greedy_requests_equal_the_reference(case, monkeypatch):
    """The prefix of both lanes, the logits of the first three steps after guidance, every code, the end, and
    the samples."""
    expected, said = found(case), facts(case)
    ours, request, seen = family("zonos"), request_of(said["request"]), []

    def merged(scores: Tensor, weight: Tensor) -> Tensor:
        seen.append(real(scores, weight))
        return seen[-1].clone()

    from zoo.zonos import model

    real = model.merge
    monkeypatch.setattr(model, "merge", merged)
    prompt = ours.prompt(request)
    length = expected["prefix"].shape[1]
    for lane, prefix in zip(prompt.lanes, expected["prefix"], strict=True):
        torch.testing.assert_close(lane.inputs[:length], prefix, **CLOSE)
    if "reference" in expected:
        assert (
            ours.writer(request, check(request, ours.spec)).codes.tolist() == expected["reference"].tolist()
        )
    speech = zoo.generate(ours, request)
    assert speech.frames.tolist() == expected["codes"].tolist()
    assert (said["stop"] == "end") == (len(speech.frames) < request.max_frames)
    logits = torch.stack([step[0] for step in seen[:3]])
    torch.testing.assert_close(logits, expected["logits"], rtol=0, atol=2e-4)  # up to 22
    torch.testing.assert_close(speech.samples[::11], expected["samples"], **CLOSE)


def test_each_condition_changes_the_codes():
    """Otherwise the fixtures would not notice a condition that is left out."""
    ours, codes = family("zonos"), set()
    changes: tuple[dict[str, float], ...] = (
        {}, {"emotion_fear": 1.0}, {"fmax": 8000.0}, {"pitch_std": 300.0}, {"speaking_rate": 5.0}, {"cfg_scale": 4.0},
    )  # fmt: skip
    for options in changes:
        request = Request(text="It hums.", temperature=0.0, max_frames=12, options=options)
        codes.add(str(zoo.generate(ours, request).frames.tolist()))
    request = Request(text="It hums.", temperature=0.0, max_frames=12, language="en-gb")
    codes.add(str(zoo.generate(ours, request).frames.tolist()))
    assert len(codes) == len(changes) + 1


def test_the_penalty_equals_the_reference():
    """A code in both of the last two columns is penalised twice, and the id of the mask counts nowhere."""
    expected = found("likely")
    columns = expected["recent"].unbind(-1)
    ours = penalise_recent(expected["logits"], (columns[0], columns[1]), torch.full((2,), 3.0))
    torch.testing.assert_close(ours, expected["penalised"], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("i", "temperature", "top_p", "top_k", "min_p", "unified"),
    [
        (0, 1.0, 1.0, 0, 0.1, (0, 0, 0)),
        (1, 0.7, 0.9, 50, 0.02, (0, 0, 0)),
        (2, 1.3, 1.0, 5, 0.0, (0, 0, 0)),
        (3, 1.0, 0.5, 0, 0.3, (0, 0, 0)),
        (4, 0.9, 0.8, 20, 0.0, (0, 0, 0)),
        (5, 1.0, 1.0, 0, 0.0, (0.5, 0.4, 0.0)),
        (6, 0.8, 0.7, 30, 0.05, (0.3, -0.1, 0.2)),
    ],
)
def test_the_probabilities_equal_the_reference(i, temperature, top_p, top_k, min_p, unified):
    """Temperature, unified sampler, top-p, top-k, min-p. The same codes are left, and their probabilities agree."""
    expected = found("likely")
    logits, each = expected["penalised"][0, :2], torch.ones(2)
    how = Settings(
        temperature * each,
        (top_k * each).long(),
        top_p * each,
        min_p * each,
        *(value * each for value in unified),
    )
    weighed, used, noise = weigh(logits, how, torch.zeros_like(logits))
    kept = keep_likely(weighed / used[:, None], how.top_k, each) + noise
    torch.testing.assert_close(kept.softmax(-1), expected[f"probabilities_{i}"], rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("frames", [1, 2, 30])
def test_the_codec_equals_the_reference(frames):
    expected, decoder = found("codec"), family("zonos").codec.decoder
    codes = expected[f"decode_{frames}.codes"].long()[None]
    edge = torch.zeros(1, decoder.context, 9, dtype=torch.int64)
    whole = torch.cat((edge, codes, edge), 1)
    samples = decoder(whole, torch.zeros(1, dtype=torch.int64), torch.tensor([frames]))
    torch.testing.assert_close(
        samples[0, :: 1 if frames < 3 else 11], expected[f"decode_{frames}.samples"], **CLOSE
    )


@pytest.mark.parametrize("num", [1, 512, 513, 5000])
def test_a_clip_has_the_codes_of_the_reference(num):
    codes = family("zonos").codec.encode(found("codec")["clip"][None, :num] / 32768)
    assert codes[0].tolist() == found("codec")[f"encode_{num}.codes"].tolist()


@pytest.mark.parametrize("case", ["16000", "22050", "44100", "48000", "two"])
def test_a_voice_equals_the_reference(case):
    """At four rates, and in two channels."""
    samples = found("codec")["clip"] / 32768
    hz = CLIP_HZ if case == "two" else int(case)
    samples = torch.stack((samples, samples.flip(0))).mean(0) if case == "two" else samples
    voice = family("zonos").writer.cloner.speaker(samples, hz)
    torch.testing.assert_close(voice, found("speaker")[case], **CLOSE)


def test_the_prefix_in_bfloat16_is_that_of_the_reference():
    """Fourier features are rounded at each step; a row's product may round differently, by one unit."""
    ours, expected = zoo.load(directory("zonos", "tiny"), "cpu", "bfloat16"), found("bfloat16")["prefix"]
    prompt = ours.prompt(request_of(facts("generate_plain")["request"]))
    for lane, prefix in zip(prompt.lanes, expected, strict=True):
        assert lane.inputs.dtype == prefix.dtype == torch.bfloat16
        torch.testing.assert_close(lane.inputs[: len(prefix)].float(), prefix.float(), rtol=2**-7, atol=2**-7)
