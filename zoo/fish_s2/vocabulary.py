"""The model's special tokens, and the text vocabulary of the demo checkpoints: a small byte-level BPE that
can be filled up to the published size."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from typing import Any

from zoo.text.bpe import QWEN_PARTS, Pair, added_token, byte_symbols, chain, in_symbols, tokenizer_json

# Added tokens in the order of their ids: those of Qwen3, then those of Fish Audio S2, which start at 151669.
_QWEN = """
<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|>
<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>
"""
_QWEN_PLAIN = """
<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>
<tool_response> </tool_response> <think> </think>
"""
_FISH = """
<|pad|> <|phoneme_start|> <|phoneme_end|> <|text|> <|voice|> <|interleave|> <|audio_start|> <|audio_end|>
<|audio_pad|>
"""
PHONEMES = ("<|phoneme_start|>", "<|phoneme_end|>")  # the only special tokens that a user's text may contain
START, END, VOICE, INTERLEAVE = "<|im_start|>", "<|im_end|>", "<|voice|>", "<|interleave|>"
ADDED = (*_QWEN.split(), *_QWEN_PLAIN.split(), *_FISH.split())  # the semantic codes follow
_S1 = """
<|begin_of_text|> <|end_of_text|> <|pad|> <|im_start|> <|im_end|> <|phoneme_start|> <|phoneme_end|>
<|tool_call_start|> <|tool_call_end|> <|text|> <|voice|> <|interleave|> <|audio_start|> <|audio_end|>
<|audio|>
"""
S1_ADDED = tuple(_S1.split())  # of OpenAudio S1; the semantic codes follow

PUBLISHED_WORDS = 151643
# Pieces of the demo's BPE. The words of the prompt keep it short. ".\n\n" would join two segments that are
# not tokenized separately. Others reveal how a text was split.
PIECES = (
    " provided", " following", " reference", " speech", " text", " the", " to", "convert", "assistant",
    "system", "user", "Speech", "Text", "speaker", ".\n\n", ":\n\n", ":\n", "\n\n", "<|", "|>", " [", "]",
    "ing", "er", "ou", "th", "'s", "n't", "12", "e\u0301",
)  # fmt: skip


def semantic(code: int) -> str:
    return f"<|semantic:{code}|>"


@cache
def merges() -> tuple[Pair, ...]:
    """Return the BPE merges: for each piece, the chain that joins its symbols one by one."""
    return tuple(dict.fromkeys(pair for piece in PIECES for pair in chain(in_symbols(piece))))


def vocabulary(full: bool) -> dict[str, int]:
    """Return token ids: bytes, merged pieces and, if `full`, filler up to the published size that no merge
    makes."""
    tokens = list(dict.fromkeys([*byte_symbols().values(), *(left + right for left, right in merges())]))
    if full:
        tokens += [f"<filler {i}>" for i in range(len(tokens), PUBLISHED_WORDS)]
    return {token: index for index, token in enumerate(tokens)}


def token_ids(full: bool, num_codes: int, added: Sequence[str] = ADDED) -> dict[str, int]:
    """Return the ids of the added tokens, including those of the semantic codes."""
    first = len(vocabulary(full))
    return {token: first + i for i, token in enumerate((*added, *map(semantic, range(num_codes))))}


def ranks(full: bool) -> str:
    """Return tokenizer.tiktoken: one line per token with its bytes in base64 and its id."""
    bytes_of = {symbol: byte for byte, symbol in byte_symbols().items()}

    def encoded(token: str) -> str:
        raw = bytes(bytes_of[symbol] for symbol in token.replace(" ", in_symbols(" ")))
        return b64encode(raw).decode()

    return "".join(f"{encoded(token)} {index}\n" for token, index in vocabulary(full).items())


def tokenizer(full: bool, num_codes: int) -> dict[str, Any]:
    """Return tokenizer.json."""
    plain = _QWEN_PLAIN.split()
    added = token_ids(full, num_codes).items()
    tokens = (added_token(index, token, token not in plain) for token, index in added)
    return tokenizer_json(vocabulary(full), map(" ".join, merges()), tokens, **QWEN_PARTS)


def tokenizer_config() -> dict[str, Any]:
    """Return tokenizer_config.json."""
    return {
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "model_max_length": 32768,
        "pad_token": "<|pad|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
