"""Random checkpoints in the published layout: every file, but no trained weights. They serve tests, first
tries and speed measurements.

    write("demo", "tiny")    # a few hundred kilobytes, runs anywhere
    write("full", "0.6b")    # the published shapes and sizes; see SIZES for others, such as "0.6b-base", which clones

A tensor's values depend only on (seed, published name, shape). Integer arithmetic makes them the same on
every machine.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zoo.checkpoint import synthetic
from zoo.checkpoint.config import change
from zoo.checkpoint.synthetic import Rule
from zoo.nn import mimi_demo
from zoo.qwen3_tts.config import SAMPLE_RATE_HZ, Config
from zoo.qwen3_tts.vocabulary import SPECIAL, merges, text_ids, tokenizer_config, vocabulary

# --- configs ------------------------------------------------------------------------------------------------

LANGUAGES = {
    "chinese": 2055,
    "english": 2050,
    "german": 2053,
    "italian": 2070,
    "portuguese": 2071,
    "spanish": 2054,
    "japanese": 2058,
    "korean": 2064,
    "french": 2061,
    "russian": 2069,
    "beijing_dialect": 2074,
    "sichuan_dialect": 2062,
}
VOICES = {
    "serena": 3066,
    "vivian": 3065,
    "uncle_fu": 3010,
    "ryan": 3061,
    "aiden": 2861,
    "ono_anna": 2873,
    "sohee": 2864,
    "eric": 2875,
    "dylan": 2878,
}
DIALECTS = {"eric": "sichuan_dialect", "dylan": "beijing_dialect"}
CONTROL = {
    "pad": 2148,
    "bos": 2149,
    "eos_token": 2150,
    "think": 2154,
    "nothink": 2155,
    "think_bos": 2156,
    "think_eos": 2157,
}


def _stack(hidden: int, inner: int, layers: int, heads: int, head_dim: int) -> dict[str, Any]:
    """The keys that the talker and the code predictor share."""
    return {
        "attention_bias": False,
        "attention_dropout": 0,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_code_groups": 16,
        "num_hidden_layers": layers,
        "num_key_value_heads": heads // 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "sliding_window": None,
        "use_cache": True,
        "use_sliding_window": False,
    }


def _root(
    size: str,
    talker: dict,
    depth: dict,
    codes: int,
    text: dict[str, int],
    text_hidden: int,
    text_vocab: int,
    ids,
) -> dict[str, Any]:
    """Return config.json of a CustomVoice model. ids: maps a published control id to its id in this
    vocabulary."""
    # no effect: all three sections count the same positions
    sections = [24, 20, 20] if talker["head_dim"] == 128 else [2, 1, 1]
    return {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "assistant_token_id": text["assistant"],
        "im_end_token_id": text["<|im_end|>"],
        "im_start_token_id": text["<|im_start|>"],
        "model_type": "qwen3_tts",
        "talker_config": {
            **talker,
            **{f"codec_{name}_id": ids(index) for name, index in CONTROL.items()},
            "code_predictor_config": {
                **depth,
                "max_position_embeddings": 65536,
                "max_window_layers": 28,
                "model_type": "qwen3_tts_talker_code_predictor",
                "rope_scaling": None,
                "vocab_size": codes,
            },
            "codec_language_id": {name: ids(index) for name, index in LANGUAGES.items()},
            "max_position_embeddings": 32768,
            "model_type": "qwen3_tts_talker",
            "position_id_per_seconds": 13,
            "rope_scaling": {
                "interleaved": True,
                "mrope_section": sections,
                "rope_type": "default",
                "type": "default",
            },
            "spk_id": {name: ids(index) for name, index in VOICES.items()},
            "spk_is_dialect": {name: DIALECTS.get(name, False) for name in VOICES},
            "text_hidden_size": text_hidden,
            "text_vocab_size": text_vocab,
            "vocab_size": codes + 1024,
        },
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        # With 4.57.3 or later, the reference splits text like another model if the vocabulary is large.
        "transformers_version": "4.57.1",
        "tts_bos_token_id": text["<tts_text_bos>"],
        "tts_eos_token_id": text["<tts_text_eod>"],
        "tts_model_size": size,
        "tts_model_type": "custom_voice",
        "tts_pad_token_id": text["<tts_pad>"],
    }


CODEC: dict[str, Any] = {
    "architectures": ["Qwen3TTSTokenizerV2Model"],
    "decode_upsample_rate": 1920,
    "decoder_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "codebook_dim": 512,
        "codebook_size": 2048,
        "decoder_dim": 1536,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "latent_dim": 1024,
        "layer_scale_initial_scale": 0.01,
        "max_position_embeddings": 8000,
        "num_attention_heads": 16,
        "num_hidden_layers": 8,
        "num_key_value_heads": 16,
        "num_quantizers": 16,
        "num_semantic_quantizers": 1,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000,
        "semantic_codebook_size": 4096,
        "sliding_window": 72,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
        "vector_quantization_hidden_dimension": 512,
    },
    "encode_downsample_rate": 1920,
    "encoder_config": {"_frame_rate": 12.5} | mimi_demo.PUBLISHED,
    "encoder_valid_num_quantizers": 16,
    "input_sample_rate": 24000,
    "model_type": "qwen3_tts_tokenizer_12hz",
    "output_sample_rate": 24000,
}
TINY_CODEC = copy.deepcopy(CODEC)
TINY_CODEC["decoder_config"] |= {
    "codebook_dim": 32,
    "codebook_size": 64,
    "decoder_dim": 32,
    "head_dim": 8,
    "hidden_size": 16,
    "intermediate_size": 32,
    "latent_dim": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "sliding_window": 6,
    "vector_quantization_hidden_dimension": 32,
}
TINY_CODEC["encoder_config"] |= mimi_demo.TINY | {"codebook_size": 64}
MID_CODEC = copy.deepcopy(CODEC)
MID_CODEC["decoder_config"] |= {
    "decoder_dim": 512,
    "latent_dim": 512,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}

GENERATION = {
    "do_sample": True,
    "repetition_penalty": 1.05,
    "temperature": 0.9,
    "top_p": 1.0,
    "top_k": 50,
    "subtalker_dosample": True,
    "subtalker_temperature": 0.9,
    "subtalker_top_p": 1.0,
    "subtalker_top_k": 50,
    "max_new_tokens": 8192,
}
FEATURES = {
    "chunk_length_s": None,
    "feature_extractor_type": "EncodecFeatureExtractor",
    "feature_size": 1,
    "overlap": None,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
    "sampling_rate": 24000,
}

# --- sizes --------------------------------------------------------------------------------------------------


def _published(size: str, talker: dict, depth: dict) -> dict[str, Any]:
    return _root(
        size,
        talker,
        depth,
        2048,
        text_ids(full=True),
        text_hidden=2048,
        text_vocab=151936,
        ids=lambda index: index,
    )


def _tiny(size: str, depth_hidden: int) -> dict[str, Any]:
    talker, depth = _stack(32, 64, 3, 4, head_dim=8), _stack(depth_hidden, 48, 2, 4, head_dim=8)
    text = text_ids(full=False)
    return _root(
        size, talker, depth, 64, text, text_hidden=24, text_vocab=768, ids=lambda index: index - 2048 + 64
    )


def _mid() -> dict[str, Any]:
    """Return the config of a model with about a fifth of the 0.6B's parameters and all of its codes and
    positions. It is for speed comparisons on machines where the published size is too slow."""
    talker, depth = _stack(512, 1536, 16, 8, head_dim=64), _stack(512, 1536, 5, 8, head_dim=64)
    return _root(
        "0b6",
        talker,
        depth,
        2048,
        text_ids(full=True),
        text_hidden=512,
        text_vocab=151936,
        ids=lambda index: index,
    )


def _files(config: dict[str, Any], codec: dict[str, Any], max_new_tokens: int) -> dict[str, dict[str, Any]]:
    first = config["im_start_token_id"] - SPECIAL.index("<|im_start|>")
    return {
        "config.json": config,
        "generation_config.json": {**GENERATION, "max_new_tokens": max_new_tokens},
        "preprocessor_config.json": {"processor_class": "Qwen3TTSProcessor"},
        "tokenizer_config.json": tokenizer_config(first),
        "configuration.json": {"framework": "pytorch", "task": "text-to-speech", "allow_remote": True},
        "speech_tokenizer/config.json": codec,
        "speech_tokenizer/preprocessor_config.json": FEATURES,
        "speech_tokenizer/configuration.json": {
            "framework": "pytorch",
            "task": "feature-extraction",
            "allow_remote": True,
        },
    }


def _variant(
    custom_voice: dict[str, dict[str, Any]], variant: str, **speaker: Any
) -> dict[str, dict[str, Any]]:
    """Return the files of a variant without built-in voices. speaker: further keys of
    speaker_encoder_config."""
    files = copy.deepcopy(custom_voice)
    config = files["config.json"]
    talker = config["talker_config"]
    talker |= {"spk_id": {}, "spk_is_dialect": {}}
    talker["codec_language_id"] = {
        name: index for name, index in talker["codec_language_id"].items() if "dialect" not in name
    }
    config["tts_model_type"] = variant
    if variant == "base":
        config["speaker_encoder_config"] = {
            "enc_dim": talker["hidden_size"],
            "sample_rate": SAMPLE_RATE_HZ,
            **speaker,
        }
    return files


TINY_SPEAKER = {"enc_channels": [16, 16, 16, 16, 48], "enc_attention_channels": 8, "enc_se_channels": 8}

# The JSON files of each size, except the vocabulary. "tiny" is built like the 0.6B model and "tiny-1.7b",
# which has a narrower code predictor, like the 1.7B model; "mid" is only for speed. A model without a suffix
# is CustomVoice, "-base" clones, and "-design" makes voices from descriptions; the 0.6B has no such variant.
CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": _files(_tiny("0b6", 32), TINY_CODEC, 250),
    "tiny-1.7b": _files(_tiny("1b7", 16), TINY_CODEC, 250),
    "mid": _files(_mid(), MID_CODEC, 8192),
    "0.6b": _files(
        _published("0b6", _stack(1024, 3072, 28, 16, 128), _stack(1024, 3072, 5, 16, 128)), CODEC, 8192
    ),
    "1.7b": _files(
        _published("1b7", _stack(2048, 6144, 28, 16, 128), _stack(1024, 3072, 5, 16, 128)), CODEC, 8192
    ),
}
CONFIGS |= {
    "tiny-base": _variant(CONFIGS["tiny"], "base", **TINY_SPEAKER),
    "tiny-1.7b-base": _variant(CONFIGS["tiny-1.7b"], "base", **TINY_SPEAKER),
    "tiny-1.7b-design": _variant(CONFIGS["tiny-1.7b"], "voice_design"),
    "0.6b-base": _variant(CONFIGS["0.6b"], "base"),
    "1.7b-base": _variant(CONFIGS["1.7b"], "base"),
    "1.7b-design": _variant(CONFIGS["1.7b"], "voice_design"),
    "full": CONFIGS["0.6b"],
}
SIZES = tuple(CONFIGS)

# --- values -------------------------------------------------------------------------------------------------

RULES: tuple[Rule, ...] = (
    (r"\.initialized$", 1.0, 0.0, False),
    (r"\.cluster_usage$", 1.5, 0.25, False),  # ones would hide the division
    (r"\.embed(ding)?_sum$", 0.0, 0.3, False),
    (r"norm\.weight$", 1.0, 0.1, False),
    (r"\.(scale|gamma|alpha|beta)$", 0.0, 0.3, False),  # trained scales start at 0.01 and 1e-6
    (r"^decoder\.decoder\.6\.conv\.bias$", 0.0, 0.001, False),
    (r"\.bias$", 0.0, 0.1, False),
    (r"code_predictor\.model\.codec_embedding\.", 0.0, 0.25, False),  # a text row meets fifteen of these
    (r"embedding\.weight$", 0.0, 1.0, False),
    (r"(codec_head|lm_head\.\d+)\.weight$", 0.0, 2.0, True),  # for logits of a few units
    (r"^decoder\.decoder\.6\.conv\.weight$", 0.0, 0.01, True),  # quiet audio, far from the clamp
    (r"^decoder\.decoder\.\d\.block\.\d\.conv2\.conv\.weight$", 0.0, 0.5, True),
    (r"^encoder\.(encoder|downsample)\..*weight$", 0.0, 1.4, True),
    (r"^speaker_encoder\.fc\.weight$", 0.0, 0.15, True),  # as large as a row of the embedding
    (r"^speaker_encoder\..*weight$", 0.0, 1.4, True),
    (r"\.weight$", 0.0, 1.0, True),
)


def fill(name: str, shape: Iterable[int], seed: int) -> np.ndarray:
    """Return random float32 values for the tensor with that published name. Raises ValueError if no rule
    matches the name."""
    shape = tuple(shape)
    return synthetic.fill(name, shape, f"qwen3_tts:{seed}", RULES, _fan_in(name, shape))


def _fan_in(name: str, shape: tuple[int, ...]) -> int | None:
    if re.search(r"^decoder\.upsample\.\d\.0\.conv", name):
        return shape[0]  # transposed, stride = kernel
    if re.search(r"^decoder\.decoder\.\d\.block\.1\.conv", name):
        return shape[0] * 2  # transposed, kernel = 2 strides
    return None


# --- writing ------------------------------------------------------------------------------------------------


def write(
    directory: str | Path,
    size: str = "tiny",
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    **config: Any,
) -> Path:
    """Write a checkpoint with every file of the published layout and return its directory.

    dtype: of the tensors in model.safetensors; the codec's are always float32. config: changes to
    config.json, merged into its blocks, such as `talker_config={"num_hidden_layers": 1}`. Tensors are made
    and written one at a time. Raises ValueError for an unknown size, key or dtype, and if the directory is
    not empty.
    """
    # Imported here, so that this module's configs and values do not need the model.
    from zoo.checkpoint.loading import published
    from zoo.qwen3_tts import build, describe, weights

    synthetic.check_dtype(dtype)
    directory = write_texts(directory, size, **config)
    model_config, _, codec_configs, _ = describe(directory)
    talker, codec = build(model_config, codec_configs)
    values = partial(fill, seed=seed)
    synthetic.write_tensors(
        directory / "model.safetensors", published(talker, weights.root(model_config)), values, dtype
    )
    shapes = published(codec, weights.codec(*codec_configs))
    synthetic.write_tensors(
        directory / "speech_tokenizer" / "model.safetensors", shapes, values, torch.float32
    )
    return directory


def write_texts(directory: str | Path, size: str, **config: Any) -> Path:
    """Write the JSON files and the tokenizer of a checkpoint, without its tensors. Arguments and errors are
    those of `write`."""
    directory, files = synthetic.begin(directory, size, CONFIGS)
    change(files["config.json"], config, "config.json")
    Config.read(files["config.json"])  # raises an error before anything is written
    (directory / "speech_tokenizer").mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        synthetic.write_json(directory / name, content)
    words = vocabulary(full=not size.startswith("tiny"))
    (directory / "vocab.json").write_text(json.dumps(words, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges())]
    (directory / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return directory
