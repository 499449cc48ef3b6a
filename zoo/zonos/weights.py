"""The tables from published tensor names to ours (see zoo.checkpoint.loading), and what changes on the
way."""

from __future__ import annotations

from einops import rearrange
from torch import Tensor

from zoo.nn import dac
from zoo.zonos.config import BOOKS, ESPEAK, LANGUAGE, SPEAKER, CodecConfig, Config


def model(config: Config) -> dict[str, str]:
    """Return the table for model.safetensors, whose tensors go to `Backbone`."""
    names = _both("backbone.norm_f", "norm")
    for k in range(BOOKS):
        names[f"embeddings.{k}.weight"] = f"codes.weight[{k}]"
        names[f"heads.{k}.weight"] = f"heads.weight[{k}]"
    for i in range(config.stack.layers):
        theirs, ours = f"backbone.layers.{i}", f"layers.{i}"
        names |= _both(f"{theirs}.norm", f"{ours}.norm") | _both(f"{theirs}.norm2", f"{ours}.mlp_norm")
        names |= {
            f"{theirs}.mixer.in_proj.weight": f"{ours}.qkv.weight",
            f"{theirs}.mixer.out_proj.weight": f"{ours}.out.weight",
            f"{theirs}.mlp.fc1.weight": f"{ours}.mlp.gate_up.weight",
            f"{theirs}.mlp.fc2.weight": f"{ours}.mlp.down.weight",
        }
    for i, condition in enumerate(config.conditions):
        theirs, ours = f"prefix_conditioner.conditioners.{i}", f"prefix.conditions.{i}"
        names |= _condition(condition.name, theirs, ours)
    names |= _both("prefix_conditioner.project", "prefix.project")
    return names | _both("prefix_conditioner.norm", "prefix.norm")


def _condition(name: str, theirs: str, ours: str) -> dict[str, str]:
    if name == ESPEAK:
        return {f"{theirs}.phoneme_embedder.weight": f"{ours}.table.weight"}
    null = {f"{theirs}.uncond_vector": f"{ours}.null"}
    if name == SPEAKER:
        return null | _both(f"{theirs}.project", f"{ours}.project")
    if name == LANGUAGE:
        return null | {f"{theirs}.int_embedder.weight": f"{ours}.table.weight"}
    return null | {f"{theirs}.weight": f"{ours}.weight"}


def _both(theirs: str, ours: str) -> dict[str, str]:
    return {f"{theirs}.{leaf}": f"{ours}.{leaf}" for leaf in ("weight", "bias")}


class Rearranged:
    """Change the published order of rows to ours: (name, tensor) -> tensor.

    The reference rotates neighbours (2 i, 2 i + 1); our leaf rotates halves (i, i + dim / 2). Both give the
    same products of queries and keys if the rows of each head are reordered alike. In the MLP the reference
    has the gate second.
    """

    def __init__(self, config: Config):
        self.stack = config.stack

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if name.endswith(".mlp.fc1.weight"):
            return tensor.roll(self.stack.inner, 0)
        if not name.endswith(".mixer.in_proj.weight"):
            return tensor
        turned = (self.stack.heads + self.stack.kv_heads) * self.stack.head_dim
        rearranged = tensor.clone()
        rearranged[:turned] = rearrange(
            tensor[:turned], "(h pairs two) d -> (h two pairs) d", pairs=self.stack.head_dim // 2, two=2
        )
        return rearranged


def codec(config: CodecConfig) -> dict[str, str]:
    """Return the table for the codec's file, whose tensors go to `Codec`."""
    names: dict[str, str] = {}
    for k in range(BOOKS):
        theirs, ours = f"quantizer.quantizers.{k}", f"books.{k}"
        names[f"{theirs}.codebook.weight"] = f"{ours}.rows"
        names |= _both(f"{theirs}.in_proj", f"{ours}.project_in")
        names |= _both(f"{theirs}.out_proj", f"{ours}.project_out")
    names |= dac.names("decoder", "decoder", len(config.decoder_rates), dac.UP)
    return names | dac.names("encoder", "encoder", len(config.encoder_rates), dac.DOWN)
