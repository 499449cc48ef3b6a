"""OpenAudio S1-mini compared with fish-speech 0.1.0, end to end: tokens, prompts, greedy requests and
sampling.

README.md in this folder describes the fixtures.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models import family
from safetensors.torch import load_file
from torch import Tensor

import zoo
from zoo.fish_s2.s1 import OpenAudioS1
from zoo.fish_s2.sampling import keep_likely
from zoo.nn.sampling import penalise
from zoo.request import AudioClip, Reference, Request

HERE = Path(__file__).parent / "fish_s1"
CASES = sorted(path.stem for path in HERE.glob("generate_*.json"))
CLOSE = {"rtol": 0, "atol": 1e-4}
LM_CLOSE = {"rtol": 0, "atol": 2e-5}  # hidden states and logits of up to 10


def facts(name: str) -> dict:
    return json.loads((HERE / f"{name}.json").read_text())


def found(name: str) -> dict[str, Tensor]:
    return load_file(HERE / f"{name}.safetensors")


def asked(name: str) -> Request:
    fields = dict(facts(name)["request"])
    clip = load_file(HERE.parent / "fish_s2" / "codec.safetensors")["clip"].numpy().astype("float32") / 32768
    said = fields.pop("references", [])
    references = [Reference(AudioClip(clip[:length], 44_100), transcript) for transcript, length in said]
    return Request(temperature=0.0, references=tuple(references), **fields)


@pytest.fixture(scope="module")
def ours() -> OpenAudioS1:
    return family("fish_s2", size="tiny-s1")


def test_token_ids_equal_tiktokens(ours):
    """The only special tokens in a text are the phoneme pair. Forged ones are ordinary text."""
    tokenize = ours.writer.tokenize
    for entry in facts("tokens")["texts"]:
        assert tokenize(entry["text"]) == entry["ids"], entry["text"]
    first = min(tokenize.special.values())
    for entry in facts("tokens")["forged"]:
        assert max(tokenize(entry["text"])) < first <= max(entry["ids"]), entry["text"]


@pytest.mark.parametrize("case", CASES)
def test_prompts_equal_the_reference(case, ours):
    """A prompt has tokens, and at frames also the rows of their codes."""
    request, expected = asked(case), found(case)["ids"]
    columns = ours.writer(request.text, request.references)
    assert columns[:, 0].tolist() == expected.tolist()
    codes = [ours.writer.cloner(reference.clip) for reference in request.references]
    is_frame = expected >= ours.config.semantic_start
    assert columns[is_frame, 1:].tolist() == [code for clip in codes for code in clip.tolist()]
    assert not columns[~is_frame, 1:].any()


@pytest.mark.parametrize("case", CASES)
def test_greedy_codes_and_samples_equal_the_reference(case, ours):
    expected, speech = found(case), zoo.generate(ours, asked(case))
    assert speech.frames.tolist() == expected["codes"].tolist()
    torch.testing.assert_close(speech.samples[:: facts(case)["stride"]], expected["samples"], **CLOSE)


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_and_logits_equal_the_reference(case, ours, monkeypatch):
    """Compare the state before the last norm (read by the fast AR) and the raw logits of code 0."""
    expected, seen = found(case), []
    emit, scores = ours.emit, ours.scores

    def watched(state, slots, h):
        seen.append((h[0], scores(ours.lm.norm(h), state.steps[slots])[0]))
        emit(state, slots, h)

    monkeypatch.setattr(ours, "emit", watched)
    zoo.generate(ours, asked(case))
    for i, step in enumerate(facts(case)["steps"]):
        hidden, logits = seen[step]
        torch.testing.assert_close(hidden, expected["hidden"][i], **LM_CLOSE)
        known = len(logits) - (step == 0)  # the end is masked at the first step
        torch.testing.assert_close(logits[:known], expected["logits"][i, :known], **LM_CLOSE)


@pytest.mark.slow
def test_the_penalty_changes_the_codes(ours):
    """Without it most of the fixtures' requests give different codes."""
    changed = 0
    for case in CASES:
        speech = zoo.generate(ours, replace(asked(case), repetition_penalty=1.0))
        changed += speech.frames.tolist() != found(case)["codes"].tolist()
    assert changed >= 4


def test_probabilities_equal_the_reference():
    expected = found("likely")
    for i, (temperature, top_p, penalty) in enumerate(facts("likely")["settings"]):
        seen = torch.zeros(8, 65, dtype=torch.bool).scatter(1, expected["previous"], True)
        logits = penalise(expected["logits"], seen, torch.full((8,), penalty))
        kept = keep_likely(logits, torch.zeros(8, dtype=torch.int64), torch.full((8,), top_p))
        probabilities = (kept / temperature).softmax(-1)
        torch.testing.assert_close(probabilities, expected["probabilities"][i], rtol=0, atol=1e-6)
