"""The checkpoint's config.json as frozen dataclasses. A missing or out-of-range key raises an error that
names it; unknown keys are ignored."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm, prod
from typing import Any

from zoo.checkpoint.config import (
    CODEBOOKS,
    EPS,
    HEADS,
    KERNEL,
    LAYERS,
    MAX_WIDTH,
    POSITIONS,
    ROPE_THETA,
    VOCABULARY,
    WIDTH,
    ConfigBlock,
)
from zoo.checkpoint.stack import StackConfig, read_stack

MODEL = "higgs_multimodal_qwen3"
V2 = ("higgs_audio", "higgs_audio_v2")
CODEC_ALONE = "higgs_audio_v2_tokenizer"
# For the first published configs, which have no rope_parameters.
ROPE = {"rope_type": "default", "rope_theta": 1_000_000.0}
CONTEXT = 8192  # positions in training (model card); config.json allows more
MAX_ROWS = 2048  # most steps of a request in sglang-omni 0.1.9
SPECIALS = 2  # the last ids of a codebook's vocabulary: "begin of codes" and "end of codes"
SAMPLE_RATE_HZ = 24_000
SEMANTIC_RATE_HZ = 16_000

# No published file describes the codec's shape. It is that of bosonai/higgs-audio-v2-tokenizer; the keys are
# those of its config.json. A demo checkpoint of another size has `audio_encoder_config.codec_config`.
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


def qwen3_stack(block: ConfigBlock) -> StackConfig:
    """Read the sizes of the Qwen3 blocks. Raises ValueError."""
    block.expect(model_type="qwen3", hidden_act="silu", attention_bias=False, tie_word_embeddings=True)
    block.expect_none("sliding_window")
    stated = block.values.get("rope_parameters") is not None
    rope = (block.block("rope_parameters") if stated else ConfigBlock({})).with_defaults(ROPE)
    rope.expect(rope_type="default")
    return read_stack(block, float(rope.number("rope_theta", *ROPE_THETA)))


@dataclass(frozen=True)
class SemanticConfig:
    """The sizes of HuBERT, the semantic branch of the reference encoder."""

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
    def read(cls, block: ConfigBlock) -> SemanticConfig:
        known = CODEC["semantic_model_config"]
        block.expect(conv_kernel=known["conv_kernel"], conv_stride=known["conv_stride"])
        kernels = tuple(known["conv_kernel"])
        heads = block.integer("num_attention_heads", *HEADS)
        groups = block.integer("num_conv_pos_embedding_groups", *WIDTH)
        return cls(
            hidden=block.integer("hidden_size", *WIDTH, step=lcm(heads, groups)),
            inner=block.integer("intermediate_size", *WIDTH),
            layers=block.integer("num_hidden_layers", *LAYERS),
            heads=heads,
            conv_widths=block.integers("conv_dim", *WIDTH, lengths=(len(kernels), len(kernels))),
            conv_kernels=kernels,
            conv_strides=tuple(known["conv_stride"]),
            position_kernel=block.integer("num_conv_pos_embeddings", *KERNEL),
            position_groups=groups,
            eps=block.number("layer_norm_eps", *EPS),
        )


@dataclass(frozen=True)
class CodecConfig:
    codebooks: int
    codebook_size: int
    codebook_width: int
    latent: int  # channels between the codebooks and the acoustic decoder
    encoder_channels: int  # of the encoder's first convolution; each block doubles them
    decoder_channels: int  # of the decoder's first block; each block halves them
    # the strides of the encoder and of the decoder, both in this order
    ratios: tuple[int, ...]
    semantic: SemanticConfig

    @property
    def frame_samples(self) -> int:
        return prod(self.ratios)

    @property
    def width(self) -> int:
        """Channels of the latent that the codebooks quantize: the acoustic and the semantic latent,
        concatenated."""
        return self.latent + self.semantic.hidden

    @classmethod
    def read(cls, block: ConfigBlock, codebooks: int, codebook_size: int) -> CodecConfig:
        """Read the codec's shape. Raises ValueError for a missing or out-of-range key, and for codes that do
        not fit the LM's vocabulary."""
        acoustic = block.block("acoustic_model_config")
        acoustic.expect(downsampling_ratios=CODEC["acoustic_model_config"]["downsampling_ratios"])
        ratios = tuple(acoustic.get("downsampling_ratios"))
        if (size := block.integer("codebook_size", *VOCABULARY)) != codebook_size:
            codes = f"the LM has {codebook_size} codes per codebook, but the codec has {size}"
            raise ValueError(f"{block.file}: {codes}")
        return cls(
            codebooks=codebooks,
            codebook_size=codebook_size,
            codebook_width=block.integer("codebook_dim", *WIDTH),
            latent=acoustic.integer("hidden_size", *WIDTH),
            encoder_channels=acoustic.integer("encoder_hidden_size", 1, MAX_WIDTH >> len(ratios)),
            decoder_channels=acoustic.integer("decoder_hidden_size", 1 << len(ratios), MAX_WIDTH),
            ratios=ratios,
            semantic=SemanticConfig.read(block.block("semantic_model_config")),
        )


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
        """The id for a codebook that has not begun yet."""
        return self.vocab - 2

    @property
    def end(self) -> int:
        """The id for a codebook that has ended. In the first codebook it ends the speech."""
        return self.vocab - 1

    @property
    def delay(self) -> int:
        """Steps from a frame's first code to its last."""
        return self.codebooks - 1

    @classmethod
    def read(cls, config: dict[str, Any]) -> Config:
        """Read config.json. Raises ValueError for a missing or out-of-range key, and for an unsupported
        model."""
        model = config.get("model_type")
        if model in V2:
            raise ValueError(
                f"this is Higgs Audio V2 ({model}), which has another architecture and codec; only Higgs Audio V3 TTS "
                f"({MODEL}) is supported"
            )
        if model == CODEC_ALONE:
            raise ValueError(
                f"this directory holds only a codec ({model}); load Higgs Audio V3 TTS, which contains it"
            )
        if model != MODEL:
            raise ValueError(f"model_type {model!r} is not supported; supported: {MODEL}")
        root = ConfigBlock(config)
        audio, text = root.block("audio_encoder_config"), root.block("text_config")
        if audio.get("encoder_type") != "discrete":
            listens = "that model understands speech; only speech synthesis ('discrete') is supported"
            raise audio.refuse("encoder_type", listens)
        audio.expect(tie_word_embeddings=True, use_delay_pattern=True)
        stack = qwen3_stack(text)
        if audio.integer("out_dim", *WIDTH) != stack.hidden:
            raise audio.refuse("out_dim", f"it must equal the LM's hidden_size, {stack.hidden}")
        codebooks = audio.integer("num_codebooks", *CODEBOOKS)
        vocab = audio.integer("vocab_size", SPECIALS + 1, VOCABULARY[1])
        stated = audio.values.get("codec_config") is not None
        codec = audio.block("codec_config") if stated else ConfigBlock(CODEC, "codec_config")
        return cls(
            stack=stack,
            text_vocab=text.integer("vocab_size", *VOCABULARY),
            codebooks=codebooks,
            vocab=vocab,
            max_positions=min(text.integer("max_position_embeddings", codebooks, POSITIONS[1]), CONTEXT),
            codec=CodecConfig.read(codec, codebooks, vocab - SPECIALS),
        )
