"""Mimi (Defossez et al., "Moshi", 2024, section 3.3): its sizes, and the published names of its codebooks.

Source: transformers 5.23, models/mimi.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Self

from zoo.checkpoint.config import (
    CODEBOOKS,
    EPS,
    HEAD_DIM,
    HEADS,
    KERNEL,
    LAYERS,
    MAX_WIDTH,
    POSITIONS,
    ROPE_THETA,
    STRIDE,
    VOCABULARY,
    WIDTH,
    ConfigBlock,
)
from zoo.checkpoint.names import qkv

# The only architecture that is known. A config with other values is refused.
FIXED = {
    "audio_channels": 1,
    "use_causal_conv": True,
    "pad_mode": "constant",
    "use_conv_shortcut": False,
    "num_residual_layers": 1,
    "hidden_act": "gelu",
    "attention_bias": False,
    "num_semantic_quantizers": 1,
}
RESAMPLE = 2  # positions of the transformers per frame


@dataclass(frozen=True)
class MimiConfig:
    filters: int  # channels of the encoder's first convolution; each strided one doubles them
    kernel: int
    residual_kernel: int
    last_kernel: int
    compress: int  # how many times fewer channels the middle of a residual unit has
    strides: tuple[int, ...]  # of the encoder, in the order in which audio passes them
    hidden: int
    inner: int
    layers: int
    heads: int
    head_dim: int
    eps: float
    rope_theta: float
    window: int  # positions that a position attends to, including itself
    codebooks: int  # in the checkpoint
    used: int  # codebooks that the model reads
    codebook_size: int
    codebook_dim: int

    @property
    def frame_samples(self) -> int:
        return RESAMPLE * prod(self.strides)

    @classmethod
    def read(cls, block: ConfigBlock) -> Self:
        """Read transformers' MimiConfig, of release 4 (`rope_theta`) or 5 (`rope_parameters`). Raises ValueError
        for a missing, out-of-range or unsupported value."""
        block.expect(**FIXED)
        strides = tuple(reversed(block.integers("upsampling_ratios", *STRIDE)))
        compress = block.integer("compress", *WIDTH)
        codebooks = block.integer("num_quantizers", *CODEBOOKS)
        read = cls(
            filters=block.integer("num_filters", compress, MAX_WIDTH >> len(strides)),
            kernel=block.integer("kernel_size", *KERNEL),
            residual_kernel=block.integer("residual_kernel_size", *KERNEL),
            last_kernel=block.integer("last_kernel_size", *KERNEL),
            compress=compress,
            strides=strides,
            hidden=block.integer("hidden_size", *WIDTH),
            inner=block.integer("intermediate_size", *WIDTH),
            layers=block.integer("num_hidden_layers", *LAYERS),
            heads=block.integer("num_attention_heads", *HEADS),
            head_dim=block.integer("head_dim", *HEAD_DIM, step=2),
            eps=float(block.number("norm_eps", *EPS)),
            rope_theta=_rope_theta(block),
            window=block.integer("sliding_window", *POSITIONS),
            codebooks=codebooks,
            used=codebooks,
            codebook_size=block.integer("codebook_size", *VOCABULARY),
            codebook_dim=block.integer("vector_quantization_hidden_dimension", *WIDTH),
        )
        if block.get("num_key_value_heads") != read.heads:
            raise block.refuse("num_key_value_heads", f"only num_attention_heads, {read.heads}, is supported")
        return read


def _rope_theta(block: ConfigBlock) -> float:
    if block.values.get("rope_parameters") is None:
        return float(block.number("rope_theta", *ROPE_THETA))
    rope = block.block("rope_parameters")
    rope.expect(rope_type="default")
    return float(rope.number("rope_theta", *ROPE_THETA))


def quantizer_names(codebooks: int, theirs: str, ours: str, initialized: str) -> dict[str, str]:
    """Return the published names of the codebooks -> those of a `SplitVQ`, by prefix (see `checkpoint`).

    initialized: our prefix for one flag per codebook, which checkpoints have and nothing reads.
    """
    table: dict[str, str] = {}
    for k in range(codebooks):
        branch, layer = ("semantic", 0) if k == 0 else ("acoustic", k - 1)
        book = f"{theirs}.{branch}_residual_vector_quantizer.layers.{layer}.codebook"
        table[f"{book}.embed_sum"] = f"{ours}.sums[{k}]"
        table[f"{book}.cluster_usage"] = f"{ours}.usage[{k}]"
        table[f"{book}.initialized"] = f"{initialized}.{k}"
    for branch, part in (("semantic", "first"), ("acoustic", "rest")):
        for side, end in (("input", "in"), ("output", "out")):
            name = f"{theirs}.{branch}_residual_vector_quantizer.{side}_proj.weight"
            table[name] = f"{ours}.{part}_{end}.weight"
    return table


def layer_names(theirs: str, ours: str) -> dict[str, str]:
    """Return the published names that the layers of all of Mimi's transformers have, by prefix: attention and
    layer scales."""
    names = {
        f"{theirs}.self_attn.o_proj.weight": f"{ours}.out.weight",
        f"{theirs}.self_attn_layer_scale.scale": f"{ours}.attention_scale",
        f"{theirs}.mlp_layer_scale.scale": f"{ours}.mlp_scale",
    }
    return qkv(theirs, ours) | names


def encoder_names(config: MimiConfig, theirs: str = "", ours: str = "") -> dict[str, str]:
    """Return the published names of the encoder's tensors -> those of `zoo.nn.mimi_encoder.Encoder`, each behind
    a prefix."""
    table: dict[str, str] = {}

    def both(name: str, our_name: str) -> None:
        table.update({f"{theirs}{name}.{leaf}": f"{ours}{our_name}.{leaf}" for leaf in ("weight", "bias")})

    num_strides = len(config.strides)
    both("encoder.layers.0.conv", "convs.0")
    for n in range(1, 3 * num_strides, 3):
        both(f"encoder.layers.{n}.block.1.conv", f"convs.{n}.1")
        both(f"encoder.layers.{n}.block.3.conv", f"convs.{n}.3")
        both(f"encoder.layers.{n + 2}.conv", f"convs.{n + 2}")
    both(f"encoder.layers.{3 * num_strides + 2}.conv", f"convs.{3 * num_strides + 2}")
    for i in range(config.layers):
        layer, our_layer = f"encoder_transformer.layers.{i}", f"layers.{i}"
        table |= layer_names(theirs + layer, ours + our_layer)
        both(f"{layer}.input_layernorm", f"{our_layer}.attention_norm")
        both(f"{layer}.post_attention_layernorm", f"{our_layer}.mlp_norm")
        table[f"{theirs}{layer}.mlp.fc1.weight"] = f"{ours}{our_layer}.widen.weight"
        table[f"{theirs}{layer}.mlp.fc2.weight"] = f"{ours}{our_layer}.narrow.weight"
    table[f"{theirs}downsample.conv.weight"] = f"{ours}downsample.weight"
    books = quantizer_names(config.codebooks, f"{theirs}quantizer", f"{ours}quantizer", f"{ours}initialized")
    return table | books
