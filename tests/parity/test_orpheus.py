"""Orpheus against the reference implementations: checkpoint, prompts, greedy requests, penalty, codec and
encoder.

The fixtures and what they hold: README.md in this folder.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from agreement import request_of, rows
from models import family
from safetensors.torch import load_file
from torch import Tensor

import zoo
from zoo.checkpoint import loading
from zoo.checkpoint.loading import weight_normed
from zoo.orpheus import build, demo, describe, weights
from zoo.orpheus.tokens import VOCABULARY
from zoo.request import AudioClip, Request

HERE = Path(__file__).parent / "orpheus"
MANIFESTS = HERE.parent.parent / "manifests"
CASES = sorted(path.stem for path in HERE.glob("generate_*.json"))


def found(name: str) -> dict[str, Tensor]:
    return load_file(HERE / f"{name}.safetensors")


def clip() -> AudioClip:
    return AudioClip(found("codec")["clip"].numpy().astype("float32") / 32768, 24_000)


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A tiny checkpoint with the published vocabulary."""
    path = tmp_path_factory.mktemp("models") / "orpheus"
    return demo.write(path, "tiny", dtype=torch.float32, vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def finetuned(published):
    return zoo.load(published, "cpu", "float32")


@pytest.fixture(scope="module")
def pretrained(published):
    """The same weights in a directory whose name says that they clone."""
    path = published.parent / "orpheus-3b-0.1-pretrained"
    path.symlink_to(published)
    return zoo.load(path, "cpu", "float32")


def test_the_full_size_has_the_published_tensors(tmp_path):
    """255 tensors of the LM, its head among them, and 269 of SNAC; as many values as the published
    checkpoints have."""
    config, codec, spec = describe(demo.write_texts(tmp_path / "demo", "full"))
    lm, snac = build(config, codec, has_head=True)
    shapes = loading.published(lm, weights.lm(config, True))
    assert rows(shapes) == (MANIFESTS / "orpheus.txt").read_text().splitlines()
    assert (
        sum(torch.Size(shape).numel() for name, shape in shapes.items() if name != weights.HEAD)
        == 3_300_867_072
    )
    shapes = weight_normed(loading.published(snac, weights.codec(codec)))
    assert (
        rows({demo.published_name(name): shape for name, shape in shapes.items()})
        == (MANIFESTS / "orpheus_snac.txt").read_text().splitlines()
    )
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 19_842_914
    assert (spec.kv.num_layers, spec.kv.num_heads, spec.kv.head_dim, spec.frame_samples) == (28, 8, 128, 2048)
    assert snac.decoder.context == spec.window.lookahead == 3


def test_the_demo_is_the_checkpoint_of_the_reference(published):
    digest = hashlib.sha256((published / "model.safetensors").read_bytes()).hexdigest()
    assert digest == json.loads((HERE / "checkpoint.json").read_text())["sha256"]


@pytest.mark.parametrize("case", CASES)
def test_greedy_requests_equal_the_reference(case, finetuned, pretrained):
    """The prompt's ids, the first logits, every code, and the samples with the same noise."""
    expected, asked = found(case), json.loads((HERE / f"{case}.json").read_text())["request"]
    has_clip = "reference" in asked
    ours = pretrained if has_clip else finetuned
    fields = {name: value for name, value in asked.items() if name != "reference"}
    fields |= {"transcript": asked["reference"]} if has_clip else {}
    request = request_of(fields, clip() if has_clip else None)
    prompt = ours.prompt(request)
    assert list(prompt.prefix_keys) == expected["prompt"].tolist()
    logits: list[Tensor] = []
    hook = ours.lm.head.register_forward_hook(lambda module, args, out: logits.append(out[0]))
    speech = zoo.generate(ours, request)
    hook.remove()
    torch.testing.assert_close(logits[0][::97], expected["logits"], rtol=0, atol=1e-4)  # up to about 70
    assert speech.frames.tolist() == expected["codes"].tolist()
    torch.testing.assert_close(speech.samples[::13], expected["samples"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("frames", [1, 2, 9])
def test_the_codec_equals_the_reference_with_the_same_noise(frames):
    decoder, expected = family("orpheus").codec.decoder, found("codec")
    codes = expected[f"decode_{frames}.codes"].long()
    padded = torch.nn.functional.pad(codes, (0, 0, 3, 3))[None]
    ours = decoder(padded, torch.tensor([0]), torch.tensor([frames]), torch.tensor([5]))[0]
    torch.testing.assert_close(ours, expected[f"decode_{frames}.samples"], rtol=0, atol=1e-5)


def test_the_codec_equals_the_reference_without_noise():
    decoder, expected = family("orpheus").codec.decoder, found("codec")
    codes = torch.nn.functional.pad(expected["decode_9.codes"].long(), (0, 0, 3, 3))[None]
    ours = decoder(codes, torch.tensor([0]), torch.tensor([9]), None)[0]
    torch.testing.assert_close(ours, expected["silent.samples"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("length", [1, 2048, 2049, 24_000])
def test_a_clip_has_the_codes_of_the_reference(length, pretrained):
    expected = found("codec")
    samples = expected["clip"][:length].float()[None] / 32768
    samples = torch.nn.functional.pad(samples, (0, -length % 2048))
    assert pretrained.codec.encode(samples)[0].tolist() == expected[f"encode_{length}.codes"].tolist()


def test_the_penalty_is_that_of_transformers(finetuned):
    """Over prompt and output, once per distinct id, whatever the batch holds."""
    from transformers import RepetitionPenaltyLogitsProcessor

    ours, random = finetuned, torch.Generator().manual_seed(1)
    state = ours.state(3, 20)
    prompts = [ours.prompt(Request(text=text, voice="tara", max_frames=8)) for text in ("One.", "Two two.")]
    for slot, prompt in zip((2, 0), prompts, strict=True):
        ours.admit(state, slot, prompt)
        state.take(torch.tensor([slot]), torch.tensor([130_000 + slot]))
    slots = torch.tensor([2, 0])
    h = torch.randn(2, ours.config.stack.hidden, generator=random)
    scores = ours.scores(state, slots, h)
    for row, (slot, prompt) in enumerate(zip((2, 0), prompts, strict=True)):
        ids = torch.tensor([[*prompt.prefix_keys, 130_000 + slot]])
        expected = RepetitionPenaltyLogitsProcessor(1.3)(ids, ours.lm.head(h[row : row + 1]).float())
        torch.testing.assert_close(scores[row : row + 1], expected, rtol=0, atol=1e-4)  # logits of about 70


def test_rotary_angles_are_those_of_transformers():
    """With Llama 3's scaling, at the published sizes."""
    from transformers import LlamaConfig as TheirConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from zoo.checkpoint.config import ConfigBlock
    from zoo.nn.llama import LlamaConfig, frequencies

    values = demo.CONFIGS["full"]["config.json"]
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](TheirConfig(**values), torch.device("cpu"))
    ours = frequencies(LlamaConfig.read(ConfigBlock(values)))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
