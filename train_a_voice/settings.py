"""Sizes of the voice, and of a trial run that goes through every step in a minute."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from train_a_voice.codes import SIZE
from zoo.qwen3_tts import demo


@dataclass(frozen=True)
class Settings:
    num_sentences: int
    num_code_sentences: int  # first sentences, to which the codebooks are fitted
    mel_levels: int
    decoder: dict[str, Any]  # changes to the published decoder_config
    talker: dict[str, int]  # hidden, inner, layers, heads, head_dim
    depth: dict[str, int]

    @property
    def codebooks(self) -> int:
        return self.mel_levels + 1


def _decoder(width: int, latent: int, hidden: int, channels: int, rates: list[int]) -> dict[str, Any]:
    return {
        "codebook_dim": width,
        "codebook_size": SIZE,
        "decoder_dim": channels,
        "head_dim": 32,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "latent_dim": latent,
        "num_attention_heads": hidden // 32,
        "num_hidden_layers": 2,
        "num_key_value_heads": hidden // 32,
        "sliding_window": 16,  # the longest context in training
        "upsample_rates": rates,
        "vector_quantization_hidden_dimension": width,
    }


def _stack(hidden: int, inner: int, layers: int, heads: int, head_dim: int) -> dict[str, int]:
    return {"hidden": hidden, "inner": inner, "layers": layers, "heads": heads, "head_dim": head_dim}


FULL = Settings(
    num_sentences=46_500,
    num_code_sentences=3_000,
    mel_levels=12,  # with eight, a fifth to a quarter more words are misheard
    # The published rates are 8, 5, 4, 3. These have fewer samples at the layers with more channels, so they
    # train faster.
    decoder=_decoder(256, 192, 128, 256, [4, 4, 5, 6]),
    talker=_stack(192, 448, 8, 4, 48),
    depth=_stack(128, 320, 2, 4, 32),
)
QUICK = Settings(
    num_sentences=40,
    num_code_sentences=40,
    mel_levels=2,
    decoder=_decoder(32, 16, 32, 64, [8, 5, 4, 3]),
    talker=_stack(32, 64, 3, 2, 16),
    depth=_stack(32, 64, 2, 2, 16),
)


def settings_of(codebooks: int) -> Settings:
    """Return the sizes of a voice, given its codes a frame."""
    return QUICK if codebooks == QUICK.codebooks else FULL


def codec_config(settings: Settings) -> dict[str, Any]:
    """Return speech_tokenizer/config.json: the published one with smaller sizes.

    A custom_voice model never runs the encoder, which is as small as the layout allows."""
    config = copy.deepcopy(demo.TINY_CODEC)
    config["decoder_config"] |= settings.decoder | {"num_quantizers": settings.codebooks}
    config["encoder_config"] |= {
        "codebook_dim": 4,
        "codebook_size": SIZE,
        "num_quantizers": settings.codebooks,
        "num_hidden_layers": 1,
        "num_filters": 2,
    }
    config["encoder_valid_num_quantizers"] = settings.codebooks
    return config
