"""Tables from published tensor names to ours (see zoo.checkpoint.loading)."""

from __future__ import annotations

from zoo.nn import llama
from zoo.nn.s3.names import both, flow_encoder, is_weight_normed, vocoder
from zoo.step_audio2.config import FlowConfig, ListenerConfig, LMConfig

__all__ = ["is_weight_normed", "vocoder"]  # shared


def published(lm: LMConfig, listener: ListenerConfig) -> dict[str, str]:
    """Return the names of the model's shards -> those of Published."""
    return {
        "model.embed_tokens.weight": "lm.embedding.weight",
        "lm_head.weight": "lm.head.weight",
        **llama.names(lm.stack, "model", "lm.stack", has_bias=True),
        **_listener(listener),
    }


def _listener(config: ListenerConfig) -> dict[str, str]:
    own = "listener.encoder"
    pairs = {"encoder.conv1": f"{own}.conv1", "encoder.conv2": f"{own}.conv2"}
    pairs["encoder.after_norm"] = f"{own}.layer_norm"
    pairs |= {f"adapter.{name}": f"listener.adaptor.{name}" for name in ("conv", "linear1", "linear2")}
    names = {"encoder.positional_embedding.weight": f"{own}.embed_positions.weight"}
    for i in range(config.layers):
        theirs, ours = f"encoder.blocks.{i}", f"{own}.layers.{i}"
        for part, letter in (("query", "q"), ("value", "v"), ("out", "out")):
            pairs[f"{theirs}.attn.{part}"] = f"{ours}.self_attn.{letter}_proj"
        names[f"{theirs}.attn.key.weight"] = f"{ours}.self_attn.k_proj.weight"
        pairs |= {
            f"{theirs}.attn_ln": f"{ours}.self_attn_layer_norm",
            f"{theirs}.mlp_ln": f"{ours}.final_layer_norm",
            f"{theirs}.mlp.0": f"{ours}.fc1",
            f"{theirs}.mlp.2": f"{ours}.fc2",
        }
    return names | both(pairs)


def flow(config: FlowConfig) -> dict[str, str]:
    """Return the names of flow.pt -> those of Flow."""
    root, own = "decoder.estimator", "estimator"
    pairs = {
        f"{root}.t_embedder.mlp.0": f"{own}.time1",
        f"{root}.t_embedder.mlp.2": f"{own}.time2",
        f"{root}.in_proj": f"{own}.input",
        f"{root}.final_layer.adaLN_modulation.1": f"{own}.modulation",
        f"{root}.final_layer.linear": f"{own}.output",
    }
    names: dict[str, str] = {}
    for i in range(config.depth):
        theirs, ours = f"{root}.blocks.{i}", f"{own}.blocks.{i}"
        for k, part in enumerate("qkv"):
            for kind in ("weight", "bias"):
                names[f"{theirs}.attn.to_{part}.{kind}"] = f"{ours}.attention.qkv.{kind}[{k}]"
        pairs |= {
            f"{theirs}.attn.q_norm": f"{ours}.attention.q_norm",
            f"{theirs}.attn.k_norm": f"{ours}.attention.k_norm",
            f"{theirs}.attn.proj": f"{ours}.attention.out",
            f"{theirs}.conv.block.1": f"{ours}.conv.first",
            f"{theirs}.conv.block.3": f"{ours}.conv.norm",
            f"{theirs}.conv.block.6": f"{ours}.conv.second",
            f"{theirs}.mlp.fc1": f"{ours}.widen",
            f"{theirs}.mlp.fc2": f"{ours}.narrow",
            f"{theirs}.adaLN_modulation.1": f"{ours}.modulation",
        }
    return flow_encoder(config) | names | both(pairs)
