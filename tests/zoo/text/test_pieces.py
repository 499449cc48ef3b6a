"""Splitting long text into pieces."""
# ruff: noqa: RUF001

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import TEXTS, family

import zoo
from zoo.contract import Prompt, following
from zoo.contract.family import pieces_of, understood
from zoo.request import BLANK, AudioClip, Reference, Request
from zoo.text.pieces import MARKUP, expected_s, language_of, odd_length, split

ENGLISH = (
    'Dr. Smith paid $3.50 to Mr. J. R. Jones on Jan. 5 at 7 p.m. and left. See https://a.b/c?d=1&e=2. "Is it so?" she '
    "asked. Yes! 🎉 Wow... okay. The U.S. is big, e.g. 3.14 times as big, and costs 1,000 dollars; that is: a lot."
)
CHINESE = "今天天气很好。我们去公园吧！“好的。”他说。价格是3.5元；很便宜，是吗？苹果、梨子和葡萄，都有。"
JAPANESE = "今日はいい天気です。散歩に行きましょう！「そうですね。」と彼は言った。"
GERMAN = (
    "Das ist z. B. gut. Am 3. Mai kam Dr. Müller um 8.30 Uhr. „Ja?“, fragte sie. Er ging, und zwar sofort."
)
SPEC = family("toy").spec


def ends(text: str, limit_s: float, language: str) -> list[str]:
    pieces = split(text, limit_s, language)
    assert "".join(pieces) == text
    assert all(expected_s(piece) <= limit_s + 1e-6 for piece in pieces)
    return [piece.strip() for piece in pieces]


def test_pieces_end_where_sentences_do():
    assert ends(ENGLISH, 6, "en") == [
        "Dr. Smith paid $3.50 to Mr. J. R. Jones on Jan. 5 at 7 p.m. and left.",
        'See https://a.b/c?d=1&e=2. "Is it so?" she asked. Yes! 🎉 Wow... okay.',
        "The U.S. is big, e.g. 3.14 times as big,",
        "and costs 1,000 dollars; that is: a lot.",
    ]
    assert ends(CHINESE, 4, "zh")[:2] == [
        "今天天气很好。我们去公园吧！",
        "“好的。”他说。价格是3.5元；很便宜，是吗？",
    ]
    assert ends(JAPANESE, 3, "ja")[0] == "今日はいい天気です。"
    assert ends(GERMAN, 4, "de")[:2] == [
        "Das ist z. B. gut. Am 3. Mai kam Dr. Müller um 8.30 Uhr.",
        "„Ja?“, fragte sie. Er ging, und zwar sofort.",
    ]


def test_a_long_sentence_is_cut_at_clauses_then_words_then_characters():
    clauses = "one hundred years ago, in a small house; near the river, 1,000 people met at 7:45 and sang"
    assert ends(clauses, 4, "en") == [
        "one hundred years ago, in a small house; near the river,",
        "1,000 people met at 7:45 and sang",
    ]
    counted = "one two three four five six seven eight nine ten "
    words = ends(counted * 4, 2, "en")
    assert len(words) > 4 and set(" ".join(words).split()) == set(counted.split())
    assert {len(piece) for piece in ends("天" * 60, 5, "zh")} == {20}
    assert [len(piece) for piece in ends("a" * 120, 5, "en")] == [60, 60]
    assert all(piece[0] not in "\u0301\u200d" for piece in ends("e\u0301" * 40 + "👩\u200d🚀" * 30, 1, "en"))


def test_pieces_are_even_and_silent_text_is_no_piece():
    lengths = [expected_s(piece) for piece in split("It hums and hums. " * 30, 20)]
    assert max(lengths) < 1.3 * min(lengths)
    assert split("!!! ... " * 50 + "Yes.", 6) == ["!!! ... " * 50 + "Yes."]
    assert split("", 6) == [""]


@pytest.mark.parametrize("text", ["word " * 30, "abc " * 120, "Hello world " * 60])
def test_no_piece_is_empty_where_parts_fill_their_bound(text):
    """Their lengths may add up to a little more than the bound."""
    assert all(piece.strip() for piece in split(text, 10))


def test_tags_and_brackets_are_not_cut():
    text = "[whisper in a small, sad voice] Go. <strong>Now, or never. I say</strong> and {HH AH0, L OW1} (well, no) <|sfx:laughter|>Haha. "
    for piece in split(text * 6, 5):
        assert piece.count("[") == piece.count("]") and piece.count("<strong>") == piece.count("</strong>")
        assert (
            piece.count("{") == piece.count("}")
            and piece.count("(") == piece.count(")")
            and piece.count("<|") == piece.count("|>")
        )


PIECES = (
    *ENGLISH.split(" "),
    *"。，！、“”今天はい🎉\u200b\u0301\n\t\"'<>[](){}.,;:-$%0123456789",
    "\r\n",
    "  ",
    "مرحبا؟",
)


SOUPS = st.lists(st.sampled_from(PIECES), max_size=300).map("".join)
FEW = st.text(st.sampled_from("a. \n1,今。"), max_size=600)


@settings(max_examples=150, deadline=None)
@given(
    text=st.one_of(st.text(max_size=400), SOUPS, FEW),
    limit_s=st.floats(1, 20),
    language=st.sampled_from(["en", "zh", "ja", "de", "fr", "ar", "hi", "klingon", ""]),
)
def test_no_text_is_lost_and_every_piece_is_within_its_bound(text, limit_s, language):
    pieces = split(text, limit_s, language)
    assert "".join(pieces) == text
    if len(pieces) > 1:
        assert all(0 < expected_s(piece) <= limit_s + 1e-6 for piece in pieces)


def test_splitting_the_longest_text_is_fast():
    """Splitting is not quadratic for any text that a client could send."""
    import time

    for unit in (ENGLISH, CHINESE, "(", "<a>", "[a", "a.", "1,", '"', "\u0301", "\0", "{" * 99 + "}"):
        began = time.process_time()
        split((unit * 100_000)[:100_000], 20)
        assert time.process_time() - began < 20, unit  # measured: 0.1 to 0.6 s


def test_which_texts_are_split():
    spec, text = replace(SPEC, piece_s=6.0), " ".join(TEXTS)
    assert len(pieces_of(Request(text=text), spec)) > 3
    for whole in (
        Request(text=TEXTS[0] + "  \n"),
        Request(text=text, split_text=False),
        Request(text=text, is_open=True),
        Request(text=text, conversation="one"),
    ):
        assert pieces_of(whole, spec) == [whole.text]
    assert pieces_of(Request(text=text), replace(spec, piece_s=None)) == [text]
    assert pieces_of(Request(text=text), replace(spec, unsplit="iPhone")) == [text]
    led = pieces_of(Request(text="<|emotion:awe|> " + text), replace(spec, lead=r"<\|emotion:\w+\|>\s*"))
    assert len(led) > 3 and all(
        piece.startswith("<|emotion:awe|> ") and piece.count("<|") == 1 for piece in led
    )
    assert all(piece == piece.strip(BLANK) for piece in pieces_of(Request(text=text), spec))


def test_the_language_is_the_requests_or_that_of_the_script():
    assert [language_of(Request(text=text)) for text in (ENGLISH, CHINESE, JAPANESE)] == ["en", "zh", "ja"]
    assert language_of(Request(text=CHINESE, language="German")) == "de"
    assert language_of(Request(text=CHINESE, language="xx")) == "xx"


def test_lengths_that_are_too_short_or_too_long():
    for expected in (0.1, 1.0, 45.0):
        assert odd_length(expected, expected) is None
        assert odd_length(2 * expected + 5.1, expected) == "long"
    assert odd_length(10, 45) == "short" and odd_length(0, 0.5) is None


# the passes of one answer


def passes(model: zoo.Family, request: Request, frames: int = 6) -> list[Prompt]:
    """Return the passes of a request, sending `frames` frames back for each."""
    answer = model.passes(request)
    generator = torch.Generator().manual_seed(1)
    found = [next(answer)]
    while not found[-1].is_final:
        shape = (min(frames, found[-1].max_frames), *model.spec.frame_shape)
        made = torch.randint(1, 9, shape, generator=generator).to(model.spec.frame_dtype)
        prompt = following(answer, made)
        if prompt is None:
            break
        found.append(prompt)
    return found


LONG = " ".join(TEXTS)


def test_a_pieces_seed_is_derived_from_the_requests():
    whole = [prompt.slot["seed"] for prompt in passes(family("toy"), Request(text=LONG, seed=7))]
    assert whole[0] == 7 and len(set(whole)) == len(whole) > 3
    assert whole == [prompt.slot["seed"] for prompt in passes(family("toy"), Request(text=LONG, seed=7))]
    assert not set(whole) & {
        prompt.slot["seed"] for prompt in passes(family("toy"), Request(text=LONG, seed=8))
    }


def test_a_short_text_is_unchanged():
    request = Request(text="Hello there.", seed=7, max_frames=9)
    [prompt] = passes(family("toy"), request)
    plain = family("toy").prompt(request)
    assert (prompt.prefix_keys, prompt.slot, prompt.max_frames) == (
        plain.prefix_keys,
        plain.slot,
        plain.max_frames,
    )
    assert prompt.expected_s == expected_s(request.text)


def test_max_frames_limits_all_pieces_together():
    found = passes(family("toy"), Request(text=LONG, max_frames=15))
    assert [prompt.max_frames for prompt in found] == [15, 9, 3] and not found[-1].is_final
    speech = zoo.generate(family("toy"), Request(text=LONG, max_frames=30, temperature=0.0))
    assert 0 < len(speech.frames) <= 30


CARRIERS = [name for name in ("toy_echoing", *zoo.families()) if family(name).spec.keeps_voice]
TEXT_FIRST = ("opuslm",)  # whose prompts have the text before the voice


@pytest.mark.parametrize("name", CARRIERS)
def test_later_pieces_continue_in_a_random_voice(name, monkeypatch):
    """All later pieces read the same frames of the first piece, so they share one prefix unless the text is before
    it."""
    model = family(name)
    monkeypatch.setattr(model, "spec", replace(model.spec, piece_s=6.0, max_frames=60))
    found = passes(model, Request(text=LONG))
    assert len(found) > 3 and found[-1].is_final
    keys = [prompt.prefix_keys for prompt in found]
    common = [sum(a == b for a, b in zip(keys[1], other, strict=False)) for other in keys[2:]]
    assert min(common) >= 6 or name in TEXT_FIRST
    plain = [
        model.prompt(understood(Request(text=prompt_text), model.spec)).prefix_keys
        for prompt_text in pieces_of(Request(text=LONG), model.spec)
    ]
    assert keys[0] == plain[0] and all(len(a) > len(b) for a, b in zip(keys[1:], plain[1:], strict=True))


CLONERS = [name for name in zoo.families() if family(name).spec.keeps_voice and family(name).spec.reference_s]


@pytest.mark.parametrize("name", CLONERS)
def test_every_piece_has_the_voice_of_the_reference(name, monkeypatch):
    model = family(name)
    monkeypatch.setattr(model, "spec", replace(model.spec, piece_s=6.0))
    clip = AudioClip(
        torch.randn(8000, generator=torch.Generator().manual_seed(random.Random(1).randrange(9))).numpy() / 4,
        16000,
    )
    request = Request(text=LONG, references=(Reference(clip, "It hums."),))
    found = passes(model, request)
    pieces = pieces_of(request, model.spec)
    assert len(found) == len(pieces) > 3
    for prompt, piece in zip(found, pieces, strict=True):
        assert prompt.prefix_keys == model.prompt(replace(request, text=piece)).prefix_keys


def test_markup_covers_the_tags_of_the_models():
    for text in ("<|speaker:0|>", "[laughter]", "<strong>very</strong>", "(whispering)", "{ni3}"):
        assert MARKUP.fullmatch(text)
