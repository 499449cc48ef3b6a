"""Mimi's encoder, which is transformers'. It turns a whole reference recording into codes in one call.

    samples [B, N] ─ conv ─ (residual, strided conv) x4 ─ conv ─ transformer ─ downsample ─ codebooks ─ codes [B, N / 1920, K]
                                4, 5, 6, 8: 24 kHz to 25 Hz       25 Hz         12.5 Hz

Source: Defossez et al., "Moshi" (2024), section 3.3.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from zoo.nn.deferred import Deferred, scratch
from zoo.nn.mimi import FIXED, MimiConfig, encoder_shapes

PACKAGES = ("transformers.models.mimi.modeling_mimi",)
WHOLE_PAST = 1 << 30  # a window that no recording fills
# The residual unit of the first block holds so many channels per channel of the first convolution.
PEAK_CHANNELS = 3.5


class Encoder(Deferred):
    """Encodes samples to codes. Run it in fp32: with less precision, near ties between codebook rows resolve
    differently."""

    def __init__(self, config: MimiConfig, rate_hz: int, is_windowed: bool = True):
        """is_windowed: whether attention sees `config.window` positions (40 ms each), or the whole past."""
        super().__init__({name_in_memory(name): shape for name, shape in encoder_shapes(config).items()})
        self.config, self.rate_hz, self.is_windowed = config, rate_hz, is_windowed

    def build(self) -> nn.Module:
        from transformers import MimiConfig as TheirConfig
        from transformers import MimiModel

        return MimiModel(TheirConfig(**settings(self.config, self.rate_hz, self.is_windowed)))

    def forward(self, samples: Tensor) -> Tensor:
        """samples [B, N] -> codes [B, ceil(N / frame_samples), K]. Padding on the right changes only the
        codes of a partial last frame."""
        if samples.is_meta:
            scratch(int(PEAK_CHANNELS * self.config.filters * samples.numel()), samples)
            num_frames = -(-samples.shape[1] // self.config.frame_samples)
            return samples.new_empty((len(samples), num_frames, self.config.used), dtype=torch.int64)
        module: Any = self.module
        codes: Tensor = module.encode(samples[:, None], num_quantizers=self.config.used).audio_codes
        return codes.mT.contiguous()


def encoder_names(config: MimiConfig, theirs: str = "", ours: str = "") -> dict[str, str]:
    """Return the published names of the encoder's tensors -> those of `Encoder`, each behind a prefix."""
    return {theirs + name: ours + name_in_memory(name) for name in encoder_shapes(config)}


def name_in_memory(name: str) -> str:
    """Return the name that transformers 5.23 gives to a published tensor in memory."""
    name = re.sub(r"^encoder\.layers\.", "encoder.encoder_seanet.layers.", name)
    return re.sub(r"^(encoder_transformer|downsample)\.", r"encoder.\1.", name)


def settings(config: MimiConfig, rate_hz: int, is_windowed: bool) -> dict[str, Any]:
    """Return the arguments of transformers' MimiConfig."""
    return FIXED | {
        "sampling_rate": rate_hz,
        "frame_rate": rate_hz / config.frame_samples,
        "num_filters": config.filters,
        "kernel_size": config.kernel,
        "residual_kernel_size": config.residual_kernel,
        "last_kernel_size": config.last_kernel,
        "compress": config.compress,
        "upsampling_ratios": list(config.strides[::-1]),
        "hidden_size": config.hidden,
        "intermediate_size": config.inner,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "head_dim": config.head_dim,
        "norm_eps": config.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "sliding_window": config.window if is_windowed else WHOLE_PAST,
        "use_cache": False,
        "num_quantizers": config.codebooks,
        "codebook_size": config.codebook_size,
        "codebook_dim": config.codebook_dim,
        "vector_quantization_hidden_dimension": config.codebook_dim,
        "upsample_groups": config.hidden,
        "decoder_config": None,  # the encoder alone
    }
