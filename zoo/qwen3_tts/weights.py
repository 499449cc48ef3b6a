"""Tables from published tensor names to ours (see zoo.checkpoint.loading)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zoo.checkpoint.names import decoder_block, gate_up
from zoo.nn.convnext import convnext_names
from zoo.nn.mimi import layer_names
from zoo.nn.mimi_encoder import encoder_names
from zoo.qwen3_tts.speaker import shapes

if TYPE_CHECKING:
    from zoo.qwen3_tts.codec import DecoderConfig
    from zoo.qwen3_tts.config import Config
    from zoo.qwen3_tts.encoder import EncoderConfig


def root(config: Config) -> dict[str, str]:
    """Return the table for model.safetensors, whose tensors go to `Talker`."""
    names = {
        "talker.model.text_embedding.weight": "text.embedding.weight",
        "talker.model.codec_embedding.weight": "codec_embedding.weight",
        "talker.model.norm.weight": "norm.weight",
        "talker.codec_head.weight": "codec_head.weight",
        "talker.code_predictor.model.norm.weight": "depth.norm.weight",
    }
    for fc in ("fc1", "fc2"):
        for kind in ("weight", "bias"):
            names[f"talker.text_projection.linear_{fc}.{kind}"] = f"text.{fc}.{kind}"
    if config.projects:
        for kind in ("weight", "bias"):
            names[f"talker.code_predictor.small_to_mtp_projection.{kind}"] = f"depth.project.{kind}"
    for g in range(config.codebooks - 1):
        names[f"talker.code_predictor.model.codec_embedding.{g}.weight"] = f"depth.embeddings.weight[{g}]"
        names[f"talker.code_predictor.lm_head.{g}.weight"] = f"depth.heads.{g}.weight"
    for i in range(config.talker.layers):
        names |= decoder_block(f"talker.model.layers.{i}", f"layers.{i}", has_qk_norm=True)
    for i in range(config.depth.layers):
        theirs, ours = f"talker.code_predictor.model.layers.{i}", f"depth.layers.{i}"
        names |= decoder_block(theirs, ours, has_qk_norm=True)
    if config.speaker is not None:
        names |= {f"speaker_encoder.{name}": f"speaker.{name}" for name in shapes(config.speaker)}
    return names


def codec(decoder: DecoderConfig, encoder: EncoderConfig) -> dict[str, str]:
    """Return the table for speech_tokenizer/model.safetensors, whose tensors go to `Codec`."""
    table: dict[str, str] = {}

    def both(theirs: str, ours: str) -> None:
        table.update({f"{theirs}.{leaf}": f"{ours}.{leaf}" for leaf in ("weight", "bias")})

    # decoder
    theirs, ours = "decoder.quantizer", "decoder.quantizer"
    for k in range(decoder.codebooks):
        book = f"{theirs}.rvq_first.vq.layers.0" if k == 0 else f"{theirs}.rvq_rest.vq.layers.{k - 1}"
        table[f"{book}._codebook.embedding_sum"] = f"{ours}.sums[{k}]"
        table[f"{book}._codebook.cluster_usage"] = f"{ours}.usage[{k}]"
    for branch in ("first", "rest"):
        table[f"{theirs}.rvq_{branch}.input_proj.weight"] = f"{ours}.{branch}_in.weight"
        table[f"{theirs}.rvq_{branch}.output_proj.weight"] = f"{ours}.{branch}_out.weight"
    both("decoder.pre_conv.conv", "decoder.conv")
    both("decoder.pre_transformer.input_proj", "decoder.transformer.input")
    both("decoder.pre_transformer.output_proj", "decoder.transformer.output")
    table["decoder.pre_transformer.norm.weight"] = "decoder.transformer.norm.weight"
    for i in range(decoder.transformer.layers):
        theirs, ours = f"decoder.pre_transformer.layers.{i}", f"decoder.transformer.layers.{i}"
        table |= layer_names(theirs, ours) | gate_up(theirs, ours)
        table[f"{theirs}.input_layernorm.weight"] = f"{ours}.norm.weight"
        table[f"{theirs}.post_attention_layernorm.weight"] = f"{ours}.mlp_norm.weight"
        table[f"{theirs}.mlp.down_proj.weight"] = f"{ours}.mlp.down.weight"
    for i in range(len(decoder.ratios)):
        theirs, ours = f"decoder.upsample.{i}", f"decoder.upsample.{i}"
        both(f"{theirs}.0.conv", f"{ours}.up")
        table |= convnext_names(f"{theirs}.1", f"{ours}.block")

    def snake(theirs: str, ours: str) -> None:
        table.update({f"{theirs}.{leaf}": f"{ours}.{leaf}" for leaf in ("alpha", "beta")})

    both("decoder.decoder.0.conv", "decoder.stem")
    num_blocks = len(decoder.rates)
    for i in range(num_blocks):
        theirs, ours = f"decoder.decoder.{i + 1}.block", f"decoder.blocks.{i}"
        snake(f"{theirs}.0", f"{ours}.snake")
        both(f"{theirs}.1.conv", f"{ours}.up")
        for j in range(3):
            unit, residual = f"{theirs}.{j + 2}", f"{ours}.residuals.{j}"
            for n in (1, 2):
                snake(f"{unit}.act{n}", f"{residual}.snake{n}")
                both(f"{unit}.conv{n}.conv", f"{residual}.conv{n}")
    snake(f"decoder.decoder.{num_blocks + 1}", "decoder.snake")
    both(f"decoder.decoder.{num_blocks + 2}.conv", "decoder.tail")

    return table | encoder_names(encoder, "encoder.", "encoder.")
