"""A small Llama 3 tokenizer for demo checkpoints, with Orpheus' added tokens at their published ids."""

from __future__ import annotations

from typing import Any

from zoo.nn import llama_vocabulary
from zoo.nn.llama_vocabulary import SPECIAL, special_tokens
from zoo.orpheus.tokens import CUSTOM, NUM_CUSTOM
from zoo.text.bpe import added_token


def tokenizer(num_words: int) -> dict[str, Any]:
    """tokenizer.json: Llama 3's, and Orpheus' custom tokens, which are not special."""
    first = num_words + CUSTOM
    custom = [added_token(first + i, f"<custom_token_{i}>", is_special=False) for i in range(NUM_CUSTOM)]
    return llama_vocabulary.tokenizer(num_words, special_tokens(num_words) + custom)


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
