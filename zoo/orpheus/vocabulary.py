"""A small Llama 3 tokenizer for demo checkpoints, with Orpheus' added tokens at their published ids."""

from __future__ import annotations

from functools import cache
from typing import Any

from zoo.nn.bpe import ENGLISH, Pair, byte_symbols, in_symbols, learn
from zoo.orpheus.tokens import BEGIN_TEXT, CUSTOM, NUM_CUSTOM

NUM_WORDS = 128000
NUM_MERGES = 200
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
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
def vocabulary() -> dict[str, int]:
    """Token -> id: bytes, merged pieces, then filler that no merge can reach, up to the published size."""
    tokens = list(dict.fromkeys([*byte_symbols().values(), *(left + right for left, right in merges())]))
    filler = [f"<filler {i}>" for i in range(len(tokens), NUM_WORDS)]
    return {token: i for i, token in enumerate([*tokens, *filler])}


def added_tokens() -> list[dict[str, Any]]:
    """The 256 special tokens of Llama 3, then Orpheus' custom tokens, which are not special."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    special = [
        {
            "id": BEGIN_TEXT + i,
            "content": SPECIAL.get(i, f"<|reserved_special_token_{i}|>"),
            **flags,
            "special": True,
        }
        for i in range(CUSTOM - BEGIN_TEXT)
    ]
    custom = [
        {"id": CUSTOM + i, "content": f"<custom_token_{i}>", **flags, "special": False}
        for i in range(NUM_CUSTOM)
    ]
    return special + custom


def tokenizer() -> dict[str, Any]:
    """tokenizer.json"""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    begin = SPECIAL[0]
    first = {"SpecialToken": {"id": begin, "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(),
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False},
                byte_level,
            ],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {begin: {"id": begin, "ids": [BEGIN_TEXT], "tokens": [begin]}},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": vocabulary(),
            "merges": [f"{left} {right}" for left, right in merges()],
        },
    }


def tokenizer_config() -> dict[str, Any]:
    """tokenizer_config.json"""
    return {
        "bos_token": SPECIAL[0],
        "clean_up_tokenization_spaces": True,
        "eos_token": SPECIAL[9],
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 131072,
        "pad_token": SPECIAL[4],
        "padding_side": "right",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def special_tokens_map() -> dict[str, Any]:
    """special_tokens_map.json"""
    return {"bos_token": SPECIAL[0], "eos_token": SPECIAL[9], "pad_token": SPECIAL[4]}
