"""Prompts of Higgs Audio V3: their layout, the errors for invalid requests, and references."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from models import Clock, directory, family, serve, write

import zoo
from serving.engine.engine import Engine
from zoo.contract.family import pieces_of
from zoo.higgs_v3.config import Config
from zoo.higgs_v3.demo import CONFIGS
from zoo.higgs_v3.vocabulary import CONTROL_TAGS
from zoo.request import AudioClip, Reference, Request, RequestError, Turn


@pytest.fixture(scope="module")
def ours():
    return family("higgs_v3")


def clip(seconds: float = 0.6, rate_hz: int = 24_000, channels: int = 1, hz: float = 130.0) -> AudioClip:
    """A buzz. Its pitch differs a little between channels."""
    at = np.arange(round(seconds * rate_hz)) / rate_hz
    sound = np.stack(
        [sum(np.sin(2 * np.pi * k * (hz + 3 * c) * at) / k for k in range(1, 9)) for c in range(channels)]
    )
    return AudioClip(
        (0.1 * sound).astype(np.float32) if channels > 1 else (0.1 * sound[0]).astype(np.float32), rate_hz
    )


def names(ours, request: Request) -> list[str]:
    """Return a prompt's ids as words: special tokens by name, text tokens as "t", rows of the reference as
    "R"."""
    by_id = {index: token for token, index in ours.writer.tokenize.special.items()}
    return ["R" if index < 0 else by_id.get(index, "t") for index in write(ours, request).ids]


# prompts


def test_the_prompt_has_three_forms(ours):
    text = ours.writer.tokenize("Hello.")
    rows = ["R"] * 32  # the clip is padded to one second: 25 frames, and seven more rows
    said = ours.writer.tokenize("It hums.")
    assert names(ours, Request(text="Hello.")) == ["<|tts|>", "<|text|>", *"t" * len(text), "<|audio|>"]
    cloned = Request(text="Hello.", references=(Reference(clip()),))
    assert names(ours, cloned) == [
        "<|tts|>",
        "<|ref_audio|>",
        *rows,
        "<|text|>",
        *"t" * len(text),
        "<|audio|>",
    ]
    with_words = replace(cloned, references=(Reference(clip(), "It hums."),))
    by_sound = replace(with_words, options={"x_vector_only_mode": True})
    assert names(ours, by_sound) == names(ours, cloned)  # although the request has a transcript
    head = ["<|tts|>", "<|ref_text|>", *"t" * len(said), "<|ref_audio|>"]
    assert names(ours, with_words) == [*head, *rows, "<|text|>", *"t" * len(text), "<|audio|>"]


def test_every_documented_control_tag_is_one_token_anywhere_in_a_text(ours):
    special = ours.writer.tokenize.special
    for tag in CONTROL_TAGS:
        assert names(ours, Request(text=f"{tag}a{tag}a")) == [
            "<|tts|>",
            "<|text|>",
            tag,
            "t",
            tag,
            "t",
            "<|audio|>",
        ]
    others = set(special) - set(CONTROL_TAGS)
    assert len(CONTROL_TAGS) == 43 and len(others) == 41
    for token in others:
        assert set(names(ours, Request(text=f"a{token}a"))[2:-1]) == {"t"}, token


def test_every_piece_begins_with_the_tags_of_the_whole_text_but_not_with_its_first_pause(ours):
    sentences = "The old man told the children a story about the sea. " * 20
    for tags, lead in (
        ("<|emotion:awe|><|prosody:speed_slow|>", "<|emotion:awe|><|prosody:speed_slow|>"),
        ("<|emotion:awe|><|prosody:pause|>", "<|emotion:awe|>"),
        ("<|prosody:long_pause|><|emotion:awe|>", ""),
    ):
        first, *more = pieces_of(Request(text=tags + sentences, voice="default"), ours.spec)
        assert first.startswith(tags) and more
        assert {piece[: piece.index("The")] for piece in more} == {lead}


def test_text_is_stripped(ours):
    assert write(ours, Request(text="  Hello.\n")).ids == write(ours, Request(text="Hello.")).ids


def test_sampling_values_and_the_frame_cap_have_defaults(ours):
    prompt = ours.prompt(Request(text="a"))
    assert prompt.slot == {"seed": 0, "temperature": 0.8, "top_k": 30, "top_p": 0.8}
    assert prompt.max_frames == 384 and prompt.usage == {"input_tokens": 1, "prompt_positions": 4}
    assert ours.prompt(Request(text="xyz" * 7)).max_frames == 21 * 24
    assert ours.prompt(Request(text="xyz" * 20)).max_frames == 1024 - 63 - 7  # the rest of the positions
    set_ = Request(text="a", seed=5, temperature=1.0, top_k=0, top_p=0.5, max_frames=3)
    assert (
        ours.prompt(set_).slot == {"seed": 5, "temperature": 1.0, "top_k": 0, "top_p": 0.5}
        and ours.prompt(set_).max_frames == 3
    )


def test_parameters_without_effect_are_accepted(ours):
    same = Request(
        text="a",
        language="Auto",
        voice="Default",
        instructions=" \u200b",
        options={"x_vector_only_mode": False},
    )
    assert ours.prompt(same).prefix_keys == ours.prompt(Request(text="a")).prefix_keys


def voice_of(clip: AudioClip, transcript: str | None = None) -> dict[str, Any]:
    return {"references": (Reference(clip, transcript),)}


TAKES = "temperature, top_k, top_p, x_vector_only_mode$"
SILENCE, NAN = (AudioClip(np.full(24000, value, np.float32), 24000) for value in (0, np.nan))


@pytest.mark.parametrize(
    ("param", "fields", "message"),
    [
        ("text", {"text": ""}, "text is empty"),
        ("text", {"text": " \n "}, "text is empty"),
        ("voice", {"voice": "vivian"}, "has no voice 'vivian'; it has: default; or give a reference"),
        (
            "instructions",
            {"instructions": "slowly"},
            r"takes no instructions: use control tags in the text, such as <\|emotion:awe\|>",
        ),
        (
            "language",
            {"language": "german"},
            "no language 'german'; possible: auto; it infers the language from the text",
        ),
        (
            "repetition_penalty",
            {"repetition_penalty": 1.3},
            f"takes no repetition_penalty; it takes: {TAKES}",
        ),
        (
            "depth_temperature",
            {"options": {"depth_temperature": 0.0}},
            f"takes no depth_temperature; it takes: {TAKES}",
        ),
        ("depth_top_k", {"options": {"depth_top_k": 0}}, f"takes no depth_top_k; it takes: {TAKES}"),
        ("depth_top_p", {"options": {"depth_top_p": 0.3}}, f"takes no depth_top_p; it takes: {TAKES}"),
        ("text_mode", {"options": {"text_mode": "interleaved"}}, f"takes no text_mode; it takes: {TAKES}"),
        ("cfg_scale", {"options": {"cfg_scale": 0.0}}, f"takes no cfg_scale; it takes: {TAKES}"),
        ("solver_steps", {"options": {"solver_steps": 5}}, f"takes no solver_steps; it takes: {TAKES}"),
        ("turns", {"turns": (Turn("user", "Hi."),)}, "takes no turns"),
        ("is_open", {"is_open": True}, "takes no text while it speaks"),
        (
            "references",
            {"references": 2 * (Reference(clip()),)},
            "2 references are given; Higgs Audio V3 takes up to 1",
        ),
        ("text", {"text": "x" * 1100}, "text has 1100 tokens; the model reads at most 1024 positions"),
        (
            "text",
            {"text": "x" * 1014, "max_frames": 5},
            "takes 1017 positions and leaves room for 0 frames; 5 are asked for",
        ),
        ("text", {"text": "x" * 1014}, "takes 1017 positions and leaves room for 0 frames; 1 are asked for"),
        (
            "max_frames",
            {"text": "x" * 1000, "max_frames": 100},
            "1003 positions and leaves room for 14 frames; 100 are asked for",
        ),
        ("references", voice_of(clip(0.05)), "the reference lasts 0.05 s; from 0.1 to 100 s are possible"),
        ("references", voice_of(clip(100.1, 8000)), "the reference lasts 100.1 s"),
        ("references", voice_of(SILENCE), "the reference is silent"),
        ("references", voice_of(NAN), "samples that are no"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_errors_name_the_wrong_parameter(param: str, fields: dict[str, Any], message: str, ours):
    with pytest.raises(RequestError, match=message) as error:
        ours.prompt(Request(**{"text": "a", **fields}))
    assert error.value.param == param


def test_the_longest_prompt_fits_the_models_positions(ours):
    prompt = ours.prompt(Request(text="x" * 1000, max_frames=14))
    assert prompt.max_positions == (ours.spec.max_positions,) == (len(prompt.inputs) + 14 + 7,)


def test_the_published_model_is_limited_to_its_training_context():
    config = Config.read(CONFIGS["full"])
    assert config.max_positions == 8192 and CONFIGS["full"]["text_config"]["max_position_embeddings"] == 32768


# references


def rows(ours, reference: AudioClip) -> list[list[int]]:
    return write(ours, Request(text="a", **voice_of(reference))).reference.rows.tolist()


def test_clips_are_averaged_and_resampled(ours):
    """A stereo clip equals its mean, and clips of other rates have the same length."""
    stereo = clip(1.1, 24000, channels=2)
    assert rows(ours, stereo) == rows(ours, AudioClip(stereo.samples.mean(0), 24000))
    for rate_hz in (44100, 16000, 24000):
        assert len(rows(ours, clip(1.1, rate_hz))) == 28 + 7  # 27.5 frames


def test_a_short_clip_is_padded_to_one_second(ours):
    short = clip(0.5)
    assert rows(ours, short) == rows(ours, AudioClip(np.pad(short.samples, (0, 12000)), 24000))
    assert len(rows(ours, short)) == 25 + 7


def test_a_reference_is_encoded_once():
    once = zoo.load(directory("higgs_v3", "tiny"), "cpu")
    store = once.writer.cloner.references
    for text in ("a", "b"):
        once.prompt(Request(text=text, **voice_of(clip())))
    once.prompt(Request(text="a", **voice_of(clip(), "Hm.")))
    assert store.num_encoded == 1
    once.prompt(Request(text="a", **voice_of(clip(hz=200.0))))
    assert store.num_encoded == 2


def test_prefix_keys_depend_on_the_codes_and_the_text(ours):
    """Keys of reference rows are equal exactly when the codes are. The text after them does not matter."""
    asked = (("a", 130.0), ("b", 130.0), ("a", 200.0))
    one, same, other = (ours.prompt(Request(text=text, **voice_of(clip(hz=hz)))) for text, hz in asked)
    assert len(one.prefix_keys) == len(one.inputs) == 4 + 32 + 1
    assert one.prefix_keys[:35] == same.prefix_keys[:35] and one.prefix_keys[35] != same.prefix_keys[35]
    for i in range(len(one.prefix_keys)):
        assert (one.prefix_keys[i] == other.prefix_keys[i]) == torch.equal(one.inputs[i], other.inputs[i]), i
    assert sum(a != b for a, b in zip(one.prefix_keys, other.prefix_keys, strict=True)) > 20
    assert all(key < 0 for key in one.prefix_keys[2:34]) and all(
        -(2**63) <= key < 2**63 for key in one.prefix_keys
    )


def test_equal_references_share_pages_in_the_engine(ours):
    """Each request still sounds as it does alone."""
    asked = [Request(text=text, **voice_of(clip(1.0), "It hums."), max_frames=5) for text in ("a", "Hello.")]
    engine = Engine(ours, max_slots=2, compile=False, clock=Clock())
    listeners = serve(engine, {0: asked[:1], 30: asked[1:]})
    assert engine.stats()["pages_shared"] == 2  # 16 positions each
    for listener, request in zip(listeners, asked, strict=True):
        assert listener.frames == 5
        np.testing.assert_allclose(listener.samples, zoo.generate(ours, request).samples, rtol=0, atol=5e-5)
