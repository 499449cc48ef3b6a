"""Random checkpoints in the published layout, no trained weight. For tests, first tries, and speed work
without weights.

    write("demo", "tiny")    # 8 megabytes, and few words: the width of the vocabulary takes most of the time
    write("mid", "mid")      # 250 million parameters; the codec as published
    write("full", "full")    # the published shapes and sizes

A tensor's values follow from (seed, published name, shape) alone. A random model would not keep to the places
of the frame, and nothing could be heard. This one keeps to them: seven columns of the embedding say the
place, and the last layer's MLP moves each column to the next one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from zoo.checkpoint import synthetic
from zoo.checkpoint.config import change
from zoo.checkpoint.synthetic import Rule
from zoo.nn.llama import config_json
from zoo.orpheus.config import CODEC_FOLDER, Config, SnacConfig
from zoo.orpheus.tokens import (
    BEGIN_SPEECH,
    BEGIN_TEXT,
    CODES,
    END_OF_LLAMA,
    END_SPEECH,
    FIRST_CODE,
    NUM_MARKED,
    PLACES,
    VOCABULARY,
)
from zoo.orpheus.vocabulary import special_tokens_map, tokenizer, tokenizer_config

PUBLISHED_CODEC: dict[str, Any] = {
    "sampling_rate": 24000,
    "encoder_dim": 48,
    "encoder_rates": [2, 4, 8, 8],
    "decoder_dim": 1024,
    "decoder_rates": [8, 8, 4, 2],
    "attn_window_size": None,
    "codebook_size": CODES,
    "codebook_dim": 8,
    "vq_strides": [4, 2, 1],
    "noise": True,
    "depthwise": True,
}
TINY_CODEC = PUBLISHED_CODEC | {"encoder_dim": 4, "decoder_dim": 32, "codebook_dim": 4}
TINY_WORDS = 512  # bytes and the merged pieces
SIZES_LM: dict[str, tuple[int, ...]] = {
    "tiny": (64, 128, 2, 4, 2, 16, TINY_WORDS + NUM_MARKED),
    "mid": (768, 2048, 12, 12, 4, 64, VOCABULARY),
    "full": (3072, 8192, 28, 24, 8, 128, VOCABULARY),
}
CONFIGS: dict[str, dict[str, Any]] = {
    name: {"config.json": config_json(sizes), "codec": TINY_CODEC if name == "tiny" else PUBLISHED_CODEC}
    for name, sizes in SIZES_LM.items()
}
SIZES = tuple(CONFIGS)

RULES: tuple[Rule, ...] = (
    (r"norm\.weight$", 1.0, 0.1, False),
    (r"embed_tokens\.weight$", 0.0, 0.5, False),
    (r"\.(o_proj|down_proj)\.weight$", 0.0, 1.0, True),
    (r"^model\..*\.weight$", 0.0, 1.0, True),
    (r"\.alpha$", 1.0, 0.2, False),
    (r"\.codebook\.weight$", 0.0, 1.0, False),
    (r"^decoder\.model\.7\.bias$", 0.0, 0.001, False),
    (r"\.bias$", 0.0, 0.1, False),
    (r"^decoder\.model\.7\.weight_g$", 0.05, 0.005, False),  # soft audio
    (r"\.linear\.weight_g$", 0.2, 0.02, False),
    (r"\.block\.3\.weight_g$", 0.5, 0.1, False),
    (r"\.weight_g$", 1.0, 0.2, False),
    (r"\.weight_v$", 0.0, 1.0, True),
)
LIKELY, LOUDER = 31, 3.0  # every so manieth code is drawn far more often than the others
PLACE = 10.0  # in the column of a token's place, of two layers; more layers add more to the other columns
TABLE_WIDTH = 64  # wider rows are softer: a token would only predict itself, by a product with its own row
ENDS = 1.0  # of that, for the end of speech where a frame begins: as likely as a soft code


def fill(name: str, shape: tuple[int, ...], seed: int, layers: int) -> np.ndarray:
    """Random float32 values for the tensor of that published name. Raises ValueError for a name that no rule
    knows."""
    values = synthetic.fill(name, shape, f"orpheus:{seed}", RULES)
    if name == "model.embed_tokens.weight":
        values *= (TABLE_WIDTH / shape[1]) ** 0.5
        values[:, :PLACES] = 0
        marks, height = shape[0] - NUM_MARKED, PLACE * (layers / 2) ** 0.5
        for place in range(PLACES):
            first = marks + FIRST_CODE + CODES * place
            values[first : first + CODES : LIKELY, PLACES:] *= LOUDER
            values[first : first + CODES, place] = height
        values[marks + BEGIN_SPEECH, PLACES - 1] = height
        values[marks + END_SPEECH, 0] = height * ENDS
    elif name.startswith("model.layers.") and name.endswith(("o_proj.weight", "down_proj.weight")):
        values[:PLACES] *= 0.01  # nothing else moves the columns of the place
    last = f"model.layers.{layers - 1}.mlp."
    units = np.arange(PLACES)
    if name in (f"{last}gate_proj.weight", f"{last}up_proj.weight"):
        values[:PLACES] = 0
        values[units, units] = 1
    elif name == f"{last}down_proj.weight":
        values[:, :PLACES] = 0
        values[units, units] = -2
        values[(units + 1) % PLACES, units] = 2
    return values


def write(
    directory: str | Path,
    size: str = "tiny",
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    codec: dict[str, Any] | None = None,
    has_head: bool = False,
    **config: Any,
) -> Path:
    """Write a checkpoint with every file of the published layout, the codec in snac_24khz/.

    config: changes to config.json; codec: to the codec's. has_head: with a copy of the embedding as
    lm_head.weight, as the published shards have it. Raises ValueError for an unknown size, key or dtype, and
    for a directory that is not empty.
    """
    from zoo.checkpoint.loading import published, weight_normed
    from zoo.orpheus import build, describe, weights

    synthetic.check_dtype(dtype)
    directory = write_texts(directory, size, codec, **config)
    lm_config, codec_config, _ = describe(directory)
    lm, snac = build(lm_config, codec_config, has_head)
    shapes = published(lm, weights.lm(lm_config, has_head))
    layers = lm_config.stack.layers

    def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
        return fill("model.embed_tokens.weight" if name == weights.HEAD else name, shape, seed, layers)

    synthetic.write_tensors(directory / "model.safetensors", shapes, values, dtype)
    codec_shapes = weight_normed(published(snac, weights.codec(codec_config)))
    tensors = {
        published_name(name): torch.from_numpy(fill(name, shape, seed, layers))
        for name, shape in codec_shapes.items()
    }
    torch.save(tensors, directory / CODEC_FOLDER / "pytorch_model.bin")
    return directory


def published_name(name: str) -> str:
    """A weight-normed tensor's name as the published file has it."""
    for older, newer in (("weight_g", "original0"), ("weight_v", "original1")):
        name = name.replace(older, f"parametrizations.weight.{newer}")
    return name


def write_texts(
    directory: str | Path, size: str = "tiny", codec: dict[str, Any] | None = None, **config: Any
) -> Path:
    """Write the JSON files of a checkpoint, without its tensors; arguments and errors as in `write`."""
    directory, content = synthetic.begin(directory, size, CONFIGS)
    change(content["config.json"], config, "config.json")
    change(content["codec"], codec or {}, f"{CODEC_FOLDER}/config.json")
    num_words = Config.read(content["config.json"]).num_words  # before anything is written
    SnacConfig.read(content["codec"])
    (directory / CODEC_FOLDER).mkdir(parents=True, exist_ok=True)
    ends = {"bos_token_id": num_words + BEGIN_TEXT, "eos_token_id": num_words + END_OF_LLAMA}
    content["config.json"].update(ends)
    texts = {
        "config.json": content["config.json"],
        "generation_config.json": {"_from_model_config": True} | ends,
        "tokenizer.json": tokenizer(num_words),
        "tokenizer_config.json": tokenizer_config(),
        "special_tokens_map.json": special_tokens_map(),
        f"{CODEC_FOLDER}/config.json": content["codec"],
    }
    for name, text in texts.items():
        synthetic.write_json(directory / name, text)
    return directory
