"""The tokenizer of the demo checkpoints: a small BPE with byte fallback in the published format."""

from __future__ import annotations

from functools import cache
from typing import Any

from zoo.text.bpe import ENGLISH, Pair, added_token, learn, tokenizer_json

SPECIAL = {
    0: "<unk>",
    1: "<s>",
    2: "</s>",
    101: "<|audio_start|>",
    102: "<|audio_end|>",
    # tokenizer_config.json spells the next two differently, as the published one does
    103: "<|ref_audio_start|>",
    104: "<|ref_audio_end|>",
}
PUBLISHED_WORDS = 73448
# Words that must be one BPE piece: Chinese words, which the tokenizer splits again, one of them with its
# space, and one with a Latin letter, which it does not split.
TRAPS = ("你好", "世界", "今天", "天气", "很好", "▁我们", "大家", "卡拉O")
NUM_MERGES = 300
WORDS = (
    ENGLISH
    + """
Good Once It's iPhone 7 4 5 0 1 2 3 6 8 9 , . ! ? : ; ' " ( ) - < > | / _ naïve café über straße señor
"""
)


@cache
def merges() -> tuple[Pair, ...]:
    """Return merges: chains that make each of TRAPS one piece, then the most frequent pairs of WORDS."""
    return learn(TRAPS, [f"▁{word}" for word in WORDS.split()], NUM_MERGES)


def vocabulary(full: bool) -> dict[str, int]:
    """Return token -> id: special tokens at their published ids, then bytes, characters and pieces.

    A full vocabulary is filled up to the published size.
    """
    characters = sorted({character for word in (*WORDS.split(), *TRAPS) for character in word} | {"▁"})
    pieces = ["".join(pair) for pair in merges()]
    rest = iter(dict.fromkeys([f"<0x{byte:02X}>" for byte in range(256)] + characters + pieces))
    words: dict[str, int] = {}
    index = 0
    while (token := SPECIAL.get(index) or next(rest, None)) is not None:
        words[token] = index
        index += 1
    return words | ({f"<filler {i}>": i for i in range(index, PUBLISHED_WORDS)} if full else {})


def tokenizer(full: bool) -> dict[str, Any]:
    """Return the content of tokenizer.json."""
    first, text, second = (
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        *({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB")),
    )
    normalizers = [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    return tokenizer_json(
        vocabulary(full),
        map(list, merges()),
        (added_token(index, token) for index, token in SPECIAL.items()),
        normalizer={"type": "Sequence", "normalizers": normalizers},
        post_processor={
            "type": "TemplateProcessing",
            "single": [first, text],
            "pair": [text, second],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        decoder={"type": "Sequence", "decoders": decoders},
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )


def tokenizer_config() -> dict[str, Any]:
    """Return the content of tokenizer_config.json."""
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    spelled = SPECIAL | {103: "<|audio_prompt_start|>", 104: "<|audio_prompt_end|>"}
    return {
        "add_bos_token": True,
        "add_eos_token": False,
        "added_tokens_decoder": {str(index): {"content": token, **flags} for index, token in spelled.items()},
        "additional_special_tokens": [token for index, token in spelled.items() if index > 2],
        "bos_token": "<s>",
        "clean_up_tokenization_spaces": False,
        "eos_token": "</s>",
        "legacy": True,
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": None,
        "sp_model_kwargs": {},
        "spaces_between_special_tokens": False,
        "tokenizer_class": "VoxCPM2Tokenizer",
        "unk_token": "<unk>",
        "use_default_system_prompt": False,
    }


def special_tokens_map() -> dict[str, Any]:
    """Return the content of special_tokens_map.json."""
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {
        f"{role}_token": {"content": token, **flags}
        for role, token in (("bos", "<s>"), ("eos", "</s>"), ("unk", "<unk>"))
    }
