"""The text vocabularies of demo checkpoints, with the ids of the published ones where the model knows
them."""

from __future__ import annotations

import string
from functools import cache
from typing import Any

from zoo.chatterbox.languages import LANGUAGES
from zoo.text.bpe import ENGLISH, Pair, added_token, byte_symbols, in_symbols, learn, tokenizer_json

STOP, UNKNOWN, SPACE, START = 0, 1, 2, 255
SIGNS = "!'(),-.?\""  # ids from 3
FIRST_LETTER, FIRST_MERGE, NUM_MERGES = 14, 40, 200
OTHERS = string.digits + string.ascii_uppercase + "éèñüß你好\u0301\u0300"  # ids from 256
SOUNDS = ("[UH]", "[UM]", "[giggle]", "[laughter]")  # ids from 604
FIRST_SOUND, ENGLISH_SIZE, FIRST_LANGUAGE, MULTILINGUAL_SIZE = 604, 704, 708, 2454
GPT2_MERGES = 240
GPT2_TAGS = ("[angry]", "[laugh]", "[sigh]")
GPT2_SIZE = 50276  # as published; 19 of them are tags
END_OF_TEXT = "<|endoftext|>"


@cache
def merges() -> tuple[Pair, ...]:
    return learn((), ENGLISH.split(), NUM_MERGES)


def tokenizer(is_multilingual: bool) -> dict[str, Any]:
    """Return tokenizer.json."""
    words = {"[STOP]": STOP, "[UNK]": UNKNOWN, "[SPACE]": SPACE, "[START]": START}
    special = dict(words) | {name: FIRST_SOUND + i for i, name in enumerate(SOUNDS)}
    if is_multilingual:
        tags = [f"[{language}]" for language in LANGUAGES]
        tags += [f"[cj_{key}]" for key in (*string.ascii_lowercase, *string.digits, ".")]
        special |= {name: FIRST_LANGUAGE + i for i, name in enumerate(tags)}
    words |= {sign: 3 + i for i, sign in enumerate(SIGNS)}
    words |= {letter: FIRST_LETTER + i for i, letter in enumerate(string.ascii_lowercase)}
    words |= {left + right: FIRST_MERGE + i for i, (left, right) in enumerate(merges())}
    words |= {character: 256 + i for i, character in enumerate(OTHERS)}
    tokens = (added_token(token_id, name) for name, token_id in sorted(special.items(), key=lambda x: x[1]))
    split = {"type": "Whitespace"}
    return tokenizer_json(
        words | special, map(" ".join, merges()), tokens, pre_tokenizer=split, unk_token="[UNK]"
    )


@cache
def gpt2_merges() -> tuple[Pair, ...]:
    return learn((), [in_symbols(f" {word}") for word in ENGLISH.split()], GPT2_MERGES)


def gpt2_words(is_full: bool) -> dict[str, int]:
    """Return vocab.json: bytes, merged pieces, at the published size filler, and the end of a text."""
    tokens = list(dict.fromkeys([*byte_symbols().values(), *map("".join, gpt2_merges())]))
    if is_full:
        tokens += [f"<filler {i}>" for i in range(len(tokens), GPT2_SIZE - 20)]
    return {token: i for i, token in enumerate([*tokens, END_OF_TEXT])}


def gpt2_tags(words: dict[str, int]) -> dict[str, int]:
    """Return added_tokens.json: the tags, whose ids follow the words."""
    return {tag: len(words) + i for i, tag in enumerate(GPT2_TAGS)}
