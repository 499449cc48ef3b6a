"""Random checkpoints in the published layout, for tests, first tries, and speed work without trained weights.

    write("demo", "tiny")    # less than a megabyte, runs anywhere
    write("mid", "mid")      # 150 million parameters, shaped like the published model
    write("full", "full")    # the published shapes and sizes; also "1.5" and "0.5b" of the first generation

The tokenizer's remote code is not written, because nothing here needs it. The values of a tensor depend only
on (seed, published name, shape).
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zoo.checkpoint import synthetic
from zoo.checkpoint.config import change
from zoo.checkpoint.synthetic import Rule
from zoo.voxcpm2.config import OLD_VAE, Config
from zoo.voxcpm2.vocabulary import (
    PUBLISHED_WORDS,
    special_tokens_map,
    tokenizer,
    tokenizer_config,
    vocabulary,
)

# --- configs ------------------------------------------------------------------------------------------------


def _lm(
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    head_dim: int,
    vocab: int,
    positions: int,
    last_factor: float,
) -> dict[str, Any]:
    pairs = head_dim // 2
    # the first and last factors are published; those between are a guess
    factors = [round(0.9978 * (last_factor / 0.9978) ** (i / (pairs - 1)), 5) for i in range(pairs)]
    return {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "max_position_embeddings": positions,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000,
        "kv_channels": head_dim,
        "rope_scaling": {
            "type": "longrope",
            "long_factor": factors,
            "short_factor": factors,
            "original_max_position_embeddings": positions,
        },
        "vocab_size": vocab,
        "use_mup": False,
        "scale_emb": 12,
        "dim_model_base": 256,
        "scale_depth": 1.4,
    }


def _local(hidden: int, inner: int, layers: int, heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "hidden_dim": hidden,
        "ffn_dim": inner,
        "num_heads": heads,
        "num_layers": layers,
        "kv_channels": head_dim,
    }


CFM = {"sigma_min": 1e-06, "solver": "euler", "t_scheduler": "log-norm", "inference_cfg_rate": 2.0}
VAE: dict[str, Any] = {
    "encoder_dim": 128,
    "encoder_rates": [2, 5, 8, 8],
    "latent_dim": 64,
    "decoder_dim": 2048,
    "decoder_rates": [8, 6, 5, 2, 2, 2],
    "sr_bin_boundaries": [20000, 30000, 40000],
    "sample_rate": 16000,
    "out_sample_rate": 48000,
}


def _config(
    lm: dict[str, Any],
    residual_layers: int,
    fsq: int,
    local: dict[str, Any],
    vae: dict[str, Any],
    longest: int,
) -> dict[str, Any]:
    return {
        "architecture": "voxcpm2",
        "lm_config": lm,
        "patch_size": 4,
        "feat_dim": vae["latent_dim"],
        "residual_lm_num_layers": residual_layers,
        "residual_lm_no_rope": True,
        "scalar_quantization_latent_dim": fsq,
        "scalar_quantization_scale": 9,
        "encoder_config": local,
        "dit_config": {**local, "mean_mode": False, "cfm_config": CFM},
        "audio_vae_config": vae,
        "max_length": longest,
        "device": "cuda",
        "dtype": "bfloat16",
    }


def _old(
    lm: dict[str, Any], patch: int, residual_layers: int, fsq: int, local: dict[str, Any], longest: int
) -> dict[str, Any]:
    """Return a config of the first generation: no head width, no output rates, and, as in 0.5B, no VAE."""
    config = copy.deepcopy(_config(lm, residual_layers, fsq, local, OLD_VAE, longest))
    for block in (config["lm_config"], config["encoder_config"], config["dit_config"]):
        del block["kv_channels"]
    del config["residual_lm_no_rope"], config["audio_vae_config"], config["dit_config"]["mean_mode"]
    return config | {"architecture": "voxcpm", "patch_size": patch}


VAE_1_5: dict[str, Any] = {
    "encoder_dim": 64,
    "encoder_rates": [2, 3, 6, 7, 7],
    "latent_dim": 64,
    "decoder_dim": 2048,
    "decoder_rates": [7, 7, 6, 3, 2],
    "sample_rate": 44100,
}
_TINY_VAE_1_5 = VAE_1_5 | {
    "encoder_dim": 4,
    "encoder_rates": [2, 3, 5],
    "latent_dim": 8,
    "decoder_dim": 32,
    "decoder_rates": [5, 3, 2],
}
_TINY_VAE = VAE | {
    "encoder_dim": 4,
    "encoder_rates": [2, 5, 4],
    "latent_dim": 8,
    "decoder_dim": 64,
    "decoder_rates": [5, 3, 2, 2, 2],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "tiny": _config(
        _lm(32, 48, 3, 4, 16, len(vocabulary(full=False)), 512, 31.02392),
        2,
        16,
        _local(24, 32, 2, 4, 16),
        _TINY_VAE,
        longest=512,
    ),
    "mid": _config(
        _lm(768, 2304, 10, 16, 64, PUBLISHED_WORDS // 8, 32768, 31.02392),
        3,
        256,
        _local(384, 1536, 4, 16, 64),
        VAE | {"encoder_dim": 48, "decoder_dim": 768},
        longest=8192,
    ),
    "full": _config(
        _lm(2048, 6144, 28, 16, 128, PUBLISHED_WORDS, 32768, 31.02392),
        8,
        512,
        _local(1024, 4096, 12, 16, 128),
        VAE,
        longest=8192,
    ),
    "tiny-1.5": _old(
        _lm(32, 48, 3, 4, 8, len(vocabulary(full=False)), 512, 49.85339),
        4,
        2,
        16,
        _local(48, 32, 2, 6, 8),
        longest=512,
    )
    | {"audio_vae_config": _TINY_VAE_1_5, "feat_dim": 8},
    "1.5": _old(
        _lm(1024, 4096, 24, 16, 64, PUBLISHED_WORDS, 32768, 49.85339),
        4,
        8,
        256,
        _local(1024, 4096, 8, 16, 64),
        longest=8192,
    )
    | {"audio_vae_config": VAE_1_5},
    "0.5b": _old(
        _lm(1024, 4096, 24, 16, 64, PUBLISHED_WORDS, 32768, 49.85339),
        2,
        6,
        256,
        _local(1024, 4096, 4, 16, 64),
        longest=4096,
    ),
}
SIZES = tuple(CONFIGS)

# --- values -------------------------------------------------------------------------------------------------

RULES: tuple[Rule, ...] = (
    (r"norm\.weight$", 1.0, 0.1, False),
    (r"\.alpha$", 1.0, 0.2, False),
    (r"scale_embed\.weight$", 1.0, 0.1, False),
    (r"^decoder\.model\.\d+\.block\.1\.weight_g$", 1.0, 0.1, False),  # transposed: per input channel
    (r"\.block\.[0-4]\.block\.3\.weight_g$", 0.5, 0.05, False),  # last convolution of a residual unit
    (r"^decoder\.model\.[789]\.weight_g$", 0.03, 0.003, False),  # quiet audio, where tanh is nearly linear
    (r"\.weight_g$", 1.0, 0.1, False),
    (r"\.weight_v$", 0.0, 1.0, False),
    (r"(embed_tokens|bias_embed)\.weight$", 0.0, 0.5, False),
    (r"special_token$", 0.0, 1.0, False),
    (r"^stop_proj\.bias$", 0.05, 0.1, False),  # see fill
    (r"\.bias$", 0.0, 0.1, False),
    # latents about as large as the noise they start from
    (r"estimator\.out_proj\.weight$", 0.0, 0.6, True),
    (r"\.weight$", 0.0, 1.0, True),
)
BOUNDARIES = "decoder.sr_bin_boundaries"


def fill(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return random float32 values for a tensor by its published name.

    Raises ValueError if no rule matches the name.
    """
    values = synthetic.fill(name, shape, f"voxcpm2:{seed}", RULES)
    # makes "continue" likelier than "stop": otherwise some seeds give a model that stops at once or never
    if name == "stop_head.weight":
        values = np.sort(values, axis=0)[::-1].copy()
    return values


# --- writing ------------------------------------------------------------------------------------------------


def write(
    directory: str | Path,
    size: str = "tiny",
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    **config: Any,
) -> Path:
    """Write a checkpoint in the published layout. dtype: of the nets' tensors (the VAE's are float32).

    config: changes to config.json, merged into its blocks: `lm_config={"num_hidden_layers": 1}`. Raises
    ValueError for an unknown size, key or dtype, and for a directory that is not empty.
    """
    # imported here, so that configs and values need no import of the model
    from zoo.checkpoint.loading import published, weight_normed
    from zoo.voxcpm2 import build, describe, weights

    synthetic.check_dtype(dtype)
    directory = write_texts(directory, size, **config)
    model, _ = describe(directory)
    net, vae = build(model)
    shapes = published(net, weights.root(model))
    if size == "0.5b":
        filled = {name: torch.from_numpy(fill(name, shape, seed)).to(dtype) for name, shape in shapes.items()}
        torch.save(filled, directory / "pytorch_model.bin")
    else:
        synthetic.write_tensors(directory / "model.safetensors", shapes, partial(fill, seed=seed), dtype)
    tensors = {
        name: torch.from_numpy(fill(name, shape, seed))
        for name, shape in weight_normed(published(vae, weights.vae(model.vae))).items()
    }
    if model.vae.boundaries:
        tensors[BOUNDARIES] = torch.tensor(model.vae.boundaries, dtype=torch.int32)
    torch.save({"state_dict": tensors}, directory / "audiovae.pth")
    return directory


def write_texts(directory: str | Path, size: str, **config: Any) -> Path:
    """Write the JSON files of a checkpoint without its tensors. Arguments and errors are those of `write`."""
    directory, content = synthetic.begin(directory, size, CONFIGS)
    change(content, config, "config.json")
    Config.read(content)  # raises before anything is written
    directory.mkdir(parents=True, exist_ok=True)
    files = {
        "config.json": content,
        "tokenizer.json": tokenizer(full=content["lm_config"]["vocab_size"] == PUBLISHED_WORDS),
        "tokenizer_config.json": tokenizer_config(),
        "special_tokens_map.json": special_tokens_map(),
    }
    for name, value in files.items():
        synthetic.write_json(directory / name, value)
    return directory
