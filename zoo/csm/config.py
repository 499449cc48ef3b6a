"""config.json as frozen dataclasses. A missing or out-of-range key raises an error that names it; unknown
keys are ignored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zoo.checkpoint.config import CODEBOOKS, POSITIONS, RATE_HZ, VOCABULARY, ConfigBlock
from zoo.nn.llama import LlamaConfig
from zoo.nn.mimi import MimiConfig

MODEL = "csm"
DEPTH = "depth_decoder_config"
CODEC = "codec_config"


@dataclass(frozen=True)
class Config:
    backbone: LlamaConfig
    depth: LlamaConfig
    codec: MimiConfig
    codebooks: int
    vocab: int  # rows per codebook, a few more than the codec has codes
    text_vocab: int
    max_positions: int
    rate_hz: int

    @classmethod
    def read(cls, values: dict[str, Any]) -> Config:
        """Read config.json. Raises ValueError for a missing, out-of-range or unsupported value."""
        root = ConfigBlock(values)
        root.expect(model_type=MODEL, tie_codebooks_embeddings=True, codebook_eos_token_id=0)
        codebooks = root.integer("num_codebooks", 3, CODEBOOKS[1])
        vocab = root.integer("vocab_size", 2, VOCABULARY[1])
        backbone = LlamaConfig.read(root)
        depth = root.block(DEPTH)
        depth.expect(num_codebooks=codebooks, vocab_size=vocab, backbone_hidden_size=backbone.hidden)
        depth.integer("max_position_embeddings", codebooks, POSITIONS[1])
        codec, rate_hz = read_codec(root.block(CODEC), codebooks, vocab)
        return cls(
            backbone=backbone,
            depth=LlamaConfig.read(depth),
            codec=codec,
            codebooks=codebooks,
            vocab=vocab,
            text_vocab=root.integer("text_vocab_size", *VOCABULARY),
            max_positions=root.integer("max_position_embeddings", 64, POSITIONS[1]),
            rate_hz=rate_hz,
        )


def read_codec(block: ConfigBlock, codebooks: int, vocab: int) -> tuple[MimiConfig, int]:
    """Return the codec's sizes and its sample rate. Raises ValueError."""
    block.expect(model_type="mimi", trim_right_ratio=1.0)
    codec = MimiConfig.read(block)
    rate_hz = block.integer("sampling_rate", *RATE_HZ)
    if codec.codebooks != codebooks:
        raise block.refuse("num_quantizers", f"num_codebooks is {codebooks}")
    if codec.codebook_size > vocab:
        raise block.refuse("codebook_size", f"vocab_size is {vocab}")
    if block.get("codebook_dim") != codec.codebook_dim:
        known = f"vector_quantization_hidden_dimension, {codec.codebook_dim}"
        raise block.refuse("codebook_dim", f"only {known}, is supported")
    if block.get("upsample_groups") != codec.hidden:
        raise block.refuse("upsample_groups", f"only hidden_size, {codec.hidden}, is supported")
    for key in ("frame_rate", "_frame_rate"):  # of releases 4 and 5
        if key in block.values and block.values[key] != rate_hz / codec.frame_samples:
            raise block.refuse(key, f"the rates give {rate_hz / codec.frame_samples:g}")
    return codec, rate_hz
