"""A tokenizer.json as the models read it: the whole text, and nothing but the text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zoo.nn.llama_vocabulary import BEGIN, special_tokens, tokenizer
from zoo.nn.plain_tokenizer import PlainTokenizer

WORDS, ROWS = 600, 1000
# what transformers' `save_pretrained` writes behind a training that cut and padded its texts
LEFT_BEHIND = {
    "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
    "padding": {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    },
}


def written(directory: Path, **changes: Any) -> Path:
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(tokenizer(WORDS, special_tokens(WORDS)) | changes))
    return path


def read(path: Path, rows: int = ROWS) -> PlainTokenizer:
    return PlainTokenizer(path, (BEGIN,), rows, "a model")


@pytest.mark.parametrize("text", ["a", "the quick brown fox jumps over the lazy dog " * 20, "🎉 مرحبا 12"])
def test_a_text_is_neither_cut_nor_padded(tmp_path, text):
    expected = read(written(tmp_path))(text)
    assert read(written(tmp_path, **LEFT_BEHIND))(text) == expected


def test_a_text_cannot_spell_a_special_token(tmp_path):
    tokens = read(written(tmp_path))
    assert tokens.special[BEGIN] not in tokens(BEGIN)


@pytest.mark.parametrize("added", [3, [{"id": 1}], [{"content": "a", "id": "b"}]])
def test_malformed_added_tokens_are_refused(tmp_path, added):
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        read(written(tmp_path, added_tokens=added))


def test_a_word_beyond_the_models_rows_is_refused(tmp_path):
    content = tokenizer(WORDS, special_tokens(WORDS))
    content["model"]["vocab"]["<filler 599>"] = ROWS  # one id is left out, so the number of words is the same
    with pytest.raises(ValueError, match=f"ids up to {ROWS}"):
        read(written(tmp_path, model=content["model"]))
