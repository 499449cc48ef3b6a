"""Higgs Audio V3 compared with the reference implementations: checkpoint, prompts, greedy requests, stop
rule, sampling and codec.

README.md in this folder describes the fixtures.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from agreement import one_page, request_of, rows
from models import directory, family, write
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

import zoo
from zoo.checkpoint.loading import published
from zoo.higgs_v3 import build, demo, describe, model, weights
from zoo.higgs_v3.delay import DelayState
from zoo.higgs_v3.prompt import TextTokenizer
from zoo.nn.rope import rope_table
from zoo.nn.sampling import draw, keep_likely
from zoo.request import AudioClip, Request

HERE = Path(__file__).parent / "higgs_v3"
MANIFEST = HERE.parent.parent / "manifests" / "higgs_v3.txt"
CASES = sorted(path.stem for path in HERE.glob("generate_*.json"))
CLOSE = {"rtol": 0, "atol": 1e-4}


def facts(name: str) -> dict:
    return json.loads((HERE / f"{name}.json").read_text())


def found(name: str) -> dict[str, Tensor]:
    return load_file(HERE / f"{name}.safetensors")


def clip() -> AudioClip:
    return AudioClip(found("codec")["clip"].numpy().astype("float32") / 32768, 24_000)


def asked(name: str) -> Request:
    fields = {key: value for key, value in facts(name)["request"].items() if key != "ends"}
    return request_of(fields, clip() if fields.get("reference") else None)


@pytest.fixture(scope="module")
def ours():
    return family("higgs_v3")


# the checkpoint


def test_our_modules_have_the_published_tensors(tmp_path):
    """The file has 929 tensors, 927 of them in its index, and as many values as the hub counts."""
    config, spec = describe(demo.write_texts(tmp_path / "demo", "full"))
    shapes = published(build(config), weights.table(config))
    assert rows(shapes, "BF16") == MANIFEST.read_text().splitlines()
    assert len(shapes) == 929 and len(shapes.keys() - set(weights.HEADS)) == 927
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 4_654_850_537
    assert (spec.kv.num_layers, spec.kv.num_heads, spec.kv.head_dim, spec.max_frames, spec.max_positions) == (
        36,
        8,
        128,
        2041,
        8192,
    )


def test_the_demo_equals_the_reference_checkpoint():
    expected = facts("checkpoint")
    for name, digest in expected["texts"].items():
        assert hashlib.sha256((directory("higgs_v3", "tiny") / name).read_bytes()).hexdigest() == digest, name
    with safe_open(directory("higgs_v3", "tiny") / "model.safetensors", framework="pt") as file:
        values = {key: file.get_tensor(key) for key in sorted(file.keys())}
    names = "\n".join(rows({key: tuple(value.shape) for key, value in values.items()}, "F32"))
    assert hashlib.sha256(names.encode()).hexdigest() == expected["rows_sha256"]
    assert (
        hashlib.sha256(b"".join(value.numpy().tobytes() for value in values.values())).hexdigest()
        == expected["sha256"]
    )


# prompts


def test_ids_of_the_public_golden(tmp_path):
    """The full demo has the published tokenizer's pieces of this one text at their published ids."""
    expected = facts("golden")
    tokenize = TextTokenizer(demo.write_texts(tmp_path / "full", "full"), 151_936)
    special = tokenize.special
    ids = [special["<|tts|>"], special["<|text|>"], *tokenize("Hello from PegaInfer."), special["<|audio|>"]]
    assert ids == expected["ids"] == [151667, 151672, 9707, 504, 393, 11188, 641, 802, 13, 151670]
    assert expected["with_reference"][:2] == [151667, special["<|ref_text|>"]]
    published_ids = {
        "<|endoftext|>": 151643,
        "<|ref_audio|>": 151679,
        "<|ref_text|>": 151680,
        "<|emotion:elation|>": 151681,
    }
    published_ids |= {
        "<|emotion:helplessness|>": 151701,
        "<|style:singing|>": 151704,
        "<|sfx:cough|>": 151707,
        "<|sfx:sneeze|>": 151715,
    }
    published_ids |= {
        "<|prosody:speed_very_slow|>": 151716,
        "<|prosody:long_pause|>": 151723,
        "<|prosody:expressive_low|>": 151726,
    }
    assert {token: special[token] for token in published_ids} == published_ids


def test_token_ids_equal_the_reference(ours):
    """Control tags in a text are special tokens.

    Unlike in the reference, all other special tokens are ordinary text.
    """
    tokenize = ours.writer.tokenize
    first = min(tokenize.special.values())
    for entry in facts("tokens")["texts"]:
        assert tokenize(entry["text"]) == entry["ids"], entry["text"]
    for entry in facts("tokens")["forged"]:
        ids = tokenize(entry["text"])
        assert max(ids) < first, entry["text"]
        assert max(entry["ids"]) >= first or "joy" in entry["text"]  # the last one is not a tag of the model


@pytest.mark.parametrize("case", CASES)
def test_prompts_equal_the_reference(case, ours):
    script, expected = write(ours, asked(case)), found(case)
    assert (
        torch.where(torch.tensor(script.ids) < 0, -100, torch.tensor(script.ids)).tolist()
        == expected["ids"].tolist()
    )
    if script.reference is not None:
        assert script.reference.rows.tolist() == expected["reference"].tolist()
    torch.testing.assert_close(ours.prompt(asked(case)).inputs, expected["inputs"], rtol=0, atol=1e-6)


# greedy requests, float32


def test_cases_cover_references_transcripts_and_forced_ends():
    requests = [facts(name)["request"] for name in CASES]
    kinds = {(bool(r.get("reference")), bool(r.get("transcript")), "ends" in r) for r in requests}
    assert len(CASES) == 7 and len(kinds) == 5
    assert min(facts(name)["margin"] for name in CASES) > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_greedy_requests_equal_the_reference(case, ours, monkeypatch):
    """Codes agree exactly; hidden states, logits and samples to 1e-4 (measured: 2e-6, 4e-6 and 8e-6)."""
    said, expected = facts(case), found(case)
    seen: list[tuple[Tensor, Tensor]] = []
    forced = said["request"].get("ends")

    def head(module, args, out):
        logits = out[0].clone()
        seen.append((args[0][0], logits.unflatten(-1, (8, -1))))
        if len(seen) - 1 == forced:
            out[0, ours.config.end] = 1e4

    hook = ours.head.register_forward_hook(head)
    speech = zoo.generate(ours, asked(case))
    hook.remove()
    assert speech.frames.tolist() == expected["codes"].tolist()
    assert len(seen) == len(expected["rows"])
    for n, step in enumerate(said["steps"]):
        torch.testing.assert_close(seen[step][0], expected["hidden"][n], **CLOSE)
        torch.testing.assert_close(seen[step][1], expected["logits"][n], **CLOSE)
    assert len(speech.samples) == 960 * said["frames"]
    torch.testing.assert_close(speech.samples[:: said["stride"]], expected["samples"], **CLOSE)


# delay pattern and stop rule


def tape(logits: Tensor, end: int, most: int) -> tuple[DelayState, int]:
    """Run greedy steps over scripted logits [R, K, V], in which codebook 0 ends at step `end`.

    Returns the state and the number of steps.
    """
    state = family("higgs_v3").state(1, most)
    state.open(0, family("higgs_v3").prompt(Request(text="a", max_frames=most)))
    told = logits.clone()
    told[end, 0, -1] = 127
    one, steps = torch.ones(8), 0
    while not state.done[0]:
        drawn = draw(told[steps].float(), one * 0, one.long() * 30, one, torch.zeros(8, told.shape[-1]))
        state.step(torch.tensor([0]), drawn[None], told.shape[-1] - 2, told.shape[-1] - 1)
        steps += 1
    return state, steps


@pytest.mark.parametrize("end", range(21))
def test_speech_ends_where_codebook_0_ends(end):
    """From step 8 on this equals the reference: the number of frames is the step of the end, no frame holds a
    special, and six more steps follow. Before step 8 the reference ignores the end and continues; here speech
    ends."""
    expected, said = found("stops"), facts("stops")
    state, steps = tape(expected["logits"], end, most=33)
    codes = state.tape[0, : state.ready[0]]
    assert (len(codes), steps) == (end, end + 7 if end else 1)
    if end >= 8:
        assert (said["frames"][end], said["steps"][end]) == (end, end + 7)
        assert codes.tolist() == expected[f"ends_{end}.codes"].tolist()
        assert codes.max() < 64
    else:
        assert (said["frames"][end], said["steps"][end]) == (33, 40)


def test_the_scripts_hold_specials_in_stored_frames():
    """Without them no test would show that specials become code 0."""
    logits = found("stops")["logits"]
    assert (logits[:20, 1:].argmax(-1) >= 64).sum() > 20


# sampling


def test_probabilities_equal_the_reference():
    expected = found("likely")
    for (temperature, top_k, top_p), probabilities in zip(
        facts("likely")["settings"], expected["probabilities"], strict=True
    ):
        kept = keep_likely(
            expected["logits"] / temperature, torch.full((8,), top_k), torch.full((8,), top_p)
        ).softmax(-1)
        assert torch.equal(kept > 0, probabilities > 0)
        torch.testing.assert_close(kept, probabilities, rtol=0, atol=1e-6)


# the codec


@pytest.mark.parametrize("frames", [1, 3, 30])  # a frame affects samples ten frames away
def test_the_decoder_equals_the_reference(frames, ours):
    """Measured: 7e-6, which is rounding. The tables of codes are folded, and sums have another order."""
    expected = found("codec")
    codes = expected[f"decode_{frames}.codes"].long()
    edge = torch.randint(64, (10, 8))  # frames beyond the tape are not read
    samples = ours.codec.decoder(
        torch.cat((edge, codes, edge))[None], torch.tensor([0]), torch.tensor([frames])
    )[0]
    assert len(samples) == 960 * frames
    kept = samples[:: 1 if frames < 3 else facts("codec")["stride"]]
    torch.testing.assert_close(kept, expected[f"decode_{frames}.samples"], rtol=0, atol=5e-5)


@pytest.mark.parametrize("length", facts("codec")["lengths"])
def test_the_encoder_equals_the_reference(length, ours):
    """At some lengths both branches give the same number of frames; at others the acoustic one is padded."""
    expected, encoder = found("codec"), ours.codec.encoder
    seen: dict[str, Tensor] = {}
    hooks = [
        encoder.acoustic.register_forward_hook(
            lambda module, args, out: seen.update(acoustic=out[0], padded=args[0])
        ),
        encoder.semantic.register_forward_hook(
            lambda module, args, out: seen.update(features=args[0][0], semantic=out[0])
        ),
    ]
    codes = ours.codec.encode(expected["clip"][:length].float()[None] / 32768)[0]
    for hook in hooks:
        hook.remove()
    assert codes.tolist() == expected[f"encode_{length}.codes"].tolist()
    pads = seen["padded"].shape[-1] != length
    assert (
        pads
        == facts("codec")["padded"][facts("codec")["lengths"].index(length)]
        == (119 <= length % 960 <= 631)
    )
    for name in ("acoustic", "semantic", "features"):
        if f"encode_{length}.{name}" in expected:
            torch.testing.assert_close(seen[name], expected[f"encode_{length}.{name}"], **CLOSE)


# bfloat16


def test_bfloat16_rounds_like_the_reference():
    """The rotary table and the sum of a step's rows are equal in every bit. Attention sums in another order,
    so hidden states are compared by their cosine."""
    rounded, expected = family("higgs_v3", "bfloat16"), found("bfloat16")
    stack = rounded.config.stack
    cos, sin = rope_table(expected["positions"], stack.head_dim, stack.rope_theta, torch.bfloat16)
    torch.testing.assert_close(cos, expected["cos"], rtol=0, atol=0)
    torch.testing.assert_close(sin, expected["sin"], rtol=0, atol=0)
    torch.testing.assert_close(rounded.backbone.rows(expected["rows"]), expected["summed"], rtol=0, atol=0)
    hidden = rounded.hidden(expected["inputs"], one_page(rounded.spec.kv, len(expected["inputs"])))
    assert hidden.dtype == torch.bfloat16
    assert F.cosine_similarity(hidden.float(), expected["hidden"].float()).min() > 0.9998


def test_logits_become_float32_before_they_are_changed(monkeypatch):
    rounded, drawn = family("higgs_v3", "bfloat16"), []
    monkeypatch.setattr(
        model, "draw", lambda logits, *how: drawn.append((logits, *how)) or draw(logits, *how)
    )
    heads: list[Tensor] = []
    hook = rounded.head.register_forward_hook(lambda module, args, out: heads.append(out))
    zoo.generate(rounded, Request(text="a", max_frames=1))
    hook.remove()
    assert len(drawn) == 8 and heads[0].dtype == torch.bfloat16
    logits, temperature, top_k, top_p, noise = drawn[0]
    assert {tensor.dtype for tensor in (logits, temperature, top_p, noise)} == {torch.float32}
    expected = heads[0].float().view(8, -1)
    expected[0, rounded.config.end] = -torch.inf  # masked in the first row only
    assert torch.equal(logits, expected)
    assert torch.equal(drawn[1][0], heads[1].float().view(8, -1))
    assert (
        temperature.tolist() == pytest.approx([0.8] * 8)
        and top_k.tolist() == [30] * 8
        and top_p.tolist() == pytest.approx([0.8] * 8)
    )


# the published weights


@pytest.mark.checkpoint
@pytest.mark.skipif(
    "ZOO_CHECKPOINT_HIGGS_V3" not in os.environ,
    reason="ZOO_CHECKPOINT_HIGGS_V3 does not name a published checkpoint",
)
def test_the_published_model_gives_the_public_golden():
    """Before any masking, the first greedy row shows that seven codebooks have not begun."""
    real = zoo.load(os.environ["ZOO_CHECKPOINT_HIGGS_V3"], "cpu", "bfloat16")
    said = Request(text="Hello from PegaInfer.")
    script = write(real, said)
    assert list(script.ids) == facts("golden")["ids"]
    heads: list[Tensor] = []
    hook = real.head.register_forward_hook(lambda module, args, out: heads.append(out[0]))
    zoo.generate(real, replace(said, temperature=0.0, max_frames=1))
    hook.remove()
    assert heads[0].view(8, -1).argmax(-1).tolist() == [244, *[1024] * 7]
