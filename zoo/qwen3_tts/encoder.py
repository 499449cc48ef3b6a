"""The sizes of the codec's encoder, which is Mimi's (`zoo.nn.mimi_encoder`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zoo.checkpoint.config import ConfigBlock
from zoo.nn.mimi import MimiConfig

CODEC_FILE = "speech_tokenizer/config.json"


class EncoderConfig(MimiConfig):
    """The sizes of the encoder."""

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> EncoderConfig:
        """Read the encoder's part of the codec's config.json. Raises ValueError for a missing, out-of-range
        or unsupported value."""
        root = ConfigBlock(config, file=CODEC_FILE)
        read = cls.read(root.block("encoder_config"))
        root.expect_product("encode_downsample_rate", read.frame_samples)
        return replace(read, used=root.integer("encoder_valid_num_quantizers", 1, read.codebooks))
