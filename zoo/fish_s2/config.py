"""The model's configuration: the LM's config.json, and the codec's sizes. No file gives the codec's sizes, so
they are read from its tensor shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from zoo.checkpoint.config import (
    CODEBOOKS,
    EPS,
    HEAD_DIM,
    HEADS,
    LAYERS,
    POSITIONS,
    ROPE_THETA,
    VOCABULARY,
    WIDTH,
    ConfigBlock,
)

MODEL, S1, DRAMA = "fish_qwen3_omni", "dual_ar", "fish_omni"
CODEC_FILE = "codec.pth"
SAMPLE_RATE_HZ = 44_100
CODEC_HEAD_DIM = 64  # used if the file lacks the RoPE tables, whose shape gives the width
LONGEST_POSITIONS = 32_768  # of the codec's transformers: a reference of 380 s, or 25 minutes of speech
MAX_FRAMES = 2048  # per pass; the original keeps this many positions free after a prompt

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class StackConfig:
    """A stack of attention blocks."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    rope_theta: float
    eps: float
    has_qk_norm: bool

    @classmethod
    def read(cls, block: ConfigBlock, rope_theta: float, eps: float, has_qk_norm: bool) -> StackConfig:
        """Read the block. Raises ValueError for a missing, out-of-range or unsupported value."""
        block.expect(attention_qk_norm=has_qk_norm, attention_qkv_bias=False, attention_o_bias=False)
        read = cls(
            hidden=block.integer("dim", *WIDTH),
            layers=block.integer("n_layer", *LAYERS),
            heads=block.integer("n_head", *HEADS),
            kv_heads=block.integer("n_local_heads", *HEADS),
            head_dim=block.integer("head_dim", *HEAD_DIM, step=2),
            inner=block.integer("intermediate_size", *WIDTH),
            rope_theta=rope_theta,
            eps=eps,
            has_qk_norm=has_qk_norm,
        )
        if read.heads % read.kv_heads:
            raise block.refuse("n_local_heads", f"use a divisor of n_head, {read.heads}")
        return read


@dataclass(frozen=True)
class Config:
    """The LM's configuration."""

    slow: StackConfig  # over time
    fast: StackConfig  # over the codes of a frame
    vocab: int
    codebooks: int
    codebook_size: int  # codes in each codebook of the LM; a codebook of the codec may have fewer
    max_positions: int
    end: int  # <|im_end|>
    semantic_start: int  # the token id of semantic code 0; the others follow
    num_residual_codes: int  # entries of the fast head from which residual codes are drawn
    is_s1: bool = False  # OpenAudio S1-mini: see s1.py

    @classmethod
    def read(cls, config: dict[str, Any]) -> Config:
        """Read S2's config.json. Raises ValueError for a missing, out-of-range or unsupported value."""
        root = ConfigBlock(config)
        _refuse_other_models(root)
        text, audio = root.block("text_config"), root.block("audio_decoder_config")
        text.expect(tie_word_embeddings=True)
        audio.expect(tie_word_embeddings=False)
        theta, eps = text.number("rope_base", *ROPE_THETA), text.number("norm_eps", *EPS)
        # The original uses text_config's rope_base and norm_eps for both stacks.
        audio.expect(
            rope_base=text.get("rope_base"),
            norm_eps=text.get("norm_eps"),
            text_dim=text.get("dim"),
            dim=text.get("dim"),
        )
        size, vocab = audio.integer("vocab_size", *VOCABULARY), text.integer("vocab_size", *VOCABULARY)
        start = root.integer("semantic_start_token_id", 0, vocab - size)
        if root.get("semantic_end_token_id") != start + size - 1:
            raise root.refuse(
                "semantic_end_token_id", f"{size} codes from {start} on must end at {start + size - 1}"
            )
        return cls(
            slow=StackConfig.read(text, theta, eps, has_qk_norm=True),
            fast=StackConfig.read(audio, theta, eps, has_qk_norm=False),
            vocab=vocab,
            codebooks=audio.integer("num_codebooks", 2, CODEBOOKS[1]),
            codebook_size=size,
            max_positions=text.integer("max_seq_len", 2, POSITIONS[1]),
            end=root.integer("eos_token_id", 0, vocab - 1),
            semantic_start=start,
            num_residual_codes=size,
        )

    def check_codec(self, codec: CodecConfig) -> None:
        """Raise ValueError if the codec cannot decode the LM's codes."""
        sizes = codec.codebook_sizes
        if len(sizes) != self.codebooks or sizes[0] != self.codebook_size or max(sizes) > self.codebook_size:
            says = f"config.json has {self.codebooks} codebooks of {self.codebook_size}"
            needed = "the first must have the same size, and none may be larger"
            raise ValueError(f"{says}, but {CODEC_FILE} has {len(sizes)} of {sizes}; {needed}")


def _refuse_other_models(root: ConfigBlock) -> None:
    if root.get("model_type") == DRAMA:
        known = f"supported: {MODEL!r} (Fish Audio S2), {S1!r} (OpenAudio S1-mini)"
        drama = f"model_type {DRAMA!r} is Fish Audio Drama, which has another architecture"
        raise ValueError(f"config.json: {drama}; {known}")
    root.expect(model_type=MODEL)


@dataclass(frozen=True)
class TransformerConfig:
    """A causal sliding-window transformer of the codec, as wide as the codec's latent."""

    width: int
    layers: int
    inner: int
    head_dim: int
    window: int  # positions that one attends to, including itself
    max_positions: int


@dataclass(frozen=True)
class CodecConfig:
    channels: int  # of the encoder after its first convolution; each block doubles them
    strides: tuple[int, ...]  # of the encoder's blocks
    latent: int
    ratios: tuple[int, ...]  # further downsampling to the frame rate, and upsampling after the codebooks
    hear: TransformerConfig | None  # inside the encoder's last block
    pre: TransformerConfig  # before the codebooks
    post: TransformerConfig  # after the codebooks
    codebook_dim: int
    codebook_sizes: tuple[int, ...]  # the semantic one first
    decoder_channels: int  # of the first block; each block halves them
    rates: tuple[int, ...]  # of the decoder's blocks

    @property
    def frame_samples(self) -> int:
        return prod(self.rates + self.ratios)

    @classmethod
    def read(cls, shapes: Shapes) -> CodecConfig:
        """Read the sizes from the tensor shapes of codec.pth. Raises ValueError for missing or inconsistent
        tensors."""
        file = _Sizes(shapes)
        num_blocks = file.count(r"encoder\.block\.(\d+)\.block\.4\..*original1")
        num_rates = file.count(r"decoder\.model\.(\d+)\.block\.1\..*original1")
        books = "quantizer.quantizer.quantizers"
        num_residual = file.count(books.replace(".", r"\.") + r"\.(\d+)\.codebook\.weight")
        num_ratios = file.count(r"quantizer\.downsample\.(\d+)\.0\.conv\.weight")
        semantic = file("quantizer.semantic_quantizer.quantizers.0.codebook.weight", 2)
        strides = tuple(file.conv(f"encoder.block.{i + 1}.block.4")[2] // 2 for i in range(num_blocks))
        rates = tuple(file.conv(f"decoder.model.{i + 1}.block.1")[2] // 2 for i in range(num_rates))
        ratios = tuple(file(f"quantizer.downsample.{i}.0.conv.weight", 3)[2] for i in range(num_ratios))
        read = cls(
            channels=file.conv("encoder.block.0")[0],
            strides=strides,
            latent=file.conv(f"encoder.block.{num_blocks + 2}")[0],
            ratios=ratios,
            hear=file.transformer(f"encoder.block.{num_blocks}.block.5", window=512),
            pre=file.required_transformer("quantizer.pre_module", window=128),
            post=file.required_transformer("quantizer.post_module", window=128),
            codebook_dim=semantic[1],
            codebook_sizes=(
                semantic[0],
                *(file(f"{books}.{i}.codebook.weight", 2)[0] for i in range(num_residual)),
            ),
            decoder_channels=file.conv("decoder.model.0")[0],
            rates=rates,
        )
        if prod(strides + ratios) != read.frame_samples or 0 in (*strides, *ratios, *rates):
            cut, joined = (*strides, *ratios), (*rates, *ratios)
            says = f"the encoder divides by {cut} and the decoder multiplies by {joined}"
            raise ValueError(f"{CODEC_FILE}: {says}; the products must be equal")
        return read


class _Sizes:
    """Reads sizes from the tensor shapes of codec.pth."""

    def __init__(self, shapes: Shapes):
        self.shapes = shapes

    def __call__(self, name: str, num_axes: int) -> tuple[int, ...]:
        shape = self.shapes.get(name, ())
        if len(shape) != num_axes:
            came = f"has shape {list(shape)}" if name in self.shapes else "is missing"
            raise ValueError(
                f"{CODEC_FILE} is not the codec of Fish Audio S2: {name} {came}; it must have {num_axes} axes"
            )
        return shape

    def conv(self, name: str) -> tuple[int, ...]:
        return self(f"{name}.conv.parametrizations.weight.original1", 3)

    def count(self, pattern: str) -> int:
        return sum(re.fullmatch(pattern, name) is not None for name in self.shapes)

    def required_transformer(self, name: str, window: int) -> TransformerConfig:
        read = self.transformer(name, window)
        if read is None:
            raise ValueError(f"{CODEC_FILE} is not the codec of Fish Audio S2: {name}.layers is missing")
        return read

    def transformer(self, name: str, window: int) -> TransformerConfig | None:
        """Return the transformer's sizes, or None if it is absent. The shape of its RoPE table gives the
        width of a head."""
        layers = self.count(name.replace(".", r"\.") + r"\.layers\.(\d+)\.attention\.wqkv\.weight")
        if layers == 0:
            return None
        inner, width = self(f"{name}.layers.0.feed_forward.w1.weight", 2)
        table = self.shapes.get(f"{name}.freqs_cis", (0, CODEC_HEAD_DIM // 2, 2))
        head_dim = 2 * table[1] if len(table) == 3 else 0
        if head_dim == 0 or width % head_dim:
            raise ValueError(
                f"{CODEC_FILE}: {name} is {width} wide, which is not a multiple of its head width {head_dim}"
            )
        return TransformerConfig(width, layers, inner, head_dim, window, LONGEST_POSITIONS)
