"""Tables from published tensor names to ours (see zoo.checkpoint.loading) of the networks around S3 codes."""

from __future__ import annotations

from collections.abc import Iterable

from zoo.nn.s3.sizes import NUM_UP_LAYERS, EncoderSizes, FlowSizes, VocoderSizes

WB = ("weight", "bias")
STATISTICS = ("running_mean", "running_var")
CAMPPLUS_BLOCKS = (12, 24, 16)  # layers of each


def both(pairs: dict[str, str], kinds: Iterable[str] = WB) -> dict[str, str]:
    """Return a table of tensors from a table of modules."""
    return {f"{theirs}.{kind}": f"{ours}.{kind}" for theirs, ours in pairs.items() for kind in kinds}


def flow(config: FlowSizes) -> dict[str, str]:
    """Return the names of flow.pt -> those of Flow."""
    return flow_encoder(config) | _estimator(config)


def flow_encoder(config: EncoderSizes) -> dict[str, str]:
    """Return the names of flow.pt, but the estimator's -> those of Flow."""
    names = {"input_embedding.weight": "codes.weight"}
    pairs = {
        "spk_embed_affine_layer": "speaker",
        "encoder_proj": "output",
        "encoder.after_norm": "encoder.norm",
    }
    for theirs, ours in (("embed", "embed"), ("up_embed", "up_embed")):
        pairs |= {
            f"encoder.{theirs}.out.0": f"encoder.{ours}.linear",
            f"encoder.{theirs}.out.1": f"encoder.{ours}.norm",
        }
    ahead = "encoder.pre_lookahead_layer"
    pairs |= {
        f"{ahead}.conv1": "encoder.ahead",
        f"{ahead}.conv2": "encoder.behind",
        "encoder.up_layer.conv": "encoder.up",
    }
    layers = [(f"encoder.encoders.{i}", f"encoder.layers.{i}") for i in range(config.layers)]
    layers += [(f"encoder.up_encoders.{i}", f"encoder.up_layers.{i}") for i in range(NUM_UP_LAYERS)]
    for theirs, ours in layers:
        names |= conformer_layer(theirs, ours)
    return names | both(pairs)


def conformer_layer(theirs: str, ours: str) -> dict[str, str]:
    """Return the names of a layer of the flow's encoder -> those of ConformerLayer."""
    pairs = {
        f"{theirs}.self_attn.linear_{part}": f"{ours}.attention.{part}" for part in ("q", "k", "v", "out")
    }
    pairs |= {f"{theirs}.norm_mha": f"{ours}.attention_norm", f"{theirs}.norm_ff": f"{ours}.mlp_norm"}
    pairs |= {f"{theirs}.feed_forward.w_1": f"{ours}.widen", f"{theirs}.feed_forward.w_2": f"{ours}.narrow"}
    return both(pairs) | {
        f"{theirs}.self_attn.linear_pos.weight": f"{ours}.attention.position.weight",
        f"{theirs}.self_attn.pos_bias_u": f"{ours}.attention.content_bias",
        f"{theirs}.self_attn.pos_bias_v": f"{ours}.attention.position_bias",
    }


def _estimator(config: FlowSizes) -> dict[str, str]:
    root, own = "decoder.estimator", "estimator"
    pairs = {
        f"{root}.time_mlp.linear_1": f"{own}.time1",
        f"{root}.time_mlp.linear_2": f"{own}.time2",
        f"{root}.down_blocks.0.2": f"{own}.first_conv",
        f"{root}.up_blocks.0.2": f"{own}.last_conv",
        f"{root}.final_block.block.0": f"{own}.final.conv",
        f"{root}.final_block.block.2": f"{own}.final.norm",
        f"{root}.final_proj": f"{own}.out",
    }
    stages = [("down_blocks.0", "first"), ("up_blocks.0", "last")]
    stages += [(f"mid_blocks.{i}", f"middle.{i}") for i in range(config.num_mid)]
    names: dict[str, str] = {}
    for theirs, ours in ((f"{root}.{theirs}", f"{own}.{ours}") for theirs, ours in stages):
        names |= stage(theirs, ours, config.num_blocks, norm=2)
    return names | both(pairs)


def stage(theirs: str, ours: str, num_blocks: int, norm: int) -> dict[str, str]:
    """Return the names of a stage of the estimator -> ours. norm: the number of a resnet's norm in its block."""
    pairs = {f"{theirs}.0.mlp.1": f"{ours}.resnet.time", f"{theirs}.0.res_conv": f"{ours}.resnet.shortcut"}
    for block in ("block1", "block2"):
        pairs[f"{theirs}.0.{block}.block.0"] = f"{ours}.resnet.{block}.conv"
        pairs[f"{theirs}.0.{block}.block.{norm}"] = f"{ours}.resnet.{block}.norm"
    names = both(pairs)
    for j in range(num_blocks):
        names |= _transformer_block(f"{theirs}.1.{j}", f"{ours}.blocks.{j}")
    return names


def _transformer_block(theirs: str, ours: str) -> dict[str, str]:
    """Return the names of a transformer block of the estimator -> ours."""
    pairs = {f"{theirs}.norm1": f"{ours}.attention_norm", f"{theirs}.norm3": f"{ours}.mlp_norm"}
    pairs |= {f"{theirs}.attn1.to_out.0": f"{ours}.out", f"{theirs}.ff.net.0.proj": f"{ours}.widen"}
    pairs[f"{theirs}.ff.net.2"] = f"{ours}.narrow"
    parts = {f"{theirs}.attn1.to_{part}.weight": f"{ours}.qkv.weight[{k}]" for k, part in enumerate("qkv")}
    return parts | both(pairs)


def vocoder(config: VocoderSizes, prefix: str = "") -> dict[str, str]:
    """Return the names of hift.pt without weight norm -> those of Vocoder."""
    pairs = {
        "conv_pre": "stem",
        "conv_post": "tail",
        "m_source.l_linear": "mix",
        "f0_predictor.classifier": "f0.out",
    }
    pairs |= {f"f0_predictor.condnet.{2 * i}": f"f0.convs.{i}" for i in range(5)}
    names: dict[str, str] = {}
    blocks = [(f"source_resblocks.{i}", f"source_blocks.{i}") for i in range(len(config.rates))]
    blocks += [
        (f"resblocks.{i}", f"blocks.{i}") for i in range(len(config.rates) * len(config.resblock_kernels))
    ]
    for i in range(len(config.rates)):
        pairs |= {f"ups.{i}": f"ups.{i}", f"source_downs.{i}": f"downs.{i}"}
    for theirs, ours in blocks:
        for half in "12":
            for j in range(len(config.resblock_dilations)):
                pairs[f"{theirs}.convs{half}.{j}"] = f"{ours}.convs{half}.{j}"
                names[f"{theirs}.activations{half}.{j}.alpha"] = f"{ours}.snakes{half}.{j}.alpha"
    return {f"{prefix}{theirs}": ours for theirs, ours in (names | both(pairs)).items()}


def is_weight_normed(name: str) -> bool:
    """Return whether a tensor of hift.pt has weight norm."""
    return "source_downs." not in name


def tokenizer_layers(num_layers: int, prefix: str = "") -> dict[str, str]:
    """Return the names of the S3 tokenizer's layers -> those of S3Tokenizer."""
    names: dict[str, str] = {}
    for i in range(num_layers):
        theirs, ours = f"{prefix}blocks.{i}", f"layers.{i}"
        pairs = {
            f"{theirs}.attn.query": f"{ours}.q",
            f"{theirs}.attn.value": f"{ours}.v",
            f"{theirs}.attn.out": f"{ours}.out",
        }
        pairs |= {f"{theirs}.attn_ln": f"{ours}.attention_norm", f"{theirs}.mlp_ln": f"{ours}.mlp_norm"}
        pairs |= {f"{theirs}.mlp.0": f"{ours}.widen", f"{theirs}.mlp.2": f"{ours}.narrow"}
        names |= both(pairs)
        names |= {
            f"{theirs}.attn.key.weight": f"{ours}.k.weight",
            f"{theirs}.attn.fsmn_block.weight": f"{ours}.memory.weight",
        }
    return names


def campplus() -> dict[str, str]:
    """Return the names of campplus.onnx -> those of CamPlus."""
    pairs = {"head.conv1": "head.conv1", "head.conv2": "head.conv2", "xvector.tdnn.linear": "stem"}
    norms: dict[str, str] = {}
    names = {"xvector.dense.linear.weight": "out.weight"}
    # only the statistics, because its scale and shift are constants of the graph: 1 and 0
    names |= both({"xvector.dense.nonlinear.batchnorm": "norm"}, STATISTICS)
    for i, (layer, block) in enumerate(((1, 0), (1, 1), (2, 0), (2, 1))):
        theirs = f"head.layer{layer}.{block}"
        pairs |= {f"{theirs}.{conv}": f"head.blocks.{i}.{conv}" for conv in ("conv1", "conv2")}
        if block == 0:
            pairs[f"{theirs}.shortcut.0"] = f"head.blocks.{i}.shortcut"
    for i, num_layers in enumerate(CAMPPLUS_BLOCKS):
        for k in range(num_layers):
            theirs, ours = f"xvector.block{i + 1}.tdnnd{k + 1}", f"blocks.{i}.{k}"
            norms[f"{theirs}.nonlinear1.batchnorm"] = f"{ours}.norm"
            pairs |= {f"{theirs}.linear1": f"{ours}.squeeze", f"{theirs}.cam_layer.linear1": f"{ours}.gate1"}
            pairs[f"{theirs}.cam_layer.linear2"] = f"{ours}.gate2"
            names[f"{theirs}.cam_layer.linear_local.weight"] = f"{ours}.local.weight"
        theirs, ours = f"xvector.transit{i + 1}", f"transits.{i}"
        norms[f"{theirs}.nonlinear.batchnorm"] = f"{ours}.norm"
        names[f"{theirs}.linear.weight"] = f"{ours}.linear.weight"
    names[f"{theirs}.linear.bias"] = f"{ours}.linear.bias"
    return names | both(pairs) | both(norms, (*WB, *STATISTICS))


_FOLDED = {
    "xvector.tdnn.linear": "xvector.tdnn.nonlinear.batchnorm",
    "xvector.transit3.linear": "xvector.out_nonlinear.batchnorm",
    "head.conv1": "head.bn1",
    "head.conv2": "head.bn2",
}


def folded_norm(owner: str) -> str | None:
    """Return the normalisation that the exported file has folded into a convolution of CAM++, or None."""
    parent, _, last = owner.rpartition(".")
    if owner in _FOLDED:
        return _FOLDED[owner]
    if parent.startswith("head.layer"):
        return f"{parent}.1" if last == "0" else f"{parent}.bn{last[-1]}"
    is_dense = ".tdnnd" in parent and last == "linear1" and not parent.endswith("cam_layer")
    return f"{parent}.nonlinear2.batchnorm" if is_dense else None
