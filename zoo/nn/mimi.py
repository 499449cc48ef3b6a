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
NORMS = ("input_layernorm", "post_attention_layernorm")  # of a layer of the transformers


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
        """Read transformers' MimiConfig, of release 4 (`rope_theta`) or 5 (`rope_parameters`). Raises
        ValueError for a missing, out-of-range or unsupported value."""
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


def encoder_shapes(config: MimiConfig) -> dict[str, tuple[int, ...]]:
    """Return the published names and shapes of the encoder's tensors, and of its codebooks."""
    hidden, dim = config.hidden, config.codebook_dim
    last = {
        "embed_sum": (config.codebook_size, dim),
        "cluster_usage": (config.codebook_size,),
        "initialized": (1,),
        "input_proj.weight": (dim, hidden, 1),
        "output_proj.weight": (hidden, dim, 1),
    }
    books = quantizer_names(config.codebooks, "quantizer", "", "")
    shapes = conv_shapes(config) | {"downsample.conv.weight": (hidden, hidden, 2 * RESAMPLE)}
    return shapes | {name: next(last[end] for end in last if name.endswith(end)) for name in books}


def conv_shapes(config: MimiConfig) -> dict[str, tuple[int, ...]]:
    """Return the published names and shapes of the tensors that only the encoder has: its convolutions and
    its transformer."""
    shapes: dict[str, tuple[int, ...]] = {}

    def conv(name: str, channels: int, out_channels: int, kernel: int) -> None:
        shapes[f"{name}.conv.weight"] = (out_channels, channels, kernel)
        shapes[f"{name}.conv.bias"] = (out_channels,)

    channels = config.filters
    conv("encoder.layers.0", 1, channels, config.kernel)
    for i, stride in enumerate(config.strides):
        middle = channels // config.compress
        conv(f"encoder.layers.{3 * i + 1}.block.1", channels, middle, config.residual_kernel)
        conv(f"encoder.layers.{3 * i + 1}.block.3", middle, channels, 1)
        conv(f"encoder.layers.{3 * i + 3}", channels, 2 * channels, 2 * stride)
        channels *= 2
    conv(f"encoder.layers.{3 * len(config.strides) + 2}", channels, config.hidden, config.last_kernel)
    for i in range(config.layers):
        shapes |= {f"encoder_transformer.layers.{i}.{name}": shape for name, shape in _layer(config).items()}
    return shapes


def _layer(config: MimiConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a layer of the encoder's transformer."""
    hidden, inner, width = config.hidden, config.inner, config.heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{part}_proj.weight": (width, hidden) for part in "qkv"}
    shapes |= {"self_attn.o_proj.weight": (hidden, width)}
    shapes |= {"mlp.fc1.weight": (inner, hidden), "mlp.fc2.weight": (hidden, inner)}
    norms = [f"{norm}.{leaf}" for norm in NORMS for leaf in ("weight", "bias")]
    return shapes | dict.fromkeys((*norms, "self_attn_layer_scale.scale", "mlp_layer_scale.scale"), (hidden,))
