"""The table from published tensor names to ours (see zoo.checkpoint.loading)."""

from __future__ import annotations

import torch
from torch import nn

from zoo.higgs_v3 import semantic
from zoo.higgs_v3.codec import Codec
from zoo.higgs_v3.config import CodecConfig, Config
from zoo.higgs_v3.model import Backbone
from zoo.nn import dac, qwen3

CODEC = "tied.embedding.modality_embeddings.0.model"
# Copies of the two embeddings. The file contains them but the index does not name them, so a loader that
# follows the index does not read them.
HEADS = ("tied.head.text_head.weight", "tied.head.modality_heads.0.weight")


class Checkpoint(nn.Module):
    """The modules of model.safetensors. The loader checks the tensors of `unread`, but leaves them on meta
    because nothing uses them."""

    def __init__(self, config: Config):
        super().__init__()
        self.backbone = Backbone(config)
        self.codec = Codec(config.codec)
        self.unread = nn.ParameterList(torch.empty(shape, device="meta") for shape in unread(config).values())


def table(config: Config) -> dict[str, str]:
    """Return the table for model.safetensors, whose tensors go to `Checkpoint`."""
    names = {
        "tied.embedding.text_embedding.weight": "backbone.text.weight",
        "tied.embedding.modality_embeddings.0.embedding.weight": "backbone.codes.weight",
    }
    names |= qwen3.names(config.stack, "body", "backbone.stack")
    names |= {f"{CODEC}.{theirs}": f"codec.{ours}" for theirs, ours in _codec(config.codec).items()}
    return names | {name: f"unread.{i}" for i, name in enumerate(unread(config))}


def unread(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors that nothing reads: the copied heads, the codec's semantic
    decoder, and the training counts of its codebooks."""
    codec = config.codec
    width, hidden = codec.width, codec.semantic.hidden
    shapes = {
        HEADS[0]: (config.text_vocab, config.stack.hidden),
        HEADS[1]: (config.codebooks * config.vocab, config.stack.hidden),
    }
    rest: dict[str, tuple[int, ...]] = {
        "semantic_model.masked_spec_embed": (hidden,),
        "fc1.weight": (hidden, width),
        "fc1.bias": (hidden,),
    }
    for k in range(codec.codebooks):
        book = f"quantizer.quantizers.{k}.codebook"
        rest |= {f"{book}.inited": (1,), f"{book}.cluster_size": (codec.codebook_size,)}
        # a running sum from training, not the codebook
        rest[f"{book}.embed_avg"] = (codec.codebook_size, codec.codebook_width)
    rest |= {f"decoder_semantic.{conv}.weight": (hidden, hidden, 3) for conv in ("conv1", "conv2")}
    for i in range(2):
        block = f"decoder_semantic.conv_blocks.{i}"
        rest |= {f"{block}.conv.weight": (hidden, hidden, 3), f"{block}.conv.bias": (hidden,)}
        for j in range(2):
            rest |= {f"{block}.res_units.{j}.conv{n}.weight": (hidden, hidden, 5 - 2 * n) for n in (1, 2)}
    return shapes | {f"{CODEC}.{name}": shape for name, shape in rest.items()}


def _codec(config: CodecConfig) -> dict[str, str]:
    """Return the table for the codec, whose tensors go to `Codec`. Both names are relative to the codec."""
    names: dict[str, str] = {}

    def both(theirs: str, ours: str) -> None:
        names.update({f"{theirs}.{leaf}": f"{ours}.{leaf}" for leaf in ("weight", "bias")})

    for k in range(config.codebooks):
        theirs, ours = f"quantizer.quantizers.{k}", f"quantizer.books.{k}"
        names[f"{theirs}.codebook.embed"] = f"{ours}.rows"
        both(f"{theirs}.project_in", f"{ours}.project_in")
        both(f"{theirs}.project_out", f"{ours}.project_out")
    both("fc2", "decoder.project")
    both("fc", "encoder.join")
    blocks = len(config.ratios)
    names |= dac.names("acoustic_decoder", "decoder", blocks, dac.UP)
    names |= dac.names("acoustic_encoder", "encoder.acoustic", blocks, dac.DOWN)

    names["encoder_semantic.conv.weight"] = "encoder.semantic.0.weight"
    for i in range(2):
        theirs, ours = f"encoder_semantic.conv_blocks.{i}", f"encoder.semantic.{i + 1}"
        for j in range(2):
            names |= {f"{theirs}.res_units.{j}.conv{n}.weight": f"{ours}.{j}.conv{n}.weight" for n in (1, 2)}
        both(f"{theirs}.conv", f"{ours}.2")

    return names | {
        f"semantic_model.{name}": f"encoder.hubert.{name}" for name in semantic.shapes(config.semantic)
    }
