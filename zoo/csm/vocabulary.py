"""The text side of demo checkpoints: a small Llama 3 tokenizer, in which two special tokens stand for
audio."""

from __future__ import annotations

from typing import Any

from zoo.nn import llama_vocabulary
from zoo.nn.llama_vocabulary import BEGIN, END, SPECIAL, special_tokens

AUDIO, AUDIO_END = 2, 3  # indices among the special tokens
NAMES = SPECIAL | {AUDIO: "<|AUDIO|>", AUDIO_END: "<|audio_eos|>"}
# Writes what the original's generator writes, with a placeholder for all frames of an audio.
CHAT_TEMPLATE = """{%- for message in messages -%}
<|begin_of_text|>[{{ message['role'] }}]
{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}{{ part['text'] }}<|end_of_text|>
{%- else -%}<|AUDIO|><|audio_eos|>
{%- endif -%}
{%- endfor -%}
{%- endfor -%}
"""


def texts(num_words: int) -> dict[str, dict[str, Any]]:
    """Return the JSON files of tokenizer and processor by name."""
    ends = {"bos_token": BEGIN, "eos_token": END, "pad_token": END}
    return {
        "tokenizer.json": llama_vocabulary.tokenizer(num_words, special_tokens(num_words, NAMES), True),
        "tokenizer_config.json": ends
        | {
            "clean_up_tokenization_spaces": True,
            "model_input_names": ["input_ids", "attention_mask"],
            "model_max_length": 2048,
            "processor_class": "CsmProcessor",
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
        "special_tokens_map.json": ends,
        "preprocessor_config.json": {
            "chunk_length_s": None,
            "feature_extractor_type": "EncodecFeatureExtractor",
            "feature_size": 1,
            "overlap": None,
            "padding_side": "right",
            "padding_value": 0.0,
            "processor_class": "CsmProcessor",
            "return_attention_mask": True,
            "sampling_rate": 24000,
        },
    }
