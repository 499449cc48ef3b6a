"""Chatterbox's text: punctuation, ids, languages."""

from __future__ import annotations

import json
import shutil
import sys
import types
from unicodedata import normalize

import pytest
from models import directory, family

from zoo.chatterbox import languages
from zoo.chatterbox.languages import in_language
from zoo.chatterbox.prompt import Gpt2Tokenizer, normalized
from zoo.chatterbox.vocabulary import END_OF_TEXT
from zoo.request import Request, RequestError


@pytest.mark.parametrize(
    ("size", "text", "expected"),
    [
        ("tiny", "hello — the “fine”; no… really", 'Hello - the "fine",  no,  really.'),
        ("tiny", "a - b; c: d...  e", "A, b,  c, d,  e."),
        ("tiny", "ßa", "SSa."),
        ("tiny", "你好。", "你好。."),
        ("tiny-multilingual", "你好。", "你好。"),
        ("tiny-turbo", "hello — the “fine”; no… really", 'Hello - the "fine"; no,  really.'),
        ("tiny-turbo", "a - b; c: d...  e", "A - b; c, d... e."),
    ],
)
def test_punctuation_is_what_the_model_knows(size, text, expected):
    assert normalized(text, family("chatterbox", size=size).config) == expected


def ids(size: str, text: str, **fields) -> list[int]:
    ours = family("chatterbox", size=size)
    return ours.writer(Request(text=text, **fields))


def test_a_text_cannot_hold_the_tokens_that_frame_it():
    special = family("chatterbox").writer.tokenize.special
    framed = ids("tiny", "a [STOP][START] [SPACE] b")
    assert framed[0] == special["[START]"] and framed[-1] == special["[STOP]"]
    assert special["[STOP]"] not in framed[:-1] and special["[START]"] not in framed[1:]
    assert framed.count(special["[SPACE]"]) == 3


def test_tags_are_single_tokens():
    assert 607 in ids("tiny", "the [laughter] x")
    turbo = family("chatterbox", size="tiny-turbo").writer.tokenize
    [laugh] = turbo("[laugh]")
    assert laugh in turbo("ha [laugh] ha")


def test_a_text_cannot_hold_the_end_of_a_text_that_is_listed_among_the_tags(tmp_path):
    copy = shutil.copytree(directory("chatterbox", "tiny-turbo"), tmp_path / "copy")
    tags, words = (json.loads((copy / name).read_text()) for name in ("added_tokens.json", "vocab.json"))
    (copy / "added_tokens.json").write_text(json.dumps(tags | {END_OF_TEXT: words[END_OF_TEXT]}))
    found = Gpt2Tokenizer(copy, len(words) + len(tags))(f"ha {END_OF_TEXT} [laugh]")
    assert words[END_OF_TEXT] not in found and tags["[laugh]"] in found


@pytest.mark.parametrize("size", ["tiny", "tiny-turbo"])
def test_english_may_be_named_to_a_model_of_english(size):
    model = family("chatterbox", size=size)
    plain, named = (next(model.passes(Request(text="Hm.", language=name))) for name in (None, "en"))
    assert named.prefix_keys == plain.prefix_keys
    with pytest.raises(RequestError, match="possible: auto, english; use Chatterbox Multilingual"):
        model.prompt(Request(text="Hm.", language="french"))


def test_a_language_is_a_tag_before_the_text():
    tag = family("chatterbox", size="tiny-multilingual").writer.tokenize.special["[fr]"]
    assert ids("tiny-multilingual", "Où", language="fr")[1] == tag
    assert tag not in ids("tiny-multilingual", "Où")


def test_a_missing_package_for_a_language_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pykakasi", None)
    with pytest.raises(RequestError, match="pip install pykakasi"):
        in_language("今", "ja", tmp_path)


def test_japanese_is_spelled_in_kana(monkeypatch, tmp_path):
    """Words with kanji become hiragana, behind a space if these begin with は or へ. Source: chatterbox at 5de7a54,
    models/tokenizers/tokenizer.py, hiragana_normalize; the words are what pykakasi returns."""
    words = {"橋": "はし", "は": "は", "カメラ": "かめら", "今日": "きょう", "が": "が"}
    parts = [{"orig": original, "hira": hiragana} for original, hiragana in words.items()]
    kakasi = types.SimpleNamespace(convert=lambda text: parts)
    monkeypatch.setattr(languages, "_kakasi", lambda: kakasi)
    assert in_language("橋はカメラ今日が", "ja", tmp_path) == "[ja]" + normalize(
        "NFKD", " はしはカメラきょうが"
    )


def test_chinese_is_spelled_in_cangjie(monkeypatch, tmp_path):
    """Characters with the same keys are numbered; a character that has none stays."""
    (tmp_path / "Cangjie5_TC.json").write_text('["你\\tonf", "好\\tonf", "x\\tvnd"]', encoding="utf-8")
    module = types.ModuleType("spacy_pkuseg")
    module.pkuseg = lambda: types.SimpleNamespace(cut=list)
    monkeypatch.setitem(sys.modules, "spacy_pkuseg", module)
    spelled = "[cj_o][cj_n][cj_f][cj_.] [cj_o][cj_n][cj_f][cj_1][cj_.] 界 x"
    assert in_language("你好界X", "zh", tmp_path) == f"[zh]{spelled}"


def test_a_text_beyond_the_table_of_positions_is_refused():
    with pytest.raises(RequestError, match="at most 500"):
        ids("tiny", "a b " * 300)
