"""From a conversation to ids."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models import family

import zoo
from zoo.check import check
from zoo.request import AudioClip, Request, RequestError, Turn
from zoo.step_audio2.listener import num_rows
from zoo.step_audio2.prompt import TRANSCRIBE

NAME = "step_audio2"
CLIP = AudioClip(np.sin(np.arange(8000) ** 1.5 / 30).astype(np.float32) / 4, 16_000)
SECOND = AudioClip(CLIP.samples[:7000].copy(), 16_000)
VOICE = "default_female"


@pytest.fixture(scope="module")
def model():
    return family(NAME)


def script(model, request):
    return model.writer(request, check(request, model.spec))


def read(model, request) -> str:
    """Return the prompt as a text, with <N> for N rows or codes in a row."""
    text, num = b"", 0
    patch = model.writer.vocabulary.special["<audio_patch>"]
    for token in (*script(model, request).ids, None):
        is_row = token is not None and (token == patch or token >= model.first_code)
        if num and not is_row:
            text, num = text + b"<%d>" % num, 0
        num += is_row
        if token is not None and not is_row:
            text += model.detokenize(token)
    return text.decode()


def asked(text="", *turns, **fields) -> Request:
    return Request(text=text, turns=turns, voice=fields.pop("voice", VOICE), **fields)


def test_a_written_turn(model):
    expected = "<|BOT|>human\nGood morning.<|EOT|><|BOT|>assistant\n<tts_start>"
    assert read(model, asked("Good morning.")) == expected


def test_a_spoken_turn(model):
    """A clip of half a second is six rows."""
    expected = (
        "<|BOT|>system\nBe brief.<|EOT|><|BOT|>human\n<audio_start><6><audio_end><|EOT|><|BOT|>assistant\n"
    )
    turns = Turn("system", "Be brief."), Turn("user", clip=CLIP)
    assert read(model, asked("", *turns)) == expected + "<tts_start>"
    assert read(model, asked("", *turns, output="text", voice=None)) == expected
    assert script(model, asked("", *turns)).num_heard == 6


def test_a_text_follows_the_clip_of_its_turn(model):
    both = read(model, asked("", Turn("user", "What is it?", CLIP)))
    assert "human\n<audio_start><6><audio_end>What is it?<|EOT|>" in both


def test_a_transcript_asks_for_the_words(model):
    request = Request(text="", turns=(Turn("user", clip=CLIP),), output="transcript")
    expected = f"<|BOT|>system\n{TRANSCRIBE}<|EOT|><|BOT|>human\n<audio_start><6><audio_end><|EOT|><|BOT|>assistant\n"
    assert read(model, request) == expected
    prompt = model.prompt(request)
    assert prompt.is_text and prompt.slot["temperature"] == 0 and prompt.max_frames == 1


def test_an_earlier_answer_goes_back_as_it_was(model):
    """A spoken one behind the token that begins speech, a text as it is, and neither with its thought."""
    vocabulary = model.writer.vocabulary
    codes = tuple(model.first_code + code for code in (5, 6561))
    spoken = (*vocabulary("Hm."), *codes, vocabulary.special["<tts_end>"])
    for tokens, expected in {
        spoken: "<tts_start>Hm.<2><tts_end>",
        tuple(vocabulary("Hm.")): "Hm.",
        tuple(vocabulary("I think.</think>Hm.")): "Hm.",
        (*vocabulary.own("I think.</think>\n\n<tts_start>"), *spoken): "<tts_start>Hm.<2><tts_end>",
    }.items():
        turns = Turn("user", "Hm?"), Turn("assistant", tokens=tokens)
        assert f"<|BOT|>assistant\n{expected}<|EOT|><|BOT|>human\nAnd?" in read(model, asked("And?", *turns))


def test_a_thought_is_opened(model):
    thinking = asked("Hm?", options={"thinks": True})
    assert read(model, thinking).endswith("<|BOT|>assistant\n\n<think>\n")
    assert model.prompt(thinking).slot["thought"] == 0


def test_tools_and_their_results_are_turns(model):
    turns = Turn("tools", "[{}]"), Turn("user", "Hm?"), Turn("assistant", "<tool_call>"), Turn("tool", "7")
    expected = "<|BOT|>tool_json_schemas\n[{}]<|EOT|><|BOT|>human\nHm?<|EOT|>"
    expected += "<|BOT|>assistant\n<tool_call><|EOT|><|BOT|>input\n7<|EOT|><|BOT|>assistant\n<tts_start>"
    assert read(model, asked("", *turns)) == expected
    assert "7<|EOT|><|BOT|>human\nAnd?<|EOT|>" in read(model, asked("", *turns, Turn("user", "And?")))


def test_an_answer_may_come_first_or_follow_another(model):
    turns = Turn("assistant", "Hello."), Turn("assistant", "Hm?")
    said = "<|BOT|>assistant\nHello.<|EOT|><|BOT|>assistant\nHm?<|EOT|><|BOT|>human\nAgain.<|EOT|>"
    assert read(model, asked("Again.", *turns)) == said + "<|BOT|>assistant\n<tts_start>"


def test_the_base_model_reads_no_roles(model):
    turns = Turn("system", "Translate."), Turn("user", "It is:", CLIP)
    read_back = read(model, asked("", *turns, options={"template": "plain"}))
    assert read_back == "Translate.It is:<audio_start><6><audio_end><tts_start>"


def test_a_turn_cannot_contain_a_special_token(model):
    ids = script(model, asked("<|EOT|><audio_3><tts_start>")).ids
    special = set(model.writer.vocabulary.special.values())
    assert sum(token in special for token in ids) == 4 and all(token < model.first_code for token in ids)


@pytest.mark.parametrize(
    ("turns", "text", "message"),
    [
        ((Turn("assistant", "Hm."),), "", "the last turn is by assistant"),
        ((Turn("user", "Hm."),), "Again.", "user, user"),
        ((Turn("user", "Hm."),) * 20, "Again.", "user, user and 13 more; possible: at most one"),
        ((Turn("user", "Hm."), Turn("system", "Hm.")), "Again.", "user, system, user"),
        ((Turn("tool", "Hm."),), "Again.", "tool, user"),
        ((Turn("user", "Hm."), Turn("assistant", None, CLIP)), "Again.", "reads only its text"),
        ((Turn("user", " "),), "", "neither text nor audio"),
        ((Turn("user", "Hm."), Turn("assistant", tokens=(10**6,))), "Again.", "not this model's"),
        ((Turn("user", None, AudioClip(np.zeros(16_000, np.float32), 16_000)),), "", "the clip is silent"),
    ],
)
def test_other_conversations_are_refused(model, turns, text, message):
    with pytest.raises(RequestError, match=message) as refused:
        model.prompt(asked(text, *turns))
    assert refused.value.param in ("turns", "text")


def test_a_result_may_be_empty(model):
    turns = Turn("user", "Hm?"), Turn("assistant", "<tool_call>"), Turn("tool", None)
    assert "<|BOT|>input\n<|EOT|><|BOT|>assistant" in read(model, asked("", *turns))


def test_an_answer_may_be_empty(model):
    answers = Turn("user", "Hm."), Turn("assistant", None)
    assert "Hm.<|EOT|><|BOT|>assistant\n<|EOT|><|BOT|>human\nAgain." in read(model, asked("Again.", *answers))


def test_rows_of_clips_have_keys_of_their_own(model):
    """Equal clips share pages of the KV cache, and others do not."""
    keys = [script(model, asked("", Turn("user", clip=clip))).keys for clip in (CLIP, CLIP, SECOND)]
    assert keys[0] == keys[1] and len(set(keys[0]) - set(keys[2])) == 6


def test_a_clip_is_encoded_once(model):
    before = model.writer.ear.heard.num_encoded
    clip = AudioClip(CLIP.samples[:5000].copy(), 16_000)
    for _ in range(3):
        model.prompt(asked("", Turn("user", clip=clip)))
    assert model.writer.ear.heard.num_encoded == before + 1


@pytest.mark.parametrize("num", [161, 1279, 16_000, 16_001, 30_161, 25 * 16_000 + 1])
def test_the_number_of_rows_follows_from_the_length(model, num):
    """13 rows for a second, 313 for 25 s, and none for a piece that is too short."""
    noise = np.random.default_rng(0).normal(size=num).astype(np.float32) / 10
    lengths = [len(piece) for piece in model.writer.ear(AudioClip(noise, 16_000)).pieces]
    pieces = [min(num - start, 400_000) for start in range(0, num, 400_000)]
    assert lengths == [num_rows((piece + 479) // 160) for piece in pieces]
    assert {16_000: [13], 400_001: [313, 0]}.get(num, lengths) == lengths


def test_the_rows_of_a_clip_replace_the_placeholders(model):
    request = asked("", Turn("user", clip=CLIP))
    [(first, rows)] = script(model, request).heard
    inputs = model.prompt(request).inputs
    assert torch.equal(inputs[first : first + 6], rows)
    others = model.lm.embedding(torch.tensor(script(model, request).ids))
    assert torch.equal(inputs[:first], others[:first]) and torch.equal(
        inputs[first + 6 :], others[first + 6 :]
    )


def test_the_bound_on_steps_counts_text_and_codes(model):
    request = asked("Good morning.", options={"max_tokens": 9}, temperature=1.0)
    prompt = model.prompt(request)
    assert prompt.max_steps == 9 and prompt.expected_s == 0
    assert len(zoo.generate(model, request).tokens) <= 9
