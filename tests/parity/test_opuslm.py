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
from zoo.checkpoint.joblib_files import read_array
from zoo.checkpoint.loading import published, weight_normed
from zoo.contract import Said
from zoo.loop import speak_pass
from zoo.nn.sampling import keep_likely
from zoo.opuslm import build, demo, demo_xeus, weights, xeus
from zoo.opuslm.config import CodecConfig, Config
from zoo.opuslm.encoder import Encoder, nearest, quantized
from zoo.opuslm.listener import CENTERS, WEIGHTS
from zoo.opuslm.model import OpusLM
from zoo.opuslm.prompt import TEMPERATURE, TOP_K
from zoo.opuslm.xeus import Xeus, XeusConfig
from zoo.request import AudioClip, Reference, Request, Turn

HERE = Path(__file__).parent / "opuslm"
MANIFESTS = HERE.parent.parent / "manifests"
FACTS = json.loads((HERE / "checkpoint.json").read_text())
MODES = [
    (size, name, case.get("output", "reply" if "turns" in case else "speech"))
    for size, cases in FACTS["cases"].items()
    for name, case in cases.items()
]
CASES = [(size, name) for size, name, mode in MODES if mode == "speech"]
OTHERS = [(size, name) for size, name, mode in MODES if mode != "speech"]
SPOKEN_SIZES = ("tiny", "tiny_smollm")
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
    """356 tensors with 7,409,405,952 values, 220 with 1,867,433,984, those of the codec, and those of XEUS."""
    model, body, codec, xeus_values = demo.CONFIGS[size]()
    config, codec_config = Config.read(model, body), CodecConfig.read(codec, "codec")
    backbone, decoder = build(config, codec_config)
    shapes = weights.shapes(config, published(backbone, weights.lm(config)))
    rows = sorted(f"{theirs}|BF16|{'x'.join(map(str, shape))}" for theirs, shape in shapes.items())
    assert rows == (MANIFESTS / f"{name}.txt").read_text().splitlines()
    assert sum(map(math.prod, shapes.values())) == values
    with torch.device("meta"):
        encoder, network = Encoder(codec_config), Xeus(XeusConfig.read(xeus_values, "xeus"))
    shapes = published(decoder, weights.codec(codec_config)) | published(
        encoder, weights.encoder(codec_config)
    )
    shapes = weight_normed(shapes, weights.is_normed)
    ours = {f"{demo.renamed(theirs)}|F32|{'x'.join(map(str, shape))}" for theirs, shape in shapes.items()}
    theirs = set((MANIFESTS / "opuslm_codec.txt").read_text().splitlines())
    assert ours <= theirs
    assert {row.partition("|")[0].rpartition(".")[2] for row in theirs - ours} == set(weights.CODEBOOK_LEAVES)
    shapes = published(network, xeus.names(network))
    direction = shapes.pop(xeus.EMBED)
    shapes |= {f"{xeus.EMBED}_g": (1, 1, direction[2]), f"{xeus.EMBED}_v": direction}
    rows = sorted(
        f"{demo_xeus.newer(theirs)}|F32|{'x'.join(map(str, shape))}" for theirs, shape in shapes.items()
    )
    assert rows == (MANIFESTS / "opuslm_xeus.txt").read_text().splitlines()


@pytest.mark.parametrize("size", FACTS["sha256"])
def test_the_demo_is_the_checkpoint_of_the_reference(size):
    digest = hashlib.sha256()
    for file in ("model.pth", f"codec/{demo.MODEL_FILE}", f"xeus/{WEIGHTS[1]}"):
        for name, value in sorted(torch.load(directory("opuslm", size) / file, weights_only=True).items()):
            digest.update(name.encode() + value.numpy().tobytes())
    assert digest.hexdigest() == FACTS["sha256"][size]


def clip(samples: int | None = None) -> AudioClip:
    return AudioClip(found("hearing")["clip"][:samples].numpy(), 16_000)


def spoken(ours: OpusLM, case: dict[str, Any], long: Tensor) -> tuple[Tensor, Any]:
    """Return the rows of the prompt [T, 9], and the greedy speech."""
    voice = case.get("voice")
    if voice == "clip":
        request = Request(text=case["text"], temperature=0.0, max_frames=10, references=(Reference(clip()),))
        return ours.writer(request).rows, zoo.generate(ours, request)
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

    def scores(h: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(real(h)[0][0].clone())
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


def asked(case: dict[str, Any]) -> Request:
    """Return the request of a case that is no speech of a text."""
    output, frames = case.get("output", "speech"), case.get("frames")
    options = {name: case[name] for name in ("max_tokens",) if name in case}
    common = {"output": output, "options": options, "max_frames": case.get("max_frames"), "temperature": 0.0}
    if "turns" in case:
        turns = tuple(
            Turn(role, text, clip() if has_clip else None) for role, text, has_clip in case["turns"]
        )
        return Request(text="", turns=turns, voice=case.get("voice", "default"), **common)
    if output == "text":
        return Request(text=case["text"], **common)
    # the least clip is longer than three frames
    turns = () if frames == 0 else (Turn("user", clip=clip()),)
    return Request(text="", turns=turns, **common)


@pytest.mark.parametrize(("size", "name"), OTHERS)
def test_words_continuations_and_dialogues_equal_the_reference(size, name, monkeypatch):
    """The prompt's ids, every token of text, every code, the ends, and the samples."""
    case, ours, written = FACTS["cases"][size][name], family(size), []
    theirs = {
        key.partition(".")[2]: value for key, value in found(size).items() if key.startswith(f"{name}.")
    }

    def detokenize(token: int) -> bytes:
        written.append(token)
        return real(token)

    real = ours.detokenize
    monkeypatch.setattr(ours, "detokenize", detokenize)
    request = asked(case)
    if case.get("frames"):
        hear = ours.writer.ear
        monkeypatch.setattr(ours.writer, "ear", lambda *asked: hear(*asked)[: case["frames"]])
    assert ours.writer(request).rows.tolist() == theirs["rows"].tolist()
    answer = zoo.generate(ours, request)
    assert written == theirs.get("words", torch.zeros(0)).tolist()
    if "codes" in theirs:
        assert answer.frames.tolist() == theirs["codes"].tolist()
        torch.testing.assert_close(answer.samples[::STRIDE], theirs["samples"], **CLOSE)
    else:
        assert len(answer.frames) == 0


def test_text_ends_by_itself_before_at_and_behind_its_limit():
    """Otherwise the fixtures would not show the ends."""
    cases = FACTS["cases"]["tiny_dialogue"]
    lengths = {name: len(found("tiny_dialogue")[f"{name}.words"]) for name in cases}
    ended = cases["ended_at_limit"]["max_tokens"]
    assert lengths["ended"] == lengths["ended_at_limit"] == ended < cases["ended"]["max_tokens"]
    assert lengths["ended_text"] < cases["ended_text"]["max_tokens"]
    assert lengths["ended_behind"] == ended - 1


@pytest.mark.parametrize("samples", [400, 3200, 3201, 3520, 11_111])
def test_the_encoders_equal_the_reference(samples):
    """The vectors of XEUS and of the codec's encoder, and the codes that they become."""
    ours, theirs = family("tiny"), found("hearing")
    part = theirs["clip"][:samples]
    assert ours.encoders is not None
    with torch.inference_mode():
        clusters = ours.encoders.xeus(part)
        vectors = ours.encoders.encoder(part)
        codes = quantized(vectors, ours.codec.tables)
        stream = nearest(clusters, ours.encoders.centers)
    torch.testing.assert_close(clusters[:, :6], theirs[f"{samples}.xeus"], rtol=0, atol=2e-5)  # up to 4
    torch.testing.assert_close(vectors[:, :4], theirs[f"{samples}.encoder"], rtol=0, atol=2e-5)
    expected = theirs[f"{samples}.codes"].long()
    num = min(len(stream), len(codes))
    assert torch.cat((stream[:num, None], codes[:num]), 1).tolist() == expected.tolist()
    if samples >= 3200:
        assert ours.writer.ear(clip(samples)).tolist() == expected.tolist()


def test_a_clustering_of_scikit_learn_is_read():
    centers = read_array(HERE / "clusters.mdl", CENTERS)
    assert centers.tolist() == found("clusters")["centers"].tolist()


@pytest.mark.parametrize("size", SPOKEN_SIZES)
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
