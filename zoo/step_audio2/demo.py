"""Random checkpoints in the published layout, without trained weights. For tests, first tries, and speed work.

    write("demo", "tiny")    # 40 megabytes, mostly the speaker encoder, which has one size; runs anywhere
    write("mid", "mid")      # 500 million parameters; the vocoder as published
    write("full", "full")    # the published shapes and sizes, 36 GB in float32

A tensor's values depend only on (seed, published name, shape). The rows of the audio tokens in the head are loud, so most
tokens of an answer are codes; text and the end come now and then. Unlike the published directory, these have the two
default voices of the original's source: noise, in assets/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

from zoo.checkpoint import synthetic
from zoo.checkpoint.synthetic import Rule
from zoo.nn.s3.demo_rules import VOCODER_RULES
from zoo.nn.s3.sizes import vocoder_sizes
from zoo.nn.s3.tokenizer import S3Config, S3Tokenizer
from zoo.step_audio2 import voices
from zoo.step_audio2.config import FOLDER, TOKENIZER_FILE, YAML, Config
from zoo.step_audio2.prompt import BEHIND_THOUGHT, THOUGHT, TRANSCRIBE
from zoo.step_audio2.vocabulary import (
    AUDIO_END,
    AUDIO_PATCH,
    AUDIO_START,
    BEGIN,
    END,
    NUM_AUDIO,
    SPEECH_END,
    SPEECH_PAD,
    SPEECH_START,
    TOKENS,
    audio,
    is_code,
)
from zoo.text.bpe import (
    ENGLISH,
    QWEN_PARTS,
    Pair,
    added_token,
    byte_symbols,
    chain,
    in_symbols,
    tokenizer_json,
)

PUBLISHED_WORDS, PUBLISHED_EARLY = 151_643, 45  # tokens before <audio_start>
FIRST_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", BEGIN, END)
AUDIO_SPECIAL = (
    AUDIO_START,
    AUDIO_END,
    AUDIO_PATCH,
    "<audio_filler>",
    SPEECH_PAD,
    SPEECH_START,
    SPEECH_END,
    "<tts_filler>",
)


@dataclass(frozen=True)
class Size:
    hidden: int = 3584
    inner: int = 18_944
    layers: int = 28
    heads: int = 28
    kv_heads: int = 4
    positions: int = 16_384
    rows: int = 158_720  # of the vocabulary; 0: as many as there are tokens, and a few more
    listener: int = 1280
    listener_layers: int = 32
    listener_heads: int = 20
    mels: int = 128
    encoder: int = 512
    encoder_heads: int = 8
    encoder_inner: int = 2048
    encoder_layers: int = 6
    estimator: int = 512
    estimator_heads: int = 8
    head_dim: int = 64
    depth: int = 16
    vocoder: int = 512
    f0: int = 512
    s3_width: int = 1280
    s3_layers: int = 6


TINY = Size(
    hidden=32, inner=64, layers=2, heads=4, kv_heads=2, positions=1024, rows=0,
    listener=32, listener_layers=2, listener_heads=2, mels=16,
    encoder=32, encoder_heads=2, encoder_inner=48, encoder_layers=2,
    estimator=32, estimator_heads=2, head_dim=8, depth=2, vocoder=16, f0=8, s3_width=64, s3_layers=1,
)  # fmt: skip
# The reference's encoder needs four layers at least, as many as behind the upsampling.
PARITY = Size(
    hidden=64, inner=96, layers=3, heads=4, kv_heads=2, positions=2048, rows=0,
    listener=64, listener_layers=3, listener_heads=4,
    encoder=64, encoder_heads=2, encoder_inner=96, encoder_layers=4,
    estimator=64, estimator_heads=3, head_dim=16, depth=3, vocoder=64, f0=32, s3_width=128, s3_layers=2,
)  # fmt: skip
MID = Size(
    hidden=1024, inner=4736, layers=12, heads=8, kv_heads=2, listener_layers=4, encoder_layers=4, depth=6
)
CONFIGS = {"tiny": TINY, "parity": PARITY, "mid": MID, "full": Size()}
SIZES = tuple(CONFIGS)

YAML_TEXT = """\
# Written by zoo: the published values, or smaller ones, under the published names.
flow: !new:cosyvoice2.flow.flow.CausalMaskedDiffWithXvec
    input_size: {encoder}
    output_size: 80
    spk_embed_dim: 192
    output_type: 'mel'
    vocab_size: 6561
    encoder: !new:cosyvoice2.transformer.upsample_encoder_v2.UpsampleConformerEncoderV2
        input_size: {encoder}
        output_size: {encoder}
        input_layer: 'linear'
        pre_lookahead_len: 3
        num_blocks: {encoder_layers}
        num_up_blocks: 4
        up_stride: 2
        up_scale_factor: 2
        attention_heads: {encoder_heads}
        pos_enc_layer_type: 'rel_pos_espnet'
        selfattention_layer_type: 'rel_selfattn'
        key_bias: true
        linear_units: {encoder_inner}
        dropout_rate: 0.1
        positional_dropout_rate: 0.1
        attention_dropout_rate: 0.1
        normalize_before: true
    decoder: !new:cosyvoice2.flow.flow_matching.CausalConditionalCFM
        inference_cfg_rate: 0.7
        estimator: !new:cosyvoice2.flow.decoder_dit.DiT
            in_channels: 320
            out_channels: 80
            mlp_ratio: 4.0
            depth: {depth}
            num_heads: {estimator_heads}
            head_dim: {head_dim}
            hidden_size: {estimator}
"""

# --- texts ---


@cache
def merges() -> tuple[Pair, ...]:
    """Return chains of whole words: those of the prompt, and English ones."""
    own = (
        f"{THOUGHT}{BEHIND_THOUGHT} human assistant system input tool_json_schemas </ >\n\n \n\n {TRANSCRIBE}"
    )
    words = [*own.split(" "), *own.split(), *ENGLISH.split(), "</", "think", ">\n\n"]
    pieces = [*words, *(f" {word}" for word in ENGLISH.split())]
    return tuple(dict.fromkeys(pair for piece in pieces for pair in chain(in_symbols(piece)) if piece))


@cache
def words(is_full: bool) -> dict[str, int]:
    """Return token -> id: bytes, merged pieces and, at the published size, filler that no merge can reach."""
    tokens = list(dict.fromkeys([*byte_symbols().values(), *(left + right for left, right in merges())]))
    if is_full:
        symbol = byte_symbols()[0]
        tokens += [f"{symbol}{i}" for i in range(len(tokens), PUBLISHED_WORDS)]
    return {token: i for i, token in enumerate(tokens)}


def added(size: Size) -> dict[str, int]:
    """Return the ids of the added tokens, which follow the words without gaps."""
    early = list(FIRST_SPECIAL)
    filler = PUBLISHED_EARLY if size.rows else len(early) + 2
    early += [f"<|filler_{i}|>" for i in range(len(early), filler)]
    names = [*early, *AUDIO_SPECIAL, *(audio(code) for code in range(NUM_AUDIO))]
    first = len(words(bool(size.rows)))
    return {name: first + i for i, name in enumerate(names)}


def texts(size: Size) -> dict[str, dict[str, Any] | str]:
    """Return the content of the text files, by name."""
    ids = added(size)
    tokens = [added_token(id, name) for name, id in ids.items()]
    vocab = words(bool(size.rows))
    tokenizer = tokenizer_json(vocab, [list(pair) for pair in merges()], tokens, **QWEN_PARTS)
    return {
        "config.json": _config(size, size.rows or max(ids.values()) + 9, ids),
        "added_tokens.json": dict(ids),
        "tokenizer_config.json": {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|endoftext|>"},
        TOKENS: tokenizer,
        f"{FOLDER}/{YAML}": YAML_TEXT.format(**vars(size)),
    }


def _config(size: Size, rows: int, ids: Mapping[str, int]) -> dict[str, Any]:
    end = ids["<|endoftext|>"]
    return {
        "architectures": ["StepAudio2ForCausalLM"],
        "audio_encoder_config": {
            "adapter_stride": 2,
            "kernel_size": 3,
            "llm_dim": size.hidden,
            "n_audio_ctx": 1500,
            "n_audio_head": size.listener_heads,
            "n_audio_layer": size.listener_layers,
            "n_audio_state": size.listener,
            "n_codebook_size": 4096,
            "n_mels": size.mels,
        },
        "auto_map": {
            "AutoConfig": "configuration_step_audio_2.StepAudio2Config",
            "AutoModelForCausalLM": "modeling_step_audio_2.StepAudio2ForCausalLM",
        },
        "model_type": "step_audio_2",
        "text_config": {
            "eos_token_id": end,
            "hidden_size": size.hidden,
            "intermediate_size": size.inner,
            "max_position_embeddings": size.positions,
            "max_seq_len": size.positions,
            "model_type": "qwen2",
            "num_attention_groups": size.kv_heads,
            "num_attention_heads": size.heads,
            "num_hidden_layers": size.layers,
            "pad_token_id": end,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
            "vocab_size": rows,
        },
        "torch_dtype": "bfloat16",
    }


# --- values ---

RULES: tuple[Rule, ...] = (
    *VOCODER_RULES,
    (r"running_var$", 1.0, 0.1, False),
    (r"running_mean$", 0.0, 0.1, False),
    (r"adaLN_modulation\.1\.bias$", 0.3, 0.3, False),
    (r"adaLN_modulation\.1\.weight$", 0.0, 0.3, True),
    (r"(norm\w*|_ln|batchnorm|layernorm|\.out\.1|conv\.block\.3|_norm)\.weight$", 1.0, 0.1, False),
    (r"(bias|pos_bias_[uv])$", 0.0, 0.1, False),
    (r"positional_embedding\.weight$", 0.0, 0.3, False),
    (r"(embedding|embed_tokens)\.weight$", 0.0, 1.0, False),
    (r"lm_head\.weight$", 0.0, 2.0, True),
    (r"(weight(_v)?|onnx::\w+)$", 0.0, 1.0, True),
)
LOUDER, MUCH_LOUDER = 1.3, 2.0


def fill(name: str, shape: tuple[int, ...], seed: int, ids: Mapping[str, int]) -> np.ndarray:
    """Return random float32 values for a tensor by its published name. Raises ValueError if no rule matches the name."""
    values = synthetic.fill(name, shape, f"step_audio2:{seed}", RULES)
    if name == "lm_head.weight":
        values[[id for token, id in ids.items() if is_code(token)]] *= LOUDER
        values[[ids[token] for token in (END, SPEECH_PAD, audio(NUM_AUDIO - 1))]] *= MUCH_LOUDER
    return values


# --- writing ---


def write(
    directory: str | Path, size: str = "tiny", seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Write a checkpoint. dtype: of the model's shards; the others are float32, as published.

    Raises ValueError for an unknown size or dtype, and for a directory that is not empty.
    """
    from zoo.checkpoint.loading import published, weight_normed
    from zoo.nn.s3 import demo_onnx
    from zoo.nn.s3.campplus import CamPlus
    from zoo.nn.s3.files import FLOW_FILE, SPEAKER_FILE, VOCODER_FILE, s3_tokenizer
    from zoo.nn.s3.names import campplus
    from zoo.step_audio2 import build, weights

    synthetic.check_dtype(dtype)
    directory = write_texts(directory, size)
    known = CONFIGS[size]
    config = replace_vocoder(Config.read(directory), known)
    values = partial(fill, seed=seed, ids=added(known))
    with torch.device("meta"):
        model, flow, vocoder = build(config)
        s3_config = S3Config(128, known.s3_width, known.s3_layers)
        tokenizer, speaker = S3Tokenizer(s3_config), CamPlus()
    shapes = published(model, weights.published(config.lm, config.listener))
    synthetic.write_tensors(directory / "model.safetensors", shapes, values, dtype)
    folder = directory / FOLDER
    synthetic.write_pickle(folder / FLOW_FILE, published(flow, weights.flow(config.flow)), values)
    shapes = published(vocoder, weights.vocoder(config.vocoder))
    synthetic.write_pickle(folder / VOCODER_FILE, weight_normed(shapes, weights.is_weight_normed), values)
    demo_onnx.write(folder / TOKENIZER_FILE, published(tokenizer, s3_tokenizer(s3_config)), values)
    demo_onnx.write(folder / SPEAKER_FILE, published(speaker, campplus()), values)
    _write_voices(directory / voices.FOLDER)
    return directory


def replace_vocoder(config: Config, size: Size) -> Config:
    """Return the config with the vocoder's sizes, which only its own file has."""
    return Config(config.lm, config.listener, config.flow, vocoder_sizes(size.vocoder, 9, size.f0))


def write_texts(directory: str | Path, size: str = "tiny") -> Path:
    """Write the text files of a checkpoint, without its tensors; errors as in `write`."""
    directory, known = synthetic.begin(directory, size, CONFIGS)
    synthetic.write_contents(directory, texts(known))
    return directory


def _write_voices(folder: Path) -> None:
    """Write two voices of hum and noise, of 2.5 and 1.3 s."""
    folder.mkdir()
    for name, num, hz in (("female", 40_000, 210), ("male", 20_800, 115)):
        t = np.arange(num) / 16_000
        hum = np.sin(2 * np.pi * (hz + 20 * np.sin(3 * t)) * t) * (0.3 + 0.2 * np.sin(7 * t))
        noise = np.random.default_rng(num).normal(size=num) / 50
        soundfile.write(folder / f"default_{name}.wav", (hum + noise).astype(np.float32), 16_000, "PCM_16")
