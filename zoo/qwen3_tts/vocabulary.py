"""The text vocabulary of the demo checkpoints: a small byte-level BPE, with the published ids and, if asked,
the published size."""

from __future__ import annotations

from functools import cache
from typing import Any

from zoo.text.bpe import ENGLISH, Pair, byte_symbols, in_symbols, learn

_SPECIAL = """
<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|> <|quad_end|>
<|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> <tool_call> </tool_call> <|fim_prefix|> <|fim_middle|>
<|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> <tool_response> </tool_response> <think> </think> <|audio_start|> <|audio_end|>
<tts_pad> <tts_text_bos> <tts_text_eod>
"""
SPECIAL = tuple(_SPECIAL.split())
ROLES = ("assistant", "user", "system")  # each must be one token, because the prompt's layout is fixed
# Pieces that reveal how a text was split. Only a wrong split, or no NFC, makes the first five; a right split
# makes the others.
TRAPS = ("12", "n't", "Tis", " 1", "e\u0301", "iPhone", ".\n", "\n\n", "  ", " !", "'s")
# The published ids of the roles. Filler takes most of the other published ids.
PUBLISHED_IDS = {"assistant": 77091, "user": 872, "system": 8948}
PUBLISHED_WORDS = 151643
NUM_MERGES = 400
WORDS = (
    ENGLISH
    + """
we were walking through the forest talking singing and laughing while the wind was blowing it should have been raining but it was not
naïve café déjà vu über straße señor mañana 你好 世界 今天 天气 很好 我们 大家 こんにちは ありがとう 안녕하세요 привет мир спасибо
"""
)


@cache
def merges() -> tuple[Pair, ...]:
    """Return the BPE merges. The first ones join each of ROLES and TRAPS into one piece; the rest are the
    most frequent pairs of WORDS."""
    pieces = [in_symbols(text) for text in (*ROLES, *TRAPS)]
    return learn(pieces, [in_symbols(f" {word}") for word in WORDS.split()], NUM_MERGES, is_last_first=True)


def vocabulary(full: bool) -> dict[str, int]:
    """Return vocab.json: bytes, merged pieces and, if `full`, filler up to the published size that no merge
    makes."""
    pieces = [left + right for left, right in merges()]
    tokens = list(dict.fromkeys([*byte_symbols().values(), *pieces]))  # two merges can make the same piece
    if not full:
        return {token: index for index, token in enumerate(tokens)}
    fixed = {index: token for token, index in PUBLISHED_IDS.items()}
    rest = iter([token for token in tokens if token not in PUBLISHED_IDS])
    return {fixed.get(i) or next(rest, f"<filler {i}>"): i for i in range(PUBLISHED_WORDS)}


def text_ids(full: bool) -> dict[str, int]:
    """Return the ids that config.json needs: every special token, and `assistant`."""
    words = vocabulary(full)
    return {"assistant": words["assistant"], **{token: len(words) + i for i, token in enumerate(SPECIAL)}}


def tokenizer_config(first: int) -> dict[str, Any]:
    """Return tokenizer_config.json. first: the id of the first special token."""
    plain = {
        token for token in SPECIAL if token.startswith(("<|fim", "<|repo", "<|file", "<tool", "</", "<think"))
    }
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(first + i): {"content": t, **flags, "special": t not in plain} for i, t in enumerate(SPECIAL)
        },
        "additional_special_tokens": [token for token in SPECIAL[1:] if token not in plain],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "processor_class": "Qwen3TTSProcessor",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
