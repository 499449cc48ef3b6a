"""Requests to Higgs Audio V3: what the prompt holds, what is refused and by which name, and references."""

from __future__ import annotations

from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from models import Clock, directory, family, serve

import zoo
from serving.engine.engine import Engine
from zoo.contract import AudioClip, Request
from zoo.higgs_v3.config import Config
from zoo.higgs_v3.demo import CONFIGS
from zoo.higgs_v3.prompt import UNUSED
from zoo.higgs_v3.vocabulary import CONTROL_TAGS


@pytest.fixture(scope="module")
def ours():
    return family("higgs_v3")


def clip(seconds: float = 0.6, rate_hz: int = 24_000, channels: int = 1, hz: float = 130.0) -> AudioClip:
    """A buzz, a little different in each channel."""
    at = np.arange(round(seconds * rate_hz)) / rate_hz
    sound = np.stack([sum(np.sin(2 * np.pi * k * (hz + 3 * c) * at) / k for k in range(1, 9)) for c in range(channels)])
    return AudioClip((0.1 * sound).astype(np.float32) if channels > 1 else (0.1 * sound[0]).astype(np.float32), rate_hz)


def names(ours, request: Request) -> list[str]:
    """A prompt's ids as words: special tokens by name, text tokens as "t", rows of the reference as "R"."""
    by_id = {index: token for token, index in ours.writer.tokenize.special.items()}
    return ["R" if index < 0 else by_id.get(index, "t") for index in ours.writer(request).ids]


# prompts


def test_three_forms(ours):
    text, rows = ours.writer.tokenize("Hello."), ["R"] * 32  # 25 frames, one second at least, and seven
    said = ours.writer.tokenize("It hums.")
    assert names(ours, Request(text="Hello.")) == ["<|tts|>", "<|text|>", *"t" * len(text), "<|audio|>"]
    cloned = Request(text="Hello.", reference=clip())
    assert names(ours, cloned) == ["<|tts|>", "<|ref_audio|>", *rows, "<|text|>", *"t" * len(text), "<|audio|>"]
    with_words = replace(cloned, reference_text="It hums.")
    assert names(ours, replace(with_words, x_vector_only=True)) == names(ours, cloned)  # though its words are given
    head = ["<|tts|>", "<|ref_text|>", *"t" * len(said), "<|ref_audio|>"]
    assert names(ours, with_words) == [*head, *rows, "<|text|>", *"t" * len(text), "<|audio|>"]


def test_every_documented_control_tag_is_one_token_anywhere_in_a_text(ours):
    special = ours.writer.tokenize.special
    for tag in CONTROL_TAGS:
        assert names(ours, Request(text=f"{tag}a{tag}a")) == ["<|tts|>", "<|text|>", tag, "t", tag, "t", "<|audio|>"]
    others = set(special) - set(CONTROL_TAGS)
    assert len(CONTROL_TAGS) == 43 and len(others) == 41
    for token in others:
        assert set(names(ours, Request(text=f"a{token}a"))[2:-1]) == {"t"}, token


def test_text_is_stripped(ours):
    assert ours.writer(Request(text="  Hello.\n")).ids == ours.writer(Request(text="Hello.")).ids


def test_defaults(ours):
    prompt = ours.prompt(Request(text="a"))
    assert prompt.slot == {"seed": 0, "temperature": 0.8, "top_k": 30, "top_p": 0.8}
    assert prompt.max_frames == 384 and prompt.usage == {"input_tokens": 1, "prompt_positions": 4}
    assert ours.prompt(Request(text="xyz" * 7)).max_frames == 21 * 24
    assert ours.prompt(Request(text="xyz" * 20)).max_frames == 1024 - 63 - 7  # what there is room for
    set_ = Request(text="a", seed=5, temperature=1.0, top_k=0, top_p=0.5, max_frames=3)
    assert ours.prompt(set_).slot == {"seed": 5, "temperature": 1.0, "top_k": 0, "top_p": 0.5} and ours.prompt(set_).max_frames == 3
    assert ours.prompt(Request(text="a", temperature=1e-5)).slot["temperature"] == 0  # greedy, as in the reference


HONOURED = {"language": "auto", "repetition_penalty": 1.0, "text_mode": "full", "voice": "Default", "x_vector_only": False}


def test_what_says_nothing_new_is_taken(ours):
    assert ours.prompt(Request(text="a", **HONOURED)).keys == ours.prompt(Request(text="a")).keys


@pytest.mark.parametrize(
    ("param", "fields", "message"),
    [
        ("text", {"text": ""}, "text is empty"),
        ("text", {"text": " \n "}, "text is empty"),
        ("voice", {"voice": "vivian"}, "voice 'vivian' is not in this checkpoint; it has: default"),
        ("instructions", {"instructions": "slowly"}, r"takes no instructions: control tags in the text, such as <\|emotion:awe\|>"),
        ("language", {"language": "german"}, "language 'german' cannot be chosen: .*; possible: auto"),
        ("x_vector_only", {"x_vector_only": True}, "x_vector_only is about a reference, and there is none"),
        ("repetition_penalty", {"repetition_penalty": 1.3}, "repetition_penalty is 1.3; Higgs Audio V3 has none, which is 1"),
        ("depth_temperature", {"depth_temperature": 0.0}, "takes no depth_temperature: temperature rules all codes"),
        ("depth_top_k", {"depth_top_k": 0}, "takes no depth_top_k"),
        ("depth_top_p", {"depth_top_p": 0.3}, "takes no depth_top_p"),
        ("layout", {"text_mode": "interleaved"}, "layout 'streaming' is not possible: .*; possible: whole"),
        ("guidance", {"guidance": 0.0}, "takes no guidance: it has no lane"),
        ("solver_steps", {"solver_steps": 5}, "takes no solver_steps: its codes are drawn, not solved"),
        ("reference_text", {"reference_text": "Hello."}, "reference_text is about a reference, and there is none"),
        ("text", {"text": "x" * 1100}, "text has 1100 tokens; the model reads 1024 positions in all"),
        ("text", {"text": "x" * 1014, "max_frames": 5}, "the prompt takes 1017 positions and leaves room for 0 frames; 5 are asked for"),
        ("text", {"text": "x" * 1014}, "the prompt takes 1017 positions and leaves room for 0 frames; 1 are asked for"),
        (
            "text",
            {"text": "x" * 1000, "max_frames": 100},
            "the prompt takes 1003 positions and leaves room for 14 frames; 100 are asked for",
        ),
        ("reference", {"reference": clip(0.05)}, "the reference lasts 0.05 s; from 0.1 to 100 s are possible"),
        ("reference", {"reference": clip(100.1, 8000)}, "the reference lasts 100.1 s"),
        ("reference", {"reference": AudioClip(np.zeros(24000, np.float32), 24000)}, "the reference is silent"),
        ("reference", {"reference": AudioClip(np.full(24000, np.nan, np.float32), 24000)}, "the reference holds samples that are no numbers"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_what_is_refused_says_by_which_field(param: str, fields: dict[str, Any], message: str, ours):
    with pytest.raises(ValueError, match=message) as error:
        ours.prompt(Request(**{"text": "a", **fields}))
    assert error.value.param == param


def test_every_field_of_a_request_is_honoured_or_refused():
    """A field that is new in the contract must be thought of here."""
    honoured = {"text", "reference", "reference_text", "x_vector_only", "seed", "temperature", "top_k", "top_p", "max_frames"}
    partly = {"voice", "language", "repetition_penalty", "layout"}
    assert {field.name for field in fields_of(Request)} == honoured | partly | set(UNUSED)


def test_the_longest_prompt_that_fits(ours):
    prompt = ours.prompt(Request(text="x" * 1000, max_frames=14))
    assert len(prompt.inputs) + prompt.max_frames + ours.spec.delay == ours.spec.max_positions


def test_the_published_context_is_what_the_model_was_trained_with():
    config = Config.read(CONFIGS["full"])
    assert config.max_positions == 8192 and CONFIGS["full"]["text_config"]["max_position_embeddings"] == 32768


# references


def rows(ours, reference: AudioClip) -> list[list[int]]:
    return ours.writer(Request(text="a", reference=reference)).reference.rows.tolist()


def test_other_rates_and_channels_are_heard(ours):
    """Channels are averaged, rates resampled: as the averaged, resampled clip."""
    stereo = clip(1.1, 24000, channels=2)
    assert rows(ours, stereo) == rows(ours, AudioClip(stereo.samples.mean(0), 24000))
    assert len(rows(ours, clip(1.1, 44100))) == len(rows(ours, clip(1.1, 16000))) == len(rows(ours, clip(1.1))) == 28 + 7  # 27.5 frames


def test_a_short_clip_is_filled_up_to_a_second(ours):
    short = clip(0.5)
    assert rows(ours, short) == rows(ours, AudioClip(np.pad(short.samples, (0, 12000)), 24000))
    assert len(rows(ours, short)) == 25 + 7


def test_a_reference_is_encoded_once():
    once = zoo.load(directory("higgs_v3", "tiny"), "cpu")
    store = once.writer.cloner.references
    for text in ("a", "b"):
        once.prompt(Request(text=text, reference=clip()))
    once.prompt(Request(text="a", reference=clip(), reference_text="Hm."))
    assert store.num_encoded == 1
    once.prompt(Request(text="a", reference=clip(hz=200.0)))
    assert store.num_encoded == 2


def test_keys_are_of_what_is_read(ours):
    """Equal where the reference's codes are equal, whatever the text behind; different from the first row whose codes differ."""
    one, same, other = (ours.prompt(Request(text=text, reference=clip(hz=hz))) for text, hz in (("a", 130.0), ("b", 130.0), ("a", 200.0)))
    assert len(one.keys) == len(one.inputs) == 4 + 32 + 1
    assert one.keys[:35] == same.keys[:35] and one.keys[35] != same.keys[35]
    for i in range(len(one.keys)):
        assert (one.keys[i] == other.keys[i]) == torch.equal(one.inputs[i], other.inputs[i]), i
    assert sum(a != b for a, b in zip(one.keys, other.keys, strict=True)) > 20
    assert all(key < 0 for key in one.keys[2:34]) and all(-(2**63) <= key < 2**63 for key in one.keys)


def test_equal_references_share_pages_in_the_engine(ours):
    """And speak as they speak alone."""
    asked = [Request(text=text, reference=clip(1.0), reference_text="It hums.", max_frames=5) for text in ("a", "Hello.")]
    engine = Engine(ours, max_slots=2, compile=False, clock=Clock())
    listeners = serve(engine, {0: asked[:1], 30: asked[1:]})
    assert engine.stats()["pages_shared"] == 2  # of 16 positions each
    for listener, request in zip(listeners, asked, strict=True):
        assert listener.frames == 5
        np.testing.assert_allclose(listener.samples, zoo.generate(ours, request).samples, rtol=0, atol=5e-5)
