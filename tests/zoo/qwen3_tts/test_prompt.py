"""Prompts: the layout of positions in every mode, and the errors for invalid requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from models import family, write

from zoo.qwen3_tts.prompt import MAX_TEXT_TOKENS
from zoo.request import Request, RequestError

SMALL, LARGE = family("qwen3_tts"), family("qwen3_tts", size="tiny-1.7b")
CONFIG, CONTROL, TOKENIZE = SMALL.config, SMALL.config.control, SMALL.writer.tokenize
ASKED = Request(text="hello world", voice="ryan")
TEXT = tuple(TOKENIZE("hello world"))
ROLE = ((CONFIG.im_start, -1), (CONFIG.assistant, -1), (TOKENIZE("\n")[0], -1))
AUTO = (CONTROL.nothink, CONTROL.think_bos, CONTROL.think_eos)


def pads(*codec: int) -> tuple[tuple[int, int], ...]:
    return tuple((CONFIG.tts_pad, index) for index in codec)


def spoken(language: str) -> tuple[int, ...]:
    return CONTROL.think, CONTROL.think_bos, CONFIG.languages[language], CONTROL.think_eos


def control(**fields: str) -> tuple[int, ...]:
    """Return the codec ids between the role and the voice."""
    pairs = write(SMALL, replace(ASKED, **fields)).pairs[3:]
    end = next(i for i, (_, codec) in enumerate(pairs) if codec in CONFIG.voices.values())
    assert all(text == CONFIG.tts_pad for text, _ in pairs[: end + 1])
    return tuple(codec for _, codec in pairs[:end])


# the layout of prompts


@pytest.mark.parametrize("options", [{}, {"text_mode": "full"}], ids=["default", "full"])
def test_full_mode_puts_all_text_in_the_prompt(options):
    script = write(SMALL, replace(ASKED, options=options))
    body = (
        (CONFIG.tts_bos, CONTROL.pad),
        *((token, CONTROL.pad) for token in (*TEXT, CONFIG.tts_eos)),
        (CONFIG.tts_pad, CONTROL.bos),
    )
    assert script.pairs == (*ROLE, *pads(*AUTO, CONFIG.voices["ryan"]), *body)
    assert script.trailing == () and script.text_tokens == len(TEXT)


def test_interleaved_mode_puts_one_text_token_in_the_prompt():
    script = write(SMALL, replace(ASKED, options={"text_mode": "interleaved"}))
    body = ((CONFIG.tts_bos, CONTROL.pad), (TEXT[0], CONTROL.bos))
    assert script.pairs == (*ROLE, *pads(*AUTO, CONFIG.voices["ryan"]), *body)
    assert script.trailing == (*TEXT[1:], CONFIG.tts_eos)


def test_only_the_end_follows_a_text_of_one_token():
    assert write(SMALL, replace(ASKED, text="a", options={"text_mode": "interleaved"})).trailing == (
        CONFIG.tts_eos,
    )


def test_instructions_come_first():
    plain, styled = (write(LARGE, replace(ASKED, instructions=words)) for words in (None, " Speak slowly. "))
    words = (CONFIG.im_start, *TOKENIZE("user\nSpeak slowly."), CONFIG.im_end, *TOKENIZE("\n"))
    assert styled.pairs == (*((token, -1) for token in words), *plain.pairs)
    assert write(LARGE, replace(ASKED, instructions="  ")) == plain


def test_text_is_stripped():
    assert write(SMALL, replace(ASKED, text="\n hello world \t\n")) == write(SMALL, ASKED)


# voices and languages


@pytest.mark.parametrize(
    ("voice", "language", "expected"),
    [
        ("ryan", None, AUTO),
        ("ryan", "auto", AUTO),
        ("ryan", "english", spoken("english")),
        ("ryan", "chinese", spoken("chinese")),
        ("dylan", None, spoken("beijing_dialect")),
        ("dylan", "auto", spoken("beijing_dialect")),
        ("dylan", "chinese", spoken("beijing_dialect")),  # like the reference; some other engines differ
        ("eric", "chinese", spoken("sichuan_dialect")),
        ("eric", "english", spoken("english")),
        ("eric", "japanese", spoken("japanese")),
    ],
)
def test_a_voice_with_a_dialect_speaks_it_for_chinese_and_auto(voice, language, expected):
    assert control(voice=voice, language=language) == expected


def test_names_are_case_insensitive():
    assert write(SMALL, replace(ASKED, voice="RyAn", language="English")) == write(
        SMALL, replace(ASKED, voice="ryan", language="english")
    )
    assert control(voice="Eric", language="CHINESE") == spoken("sichuan_dialect")
    assert control(language="AUTO") == AUTO


# the prompt


def test_inputs_are_sums_of_a_text_row_and_a_codec_row():
    asked = replace(ASKED, instructions="Sing.")
    script, prompt, talker = write(LARGE, asked), LARGE.prompt(asked), LARGE.talker
    for row, (text, codec) in zip(prompt.inputs, script.pairs, strict=True):
        expected = talker.text(torch.tensor(text))
        if codec >= 0:
            expected = expected + talker.codec_embedding.weight[codec]
        torch.testing.assert_close(row, expected, rtol=0, atol=1e-5)
    assert prompt.usage == {"input_tokens": len(TEXT), "prompt_positions": len(script.pairs)}


def test_keys_are_equal_exactly_when_inputs_are():
    changes = ({}, {"voice": "eric"}, {"language": "french"}, {"instructions": "Sing."})
    prompts = [LARGE.prompt(replace(ASKED, **change)) for change in changes]
    rows: dict[int, torch.Tensor] = {}
    for prompt in prompts:
        assert len(prompt.prefix_keys) == len(prompt.inputs)
        for key, row in zip(prompt.prefix_keys, prompt.inputs, strict=True):
            assert -(2**63) <= key < 2**63
            torch.testing.assert_close(rows.setdefault(key, row), row, rtol=0, atol=1e-6)
    distinct = torch.stack(list(rows.values()))
    assert (torch.cdist(distinct, distinct) + 10 * torch.eye(len(distinct))).min() > 0.1


def sampling(slot: dict[str, Any]) -> list[list[float]]:
    """Return the sampling values, each for the first code and for the depth codes."""
    return [
        [pytest.approx(value) for value in slot[name].tolist()] for name in ("temperature", "top_k", "top_p")
    ]


def test_sampling_values_default_to_the_checkpoints():
    slot = SMALL.prompt(ASKED).slot
    assert slot["seed"] == 0 and slot["penalty"] == 1.05
    assert sampling(slot) == [[0.9, 0.9], [50, 50], [1.0, 1.0]]
    depth = {"depth_temperature": 0.3, "depth_top_k": 9, "depth_top_p": 0.2}
    asked = replace(ASKED, temperature=0.5, top_k=0, top_p=0.7, options=depth)
    slot = SMALL.prompt(replace(asked, repetition_penalty=1.0, seed=2**63 - 1)).slot
    assert sampling(slot) == [[0.5, 0.3], [0, 9], [0.7, 0.2]]
    assert slot["seed"] == 2**63 - 1 and slot["penalty"] == 1.0


def test_a_temperature_of_zero_is_greedy_in_every_codebook():
    both = [
        {"temperature": 0.0},
        {"temperature": 0.0, "options": {"depth_temperature": 1.0}},
        {"temperature": 1e-38},
        {"temperature": 0.5},
    ]
    found = [sampling(SMALL.prompt(replace(ASKED, **fields)).slot)[0] for fields in both]
    assert found == [[0.0, 0.0], [0.0, 1.0], [pytest.approx(1e-38), 0.0], [0.5, 0.9]]


# invalid requests


TAKES = (
    "temperature, top_k, top_p, repetition_penalty, depth_temperature, depth_top_k, depth_top_p, text_mode"
)
VOICES = "aiden, dylan, eric, ono_anna, ryan, serena, sohee, uncle_fu, vivian"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"text": " \n"}, "text", "text is empty"),
        ({"text": "1" * (MAX_TEXT_TOKENS + 1)}, "text", "text has 8193 tokens; the limit is 8192"),
        ({"voice": "alloy"}, "voice", f"has no voice 'alloy'; it has: {VOICES}"),
        ({"voice": None}, "voice", f"a voice is needed; Qwen3-TTS 0.6B custom_voice has: {VOICES}"),
        (
            {"language": "klingon"},
            "language",
            "has no language 'klingon'; possible: auto, chinese, english, french",
        ),
        # a dialect comes only with its voice
        ({"language": "beijing_dialect"}, "language", "has no language 'beijing_dialect'"),
        (
            {"instructions": "Sing."},
            "instructions",
            "0.6B custom_voice takes no instructions: the 1.7B model of Qwen3-TTS does",
        ),
        (
            {"options": {"text_mode": "diagonal"}},
            "text_mode",
            "text_mode is 'diagonal'; possible: full, interleaved",
        ),
        (
            {"options": {"cfg_scale": 2.0}},
            "cfg_scale",
            f"0.6B custom_voice takes no cfg_scale; it takes: {TAKES}$",
        ),
        ({"options": {"solver_steps": 9}}, "solver_steps", f"takes no solver_steps; it takes: {TAKES}$"),
        (
            {"options": {"x_vector_only_mode": True}},
            "x_vector_only_mode",
            f"takes no x_vector_only_mode; it takes: {TAKES}$",
        ),
        ({"options": {"depth_top_k": 1.5}}, "depth_top_k", "depth_top_k is 1.5; possible: "),
        ({"temperature": 2.1}, "temperature", "temperature is 2.1; possible: .* from 0 to 2"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_errors_name_the_wrong_parameter(fields, param, message):
    with pytest.raises(RequestError, match=message) as refused:
        SMALL.prompt(replace(ASKED, **fields))
    assert refused.value.param == param


def test_long_instructions_are_refused():
    with pytest.raises(ValueError, match="instructions has 8193 tokens; the limit is 8192"):
        LARGE.prompt(replace(ASKED, instructions="1" * (MAX_TEXT_TOKENS + 1)))


def test_the_longest_text_fits_the_state():
    asked = replace(ASKED, text="1" * MAX_TEXT_TOKENS)
    assert len(SMALL.prompt(asked).inputs) == MAX_TEXT_TOKENS + 10
    prompt = SMALL.prompt(replace(asked, options={"text_mode": "interleaved"}))
    state = SMALL.state(1, 1)
    SMALL.admit(state, 0, prompt)
    assert state.text_count[0] == MAX_TEXT_TOKENS
