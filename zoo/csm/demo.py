"""Random checkpoints in the published layouts, without trained weights. For tests, first tries, and speed
work.

    write("demo", "tiny")    # 1.4 megabytes; runs anywhere
    write("mid", "mid")      # 185 million parameters; the codec as published
    write("full", "full")    # the published shapes and sizes, 7.1 GB

A tensor's values depend only on (seed, published name, shape). A random model would never write a frame of
zeros, so no speech would end. This one has a channel of the codes' embeddings that only code 0 sets. The
projector hands it to a channel of the depth decoder, which favours code 0: if code 0 of a frame is 0, all its
codes are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from zoo.checkpoint import synthetic
from zoo.checkpoint.config import change
from zoo.checkpoint.loading import published
from zoo.checkpoint.synthetic import Rule
from zoo.csm import weights
from zoo.csm.config import CODEC, DEPTH, Config
from zoo.csm.vocabulary import AUDIO, AUDIO_END, CHAT_TEMPLATE, texts
from zoo.nn import mimi_demo
from zoo.nn.llama_vocabulary import NUM_SPECIAL, NUM_WORDS

INDEX = "transformers.safetensors.index.json"
SHARDS = tuple(f"transformers-{i:05}-of-00002.safetensors" for i in (1, 2))


def _rope(positions: int, low: float, high: float) -> dict[str, Any]:
    return {
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": high,
            "low_freq_factor": low,
            "original_max_position_embeddings": positions,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
    }


def _stack(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": inner,
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-05,
        "use_cache": True,
    }


HEAD = {"frame_rate": 12.5, "model_type": "mimi"}
MIMI = HEAD | mimi_demo.PUBLISHED
TINY_MIMI = HEAD | mimi_demo.TINY | {"codebook_size": 32, "num_quantizers": 4}


def _config(
    backbone: dict[str, Any], depth: dict[str, Any], codec: dict[str, Any], num_words: int
) -> dict[str, Any]:
    """Return config.json. backbone, depth: `_stack` and `_rope`."""
    codebooks, vocab = codec["num_quantizers"], codec["codebook_size"] + 3
    both = {"num_codebooks": codebooks, "vocab_size": vocab}
    decoder = {"backbone_hidden_size": backbone["hidden_size"], "max_position_embeddings": codebooks + 1}
    return {
        "architectures": ["CsmForConditionalGeneration"],
        "audio_eos_token_id": num_words + AUDIO_END,
        "audio_token_id": num_words + AUDIO,
        "bos_token_id": num_words,
        "codebook_eos_token_id": 0,
        "codebook_pad_token_id": vocab - 1,
        CODEC: codec,
        DEPTH: depth | both | decoder | {"model_type": "csm_depth_decoder_model"},
        "eos_token_id": num_words + 1,
        "max_position_embeddings": 2048,
        "model_type": "csm",
        "pad_token_id": num_words + AUDIO,
        "text_vocab_size": num_words + NUM_SPECIAL,
        "tie_codebooks_embeddings": True,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.53.0",
        weights.INDEX_KEY: INDEX,
        **both,
        **backbone,
    }


_LONG, _SHORT = _rope(1024, 0.125, 0.5), _rope(16, 0.001953125, 0.0078125)  # as published
CONFIGS: dict[str, dict[str, Any]] = {
    # Scalings that short prompts show, and a head_dim that is not hidden / heads.
    "tiny": _config(
        _stack(64, 128, 2, 4, 2, 16) | _rope(16, 0.125, 0.5),
        _stack(32, 64, 2, 2, 1, 24) | _rope(4, 0.125, 0.5),
        TINY_MIMI,
        512,
    ),
    "mid": _config(
        _stack(512, 2048, 8, 8, 2, 64) | _LONG, _stack(256, 2048, 4, 4, 1, 64) | _SHORT, MIMI, 512
    ),
    "full": _config(
        _stack(2048, 8192, 16, 32, 8, 64) | _LONG, _stack(1024, 8192, 4, 8, 2, 128) | _SHORT, MIMI, NUM_WORDS
    ),
}
SIZES = tuple(CONFIGS)
GENERATION = {
    "depth_decoder_do_sample": True,
    "depth_decoder_temperature": 0.9,
    "depth_decoder_top_k": 50,
    "do_sample": True,
    "max_new_tokens": 125,
    "temperature": 0.9,
    "top_k": 50,
}

RULES: tuple[Rule, ...] = (
    (r"(layernorm|norm)\.weight$", 1.0, 0.1, False),
    (r"embed_text_tokens\.weight$", 0.0, 0.5, False),
    (r"embed_tokens\.weight$", 0.0, 0.3, False),
    (r"codebooks_head$|codebooks_head\.weight$", 0.0, 0.5, False),
    (r"embed_sum$", 0.0, 1.0, False),
    (r"cluster_usage$", 1.0, 0.2, False),
    (r"initialized$", 1.0, 0.0, False),
    (r"layer_scale\.scale$", 0.3, 0.05, False),
    (r"upsample\.conv\.weight$", 0.5, 0.2, False),
    (r"\.decoder\.layers\.14\.conv\.weight$", 0.0, 0.2, True),  # soft audio
    (r"\.encoder\.layers\.0\.conv\.weight$", 0.0, 6.0, True),  # a clip is soft, and all of it is to matter
    (r"\.encoder\.layers\..*\.weight$", 0.0, 1.5, True),
    (r"\.encoder\.layers\..*\.bias$", 0.0, 0.02, False),
    (r"\.bias$", 0.0, 0.1, False),
    (r"lm_head\.weight$", 0.0, 2.0, True),
    (r"\.weight$", 0.0, 1.0, True),
)
ZERO = 6.0  # in the last channel of code 0's embeddings
FAVOUR = 12.0  # of the depth decoder's heads for code 0, on that channel
LOUDER = 1.2  # code 0 among the first codes: a speech has some twenty frames


def fill(name: str, shape: tuple[int, ...], seed: int, config: Config) -> np.ndarray:
    """Return random float32 values for the published tensor `name` of transformers' layout. Raises ValueError
    if no rule matches the name."""
    if name == weights.COPIES[1]:
        name = weights.COPIES[0]
    values = synthetic.fill(name, shape, f"csm-demo:{seed}", RULES)
    if name == weights.COPIES[0]:
        values[:, -1] = 0
        values[:: config.vocab, -1] = ZERO
    elif name == "lm_head.weight":
        values[0] *= LOUDER
        values[config.codec.codebook_size :] = 0  # the codec lacks these codes: they are drawn, but seldom
    elif name == "depth_decoder.model.inputs_embeds_projector.weight":
        values[:, -1] = 0
        values[-1] = 0
        values[-1, -1] = 1
    elif name == "depth_decoder.codebooks_head.weight":
        values[:, :, config.codec.codebook_size :] = 0
        values[:, -1] = 0
        values[:, -1, 0] = FAVOUR
    elif name.startswith("depth_decoder.") and name.endswith(("o_proj.weight", "down_proj.weight")):
        values[-1] = 0
    return values


def write(
    directory: str | Path,
    size: str = "tiny",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    layout: str = "transformers",
    **config: Any,
) -> Path:
    """Write a checkpoint with every file of the published layout.

    layout: "transformers", or "original" with the codec in mimi/. Both have the same values. config: changes
    to config.json. Raises ValueError for an unknown size, key or dtype, and for a directory that is not
    empty.
    """
    from zoo.csm import build
    from zoo.csm.layouts import CODEC_FOLDER, Checkpoint

    synthetic.check_dtype(dtype)
    directory, sizes = write_texts(directory, size, **config)
    shapes = published(Checkpoint(*build(sizes)), weights.transformers(sizes))

    def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
        return fill(name, shape, seed, sizes)

    if layout == "transformers":
        _write_shards(directory, shapes, values, dtype)
        return directory
    _write_original(directory, sizes, values, dtype)
    codec = {
        name.removeprefix(weights.CODEC): shape
        for name, shape in shapes.items()
        if name.startswith(weights.CODEC)
    }
    (directory / CODEC_FOLDER).mkdir()
    file = directory / CODEC_FOLDER / "model.safetensors"
    synthetic.write_tensors(file, codec, lambda name, shape: values(weights.CODEC + name, shape), dtype)
    return directory


def _write_shards(
    directory: Path, shapes: dict[str, tuple[int, ...]], values: synthetic.Fill, dtype: torch.dtype
) -> None:
    names = sorted(shapes)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    for shard, half in zip(SHARDS, halves, strict=True):
        synthetic.write_tensors(directory / shard, {name: shapes[name] for name in half}, values, dtype)
    places = {name: shard for shard, half in zip(SHARDS, halves, strict=True) for name in half}
    synthetic.write_json(directory / INDEX, {"metadata": {}, "weight_map": places})


def _write_original(directory: Path, config: Config, values: synthetic.Fill, dtype: torch.dtype) -> None:
    """Write model.safetensors with the original names and the original order of rows."""
    from zoo.csm import build

    lm, _ = build(config)
    theirs = {ours: name for name, ours in weights.transformers(config, weights.COPIES[:1]).items()}
    table = weights.original(config)

    def original(name: str, shape: tuple[int, ...]) -> np.ndarray:
        return weights.in_pairs(
            config, name, torch.from_numpy(values(theirs[f"lm.{table[name]}"], shape))
        ).numpy()

    synthetic.write_tensors(directory / "model.safetensors", published(lm, table), original, dtype)


def write_texts(directory: str | Path, size: str, **config: Any) -> tuple[Path, Config]:
    """Write the files of a checkpoint other than its tensors, and return its sizes. Arguments and errors are
    those of `write`."""
    directory, content = synthetic.begin(directory, size, CONFIGS)
    change(content, config, "config.json")
    sizes = Config.read(content)  # before anything is written
    directory.mkdir(parents=True, exist_ok=True)
    files = {"config.json": content, "generation_config.json": GENERATION}
    for name, text in (files | texts(content["bos_token_id"])).items():
        synthetic.write_json(directory / name, text)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return directory, sizes
