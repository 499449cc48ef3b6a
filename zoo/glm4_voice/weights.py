"""Tables from published tensor names to ours (see zoo.checkpoint.loading)."""

from __future__ import annotations

from zoo.glm4_voice.config import FlowConfig, ListenerConfig, LMConfig
from zoo.glm4_voice.flow import NUM_CONVS
from zoo.glm4_voice.listener import unread
from zoo.nn.s3.names import both, conformer_layer, is_weight_normed, stage, vocoder

FLOW_FILE, VOCODER_FILE = "flow.pt", "hift.pt"
ANGLES = "transformer.rotary_pos_emb.inv_freq"  # follows from the config
__all__ = ["is_weight_normed", "vocoder"]  # shared


def lm(config: LMConfig) -> dict[str, str]:
    names = {
        "transformer.embedding.word_embeddings.weight": "embedding.weight",
        "transformer.encoder.final_layernorm.weight": "stack.norm.weight",
        "transformer.output_layer.weight": "head.weight",
        ANGLES: "unread.0",
    }
    for i in range(config.stack.layers):
        theirs, ours = f"transformer.encoder.layers.{i}", f"stack.layers.{i}"
        names |= both({f"{theirs}.self_attention.query_key_value": f"{ours}.qkv"})
        names |= {
            f"{theirs}.self_attention.dense.weight": f"{ours}.out.weight",
            f"{theirs}.mlp.dense_h_to_4h.weight": f"{ours}.mlp.gate_up.weight",
            f"{theirs}.mlp.dense_4h_to_h.weight": f"{ours}.mlp.down.weight",
            f"{theirs}.input_layernorm.weight": f"{ours}.norm.weight",
            f"{theirs}.post_attention_layernorm.weight": f"{ours}.mlp_norm.weight",
        }
    return names


def listener(config: ListenerConfig) -> dict[str, str]:
    pairs = {"conv1": "conv1", "conv2": "conv2"}
    names = {"embed_positions.weight": "positions.weight", "codebook.weight": "codebook.weight"}
    for i in range(config.layers):
        theirs, ours = f"layers.{i}", f"layers.{i}"
        pairs |= {f"{theirs}.self_attn.{part}_proj": f"{ours}.{part}" for part in ("q", "v", "out")}
        pairs |= {f"{theirs}.self_attn_layer_norm": f"{ours}.attention_norm"}
        pairs |= {f"{theirs}.final_layer_norm": f"{ours}.mlp_norm"}
        pairs |= {f"{theirs}.fc1": f"{ours}.widen", f"{theirs}.fc2": f"{ours}.narrow"}
        names[f"{theirs}.self_attn.k_proj.weight"] = f"{ours}.k.weight"
    return names | both(pairs) | {name: f"unread.{i}" for i, name in enumerate(unread(config))}


def flow(config: FlowConfig) -> dict[str, str]:
    names = {"input_embedding.weight": "codes.weight"}
    pairs = {
        "spk_embed_affine_layer": "speaker",
        "encoder_proj": "output",
        "encoder.embed.out.0": "encoder.embed.linear",
        "encoder.embed.out.1": "encoder.embed.norm",
        "encoder.after_norm": "encoder.norm",
        f"length_regulator.model.{3 * NUM_CONVS}": "regulator.out",
    }
    for i in range(NUM_CONVS):
        pairs |= {f"length_regulator.model.{3 * i}": f"regulator.convs.{i}"}
        pairs |= {f"length_regulator.model.{3 * i + 1}": f"regulator.norms.{i}"}
    for i in range(config.layers):
        names |= conformer_layer(f"encoder.encoders.{i}", f"encoder.layers.{i}")
    return names | both(pairs) | _estimator(config)


def _estimator(config: FlowConfig) -> dict[str, str]:
    root, own = "decoder.estimator", "estimator"
    pairs = {
        f"{root}.time_mlp.linear_1": f"{own}.time1",
        f"{root}.time_mlp.linear_2": f"{own}.time2",
        f"{root}.down_blocks.0.2.conv": f"{own}.shrink",
        f"{root}.down_blocks.1.2": f"{own}.down_conv",
        f"{root}.up_blocks.0.2.conv": f"{own}.grow",
        f"{root}.up_blocks.1.2": f"{own}.up_conv",
        f"{root}.final_block.block.0": f"{own}.final.conv",
        f"{root}.final_block.block.1": f"{own}.final.norm",
        f"{root}.final_proj": f"{own}.out",
    }
    stages = [(f"down_blocks.{i}", f"downs.{i}") for i in range(2)]
    stages += [(f"up_blocks.{i}", f"ups.{i}") for i in range(2)]
    stages += [(f"mid_blocks.{i}", f"middle.{i}") for i in range(config.num_mid)]
    names: dict[str, str] = {}
    for theirs, ours in ((f"{root}.{theirs}", f"{own}.{ours}") for theirs, ours in stages):
        names |= stage(theirs, ours, config.num_blocks, norm=1)
    return names | both(pairs)
