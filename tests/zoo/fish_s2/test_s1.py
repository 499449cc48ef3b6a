"""OpenAudio S1-mini, as far as it differs from S2. tests/parity/test_fish_s1.py compares its results with the
original."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from models import Clock, directory, family, serve
from torch.nn import functional as F

import zoo
from serving.engine.engine import Engine
from zoo.fish_s2 import build, claims, demo, s1, vocabulary
from zoo.request import AudioClip, Reference, Request, RequestError

TINY = directory("fish_s2", "tiny-s1")
S1 = family("fish_s2", size="tiny-s1")
CLIP = AudioClip(np.sin(np.arange(9000) ** 1.5 / 30).astype(np.float32) / 4, 24_000)
ASKED = Request(text="(sad) Good morning.", max_frames=20, seed=3)


@pytest.fixture
def copied(tmp_path) -> Path:
    return shutil.copytree(TINY, tmp_path / "model")


def refused(path: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        zoo.load(path, "cpu")
    assert "\n" not in str(error.value)


def test_a_full_demo_has_the_published_sizes_and_ids():
    """The model has 860 million parameters. The ids follow 151,643 ranks."""
    special = vocabulary.token_ids(True, 4096, vocabulary.S1_ADDED)
    config = s1.read_config(demo.CONFIGS["full-s1"][0], special)
    assert (config.end, config.semantic_start, config.vocab) == (151647, 151658, 155776)
    assert special["<|semantic:4095|>"] == 155753 and config.num_residual_codes == 1024
    lm, _ = build(config, demo.CODEC)
    assert sum(parameter.numel() for parameter in lm.parameters()) == 860_169_216


def test_inspect_describes_the_model():
    facts = zoo.inspect(TINY)
    assert claims(TINY) and facts["variant"] == "s1-mini" and "CC-BY-NC-SA" in facts["licence"]
    assert facts["options"]["repetition_penalty"]["default"] == 1.1 and "chunk_length" not in facts["options"]


def test_a_batched_stream_equals_the_request_alone():
    requests = [
        replace(ASKED, seed=i, max_frames=5 + 3 * i, repetition_penalty=(None, 1.0, 1.8)[i % 3])
        for i in range(5)
    ]
    requests.append(replace(ASKED, references=(Reference(CLIP, "One."), Reference(CLIP)), temperature=0.0))
    heard = serve(Engine(S1, max_slots=4, compile=False, clock=Clock()), {0: requests[:2], 3: requests[2:]})
    for listener, request in zip(heard, requests, strict=True):
        truth = zoo.generate(S1, request)
        assert listener.frames == len(truth.frames)
        torch.testing.assert_close(torch.from_numpy(listener.samples), truth.samples, rtol=0, atol=5e-5)


@torch.inference_mode()
def test_code_0_is_penalised_only_for_the_oldest_frame(monkeypatch):
    """The original does the same, probably by mistake. The first frame never enters the window, and missing
    frames are zeros."""
    endless = F.one_hot(torch.tensor(S1.config.codebook_size), S1.config.codebook_size + 1) * -1e4
    scores = S1.scores
    monkeypatch.setattr(S1, "scores", lambda h, steps: scores(h, steps) + endless)
    state = S1.state(1)
    S1.admit(state, 0, S1.prompt(replace(ASKED, max_frames=25)))
    slots, random = torch.tensor([0]), torch.Generator().manual_seed(2)
    for step in range(25):
        said = state.tape[0, 1:step].tolist()  # the frames before this step, without the first one
        padded = [[0] * S1.config.codebooks] * s1.PENALTY_WINDOW + said
        assert state.recent[0].tolist() == padded[-s1.PENALTY_WINDOW :]
        oldest = S1._oldest(state.recent[slots], state.steps[slots])[0].nonzero()[:, 0].tolist()
        assert oldest == [frame[0] for frame in said[-s1.PENALTY_WINDOW :][:1]]
        S1.emit(state, slots, torch.randn(1, S1.spec.width, generator=random))
    assert state.ready[0] == 25


def test_residual_codes_come_from_the_first_rows_of_the_head():
    config = replace(S1.config, num_residual_codes=9)
    lm, _ = build(config, demo.TINY_CODEC)
    lm.to_empty(device="cpu").prepare()
    assert lm.fast.head.weight.shape == (9, 64) and lm.head.weight.shape == (65, 64)
    assert "output.weight" not in dict(lm.named_parameters())


def test_a_named_speaker_is_refused():
    with pytest.raises(RequestError, match="S1-mini has a single, unnamed speaker"):
        S1.prompt(replace(ASKED, references=(Reference(CLIP, "One.", speaker="1"),)))


def test_the_checkpoint_of_a_training_run_loads(copied):
    """It has a `state_dict` wrapper, the prefix `model.`, and the tensors of an audio encoder."""
    tensors = torch.load(copied / "model.pth", weights_only=True)
    tensors = {f"model.{name}": value for name, value in tensors.items()} | {"model.audio_x": torch.zeros(2)}
    torch.save({"state_dict": tensors}, copied / "model.pth")
    greedy = replace(ASKED, temperature=0.0, max_frames=3)
    assert torch.equal(zoo.generate(zoo.load(copied, "cpu"), greedy).frames, zoo.generate(S1, greedy).frames)


@pytest.mark.parametrize("name", ["model.pth", "codec.pth", "tokenizer.tiktoken", "special_tokens.json"])
def test_errors_name_a_missing_file(copied, name):
    (copied / name).unlink()
    refused(copied, f"{name} does not exist")


@pytest.mark.parametrize("name", ["model.pth", "tokenizer.tiktoken", "special_tokens.json"])
def test_errors_name_a_truncated_file(copied, name):
    content = (copied / name).read_bytes()
    (copied / name).write_bytes(content[: len(content) // 2])
    refused(copied, name.replace(".", r"\."))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("!! 5", r"line 261 is '!! 5'; it must be a token in base64, a space, and its rank"),
        ("YWFhYQ==", r"line 261 is 'YWFhYQ=='; it must be a token in base64"),
        ("YWFhYQ== 7", "tokens, which are not a complete vocabulary"),
    ],
)
def test_invalid_ranks_are_refused(copied, line, message):
    lines = (copied / "tokenizer.tiktoken").read_text().splitlines()
    lines[260] = line
    (copied / "tokenizer.tiktoken").write_text("\n".join(lines))
    refused(copied, message)


def test_ids_out_of_order_are_refused(copied):
    special = json.loads((copied / "special_tokens.json").read_text())
    special["<|voice|>"] += 1
    (copied / "special_tokens.json").write_text(json.dumps(special))
    refused(
        copied, r"gives <\|voice\|> the id \d+; after the \d+ tokens of tokenizer\.tiktoken it must be \d+"
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("fast_dim", 32, r"fast_\* has dim=32; only 64 is known"),
        ("tie_word_embeddings", True, "only False is known"),
        ("scale_codebook_embeddings", False, "only True is known"),
        ("fast_attention_qk_norm", True, r"fast_\* has attention_qk_norm=True; only False is known"),
        ("n_fast_layer", 1, r"unknown fast_layers\.1\."),
    ],
)
def test_a_config_that_does_not_fit_is_refused(copied, key, value, message):
    config = json.loads((copied / "config.json").read_text()) | {key: value}
    (copied / "config.json").write_text(json.dumps(config))
    refused(copied, message)


def test_a_null_fast_key_takes_the_slow_stacks_value(copied):
    content = demo.CONFIGS["tiny-s1"][0] | {"fast_n_head": None, "fast_head_dim": None}
    config = s1.read_config(content, vocabulary.token_ids(False, 64, vocabulary.S1_ADDED))
    assert (config.fast.heads, config.fast.head_dim) == (config.slow.heads, config.slow.head_dim)
