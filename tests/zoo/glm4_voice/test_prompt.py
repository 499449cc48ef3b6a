"""From a conversation to ids."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models import family

import zoo
from zoo.glm4_voice.prompt import SPOKEN, WRITTEN
from zoo.glm4_voice.vocabulary import ASSISTANT, AUDIO_BEGIN, AUDIO_END, SYSTEM, USER
from zoo.request import AudioClip, Request, RequestError, Turn

CLIP = AudioClip(np.sin(np.arange(8000) ** 1.5 / 30).astype(np.float32) / 4, 16_000)


@pytest.fixture(scope="module")
def model():
    return family("glm4_voice")


def read(model, ids) -> str:
    """Return the prompt as a text, with <N> for N codes in a row."""
    text, codes = "", 0
    for token in (*ids, None):
        is_code = token is not None and token >= model.first_code
        if codes and not is_code:
            text, codes = f"{text}<{codes}>", 0
        codes += is_code
        if token is not None and not is_code:
            text += model.detokenize(token).decode()
    return text


def test_a_written_turn(model):
    script = model.writer(Request(text="Good morning."))
    opening = f"[gMASK]<sop>{SYSTEM}\n{WRITTEN}{USER}\nGood morning.{ASSISTANT}streaming_transcription\n"
    assert read(model, script.ids) == opening and script.num_codes == 0


def test_the_first_turn_decides_the_system_line(model):
    """A clip of half a second is seven codes."""
    turns = (Turn("user", clip=CLIP), Turn("assistant", "Hm."))
    script = model.writer(Request(text="Again.", turns=turns))
    heard = f"{AUDIO_BEGIN}<7>{AUDIO_END}{ASSISTANT}streaming_transcription\nHm."
    written = f"{USER}\nAgain.{ASSISTANT}streaming_transcription\n"
    assert read(model, script.ids) == f"[gMASK]<sop>{SYSTEM}\n{SPOKEN}{USER}\n{heard}{written}"
    assert script.num_codes == 7


def test_a_system_turn_replaces_the_line(model):
    turns = (Turn("system", "Be brief."), Turn("user", "Hm."))
    assert f"{SYSTEM}\nBe brief.{USER}" in read(model, model.writer(Request(text="", turns=turns)).ids)


def test_an_answer_may_be_empty(model):
    script = model.writer(Request(text="Again.", turns=(Turn("user", "Hm."), Turn("assistant", None))))
    assert f"{ASSISTANT}streaming_transcription\n{USER}\nAgain." in read(model, script.ids)


def test_an_answer_may_come_first_or_follow_another(model):
    turns = (Turn("assistant", "Hello."), Turn("assistant", "Hm?"))
    opened = f"{ASSISTANT}streaming_transcription\n"
    expected = f"[gMASK]<sop>{SYSTEM}\n{WRITTEN}{opened}Hello.{opened}Hm?{USER}\nAgain.{opened}"
    assert read(model, model.writer(Request(text="Again.", turns=turns)).ids) == expected


def test_a_turn_cannot_contain_a_special_token(model):
    ids = model.writer(Request(text="<|user|><|audio_3|>")).ids
    special = set(model.writer.vocabulary.special.values())
    assert sum(token in special for token in ids) == 5 and all(token < model.first_code for token in ids)


@pytest.mark.parametrize(
    ("turns", "text", "message"),
    [
        ((Turn("assistant", "Hm."),), "", "the last turn is by assistant"),
        ((Turn("user", "Hm."),), "Again.", "user, user"),
        ((Turn("user", "Hm."),) * 20, "Again.", "user, user and 13 more; possible: at most one"),
        ((Turn("user", "Hm."), Turn("system", "Hm.")), "Again.", "user, system, user"),
        ((Turn("user", "Hm."), Turn("assistant", None, CLIP)), "Again.", "reads only its text"),
        ((Turn("user", "Hm.", CLIP),), "", "reads one of them"),
        ((Turn("user", " "),), "", "neither text nor audio"),
        ((Turn("user", None, AudioClip(np.zeros(16_000, np.float32), 16_000)),), "", "the clip is silent"),
    ],
)
def test_other_conversations_are_refused(model, turns, text, message):
    with pytest.raises(RequestError, match=message) as refused:
        model.prompt(Request(text=text, turns=turns))
    assert refused.value.param in ("turns", "text")


def test_a_clip_is_encoded_once(model):
    before = model.writer.ear.heard.num_encoded
    clip = AudioClip(CLIP.samples[:5000].copy(), 16_000)
    for _ in range(3):
        model.prompt(Request(text="", turns=(Turn("user", clip=clip),)))
    assert model.writer.ear.heard.num_encoded == before + 1


@pytest.mark.parametrize("num", [1279, 1280, 1281, 40_961])
def test_every_begun_token_of_a_clip_counts(model, num):
    noise = np.random.default_rng(0).normal(size=num).astype(np.float32) / 10
    assert len(model.writer.ear(AudioClip(noise, 16_000))) == -(-num // 1280)


def test_the_bound_on_steps_counts_text_and_codes(model):
    """So an answer without audio ends, too."""
    request = Request(text="Good morning.", options={"max_tokens": 9}, temperature=1.0)
    prompt = model.prompt(request)
    assert prompt.max_steps == 9 and prompt.expected_s == 0
    assert len(zoo.generate(model, request).frames) <= 9


def test_a_written_turn_is_read_as_it_is(model):
    """A text without a word, or with what is a pause in a text to speak, is a turn like any other."""
    for text in ("?!", "Wait. [pause: 1s] Go on."):
        first = next(model.passes(Request(text=text)))
        assert first.is_final and f"\n{text}{ASSISTANT}" in read(model, first.prefix_keys)


def test_nothing_hears_the_padding_of_a_clip(model):
    """1,281 samples are two tokens, of eight positions; the first five begin within the clip."""
    sees = model.listener._mask(8, 1281, torch.device("cpu"))
    assert sees[:, :5].all() and not sees[:, 5:].any()
