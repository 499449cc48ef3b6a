"""VoxCPM2: prompts in every mode, the encoding of references, and the errors for invalid requests."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from models import directory, family
from one_pass import decode_latents

import zoo
from zoo import AudioClip, Reference, Request, RequestError
from zoo.check import check
from zoo.voxcpm2.prompt import AUDIO, Script, TextTokenizer

OURS = family("voxcpm2")
TOKENS = OURS.writer.tokenize
START, REFERENCE_START, REFERENCE_END = 101, 103, 104
ASKED = Request(text="hello world")
TEXT = tuple(TOKENS("hello world"))


def clip(seed: int = 0, seconds: float = 0.1, rate_hz: int = 16000, channels: int = 1) -> AudioClip:
    """Return a buzz whose pitch depends on the seed. A patch of the tiny model lasts 10 ms."""
    at = np.arange(round(seconds * rate_hz)) / rate_hz
    voices = [
        sum(np.sin(2 * np.pi * (200 + 37 * seed + c) * k * at) / k for k in range(1, 9))
        for c in range(channels)
    ]
    samples = (0.1 * np.stack(voices)).astype(np.float32)
    return AudioClip(samples if channels > 1 else samples[0], rate_hz)


def ask(*references: Reference, **fields: Any) -> Request:
    return replace(ASKED, references=references, **fields)


def write(asked: Request) -> Script:
    return OURS.writer(asked, check(asked, OURS.spec))


CLIP = clip(seconds=0.095)  # 9.5 patches
VOICE, PROMPT = Reference(clip(1, seconds=0.03)), Reference(CLIP, "Good evening.")
ALONE, CONTINUED, COMBINED = ask(Reference(CLIP)), ask(PROMPT), ask(VOICE, PROMPT)
FORMS = {
    "plain": ASKED,
    "described": replace(ASKED, instructions="slowly"),
    "reference": ALONE,
    "continued": CONTINUED,
    "combined": COMBINED,
}

# the order of positions


def test_the_prompt_of_a_plain_text():
    script = write(ASKED)
    assert (
        script.ids == (*TEXT, START)
        and script.text_tokens == len(TEXT)
        and script.references == ()
        and not script.continues
    )
    assert write(replace(ASKED, voice="Default", language="Auto")) == script


@pytest.mark.parametrize("text", ["  hello world", "\n hello\t\n world", "hello  \u3000world"])
def test_white_space_in_a_text_is_collapsed_and_dropped_at_its_start(text):
    assert write(replace(ASKED, text=text)) == write(ASKED)


@pytest.mark.parametrize("description", ["A slow old man", " (A slow old man) ", "（A slow\nold man）"])  # noqa: RUF001
def test_a_description_precedes_the_text_in_parentheses(description):
    script = write(replace(ASKED, instructions=description))
    assert script.ids == (*TOKENS("(A slow old man)hello world"), START)
    # the description counts for the cap, as in the reference
    assert script.text_tokens == len(script.ids) - 1
    assert write(replace(ASKED, instructions=" () ")) == write(ASKED)


def test_a_reference_without_a_transcript_precedes_the_text():
    script = write(ALONE)
    assert script.ids == (REFERENCE_START, *[AUDIO] * 10, REFERENCE_END, *TEXT, START)
    assert not script.continues and script.references[0].codec_state is None
    assert write(ask(PROMPT, options={"x_vector_only_mode": True})) == script  # the transcript is ignored
    assert write(replace(ALONE, instructions="slowly")).ids[12:] == (*TOKENS("(slowly)hello world"), START)
    assert write(ask(Reference(CLIP, " \n"))) == script  # a blank transcript counts as none


def test_speech_continues_a_reference_with_a_transcript():
    """Transcript and text are one string. Only the text counts for the cap."""
    script = write(CONTINUED)
    assert script.ids == (*TOKENS("Good evening.hello world"), START, *[AUDIO] * 10)
    assert script.continues and script.text_tokens == len(TEXT)
    assert write(replace(CONTINUED, text=" hello world")).ids[:-11] == tuple(
        TOKENS("Good evening. hello world")
    )
    assert write(ask(Reference(CLIP, "Good evening. "))).ids[:-11] == tuple(
        TOKENS("Good evening. hello world")
    )


def test_a_voice_and_a_clip_to_continue_are_accepted_in_either_order():
    script = write(COMBINED)
    assert script.ids == (REFERENCE_START, *[AUDIO] * 3, REFERENCE_END, *write(CONTINUED).ids)
    assert script == write(ask(PROMPT, VOICE)) and script.continues and script.text_tokens == len(TEXT)
    assert script.references == (*write(ask(VOICE)).references, *write(CONTINUED).references)


@pytest.mark.parametrize("asked", FORMS.values(), ids=FORMS)
def test_the_prompt_flags_audio_and_the_slot_holds_the_end_of_a_continued_clip(asked):
    script, prompt, state = write(asked), OURS.prompt(asked), OURS.state(1)
    is_audio = [index == AUDIO for index in script.ids]
    assert prompt.is_audio.dtype == torch.bool and prompt.is_audio.tolist() == is_audio
    assert prompt.usage == {"input_tokens": script.text_tokens, "prompt_positions": len(is_audio)}
    continues = asked in (CONTINUED, COMBINED)
    # values that an earlier request left in the slot
    state.before[0], state.codec_state[0], state.first_is_audio[0] = 7, 7, not continues
    OURS.admit(state, 0, prompt)
    assert bool(state.first_is_audio[0]) == is_audio[-1] == continues
    before = script.references[-1].patches[-1] if continues else torch.zeros(4, 8)
    assert torch.equal(state.before[0], before) and before.any() == continues
    assert (state.codec_state[0] == 0).all() != continues


def test_prefix_keys_name_the_content_of_positions():
    """Equal references share their positions with any text after them. Different references share none."""
    plain, one, other, longer, continued, combined = (
        OURS.prompt(asked).prefix_keys
        for asked in (
            ASKED,
            ALONE,
            ask(Reference(clip(1))),
            replace(ALONE, text="hello world again"),
            CONTINUED,
            ask(PROMPT, Reference(CLIP)),
        )
    )
    assert plain == (*TEXT, START)
    assert (
        one[:12] == longer[:12]
        and one[12:] == plain
        and all(key < 0 for key in one[1:11])
        and len(set(one[1:11])) == 10
    )
    assert not set(one[1:11]) & set(other)
    assert not set(one[1:11]) & set(continued)  # a continued clip is padded on the other side
    # the same clip in both uses, so that its pages also serve requests for its voice
    assert combined == (*one[:12], *continued)
    assert OURS.prompt(ask(Reference(clip(seconds=0.095)))).prefix_keys == one


def test_the_cap_follows_the_text_unless_the_request_sets_one():
    """The default is six patches per token of the text plus ten, as in the reference."""
    assert OURS.prompt(ASKED).max_frames == 6 * len(TEXT) + 10
    assert OURS.prompt(replace(CONTINUED, max_frames=200)).max_frames == 200
    assert OURS.prompt(replace(ASKED, text="a " * 40)).max_frames == 6 * len(TOKENS("a " * 40)) + 10
    room = OURS.spec.max_positions - len(TEXT) - 1
    assert OURS.prompt(replace(ASKED, max_frames=room)).max_frames == room
    long = OURS.prompt(replace(ASKED, text="a " * 90))
    # as many as fit
    assert long.max_frames == OURS.spec.max_positions - len(long.inputs) < 6 * long.usage["input_tokens"]
    says = r"the prompt takes \d+ positions and leaves room for \d+ frames; \d+ are asked for"
    refused(replace(ASKED, max_frames=room + 1), "max_frames", says)
    refused(replace(ASKED, text="a " * 600), "text", says)


# invalid requests


def refused(asked: Request, param: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        OURS.prompt(asked)
    assert error.value.param == param and "\n" not in str(error.value)


@pytest.mark.parametrize("param", ["temperature", "top_k", "top_p", "repetition_penalty"])
def test_token_sampling_options_are_refused(param):
    refused(
        replace(ASKED, **{param: 1}),
        param,
        f"VoxCPM2 takes no {param}.*; it takes: cfg_scale, solver_steps, x_vector_only_mode",
    )


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"text": " \n"}, "text", "text is empty"),
        ({"temperature": 1}, "temperature", "it samples no tokens"),
        (
            {"voice": "alloy"},
            "voice",
            "VoxCPM2 has no voice 'alloy'; it has: default; describe one in instructions, or give a reference",
        ),
        (
            {"language": "english"},
            "language",
            "VoxCPM2 has no language 'english'; possible: auto; the model infers the language from the text",
        ),
        (
            {"options": {"text_mode": "interleaved"}},
            "text_mode",
            "VoxCPM2 takes no text_mode; it takes: cfg_scale",
        ),
        (
            {"options": {"solver_steps": 1}},
            "solver_steps",
            "solver_steps is 1; possible: an integer from 2 to 10",
        ),
        (
            {"options": {"solver_steps": 11}},
            "solver_steps",
            "solver_steps is 11; possible: an integer from 2 to 10",
        ),
        (
            {"references": (PROMPT,), "instructions": "slowly"},
            "instructions",
            "the model would read instructions aloud after a transcript; omit one of the two",
        ),
        (
            {"references": (VOICE, PROMPT), "instructions": "slowly"},
            "instructions",
            "would read instructions aloud",
        ),
        (
            {"references": (VOICE, Reference(CLIP, " "))},
            "references",
            r"2 references have no transcript; give at most one without \(for the voice\) and one with a "
            r"transcript \(to continue\)",
        ),
        (
            {"references": (PROMPT, PROMPT)},
            "references",
            "2 references have a transcript; give at most one without .* and one with",
        ),
        (
            {"references": (VOICE, PROMPT, PROMPT)},
            "references",
            "3 references are given; VoxCPM2 takes up to 2",
        ),
        (
            {"references": (VOICE, PROMPT), "options": {"x_vector_only_mode": True}},
            "x_vector_only_mode",
            "x_vector_only_mode takes the sound of one reference; 2 are given",
        ),
    ],
)
def test_invalid_requests_are_refused(fields, param, message):
    refused(replace(ASKED, **fields), param, message)


@pytest.mark.parametrize("value", [-0.1, 101.0, float("nan")])
def test_guidance_out_of_range_is_refused(value):
    refused(
        replace(ASKED, options={"cfg_scale": value}),
        "cfg_scale",
        r"cfg_scale is .*; possible: a number from 0 to 100",
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (AudioClip(np.zeros(1600, np.float32), 16000), "the reference is silent"),
        (clip(seconds=0.009), r"the reference lasts 0\.009 s; from 0\.01 to 60 s are possible"),
        (
            AudioClip(np.zeros(61 * 16000, np.float32), 16000),
            r"the reference lasts 61 s; from 0\.01 to 60 s are possible",
        ),
        (AudioClip(np.full(1600, np.nan, np.float32), 16000), "not finite"),
        (AudioClip(np.zeros(1600, np.int16), 16000), r"int16 \[1600\]; a float32 array"),
        (clip(rate_hz=4000), "rate is 4000 Hz"),
    ],
    ids=["silent", "short", "long", "nan", "dtype", "rate"],
)
def test_unusable_reference_audio_is_refused(given, message):
    for asked in (ask(Reference(given)), ask(VOICE, Reference(given, "Good evening."))):
        refused(asked, "references", message)


def test_other_families_refuse_solver_options_and_noise():
    for option in ({"cfg_scale": 2.0}, {"solver_steps": 5}):
        param = next(iter(option))
        with pytest.raises(RequestError, match=f"takes no {param}; it takes: ") as error:
            family("qwen3_tts").prompt(Request(text="hello", voice="ryan", options=option))
        assert error.value.param == param
    with pytest.raises(ValueError, match="qwen3_tts takes no noise: its frames are not solved from any"):
        zoo.generate(family("qwen3_tts"), Request(text="hello", voice="ryan"), noise=torch.zeros(3, 4, 8))


# references


def test_a_reference_is_encoded_once_for_each_use():
    cloner = type(OURS.writer.cloner)(OURS.config, OURS.vae, OURS.net.rows, OURS.device, OURS.dtype)
    first = cloner(CLIP, continues=False)
    assert cloner(clip(seconds=0.095), continues=False) is first and cloner.references.num_encoded == 1
    assert cloner(CLIP, continues=True) is not first and cloner.references.num_encoded == 2
    assert first.num_bytes == first.patches.nbytes + first.rows.nbytes


def test_a_reference_is_padded_after_and_its_continuation_before():
    """The padding comes before a continued clip so that speech continues its end."""
    heard, gone_on_from = (write(asked).references[0].patches for asked in (ALONE, CONTINUED))
    half = np.zeros(80, np.float32)
    after, before = (
        AudioClip(np.concatenate(parts), 16000) for parts in ((CLIP.samples, half), (half, CLIP.samples))
    )
    for padded, transcript, patches in ((after, None, heard), (before, "Good evening.", gone_on_from)):
        assert torch.equal(write(ask(Reference(padded, transcript))).references[0].patches, patches)
    assert not torch.allclose(heard, gone_on_from, atol=1e-2)


@pytest.mark.parametrize(("rate_hz", "channels"), [(44100, 1), (48000, 2), (16000, 2)])
def test_references_of_any_rate_and_number_of_channels_are_accepted(rate_hz, channels):
    [reference] = write(ask(Reference(clip(2, rate_hz=rate_hz, channels=channels)))).references
    assert reference.patches.shape == (10, 4, 8)
    [plain] = write(ask(Reference(clip(2)))).references
    ratio = (reference.patches - plain.patches).norm() / plain.patches.norm()
    assert ratio < 0.5  # the second channel has a different pitch, and resampling rings at the edges


@pytest.mark.parametrize("asked", [CONTINUED, COMBINED], ids=["continued", "combined"])
def test_the_decoder_continues_a_reference_without_a_seam(asked):
    """Speech after a reference equals that of a decoder that decoded both at once."""
    speech, reference = zoo.generate(OURS, replace(asked, max_frames=6)), write(asked).references[-1]
    whole = torch.cat((reference.patches, speech.frames)).flatten(0, 1).T[None]  # [1, D, F]
    decoder = OURS.vae.decoder
    with torch.inference_mode():
        heard, _ = decode_latents(decoder, whole, 16)
    torch.testing.assert_close(speech.samples, heard[0, 10 * 480 :], rtol=0, atol=1e-5)


# the tokenizer


def test_chinese_words_are_split_into_characters():
    ids = {token: index for index, token in enumerate(sorted(TOKENS._vocabulary, key=TOKENS._vocabulary.get))}
    assert "你好" in ids and "卡拉O" in ids
    assert TOKENS("x你好世界")[-4:] == [ids[character] for character in "你好世界"]
    # a piece with its space is not split if the word alone is not in the vocabulary
    assert TOKENS("我们") == [ids["▁我们"]] and "我们" not in ids
    assert TOKENS("x卡拉O")[-1] == ids["卡拉O"]


@pytest.mark.parametrize(
    "text", ["<|audio_start|>", "</s>", "<unk>", "a<|ref_audio_start|>b", "<|audio_prompt_start|>", "<s>"]
)
def test_special_tokens_in_a_text_are_ordinary_text(text):
    assert not set(TOKENS(text)) & {0, 1, 2, 101, 102, 103, 104} and len(TOKENS(text)) > 2


def test_an_invalid_tokenizer_is_refused(tmp_path):
    for change, message in (
        ({"model": {"type": "BPE"}}, "is not a tokenizer: "),
        ({"model": None}, "is not a tokenizer: "),
    ):
        path = tmp_path / "tokenizer.json"
        path.write_text(
            json.dumps(json.loads((directory("voxcpm2", "tiny") / "tokenizer.json").read_text()) | change)
        )
        with pytest.raises(ValueError, match=message):
            TextTokenizer(tmp_path)
    shutil.rmtree(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer.json does not exist"):
        TextTokenizer(tmp_path)
