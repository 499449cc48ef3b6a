"""A small Llama 3 tokenizer for demo checkpoints: byte-level BPE with the published split pattern, filled up
to the published number of ids."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from zoo.text.bpe import (
    BYTE_LEVEL,
    ENGLISH,
    Pair,
    added_token,
    byte_symbols,
    in_symbols,
    learn,
    split_bytes,
    tokenizer_json,
)

NUM_WORDS = 128000  # as published; the special tokens follow
NUM_SPECIAL = 256
NUM_MERGES = 200
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = {
    0: BEGIN,
    1: END,
    4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}


@cache
def merges() -> tuple[Pair, ...]:
    words = [in_symbols(f" {word}") for word in ENGLISH.split()]
    return learn((), words, NUM_MERGES)


@cache
def vocabulary(num_words: int) -> dict[str, int]:
    """Return token -> id: bytes, merged pieces, then filler that no merge can reach."""
    tokens = list(dict.fromkeys([*byte_symbols().values(), *(left + right for left, right in merges())]))
    filler = [f"<filler {i}>" for i in range(len(tokens), num_words)]
    return {token: i for i, token in enumerate([*tokens, *filler])}


def special_tokens(num_words: int, names: Mapping[int, str] = SPECIAL) -> list[dict[str, Any]]:
    """Return Llama 3's special tokens, which follow the words. names: the text of each, by its index."""
    texts = (names.get(i, f"<|reserved_special_token_{i}|>") for i in range(NUM_SPECIAL))
    return [added_token(num_words + i, text) for i, text in enumerate(texts)]


def tokenizer(num_words: int, added: list[dict[str, Any]], has_end: bool = False) -> dict[str, Any]:
    """Return tokenizer.json. has_end: the tokenizer's own template adds END after a text, too."""
    byte_level = BYTE_LEVEL | {"trim_offsets": True}
    first, last = ({"SpecialToken": {"id": name, "type_id": 0}} for name in (BEGIN, END))
    text = [{"Sequence": {"id": "A", "type_id": 0}}, *([last] if has_end else [])]
    names = {BEGIN: num_words} | ({END: num_words + 1} if has_end else {})
    return tokenizer_json(
        vocabulary(num_words),
        map(" ".join, merges()),
        added,
        pre_tokenizer=split_bytes(SPLIT, byte_level),
        post_processor={
            "type": "TemplateProcessing",
            "single": [first, *text],
            "pair": [first, *text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {
                name: {"id": name, "ids": [token_id], "tokens": [name]} for name, token_id in names.items()
            },
        },
        decoder=byte_level,
        ignore_merges=True,
    )
