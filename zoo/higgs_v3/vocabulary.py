"""The model's special tokens, and the text vocabulary of the demo checkpoints: a small byte-level BPE with,
if asked, the published ids and size."""

from __future__ import annotations

from functools import cache
from itertools import chain as concatenate
from typing import Any

from zoo.text.bpe import QWEN_PARTS, Pair, added_token, byte_symbols, chain, in_symbols, tokenizer_json

# The 43 control tags that the model card documents. A user's text may contain no other special tokens.
_EMOTIONS = """
elation amusement enthusiasm determination pride contentment affection relief contemplation confusion surprise awe longing arousal anger
fear disgust bitterness sadness shame helplessness
"""
_STYLES = "singing shouting whispering"
_SOUNDS = "cough laughter crying screaming burping humming sigh sniff sneeze"
_PROSODY = "speed_very_slow speed_slow speed_fast speed_very_fast pitch_low pitch_high pause long_pause"
_EXPRESSIVENESS = "expressive_high expressive_low"


def _tags(kind: str, names: str) -> list[str]:
    return [f"<|{kind}:{name}|>" for name in names.split()]


CONTROL_TAGS = (
    *_tags("emotion", _EMOTIONS),
    *_tags("style", _STYLES),
    *_tags("sfx", _SOUNDS),
    *_tags("prosody", _PROSODY),
    *_tags("prosody", _EXPRESSIVENESS),
)
# Added tokens in the order of their ids: those of Qwen2.5, then those of Higgs, which start at 151665.
_QWEN = """
<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|> <|quad_end|>
<|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>
"""
_QWEN_PLAIN = "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>"
_STRUCTURE = """
<|asr|> <|streaming_asr|> <|tts|> <|streaming_tts|> <|audio_cont_txt|> <|audio|> <|audio_end|> <|text|> <|text_end|> <|eoc|> <|user|>
<|assistant|> <|system|> <|await_audio|> <|ref_audio|> <|ref_text|>
"""
HIGGS = (
    *_STRUCTURE.split(),
    *_tags("emotion", _EMOTIONS),
    *_tags("env", "music noise"),
    *_tags("style", _STYLES),
    *_tags("sfx", _SOUNDS),
    *_tags("prosody", _PROSODY),
    "<|chatml|>",
    *_tags("prosody", _EXPRESSIVENESS),
)
ADDED = (*_QWEN.split(), *_QWEN_PLAIN.split(), *HIGGS)

PUBLISHED_WORDS = 151643
# The pieces of "Hello from PegaInfer.", the only text whose published ids are known (a public golden test).
# All other pieces are filler at that size.
PUBLISHED_IDS = {"Hello": 9707, " from": 504, " P": 393, "ega": 11188, "In": 641, "fer": 802, ".": 13}
WORDS = (" the", " to", " h", " s", " w", "ing", "er", "ou", "th", "'s", "n't")


@cache
def merges() -> tuple[Pair, ...]:
    """Return the BPE merges: for each known piece and word, the chain that joins its letters one by one."""
    chains = [chain(in_symbols(piece)) for piece in (*PUBLISHED_IDS, *WORDS)]
    return tuple(dict.fromkeys(concatenate(*chains)))


def vocabulary(full: bool) -> dict[str, int]:
    """Return token ids: bytes, merged pieces and, if `full`, filler up to the published size that no merge
    makes."""
    tokens = list(dict.fromkeys([*byte_symbols().values(), *(left + right for left, right in merges())]))
    if not full:
        return {token: index for index, token in enumerate(tokens)}
    fixed = {index: in_symbols(piece) for piece, index in PUBLISHED_IDS.items()}
    rest = iter([token for token in tokens if token not in fixed.values()])
    return {fixed.get(i) or next(rest, f"<filler {i}>"): i for i in range(PUBLISHED_WORDS)}


def tokenizer(full: bool) -> dict[str, Any]:
    """Return tokenizer.json."""
    words, plain = vocabulary(full), _QWEN_PLAIN.split()
    return tokenizer_json(
        words,
        map(" ".join, merges()),
        (added_token(len(words) + i, token, token not in plain) for i, token in enumerate(ADDED)),
        **QWEN_PARTS,
    )


def tokenizer_config() -> dict[str, Any]:
    """Return tokenizer_config.json, which lists the special tokens of Higgs."""
    return {
        "add_prefix_space": False,
        "backend": "tokenizers",
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "errors": "replace",
        "extra_special_tokens": list(HIGGS),
        "is_local": False,
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
