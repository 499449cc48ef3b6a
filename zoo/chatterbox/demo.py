"""Random checkpoints in the published layouts, for tests, first tries, and speed work without trained
weights.

    write("demo", "tiny")               # 40 megabytes, mostly the speaker encoder, which has one size
    write("demo", "tiny-multilingual")  # or "tiny-turbo"
    write("full", "full")               # the published shapes; also "full-multilingual", "full-turbo", "full-nano"

The values of a tensor depend only on (seed, published name, shape).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from zoo.chatterbox import vocabulary
from zoo.chatterbox.clone import VOICES_FILE
from zoo.chatterbox.config import HEAD_DIM, SPEAKER, T3_FILES, Config, T3Config
from zoo.checkpoint import synthetic
from zoo.checkpoint.synthetic import Rule
from zoo.nn.mel import slaney_filters
from zoo.nn.s3.sizes import MELS, NUM_CODES, FlowSizes, vocoder_sizes
from zoo.nn.s3.tokenizer import FFT, S3Config
from zoo.nn.s3.tokenizer import RATE_HZ as SPEECH_HZ

Shapes = dict[str, tuple[int, ...]]
Sizes = dict[str, Any]  # fields of Size


@dataclass(frozen=True)
class Size:
    t3_file: str = "t3_cfg.safetensors"
    hidden: int = 1024
    heads: int = 16
    inner: int = 4096
    layers: int = 30
    text_vocab: int = vocabulary.ENGLISH_SIZE
    num_outputs: int = 8194
    text_positions: int = 2050
    speech_positions: int = 4100
    positions: int = 0
    queries: int = 32
    encoder: int = 512
    encoder_heads: int = 8
    encoder_inner: int = 2048
    encoder_layers: int = 6
    channels: int = 256
    estimator_heads: int = 8
    num_blocks: int = 4
    num_mid: int = 12
    vocoder: int = 512
    f0: int = 512
    s3_width: int = 1280
    s3_layers: int = 6


TINY = Size(
    hidden=64, heads=1, inner=96, layers=2, text_positions=500, speech_positions=160, queries=4,
    encoder=32, encoder_heads=2, encoder_inner=48, encoder_layers=2,
    channels=16, estimator_heads=1, num_blocks=1, num_mid=2, vocoder=16, f0=8, s3_width=64, s3_layers=1,
)  # fmt: skip
# The reference's encoder always has 512 channels.
PARITY = replace(
    TINY, hidden=128, heads=1, text_positions=2050, speech_positions=4100, queries=32,
    encoder=512, encoder_heads=8, encoder_inner=64, channels=64, vocoder=64, f0=32, s3_width=128, s3_layers=2,
)  # fmt: skip
MID = replace(Size(), hidden=512, heads=8, inner=2048, layers=15, encoder_layers=3, num_blocks=2, num_mid=4)
MULTILINGUAL: Sizes = {"t3_file": "t3_mtl23ls_v2.safetensors", "text_vocab": vocabulary.MULTILINGUAL_SIZE}
GPT2: Sizes = {"num_outputs": 6563, "text_positions": 0, "speech_positions": 0, "queries": 0}
TURBO: Sizes = GPT2 | {
    "t3_file": "t3_turbo_v1.safetensors",
    "text_vocab": vocabulary.GPT2_SIZE,
    "positions": 8196,
}
SMALL_TURBO: Sizes = TURBO | {"text_vocab": 512, "positions": 1200}
NANO: Sizes = TURBO | {
    "t3_file": "t3_nano_v1.safetensors",
    "hidden": 768,
    "heads": 12,
    "inner": 3072,
    "layers": 12,
}
CONFIGS = {
    "tiny": TINY,
    "tiny-multilingual": replace(TINY, **MULTILINGUAL),
    "tiny-turbo": replace(TINY, **SMALL_TURBO),
    "parity": PARITY,
    "parity-multilingual": replace(PARITY, **MULTILINGUAL),
    "parity-turbo": replace(PARITY, heads=2, **SMALL_TURBO),
    "mid": MID,
    "full": Size(),
    "full-multilingual": replace(Size(), **MULTILINGUAL),
    "full-turbo": replace(Size(), layers=24, **TURBO),
    "full-nano": replace(Size(), **NANO),
}
SIZES = tuple(CONFIGS)

RULES: tuple[Rule, ...] = (
    (r"^mel2wav\.f0_predictor\.classifier\.bias$", 110.0, 0.0, False),  # the pitch of a voice, in Hz
    (r"^mel2wav\.f0_predictor\.classifier\.weight$", 0.0, 60.0, True),
    (r"^mel2wav\.conv_post\..*original0$", 0.1, 0.01, False),  # quiet audio, far from the clamp
    (r"^mel2wav\.conv_post\.bias$", 0.0, 0.1, False),
    (r"^mel2wav\.m_source\.l_linear\.weight$", 0.0, 3.0, True),
    (
        r"^mel2wav\.ups\..*original0$",
        1.5,
        0.2,
        False,
    ),  # transposed convolution: the gain of each input channel
    (r"original0$", 0.7, 0.1, False),  # convolution: the gain of each output channel
    (r"\.alpha$", 1.0, 0.2, False),
    (r"running_var$", 1.0, 0.1, False),
    (r"running_mean$", 0.0, 0.1, False),
    (
        r"(norm\w*|_ln|ln_\w+|batchnorm|layernorm|bn\d|shortcut\.1|\.out\.1|block\.2)\.weight$",
        1.0,
        0.1,
        False,
    ),
    (r"bias(_\w+)?$|pos_bias_[uv]$", 0.0, 0.1, False),
    (r"^speech_head\.weight$", 0.0, 2.0, True),  # logits of a few units
    (r"^cond_enc\.emotion_adv_fc\.weight$", 0.0, 2.0, False),
    (r"(q_proj|k_proj)\.weight$", 0.0, 2.0, True),
    (r"pos_emb\.emb\.weight$|wpe\.weight$", 0.0, 0.5, False),
    (r"pre_attention_query$|(emb|embed_tokens|wte|embedding)\.weight$", 0.0, 1.0, False),
    (r"time_embed_mixer\.weight$", 0.0, 1.0, True),
    (r"similarity_", 0.0, 1.0, False),
    (r"(weight(_\w+)?|original1)$", 0.0, 1.0, True),
)


def fill(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return random float32 values for a tensor by its published name. Raises ValueError without a rule for
    it."""
    return synthetic.fill(name, shape, f"chatterbox:{seed}", RULES)


def write(
    directory: str | Path, size: str = "tiny", seed: int = 0, dtype: torch.dtype = torch.float32
) -> Path:
    """Write a checkpoint with every published file that the loader reads. dtype: of the language model.

    Raises ValueError for an unknown size or dtype, and for a directory that is not empty.
    """
    synthetic.check_dtype(dtype)
    directory, known = synthetic.begin(directory, size, CONFIGS)
    directory.mkdir(parents=True, exist_ok=True)
    config = config_of(known)
    for name, shapes in files(config, known.t3_file).items():
        tensors = {key: made(key, shape, seed) for key, shape in shapes.items()}
        if name == known.t3_file:
            tensors = {key: value.to(dtype) for key, value in tensors.items()}
        save_file(tensors, directory / name)
    write_texts(directory, config)
    torch.save(voice(config, seed), directory / VOICES_FILE)
    return directory


def config_of(size: Size) -> Config:
    kind = T3_FILES[size.t3_file]
    t3 = T3Config(**{name: getattr(size, name) for name in T3Config.__dataclass_fields__})
    flow = FlowSizes(
        num_codes=NUM_CODES,
        width=size.encoder,
        heads=size.encoder_heads,
        inner=size.encoder_inner,
        layers=size.encoder_layers,
        speaker=192,
        channels=size.channels,
        estimator_heads=size.estimator_heads,
        head_dim=HEAD_DIM,
        num_blocks=size.num_blocks,
        num_mid=size.num_mid,
        guidance=0.7,
        is_meanflow=kind == "turbo",
    )
    vocoder = vocoder_sizes(size.vocoder, harmonics=9, f0_channels=size.f0)
    return Config(kind, "", t3, flow, vocoder, S3Config(128, size.s3_width, size.s3_layers))


def files(config: Config, t3_file: str) -> dict[str, Shapes]:
    """Return the published shapes of every file of tensors, by its name."""
    from zoo.chatterbox import build, weights
    from zoo.checkpoint.loading import published

    t3, _, _, encoders = build(config)
    shapes = published(t3, weights.t3(config.t3))
    hidden, rows = config.t3.hidden, config.t3.text_vocab
    if config.is_turbo:
        shapes = {
            name: shape[::-1] if weights.is_gpt2_matrix(name) else shape for name, shape in shapes.items()
        }
        shapes["tfmr.wte.weight"] = (rows, hidden)
    else:
        shapes["tfmr.embed_tokens.weight"] = (8, hidden)
    shapes["text_head.weight"] = (rows, hidden)
    voice_encoder = published(encoders.voice, weights.voice_encoder())
    voice_encoder |= dict.fromkeys(weights.UNREAD_OF_VOICE, (1,))
    s3gen = "s3gen_meanflow.safetensors" if config.is_turbo else "s3gen.safetensors"
    return {t3_file: shapes, s3gen: s3gen_shapes(config), "ve.safetensors": voice_encoder}


def s3gen_shapes(config: Config) -> Shapes:
    from zoo.chatterbox import build, weights
    from zoo.checkpoint.loading import published, weight_normed

    _, flow, vocoder, encoders = build(config)
    tokenizer = published(encoders.tokenizer, weights.tokenizer(config.tokenizer))
    tokenizer["_mel_filters"] = (config.tokenizer.mels, FFT // 2 + 1)
    if config.is_turbo:
        tokenizer["window"] = (FFT,)
    is_normed = weights.names.is_weight_normed
    normed = weight_normed(published(vocoder, weights.vocoder(config)), is_normed)
    parts = {
        "tokenizer.": tokenizer,
        "speaker_encoder.": unfolded(published(encoders.timbre, weights.names.campplus())),
        "flow.": published(flow, weights.flow(config)),
        "mel2wav.": {newer(name): shape for name, shape in normed.items()},
    }
    return {prefix + name: shape for prefix, shapes in parts.items() for name, shape in shapes.items()}


def unfolded(shapes: Mapping[str, tuple[int, ...]]) -> Shapes:
    """Return CAM++'s tensors with the normalisations that its exporter folds into convolutions."""
    from zoo.nn.s3.names import STATISTICS, folded_norm

    found: Shapes = {}
    for name, shape in shapes.items():
        owner, _, kind = name.rpartition(".")
        norm = folded_norm(owner)
        if norm is None:
            found[name] = shape
        elif kind == "weight":
            found[name] = shape
            found |= {f"{norm}.{each}": shape[:1] for each in ("weight", "bias", *STATISTICS)}
    norms = [name.removesuffix("running_var") for name in found if name.endswith("running_var")]
    return found | {f"{norm}num_batches_tracked": () for norm in norms}


def newer(name: str) -> str:
    for older, instead in (("weight_g", "original0"), ("weight_v", "original1")):
        name = name.replace(f".{older}", f".parametrizations.weight.{instead}")
    return name


def made(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return the values of a published tensor."""
    if name.endswith("num_batches_tracked"):
        return torch.tensor(1)
    if name.endswith("_mel_filters"):
        return slaney_filters(SPEECH_HZ, FFT, shape[0]).float().abs()  # zeros without a sign
    if name == "tokenizer.window":
        return torch.hann_window(FFT)
    return torch.from_numpy(fill(name, shape, seed)).contiguous()


def write_texts(directory: Path, config: Config) -> None:
    """Write the files of the text tokenizer."""
    if not config.is_turbo:
        name = "tokenizer.json" if config.kind == "english" else "grapheme_mtl_merged_expanded_v1.json"
        synthetic.write_json(directory / name, vocabulary.tokenizer(config.kind == "multilingual"))
        if config.kind == "multilingual":
            (directory / "Cangjie5_TC.json").write_text(json.dumps(["你\tonf", "好\tvnd"]), encoding="utf-8")
        return
    words = vocabulary.gpt2_words(config.t3.text_vocab == vocabulary.GPT2_SIZE)
    synthetic.write_json(directory / "vocab.json", words)
    lines = ["#version: 0.2", *(" ".join(pair) for pair in vocabulary.gpt2_merges())]
    (directory / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    synthetic.write_json(directory / "added_tokens.json", vocabulary.gpt2_tags(words))
    end = vocabulary.END_OF_TEXT
    ends = {"bos_token": end, "eos_token": end, "unk_token": end}
    settings = {"add_prefix_space": False, "model_max_length": 1024, "tokenizer_class": "GPT2Tokenizer"}
    synthetic.write_json(directory / "tokenizer_config.json", ends | settings)


def voice(config: Config, seed: int, num_codes: int = 38) -> dict[str, dict[str, Tensor | None]]:
    """Return conds.pt: a voice of random values, with the entries that the published one has."""
    codes = torch.arange(num_codes)[None] * 1237 % NUM_CODES
    mel = torch.from_numpy(fill("voice.weight", (1, 2 * num_codes, MELS), seed)) * MELS - 4
    speaker = torch.from_numpy(fill("speaker.embedding.weight", (1, SPEAKER), seed)).relu()
    t3: dict[str, Tensor | None] = {
        "speaker_emb": F.normalize(speaker, dim=1),
        "clap_emb": None,
        "cond_prompt_speech_tokens": (codes + 7) % NUM_CODES,
        "cond_prompt_speech_emb": None,
        "emotion_adv": torch.full((1, 1, 1), 0.5),
    }
    flow: dict[str, Tensor | None] = {
        "prompt_token": codes,
        "prompt_token_len": torch.tensor([num_codes]),
        "prompt_feat": mel,
        "prompt_feat_len": None,
        "embedding": torch.from_numpy(fill("timbre.embedding.weight", (1, config.flow.speaker), seed)),
    }
    return {"t3": t3, "gen": flow}
