"""Tables from published tensor names to ours (see zoo.checkpoint.loading).

The weights are published in two layouts, and a file's name does not tell which one it holds. transformers'
layout has the codec's tensors too. The original one has the LM's alone, under torchtune's names; there, RoPE
turns value 2i with value 2i + 1, so the rows of queries and keys are put into the order of halves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from einops import rearrange
from torch import Tensor, nn

from zoo.checkpoint.json_files import read_config
from zoo.checkpoint.tensor_files import INDEX, Header, open_file
from zoo.csm.config import Config
from zoo.csm.mimi import Decoder
from zoo.nn import llama
from zoo.nn.llama import LlamaConfig
from zoo.nn.mimi import NORMS, RESAMPLE, MimiConfig, conv_shapes, layer_names, quantizer_names

ORIGINAL = "backbone.layers.0.attn.q_proj.weight"  # a tensor that only the original layout has
TRANSFORMERS = "backbone_model.layers.0.self_attn.q_proj.weight"
# The codes' embeddings. A file has one copy of them or two, which are equal.
COPIES = (
    "depth_decoder.model.embed_tokens.weight",
    "backbone_model.embed_tokens.embed_audio_tokens.weight",
)
CODEC = "codec_model."
INDEX_KEY = "transformers_weights"  # in config.json: the file with transformers' layout
FILES = (f"model.safetensors{INDEX}", "model.safetensors", "ckpt.pt")


class Codec(nn.Module):
    """The decoder, and the tensors of the encoder. Those of `unread` are checked but stay on meta: the
    encoder reads them itself, when a clip comes (`clone.py`)."""

    def __init__(self, config: MimiConfig):
        super().__init__()
        self.decoder = Decoder(config)
        # Read although only the encoder needs it: it tells one encoder from another.
        self.downsample = nn.Parameter(torch.empty(config.hidden, config.hidden, 2 * RESAMPLE))
        self.unread = nn.ParameterList(torch.empty(shape) for shape in unread(config).values())


def find(directory: Path) -> Path:
    """Return the file with the weights, or their index. Raises ValueError without one."""
    named = read_config(directory).get(INDEX_KEY)
    if named is not None and (not isinstance(named, str) or Path(named).name != named):
        raise ValueError(f"config.json: the root has {INDEX_KEY}={named!r}; a file's name is possible")
    names = (*([named] if named else []), *FILES)
    for name in names:
        if (directory / name).is_file():
            return directory / name
    raise ValueError(f"{directory / names[0]} does not exist, nor does any of: {', '.join(names[1:])}")


def is_original(found: Mapping[str, Header], source: Path) -> bool:
    """Return whether the tensors are in the original layout. Raises ValueError for neither layout."""
    if ORIGINAL in found:
        return True
    if TRANSFORMERS not in found:
        raise ValueError(f"{source} holds no CSM: it has neither {TRANSFORMERS} nor {ORIGINAL}")
    return False


def check_copies(found: Mapping[str, Header]) -> tuple[str, ...]:
    """Return which of COPIES the files have. Raises ValueError for copies that differ."""
    copies = tuple(name for name in COPIES if name in found)
    if len(copies) == 2:
        first, second = (open_file(found[name].path).read(name) for name in copies)
        if not torch.equal(first, second):
            raise ValueError(
                f"{found[copies[0]].path}: {copies[0]} and {copies[1]} differ; they must be equal"
            )
    return copies or COPIES[:1]


def transformers(config: Config, copies: Sequence[str] = COPIES) -> dict[str, str]:
    """Return the table for transformers' layout -> `Checkpoint`. copies: those of COPIES that the files
    have."""
    table = dict.fromkeys(copies, "lm.audio.weight") | {
        "embed_text_tokens.weight": "lm.text.weight",
        "lm_head.weight": "lm.head.weight",
        "depth_decoder.model.inputs_embeds_projector.weight": "lm.depth.projector.weight",
        "depth_decoder.codebooks_head.weight": "lm.depth.published_heads",
    }
    table |= llama.names(config.backbone, "backbone_model", "lm.backbone")
    table |= llama.names(config.depth, "depth_decoder.model", "lm.depth")
    return table | {CODEC + theirs: f"codec.{ours}" for theirs, ours in codec(config.codec).items()}


def original(config: Config) -> dict[str, str]:
    """Return the table for the original layout -> `Lm`."""
    table = {
        "audio_embeddings.weight": "audio.weight",
        "text_embeddings.weight": "text.weight",
        "codebook0_head.weight": "head.weight",
        "projection.weight": "depth.projector.weight",
        "audio_head": "depth.published_heads",
    }
    return (
        table
        | _torchtune(config.backbone, "backbone", "backbone")
        | _torchtune(config.depth, "decoder", "depth")
    )


def _torchtune(config: LlamaConfig, theirs: str, ours: str) -> dict[str, str]:
    names = {
        "attn.q_proj.weight": "qkv.weight[0]",
        "attn.k_proj.weight": "qkv.weight[1]",
        "attn.v_proj.weight": "qkv.weight[2]",
        "attn.output_proj.weight": "out.weight",
        "mlp.w1.weight": "mlp.gate_up.weight[0]",
        "mlp.w3.weight": "mlp.gate_up.weight[1]",
        "mlp.w2.weight": "mlp.down.weight",
        "sa_norm.scale": "norm.weight",
        "mlp_norm.scale": "mlp_norm.weight",
    }
    table = {f"{theirs}.norm.scale": f"{ours}.norm.weight"}
    for i in range(config.layers):
        table |= {f"{theirs}.layers.{i}.{a}": f"{ours}.layers.{i}.{b}" for a, b in names.items()}
    return table


def in_halves(config: Config, name: str, value: Tensor) -> Tensor:
    """Return a tensor of the original layout with RoPE's pairs as halves of a head: rows 0, 2, 4, ... of
    queries and keys, then rows 1, 3, 5, ..."""
    return _permuted(config, name, value, lambda head_dim: (head_dim // 2, 2))


def in_pairs(config: Config, name: str, value: Tensor) -> Tensor:
    """Return the inverse of `in_halves`."""
    return _permuted(config, name, value, lambda head_dim: (2, head_dim // 2))


def _permuted(config: Config, name: str, value: Tensor, split: Callable[[int], tuple[int, int]]) -> Tensor:
    if not name.endswith((".attn.q_proj.weight", ".attn.k_proj.weight")):
        return value
    head_dim = (config.backbone if name.startswith("backbone.") else config.depth).head_dim
    first, second = split(head_dim)
    return rearrange(value, "(h a b) d -> (h b a) d", a=first, b=second)


def codec(config: MimiConfig) -> dict[str, str]:
    """Return the table for Mimi's tensors -> `Codec`."""
    table: dict[str, str] = {}

    def both(theirs: str, ours: str) -> None:
        table.update({f"{theirs}.{leaf}": f"{ours}.{leaf}" for leaf in ("weight", "bias")})

    table |= quantizer_names(config.codebooks, "quantizer", "decoder.quantizer", "unread")
    table["upsample.conv.weight"] = "decoder.upsample.weight"
    table["downsample.conv.weight"] = "downsample"
    for i in range(config.layers):
        theirs, ours = f"decoder_transformer.layers.{i}", f"decoder.layers.{i}"
        table |= layer_names(theirs, ours)
        for norm, our_norm in zip(NORMS, ("norm", "mlp_norm"), strict=True):
            both(f"{theirs}.{norm}", f"{ours}.{our_norm}")
        table[f"{theirs}.mlp.fc1.weight"] = f"{ours}.mlp.widen.weight"
        table[f"{theirs}.mlp.fc2.weight"] = f"{ours}.mlp.narrow.weight"
    num_blocks = len(config.strides)
    both("decoder.layers.0.conv", "decoder.stem")
    for i in range(num_blocks):
        both(f"decoder.layers.{3 * i + 2}.conv", f"decoder.blocks.{i}.up")
        for n, place in enumerate((1, 3), 1):
            both(f"decoder.layers.{3 * i + 3}.block.{place}.conv", f"decoder.blocks.{i}.residual.conv{n}")
    both(f"decoder.layers.{3 * num_blocks + 2}.conv", "decoder.tail")
    return table | {name: f"unread.{i}" for i, name in enumerate(unread(config))}


def unread(config: MimiConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors that only the encoder reads, and first of the flags that
    nothing reads, one per codebook."""
    flags = quantizer_names(config.codebooks, "quantizer", "", "unread")
    return {name: (1,) for name, ours in flags.items() if ours.startswith("unread")} | conv_shapes(config)
