"""Random checkpoints in the published layout: every file, but no trained weights. They serve tests, first
tries and speed measurements.

    write("demo", "tiny")    # a few megabytes, runs anywhere
    write("full", "full")    # the published shapes and sizes, 11 GB
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zoo.checkpoint import synthetic
from zoo.checkpoint.config import change
from zoo.checkpoint.synthetic import Rule
from zoo.fish_s2 import weights
from zoo.fish_s2.config import CODEC_FILE, LONGEST_POSITIONS, S1, CodecConfig, Config, TransformerConfig
from zoo.fish_s2.layers import ROPE_THETA
from zoo.fish_s2.s1 import LM_FILE, SPECIAL_FILE, TIKTOKEN
from zoo.fish_s2.s1 import read_config as read_s1_config
from zoo.fish_s2.vocabulary import END, S1_ADDED, ranks, semantic, token_ids, tokenizer, tokenizer_config

# --- configs ---


def _stack(dim: int, inner: int, layers: int, heads: int, head_dim: int) -> dict[str, Any]:
    """Return the keys that both stacks share."""
    return {
        "attention_o_bias": False,
        "attention_qkv_bias": False,
        "dim": dim,
        "dropout": 0.0,
        "head_dim": head_dim,
        "initializer_range": dim**-0.5,
        "intermediate_size": inner,
        "moe_intermediate_size": 768,
        "n_head": heads,
        "n_layer": layers,
        "n_local_heads": max(1, heads // 4) if heads > 4 else heads // 2,
        "norm_eps": 1e-06,
        "norm_topk_prob": True,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "rope_base": 1000000,
        "router_gamma": 0.001,
        "use_aux_loss_free": True,
        "use_moe": False,
    }


def _config(
    text: dict[str, Any], audio: dict[str, Any], positions: int, codebooks: int, codes: int, is_full: bool
) -> dict[str, Any]:
    ids = token_ids(is_full, codes)
    start = ids["<|semantic:0|>"]
    text |= {
        "attention_qk_norm": True,
        "max_seq_len": positions,
        "model_type": "fish_qwen3",
        "tie_word_embeddings": True,
        "vocab_size": start + codes + 2,
    }
    audio |= {
        "attention_qk_norm": False,
        "max_seq_len": codebooks + 1,
        "model_type": "fish_qwen3_audio_decoder",
        "num_codebooks": codebooks,
        "text_dim": text["dim"],
        "tie_word_embeddings": False,
        "vocab_size": codes,
    }
    return {
        "audio_decoder_config": audio,
        "audio_pad_token_id": ids["<|audio_pad|>"],
        "dtype": "bfloat16",
        "eos_token_id": ids[END],
        "model_type": "fish_qwen3_omni",
        "pad_token_id": ids["<|pad|>"],
        "semantic_end_token_id": start + codes - 1,
        "semantic_start_token_id": start,
        "text_config": text,
    }


CODEC = CodecConfig(
    channels=64,
    strides=(2, 4, 8, 8),
    latent=1024,
    ratios=(2, 2),
    hear=TransformerConfig(1024, 4, 3072, 64, 512, LONGEST_POSITIONS),
    pre=TransformerConfig(1024, 8, 3072, 64, 128, LONGEST_POSITIONS),
    post=TransformerConfig(1024, 8, 3072, 64, 128, LONGEST_POSITIONS),
    codebook_dim=8,
    codebook_sizes=(4096, *[1024] * 9),
    decoder_channels=1536,
    rates=(8, 8, 4, 2),
)
TINY_CODEC = replace(
    CODEC,
    channels=4,
    latent=32,
    hear=TransformerConfig(64, 2, 192, 64, 512, LONGEST_POSITIONS),
    pre=TransformerConfig(32, 2, 48, 16, 128, LONGEST_POSITIONS),
    post=TransformerConfig(32, 2, 48, 16, 128, LONGEST_POSITIONS),
    codebook_dim=4,
    codebook_sizes=(64, 32, 32, 32),
    decoder_channels=32,
)
MID_CODEC = replace(
    CODEC,
    channels=16,
    latent=256,
    hear=TransformerConfig(256, 2, 768, 64, 512, LONGEST_POSITIONS),
    pre=TransformerConfig(256, 4, 768, 64, 128, LONGEST_POSITIONS),
    post=TransformerConfig(256, 4, 768, 64, 128, LONGEST_POSITIONS),
    decoder_channels=384,
)


def _s1_config(
    stack: dict[str, int], fast: dict[str, int], positions: int, codebooks: int, codes: int, is_full: bool
) -> dict[str, Any]:
    """Return config.json of OpenAudio S1-mini."""
    return {
        "model_type": S1,
        **stack,
        "attention_o_bias": False,
        "attention_qk_norm": True,
        "attention_qkv_bias": False,
        "codebook_size": codes,
        "dropout": 0.0,
        **{f"fast_{key}": value for key, value in fast.items() if key != "n_layer"},
        "fast_attention_o_bias": False,
        "fast_attention_qk_norm": False,
        "fast_attention_qkv_bias": False,
        "initializer_range": stack["dim"] ** -0.5,
        "is_reward_model": False,
        "max_seq_len": positions,
        "n_fast_layer": fast["n_layer"],
        "norm_eps": 1e-06,
        "num_codebooks": codebooks,
        "rope_base": 1000000,
        "scale_codebook_embeddings": True,
        "tie_word_embeddings": False,
        "use_gradient_checkpointing": True,
        # the published embedding has 22 more rows after the last code
        "vocab_size": token_ids(is_full, codes, S1_ADDED)[semantic(codes - 1)] + (23 if is_full else 1),
    }


def _s1_stack(dim: int, inner: int, layers: int, heads: int, head_dim: int) -> dict[str, int]:
    sizes = {"dim": dim, "intermediate_size": inner, "n_layer": layers}
    return sizes | {"n_head": heads, "n_local_heads": heads // 2, "head_dim": head_dim}


# "mid" has about a tenth of the published parameters, for speed comparisons on slow machines. The sizes with
# "s1" are of OpenAudio S1-mini.
CONFIGS: dict[str, tuple[dict[str, Any], CodecConfig]] = {
    "tiny": (
        _config(_stack(64, 96, 3, 4, 16), _stack(64, 80, 2, 4, 16), 512, 4, 64, is_full=False),
        TINY_CODEC,
    ),
    "mid": (
        _config(_stack(768, 2944, 16, 12, 64), _stack(768, 2944, 4, 12, 64), 4096, 10, 4096, is_full=False),
        MID_CODEC,
    ),
    "full": (
        _config(
            _stack(2560, 9728, 36, 32, 128), _stack(2560, 9728, 4, 32, 128), 32768, 10, 4096, is_full=True
        ),
        CODEC,
    ),
    "tiny-s1": (
        _s1_config(_s1_stack(64, 96, 3, 4, 16), _s1_stack(64, 80, 2, 4, 8), 2560, 4, 64, is_full=False),
        TINY_CODEC,
    ),
    "full-s1": (
        _s1_config(
            _s1_stack(1024, 3072, 28, 16, 128), _s1_stack(1024, 3072, 4, 16, 64), 8192, 10, 4096, is_full=True
        ),
        CODEC,
    ),
}
SIZES = tuple(CONFIGS)
# Positions in the unused buffers of codec.pth: those of the encoder's transformer, then those of the other
# two.
UNUSED_POSITIONS = {
    "tiny": (64, 64),
    "mid": (256, 256),
    "full": (16384, 4096),
    "tiny-s1": (64, 64),
    "full-s1": (16384, 4096),
}

# --- values ---

RULES: tuple[Rule, ...] = (
    (r"norm\.weight$", 1.0, 0.1, False),
    (r"\.gamma$", 0.0, 0.3, False),  # trained scales start at 0.01
    (r"\.alpha$", 1.0, 0.2, False),
    (r"^decoder\.model\.6\.conv\..*original0$", 0.05, 0.005, False),  # quiet audio, in tanh's linear range
    (r"block\.3\.conv\..*original0$", 0.4, 0.1, False),  # small, because residual units add up
    (r"(\.original0|\.weight_g)$", 1.0, 0.2, False),
    (r"(\.original1|\.weight_v)$", 0.0, 1.0, False),
    (r"^decoder\.model\.6\.conv\.bias$", 0.0, 0.001, False),
    (r"\.bias$", 0.0, 0.1, False),
    (r"\.codebook\.weight$", 0.0, 1.0, False),
    (r"(codebook_)?embeddings\.weight$", 0.0, 0.5, False),
    (r"(^|_|\.)output\.weight$", 0.0, 2.0, True),  # for logits of a few units
    # larger than the embeddings; otherwise the tied head would repeat its input again and again
    (r"text_model\..*\.(wo|w2)\.weight$", 0.0, 3.0, True),
    (r"\.weight$", 0.0, 1.0, True),
)


def fill(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return random float32 values for the tensor with that published name. Raises ValueError if no rule
    matches the name."""
    # a transposed convolution whose stride is its kernel
    is_upsampling = re.match(r"quantizer\.upsample\.\d\.0\.conv", name) and len(shape) == 3
    fan_in = shape[0] if is_upsampling else None
    return synthetic.fill(name, shape, f"fish_s2:{seed}", RULES, fan_in)


# --- writing ---


def write(
    directory: str | Path,
    size: str = "tiny",
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    **config: Any,
) -> Path:
    """Write a checkpoint with every file of the published layout and return its directory.

    dtype: of the LM's tensors; the codec's are always float32. config: changes to config.json, merged into
    its blocks, such as `text_config={"n_layer": 1}`. Raises ValueError for an unknown size, key or dtype, and
    if the directory is not empty.
    """
    from zoo.checkpoint.loading import published
    from zoo.fish_s2 import build, read_configs

    synthetic.check_dtype(dtype)
    directory = write_texts(directory, size, **config)
    read = read_configs(directory)
    codec_config = CONFIGS[size][1]
    lm, codec = build(read, codec_config)
    values = partial(fill, seed=seed)
    names = published(lm, weights.lm(read))
    if read.is_s1:
        made = {name: torch.from_numpy(values(name, shape)).to(dtype) for name, shape in names.items()}
        torch.save(made, directory / LM_FILE)
    else:
        _write_shards(directory, names, values, dtype)
    shapes = weights.as_saved(published(codec, weights.codec(codec_config)))
    tensors = {name: torch.from_numpy(values(name, shape)) for name, shape in shapes.items()}
    torch.save(tensors | unused(codec_config, *UNUSED_POSITIONS[size]), directory / CODEC_FILE)
    return directory


def write_texts(directory: str | Path, size: str, **config: Any) -> Path:
    """Write the texts of a checkpoint, without its tensors. Arguments and errors are those of `write`."""
    directory, (content, _) = synthetic.begin(directory, size, CONFIGS)
    change(content, config, "config.json")
    if content["model_type"] == S1:
        return _write_s1_texts(directory, content, size == "full-s1")
    Config.read(content)  # raises an error before anything is written
    directory.mkdir(parents=True, exist_ok=True)
    synthetic.write_json(directory / "config.json", content)
    synthetic.write_json(
        directory / "tokenizer.json", tokenizer(size == "full", content["audio_decoder_config"]["vocab_size"])
    )
    synthetic.write_json(directory / "tokenizer_config.json", tokenizer_config())
    return directory


def _write_s1_texts(directory: Path, content: dict[str, Any], is_full: bool) -> Path:
    special = token_ids(is_full, content["codebook_size"], S1_ADDED)
    read_s1_config(content, special)  # raises an error before anything is written
    directory.mkdir(parents=True, exist_ok=True)
    synthetic.write_json(directory / "config.json", content)
    synthetic.write_json(directory / SPECIAL_FILE, special)
    (directory / TIKTOKEN).write_text(ranks(is_full), encoding="ascii")
    return directory


def unused(config: CodecConfig, encoder_positions: int, positions: int) -> dict[str, Tensor]:
    """Return the unused buffers of codec.pth. The loader reads only their shape, for the width of a head."""
    from zoo.fish_s2.block import rope_table

    buffers: dict[str, Tensor] = {}
    places = {
        f"encoder.block.{len(config.strides)}.block.5": (config.hear, encoder_positions),
        "quantizer.pre_module": (config.pre, positions),
        "quantizer.post_module": (config.post, positions),
    }
    for name, (transformer, length) in places.items():
        if transformer is not None:
            table = rope_table(length, transformer.head_dim, ROPE_THETA)
            buffers[f"{name}.freqs_cis"] = table.transpose(1, 2).contiguous()  # [length, dim / 2, 2]
            buffers[f"{name}.causal_mask"] = torch.ones(length, length, dtype=torch.bool).tril()
    return buffers


def _write_shards(
    directory: Path, shapes: Mapping[str, tuple[int, ...]], values: synthetic.Fill, dtype: torch.dtype
) -> None:
    """Write two shards and their index. The first shard has a little more than half of the bytes."""
    sizes = {name: math.prod(shapes[name]) * dtype.itemsize for name in sorted(shapes)}
    total, written = sum(sizes.values()), 0
    shards: tuple[dict[str, tuple[int, ...]], ...] = ({}, {})
    weight_map = {}
    for name, size in sizes.items():
        which = int(written > total / 2)
        shards[which][name] = shapes[name]
        weight_map[name] = f"model-{which + 1:05}-of-00002.safetensors"
        written += size
    for i, shard in enumerate(shards):
        synthetic.write_tensors(directory / f"model-{i + 1:05}-of-00002.safetensors", shard, values, dtype)
    synthetic.write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )
