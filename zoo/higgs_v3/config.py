"""The checkpoint's config.json as frozen dataclasses. A missing key is an error that names it; unknown keys are ignored."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from math import prod
from typing import Any

from zoo.nn.config import expect, need

MODEL = "higgs_multimodal_qwen3"
V2 = ("higgs_audio", "higgs_audio_v2")
CODEC_ALONE = "higgs_audio_v2_tokenizer"
ROPE_THETA = 1_000_000.0  # the first published configs name none
CONTEXT = 8192  # positions that the model was trained with (model card); config.json has room for more
MAX_ROWS = 2048  # steps that a request takes at most in sglang-omni 0.1.9
SPECIALS = 2  # of a codebook's vocabulary, at its end: "begin of codes" and "end of codes"
SAMPLE_RATE_HZ = 24_000
SEMANTIC_RATE_HZ = 16_000

# No published file names the codec's shape: it is that of bosonai/higgs-audio-v2-tokenizer, config.json, whose names these are. A demo
# checkpoint of another size says so in `audio_encoder_config.codec_config`.
CODEC: dict[str, Any] = {
    "codebook_size": 1024,
    "codebook_dim": 64,
    "acoustic_model_config": {
        "encoder_hidden_size": 64,
        "decoder_hidden_size": 1024,
        "hidden_size": 256,
        "downsampling_ratios": [8, 5, 4, 2, 3],
    },
    "semantic_model_config": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "conv_dim": [512] * 7,
        "conv_kernel": [10, 3, 3, 3, 3, 2, 2],
        "conv_stride": [5, 2, 2, 2, 2, 2, 2],
        "num_conv_pos_embeddings": 128,
        "num_conv_pos_embedding_groups": 16,
        "layer_norm_eps": 1e-5,
    },
}


@dataclass(frozen=True)
class StackConfig:
    """The Qwen3 blocks."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float

    @classmethod
    def read(cls, config: dict[str, Any], where: str) -> StackConfig:
        expect(config, where, model_type="qwen3", hidden_act="silu", attention_bias=False, tie_word_embeddings=True)
        rope = config.get("rope_parameters") or {}
        if (kind := rope.get("rope_type", "default")) != "default" or config.get("sliding_window"):
            raise ValueError(
                f"config.json: {where} has rope_type={kind!r}, sliding_window={config.get('sliding_window')}; neither is known"
            )
        return cls(
            hidden=need(config, "hidden_size", where),
            inner=need(config, "intermediate_size", where),
            layers=need(config, "num_hidden_layers", where),
            heads=need(config, "num_attention_heads", where),
            kv_heads=need(config, "num_key_value_heads", where),
            head_dim=need(config, "head_dim", where),
            eps=need(config, "rms_norm_eps", where),
            rope_theta=float(rope.get("rope_theta", ROPE_THETA)),
        )


@dataclass(frozen=True)
class SemanticConfig:
    """HuBERT: it hears what is said, for the codes of a reference."""

    hidden: int
    inner: int
    layers: int
    heads: int
    conv_widths: tuple[int, ...]
    conv_kernels: tuple[int, ...]
    conv_strides: tuple[int, ...]
    position_kernel: int
    position_groups: int
    eps: float

    @classmethod
    def read(cls, config: dict[str, Any]) -> SemanticConfig:
        where = "codec_config.semantic_model_config"
        return cls(
            hidden=need(config, "hidden_size", where),
            inner=need(config, "intermediate_size", where),
            layers=need(config, "num_hidden_layers", where),
            heads=need(config, "num_attention_heads", where),
            conv_widths=tuple(need(config, "conv_dim", where)),
            conv_kernels=tuple(need(config, "conv_kernel", where)),
            conv_strides=tuple(need(config, "conv_stride", where)),
            position_kernel=need(config, "num_conv_pos_embeddings", where),
            position_groups=need(config, "num_conv_pos_embedding_groups", where),
            eps=need(config, "layer_norm_eps", where),
        )


@dataclass(frozen=True)
class CodecConfig:
    codebooks: int
    codebook_size: int
    codebook_width: int
    latent: int  # channels between the codebooks and the acoustic decoder
    encoder_channels: int  # of the encoder's first convolution, doubled by each block
    decoder_channels: int  # of the decoder's first block, halved by each
    ratios: tuple[int, ...]  # samples to frames in the encoder, frames to samples in the decoder, in this order in both
    semantic: SemanticConfig

    @property
    def frame_samples(self) -> int:
        return prod(self.ratios)

    @property
    def width(self) -> int:
        """Of what the codebooks quantise: acoustic and semantic latent side by side."""
        return self.latent + self.semantic.hidden

    @classmethod
    def read(cls, config: dict[str, Any], codebooks: int, codebook_size: int) -> CodecConfig:
        """Raises ValueError for what is missing and for what does not fit the LM's vocabulary."""
        where = "codec_config"
        acoustic = need(config, "acoustic_model_config", where)
        if (size := need(config, "codebook_size", where)) != codebook_size:
            raise ValueError(f"config.json: the LM has {codebook_size} codes per codebook, and the codec {size}")
        read = cls(
            codebooks=codebooks,
            codebook_size=codebook_size,
            codebook_width=need(config, "codebook_dim", where),
            latent=need(acoustic, "hidden_size", where),
            encoder_channels=need(acoustic, "encoder_hidden_size", where),
            decoder_channels=need(acoustic, "decoder_hidden_size", where),
            ratios=tuple(need(acoustic, "downsampling_ratios", where)),
            semantic=SemanticConfig.read(need(config, "semantic_model_config", where)),
        )
        hop = 2 * prod(read.semantic.conv_strides) * SAMPLE_RATE_HZ // SEMANTIC_RATE_HZ  # every second frame of HuBERT's is kept
        if read.frame_samples != hop:
            raise ValueError(
                f"config.json: a frame has {read.frame_samples} samples in the acoustic half of the codec, {hop} in the semantic"
            )
        return read


@dataclass(frozen=True)
class Config:
    stack: StackConfig
    text_vocab: int
    codebooks: int
    vocab: int  # of a codebook: codes, then "begin" and "end"
    max_positions: int
    codec: CodecConfig

    @property
    def begin(self) -> int:
        """Stands where a codebook has not begun yet."""
        return self.vocab - 2

    @property
    def end(self) -> int:
        """Stands where a codebook has ended; the first codebook's ends the speech."""
        return self.vocab - 1

    @property
    def delay(self) -> int:
        """Steps from a frame's first code to its last."""
        return self.codebooks - 1

    @classmethod
    def read(cls, config: dict[str, Any]) -> Config:
        """Raises ValueError for what is missing, and for models that this package cannot run, by name."""
        model = config.get("model_type")
        if model in V2:
            raise ValueError(
                f"this is Higgs Audio V2 ({model}): a Llama with a second set of layers for audio and a codec of its own; only Higgs Audio "
                f"V3 TTS ({MODEL}) is supported"
            )
        if model == CODEC_ALONE:
            raise ValueError(
                f"this directory is a codec alone ({model}) and cannot speak; Higgs Audio V3 TTS has it inside its own weights"
            )
        if model != MODEL:
            raise ValueError(f"model_type {model!r} is not supported; supported: {MODEL}")
        audio, text = need(config, "audio_encoder_config", "the root"), need(config, "text_config", "the root")
        where = "audio_encoder_config"
        if (kind := need(audio, "encoder_type", where)) != "discrete":
            raise ValueError(
                f"config.json: {where} has encoder_type={kind!r}: a model that listens; only models that speak ('discrete') are known"
            )
        expect(audio, where, tie_word_embeddings=True, use_delay_pattern=True)
        stack = StackConfig.read(text, "text_config")
        if (width := need(audio, "out_dim", where)) != stack.hidden:
            raise ValueError(f"config.json: {where} has out_dim={width}, but the LM that reads it has hidden_size={stack.hidden}")
        codebooks, vocab = need(audio, "num_codebooks", where), need(audio, "vocab_size", where)
        codec = audio.get("codec_config") or copy.deepcopy(CODEC)
        return cls(
            stack=stack,
            text_vocab=need(text, "vocab_size", "text_config"),
            codebooks=codebooks,
            vocab=vocab,
            max_positions=min(need(text, "max_position_embeddings", "text_config"), CONTEXT),
            codec=CodecConfig.read(codec, codebooks, vocab - SPECIALS),
        )
