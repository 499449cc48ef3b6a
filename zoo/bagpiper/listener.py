"""The ear of the model: a clip to vectors of the LM's width, 13 per second, in fp32. A clip is encoded once, and
kept.

    clip ─ first channel, 16 kHz, mean 0, deviation 1 ─ log mel, 100 Hz ─ chunks of 1 s ─ three strided convs ─ layers ─ linear ─ linear
                                                                                                         └ a vector sees 8 s

The encoder is Qwen3-Omni's, from transformers 5.23 (models/qwen3_omni_moe). Source of the features: espnet 202611,
espnet2/speechlm/model/speechlm/multimodal_io/audio.py, ContinuousAudioIO.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zoo.bagpiper.config import SAMPLE_RATE_HZ, TowerConfig
from zoo.nn.deferred import Deferred, Shape
from zoo.nn.resample import resampled
from zoo.nn.s3.tokenizer import WhisperMel
from zoo.request import AudioClip
from zoo.voices.encoded_files import Encoded
from zoo.voices.references import References, content, first_channel

CLIP_S = (0.1, 300.0)
MEL_HOP = 160
EPS = 1e-7  # of the variance


class Tower(Deferred):
    """Qwen3-Omni's audio encoder. Run it in fp32."""

    def __init__(self, config: TowerConfig, shapes: dict[str, Shape]):
        super().__init__(shapes)
        self.config = config

    def build(self) -> nn.Module:
        from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
            Qwen3OmniMoeAudioEncoderConfig,
        )
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

        c = self.config
        config = Qwen3OmniMoeAudioEncoderConfig(
            num_mel_bins=c.mels,
            d_model=c.width,
            encoder_ffn_dim=c.inner,
            encoder_layers=c.layers,
            encoder_attention_heads=c.heads,
            downsample_hidden_size=c.channels,
            output_dim=c.out,
            n_window=c.chunk,
            n_window_infer=c.seen,
            max_source_positions=1500,
        )
        return Qwen3OmniMoeAudioEncoder(config)

    def forward(self, mel: Tensor) -> Tensor:
        """mel [M, F] -> vectors [N, out]"""
        module: Any = self.module
        return module(mel, feature_lens=torch.tensor([mel.shape[1]], device=mel.device)).last_hidden_state


class Ear(nn.Module):
    """The encoder, and the projection to the LM's width."""

    def __init__(self, config: TowerConfig, shapes: dict[str, Shape], hidden: int):
        super().__init__()
        self.tower = Tower(config, shapes)
        self.adaptor = nn.Linear(config.out, hidden)


@dataclass(frozen=True)
class Heard(Encoded):
    vectors: Tensor  # [N, D] on the CPU


class Listener(nn.Module):
    """AudioClip -> vectors [N, D] float32 on the CPU. May be called from several threads."""

    packages = ("transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe",)

    def __init__(self, ear: Ear, device: torch.device):
        super().__init__()
        self.ear = ear
        self.device = device
        self.mel = WhisperMel(ear.tower.config.mels, device)
        self.heard: References[Heard] = References()

    def __call__(self, clip: AudioClip) -> Tensor:
        """Raises RequestError (`param` "turns") for unusable audio."""
        return self.heard.get(content(clip, field="turns"), lambda: Heard(self._encode(clip))).vectors

    @torch.inference_mode()
    def _encode(self, clip: AudioClip) -> Tensor:
        samples = torch.tensor(first_channel(clip, CLIP_S, "turns")).to(self.device)
        samples = resampled(samples, clip.sample_rate_hz, SAMPLE_RATE_HZ)
        samples = (samples - samples.mean()) / (samples.var(correction=0) + EPS).sqrt()
        mel = self.mel(samples)[:, : len(samples) // MEL_HOP]
        return self.ear.adaptor(self.ear.tower(mel)).float().cpu()
