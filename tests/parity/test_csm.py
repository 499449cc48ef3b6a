"""CSM against transformers: checkpoint, prompts, greedy requests, codec and encoder, rounding in bfloat16.

The fixtures and what they hold: README.md in this folder.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
from agreement import rows
from models import directory, family
from safetensors.torch import load_file
from torch import Tensor

import zoo
from zoo.checkpoint.loading import published
from zoo.csm import build, demo, model, survey, weights
from zoo.csm.layouts import Checkpoint
from zoo.nn import mimi_encoder
from zoo.nn.conv import CodecState
from zoo.request import AudioClip, Reference, Request

HERE = Path(__file__).parent / "csm"
MANIFESTS = HERE.parent.parent / "manifests"
CASES = sorted(path.stem for path in HERE.glob("generate_*.json"))
HEADERS = "4599e6510bc0198383c220f3da32348946868ab47e8cd6e24ef81cee1a4a17f5"  # of the published original file
CLOSE = {"rtol": 0, "atol": 1e-5}


def found(name: str) -> dict[str, Tensor]:
    return load_file(HERE / f"{name}.safetensors")


def clip(num: int) -> AudioClip:
    return AudioClip(found("codec")["clip"][:num].numpy().astype("float32") / 32768, 24_000)


def request_of(asked: dict) -> Request:
    """Return the greedy request of a fixture."""
    references = tuple(
        Reference(clip(num), text, speaker) for num, text, speaker in asked.get("references", ())
    )
    options = {"speaker": asked.get("speaker", 0)}
    fields = {"text": asked["text"], "max_frames": asked["max_frames"], "options": options}
    return Request(temperature=0.0, references=references, **fields)


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return demo.write_texts(tmp_path_factory.mktemp("csm") / "full", "full")


def test_the_full_size_has_the_published_tensors(full):
    """538 tensors in transformers' layout, with 1,783,357,281 values; the codes' embeddings are there
    twice."""
    path, config = full
    shapes = published(Checkpoint(*build(config)), weights.transformers(config))
    assert rows(shapes) == (MANIFESTS / "csm.txt").read_text().splitlines()
    assert sum(map(math.prod, shapes.values())) == 1_783_357_281
    spec, _ = survey(path)
    assert (spec.kv.num_layers, spec.kv.num_heads, spec.kv.head_dim, spec.frame_samples) == (16, 8, 64, 1920)


def test_the_original_layout_has_the_published_header(full):
    """187 tensors. The hash of their names, dtypes and shapes is that of the published file."""
    _, config = full
    lm, _ = build(config)
    names = rows(published(lm, weights.original(config)))
    assert len(names) == 187
    assert hashlib.sha256("\n".join(names).encode()).hexdigest() == HEADERS


def test_the_demo_is_the_checkpoint_of_the_reference():
    digests = json.loads((HERE / "checkpoint.json").read_text())["sha256"]
    for shard, digest in digests.items():
        content = (directory("csm", "tiny") / shard).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest, shard


@pytest.mark.parametrize("case", CASES)
def test_greedy_requests_equal_the_reference(case, monkeypatch):
    """The prompt's ids, the logits of code 0, every code, the end, and the samples."""
    expected, facts = found(case), json.loads((HERE / f"{case}.json").read_text())
    ours, request, drawn = family("csm"), request_of(facts["request"]), []

    def draw(logits: Tensor, *how: Tensor) -> Tensor:
        drawn.append(logits[0])
        return real(logits, *how)

    real = model.draw
    monkeypatch.setattr(model, "draw", draw)
    assert ids_of(request) == expected["ids"].tolist()
    speech = zoo.generate(ours, request)
    assert speech.frames.tolist() == expected["codes"].tolist()
    assert (facts["stop"] == "end") == (len(speech.frames) < request.max_frames)
    first = torch.stack(drawn[:: ours.config.codebooks])[: len(speech.frames)]
    torch.testing.assert_close(first, expected["logits"], **CLOSE)
    torch.testing.assert_close(speech.samples[::7], expected["samples"], **CLOSE)


def ids_of(request: Request) -> list[int]:
    """Return a request's prompt with transformers' placeholders for audio."""
    writer = family("csm").writer
    audio, end = (writer.tokenize.special[name] for name in ("<|AUDIO|>", "<|audio_eos|>"))
    parts = writer(request, {"speaker": request.options["speaker"]}).parts
    written = (part.tolist() if part.dim() == 1 else [audio] * (len(part) - 1) + [end] for part in parts)
    return [token for part in written for token in part]


@pytest.mark.parametrize("frames", [1, 2, 30])
def test_the_codec_equals_the_reference(frames):
    """The tiny window is 5 frames."""
    expected, decoder = found("codec"), family("csm").decoder
    codes = expected[f"decode_{frames}.codes"].long()[None]
    rows = torch.zeros(1, decoder.state_size)
    state = CodecState(decoder.layout, rows, frames, torch.tensor([frames]))
    samples = decoder(codes, torch.zeros(1, dtype=torch.int64), state)
    torch.testing.assert_close(
        samples[0, :: 1 if frames < 3 else 7], expected[f"decode_{frames}.samples"], **CLOSE
    )


@pytest.mark.parametrize("num", [1, 1920, 1921, 5000, 19_200])
def test_a_clip_has_the_codes_of_the_reference(num):
    """With zeros up to a whole frame, as the original does."""
    cloner = family("csm").writer.cloner
    ours = cloner.encoder(torch.nn.functional.pad(found("codec")["clip"][:num] / 32768, (0, -num % 1920)))
    assert ours.tolist() == found("codec")[f"encode_{num}.codes"].tolist()


def test_a_clip_beyond_the_encoders_window_has_the_codes_of_transformers():
    """40 frames of noise, and a window of five: with the whole past, other codes come out."""
    from transformers import CsmForConditionalGeneration

    path = directory("csm", "tiny")
    theirs = CsmForConditionalGeneration.from_pretrained(path, dtype=torch.float32).codec_model
    samples = torch.randn(40 * 1920, generator=torch.Generator().manual_seed(0)) / 10
    encoder = family("csm").writer.cloner.encoder
    ours = encoder(samples)
    with torch.inference_mode():
        [expected] = theirs.encode(samples[None, None]).audio_codes.mT
        blind = mimi_encoder.Encoder(encoder.config, encoder.rate_hz, is_windowed=False)
        blind.load_state_dict(encoder._model.state_dict())
        [whole_past] = blind(samples[None])
    assert torch.equal(ours, expected) and not torch.equal(ours, whole_past)


def test_the_mean_squares_and_angles_of_both_stacks_are_those_of_transformers(full):
    """At the published sizes: two ways to write the same scaling."""
    from transformers import CsmConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from zoo.nn.llama import frequencies

    path, config = full
    theirs = CsmConfig.from_pretrained(path)
    for ours, other in ((config.backbone, theirs), (config.depth, theirs.depth_decoder_config)):
        expected, _ = ROPE_INIT_FUNCTIONS["llama3"](other, torch.device("cpu"))
        torch.testing.assert_close(frequencies(ours), expected, rtol=1e-6, atol=0)
        assert ours.eps == other.rms_norm_eps


def test_bfloat16_logits_are_close_to_the_reference():
    """Teacher-forced over the codes of a fixture; the tables, norms and casts are those of transformers."""
    from transformers import CsmForConditionalGeneration

    from zoo.loop import SoloBatches

    path = directory("csm", "tiny")
    ours = zoo.load(path, "cpu", "bfloat16")
    theirs = CsmForConditionalGeneration.from_pretrained(
        path, dtype=torch.bfloat16, attn_implementation="eager"
    )
    expected = found("generate_plain")
    request = request_of(json.loads((HERE / "generate_plain.json").read_text())["request"])
    prompt = ours.prompt(request)
    with torch.inference_mode():
        rows = ours.lm.frames(expected["codes"].long())
        prompt.inputs = torch.cat((prompt.inputs, rows))
        prompt.prefix_keys = tuple(range(len(prompt.inputs)))
        batches = SoloBatches(ours, prompt)
        hidden = ours.hidden(prompt.inputs[:-1], batches.prefill())
        embeds = torch.cat(
            (
                theirs.embed_text_tokens(expected["ids"]),
                theirs.backbone_model.embed_tokens(expected["codes"].long()[None])[0],
            )
        )
        other = theirs.backbone_model(inputs_embeds=embeds[None]).last_hidden_state[0, :-1]
        torch.testing.assert_close(prompt.inputs, embeds, rtol=0, atol=0)
        torch.testing.assert_close(ours.lm.head(hidden), theirs.lm_head(other), rtol=0, atol=0.1)
