"""Tables from published tensor names to ours (see zoo.checkpoint.loading)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from zoo.nn.convnext import convnext_names

if TYPE_CHECKING:
    from zoo.fish_s2.config import CodecConfig, Config

Shapes = dict[str, tuple[int, ...]]
UNUSED = (".freqs_cis", ".causal_mask")  # buffers of codec.pth that depend only on the positions


def lm(config: Config) -> dict[str, str]:
    """Return the table for the shards, or S1's model.pth, whose tensors go to `DualAR`."""
    return _s1(config) if config.is_s1 else _s2(config)


def _s1(config: Config) -> dict[str, str]:
    names = {
        "embeddings.weight": "embedding.weight",
        "norm.weight": "norm.weight",
        "output.weight": "output.weight",
        "codebook_embeddings.weight": "codes.weight",
        "fast_embeddings.weight": "fast.embedding.weight",
        "fast_norm.weight": "fast.norm.weight",
        "fast_output.weight": "fast.head.weight",
    }
    for i in range(config.slow.layers):
        names |= _block(f"layers.{i}", f"layers.{i}", config.slow.has_qk_norm)
    for i in range(config.fast.layers):
        names |= _block(f"fast_layers.{i}", f"fast.layers.{i}", config.fast.has_qk_norm)
    return names


def _s2(config: Config) -> dict[str, str]:
    names = {
        "text_model.model.embeddings.weight": "embedding.weight",
        "text_model.model.norm.weight": "norm.weight",
        "audio_decoder.codebook_embeddings.weight": "codes.weight",
        "audio_decoder.embeddings.weight": "fast.embedding.weight",
        "audio_decoder.norm.weight": "fast.norm.weight",
        "audio_decoder.output.weight": "fast.head.weight",
    }
    for i in range(config.slow.layers):
        names |= _block(f"text_model.model.layers.{i}", f"layers.{i}", config.slow.has_qk_norm)
    for i in range(config.fast.layers):
        names |= _block(f"audio_decoder.layers.{i}", f"fast.layers.{i}", config.fast.has_qk_norm)
    return names


def _block(theirs: str, ours: str, has_qk_norm: bool) -> dict[str, str]:
    pairs = {"attention_norm": "norm", "attention.wqkv": "qkv", "attention.wo": "out", "ffn_norm": "mlp_norm"}
    if has_qk_norm:
        pairs |= {"attention.q_norm": "q_norm", "attention.k_norm": "k_norm"}
    return _weights(theirs, ours, pairs)


def _weights(theirs: str, ours: str, pairs: Mapping[str, str]) -> dict[str, str]:
    """Return the names of a block's weights, and of its SwiGLU."""
    mlp = {
        f"{theirs}.feed_forward.w1.weight": f"{ours}.mlp.gate_up.weight[0]",
        f"{theirs}.feed_forward.w3.weight": f"{ours}.mlp.gate_up.weight[1]",
        f"{theirs}.feed_forward.w2.weight": f"{ours}.mlp.down.weight",
    }
    return mlp | {f"{theirs}.{a}.weight": f"{ours}.{b}.weight" for a, b in pairs.items()}


def codec(config: CodecConfig) -> dict[str, str]:
    """Return the table for codec.pth, whose tensors go to `Codec` after weight norm is folded."""
    table: dict[str, str] = {}

    def add(theirs: str, ours: str, leaves: Iterable[str] = ("weight", "bias")) -> None:
        table.update({f"{theirs}.{leaf}": f"{ours}.{leaf}" for leaf in leaves})

    def residual(theirs: str, ours: str) -> None:
        for n in (0, 1):
            add(f"{theirs}.block.{2 * n}", f"{ours}.snake{n + 1}", ("alpha",))
            add(f"{theirs}.block.{2 * n + 1}.conv", f"{ours}.conv{n + 1}")

    last, num_rates = len(config.strides), len(config.rates)
    add("encoder.block.0.conv", "encoder.stem")
    for i in range(last):
        theirs, ours = f"encoder.block.{i + 1}.block", f"encoder.blocks.{i}"
        for j in range(3):
            residual(f"{theirs}.{j}", f"{ours}.residuals.{j}")
        add(f"{theirs}.3", f"{ours}.snake", ("alpha",))
        add(f"{theirs}.4.conv", f"{ours}.down")
    if config.hear is not None:
        table |= _transformer(f"encoder.block.{last}.block.5", "encoder.hear", config.hear.layers)
    add(f"encoder.block.{last + 1}", "encoder.snake", ("alpha",))
    add(f"encoder.block.{last + 2}.conv", "encoder.tail")
    for i in range(len(config.ratios)):
        for way, ours in (("down", f"encoder.downsample.{i}"), ("up", f"decoder.upsample.{i}")):
            add(f"quantizer.{way}sample.{i}.0.conv", f"{ours}.{way}")
            table |= convnext_names(f"quantizer.{way}sample.{i}.1", f"{ours}.block")
    table |= _transformer("quantizer.pre_module", "encoder.pre", config.pre.layers)
    table |= _transformer("quantizer.post_module", "decoder.post", config.post.layers)
    for k in range(len(config.codebook_sizes)):
        theirs = (
            "quantizer.semantic_quantizer.quantizers.0"
            if k == 0
            else f"quantizer.quantizer.quantizers.{k - 1}"
        )
        add(f"{theirs}.in_proj", f"codebooks.{k}.into")
        add(f"{theirs}.out_proj", f"codebooks.{k}.out")
        add(f"{theirs}.codebook", f"codebooks.{k}.rows", ("weight",))
    add("decoder.model.0.conv", "decoder.stem")
    for i in range(num_rates):
        theirs, ours = f"decoder.model.{i + 1}.block", f"decoder.blocks.{i}"
        add(f"{theirs}.0", f"{ours}.snake", ("alpha",))
        add(f"{theirs}.1.conv", f"{ours}.up")
        for j in range(3):
            residual(f"{theirs}.{j + 2}", f"{ours}.residuals.{j}")
    add(f"decoder.model.{num_rates + 1}", "decoder.snake", ("alpha",))
    add(f"decoder.model.{num_rates + 2}.conv", "decoder.tail")
    return table


def _transformer(theirs: str, ours: str, layers: int) -> dict[str, str]:
    table = {f"{theirs}.norm.weight": f"{ours}.norm.weight"}
    pairs = {
        "attention.wqkv": "qkv",
        "attention.wo": "out",
        "attention_norm": "norm",
        "ffn_norm": "mlp_norm",
    }
    for i in range(layers):
        prefix, layer = f"{theirs}.layers.{i}", f"{ours}.layers.{i}"
        table |= _weights(prefix, layer, pairs)
        table[f"{prefix}.attention_layer_scale.gamma"] = f"{layer}.attention_scale"
        table[f"{prefix}.ffn_layer_scale.gamma"] = f"{layer}.mlp_scale"
    return table


def is_weight_normed(name: str) -> bool:
    """Return whether a convolution of codec.pth has weight norm. All have it except those of
    quantizer.downsample and quantizer.upsample."""
    return not name.startswith(("quantizer.downsample.", "quantizer.upsample."))


def as_saved(shapes: Mapping[str, tuple[int, ...]]) -> Shapes:
    """Convert the names and shapes of `codec` to those of codec.pth, which stores weight norm in two
    formats."""
    saved: Shapes = {}
    for name, shape in shapes.items():
        if not name.endswith(".weight") or len(shape) != 3 or not is_weight_normed(name):
            saved[name] = shape
            continue
        is_older = name.startswith("quantizer.")
        stem = name if is_older else f"{name.removesuffix('weight')}parametrizations.weight"
        size, direction = ("_g", "_v") if is_older else (".original0", ".original1")
        saved |= {stem + size: (shape[0], 1, 1), stem + direction: shape}
    return saved
