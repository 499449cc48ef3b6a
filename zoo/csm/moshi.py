"""Mimi's file under moshi's names, seen as if it had those of transformers.

The original takes its codec from this file of `kyutai/moshiko-pytorch-bf16`. It has one matrix for queries, keys
and values, and RoPE turns value 2i with value 2i + 1, so the rows of queries and keys are put into the order of
halves. Source: transformers, models/mimi/convert_mimi_checkpoint_to_pytorch.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from einops import rearrange
from torch import Tensor

from zoo.checkpoint.tensor_files import TensorFile
from zoo.nn.mimi import MimiConfig

FILE = "tokenizer-e351c8d8-checkpoint125.safetensors"
PACKED = "self_attn.in_proj_weight"
# Each class that wraps a convolution repeats its name: conv.conv.conv.weight.
RENAMED = (
    (r"\.(?:conv\.|convtr\.)+(weight|bias)$", r".conv.\1"),
    (r"^(encoder|decoder)\.model\.", r"\1.layers."),
    (r"^(encoder|decoder)_transformer\.transformer\.", r"\1_transformer."),
    (r"\.linear([12])\.", r".mlp.fc\1."),
    (r"\.out_proj\.", ".o_proj."),
    (r"\.norm1\.", ".input_layernorm."),
    (r"\.norm2\.", ".post_attention_layernorm."),
    (r"\.layer_scale_1\.", ".self_attn_layer_scale."),
    (r"\.layer_scale_2\.", ".mlp_layer_scale."),
    (r"\.rvq_first\.(vq\.)?", ".semantic_residual_vector_quantizer."),
    (r"\.rvq_rest\.(vq\.)?", ".acoustic_residual_vector_quantizer."),
    (r"\._codebook\._?", ".codebook."),
    (r"\.embedding_sum$", ".embed_sum"),
)


def renamed(name: str) -> str:
    """Return the name that transformers gives to a tensor of moshi's."""
    for theirs, ours in RENAMED:
        name = re.sub(theirs, ours, name)
    return name


def as_transformers(config: MimiConfig, file: TensorFile) -> TensorFile:
    """Return a view of a file with moshi's names and its packed matrices. Names that are not moshi's stay."""
    headers, reads = {}, {}
    for name, header in file.headers.items():
        if name.endswith(PACKED) and len(header.shape) == 2 and header.shape[0] % 3 == 0:
            rows, columns = header.shape
            for third, part in enumerate("qkv"):
                ours = renamed(name).replace(PACKED, f"self_attn.{part}_proj.weight")
                headers[ours] = header._replace(shape=(rows // 3, columns))
                reads[ours] = partial(_part, config, file.read, name, third)
        else:
            headers[renamed(name)] = header
            reads[renamed(name)] = partial(file.read, name)
    return TensorFile(file.path, headers, lambda name: reads[name]())


def _part(config: MimiConfig, read: Callable[[str], Tensor], name: str, third: int) -> Tensor:
    """Return the queries, keys or values of a packed matrix."""
    part = read(name).chunk(3)[third]
    if third == 2:
        return part
    return rearrange(part, "(h a b) d -> (h b a) d", a=config.head_dim // 2, b=2)
