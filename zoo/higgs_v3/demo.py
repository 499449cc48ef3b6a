"""Random checkpoints in the published layout, without trained weights. They serve tests, first tries and
speed measurements.

    write("demo", "tiny")    # about a megabyte, runs anywhere
    write("mid", "mid")      # 150 million parameters, for speed measurements
    write("full", "full")    # the published shapes and sizes, 9.3 GB

A tensor's values depend only on (seed, published name, shape). All tensors have the same dtype, including
those of the codec, as in the published file.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zoo.checkpoint import synthetic
from zoo.checkpoint.config import change
from zoo.checkpoint.synthetic import Rule
from zoo.higgs_v3.config import CODEC, Config
from zoo.higgs_v3.vocabulary import ADDED, PUBLISHED_WORDS, tokenizer, tokenizer_config, vocabulary

# --- configs ------------------------------------------------------------------------------------------------


def _text(
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    words: int,
    rows: int,
    positions: int,
) -> dict[str, Any]:
    """Return text_config. words: tokens of the tokenizer without the added ones; rows: rows of the
    embedding."""
    return {
        "_name_or_path": "Qwen/Qwen3-4B-Base",
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": words,
        "dtype": "bfloat16",
        "eos_token_id": words,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": inner,
        "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": positions,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "pad_token_id": None,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": rows,
    }


def _config(text: dict[str, Any], codec: dict[str, Any] | None) -> dict[str, Any]:
    """Return config.json. codec None is the published codec, which no published file describes."""
    codes = (codec or CODEC)["codebook_size"]
    audio = {
        "encoder_type": "discrete",
        "max_chunk_size": 50,
        "mel_per_sample": 8,
        "model_type": "higgs_audio_encoder",
        "num_codebooks": 8,
        "out_dim": text["hidden_size"],
        "qwen3_aut_config": None,
        "tie_word_embeddings": True,
        "use_delay_pattern": True,
        "vocab_size": codes + 2,
        "whisper_config": None,
    }
    return {
        "_hidden_size": text["hidden_size"],
        "_vocab_size": text["vocab_size"],
        "architectures": ["HiggsMultimodalQwen3ForConditionalGeneration"],
        "audio_encoder_config": audio if codec is None else audio | {"codec_config": codec},
        "audio_token_id": -100,
        "dtype": "bfloat16",
        "ignore_index": -100,
        "model_type": "higgs_multimodal_qwen3",
        "text_config": text,
        "transformers_version": "5.5.0",
    }


def _codec(size: int, width: int, acoustic: dict[str, int], semantic: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a codec of another size. Ratios, kernels and strides are the published ones."""
    return {
        **CODEC,
        "codebook_size": size,
        "codebook_dim": width,
        "acoustic_model_config": CODEC["acoustic_model_config"] | acoustic,
        "semantic_model_config": CODEC["semantic_model_config"] | semantic,
    }


TINY_CODEC = _codec(
    64,
    8,
    {"encoder_hidden_size": 2, "decoder_hidden_size": 32, "hidden_size": 16},
    {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "conv_dim": [16] * 7,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
    },
)
MID_CODEC = _codec(
    1024,
    64,
    {"encoder_hidden_size": 32, "decoder_hidden_size": 256},
    {
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "conv_dim": [256] * 7,
    },
)
_WORDS = len(vocabulary(full=False))
_ROWS = -(-(_WORDS + len(ADDED)) // 64) * 64
CONFIGS: dict[str, dict[str, Any]] = {
    "tiny": _config(_text(64, 128, 3, 4, 2, 16, _WORDS, _ROWS, 1024), TINY_CODEC),
    "mid": _config(_text(1024, 3072, 8, 16, 4, 64, _WORDS, _ROWS, 8192), MID_CODEC),
    "full": _config(_text(2560, 9728, 36, 32, 8, 128, PUBLISHED_WORDS, 151936, 32768), None),
}
SIZES = tuple(CONFIGS)

# --- values -------------------------------------------------------------------------------------------------

RULES: tuple[Rule, ...] = (
    (r"\.inited$", 1.0, 0.0, False),
    (r"\.cluster_size$", 1.5, 0.25, False),
    (r"\.embed_avg$", 0.0, 4.0, False),
    (r"\.codebook\.embed$", 0.0, 1.0, False),
    (r"(norm|norm\d?)\.weight$", 1.0, 0.1, False),
    (r"\.alpha$", 1.0, 0.2, False),
    (r"\.original0$", 1.4, 0.2, False),
    (r"(\.original1|\.masked_spec_embed)$", 0.0, 1.0, False),
    (r"\.acoustic_decoder\.conv2\.bias$", 0.0, 0.001, False),
    (r"\.bias$", 0.0, 0.1, False),
    (r"text_embedding\.weight$", 0.0, 0.5, False),
    (r"modality_embeddings\.0\.embedding\.weight$", 0.0, 2.0, True),  # as a head, for logits of a few units
    # larger than the embedded codes; otherwise the tied head would repeat them again and again
    (r"\.(o_proj|down_proj)\.weight$", 0.0, 3.0, True),
    (r"\.acoustic_decoder\.conv2\.weight$", 0.0, 0.01, True),  # quiet audio
    (r"\.acoustic_(en|de)coder\..*\.res_unit\d\.conv2\.weight$", 0.0, 0.5, True),
    (r"\.conv_t1\.weight$", 0.0, 1.4, True),  # transposed: its real fan-in is at most two thirds of this
    (r"\.feature_extractor\..*\.weight$", 0.0, 1.4, True),
    (r"\.weight$", 0.0, 1.0, True),
)
CODES = "tied.embedding.modality_embeddings.0.embedding.weight"
COPIES = {
    "tied.head.text_head.weight": "tied.embedding.text_embedding.weight",
    "tied.head.modality_heads.0.weight": CODES,
}


def fill(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return random float32 values for the tensor with that published name. Raises ValueError if no rule
    matches the name."""
    name = COPIES.get(name, name)
    values = synthetic.fill(name, shape, f"higgs_v3:{seed}", RULES)
    if name == CODES:
        # Makes the end less likely in codebook 0; a random voice would otherwise stop early.
        values[shape[0] // 8 - 1] *= 0.3
    return values


# --- writing ------------------------------------------------------------------------------------------------


def write(
    directory: str | Path,
    size: str = "tiny",
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    **config: Any,
) -> Path:
    """Write a checkpoint with every file of the published layout and return its directory.

    config: changes to config.json, merged into its blocks, such as `text_config={"num_hidden_layers": 1}`.
    Raises ValueError for an unknown size, key or dtype, and if the directory is not empty.
    """
    # Imported here, so that this module's configs and values do not need the model.
    from zoo.checkpoint.loading import published
    from zoo.higgs_v3 import build, describe, weights

    synthetic.check_dtype(dtype)
    directory = write_texts(directory, size, **config)
    model, _ = describe(directory)
    shapes = published(build(model), weights.table(model))
    synthetic.write_tensors(directory / "model.safetensors", shapes, partial(fill, seed=seed), dtype)
    # As in the published index, the copies are only in the file.
    indexed = sorted(name for name in shapes if name not in COPIES)
    total = sum(math.prod(shapes[name]) for name in indexed) * dtype.itemsize
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(indexed, "model.safetensors")}
    synthetic.write_json(directory / "model.safetensors.index.json", index)
    return directory


def write_texts(directory: str | Path, size: str, **config: Any) -> Path:
    """Write the JSON files of a checkpoint, without its tensors. Arguments and errors are those of
    `write`."""
    directory, content = synthetic.begin(directory, size, CONFIGS)
    change(content, config, "config.json")
    Config.read(content)  # raises an error before anything is written
    directory.mkdir(parents=True, exist_ok=True)
    synthetic.write_json(directory / "config.json", content)
    synthetic.write_json(directory / "tokenizer.json", tokenizer(full=size == "full"))
    synthetic.write_json(directory / "tokenizer_config.json", tokenizer_config())
    return directory
