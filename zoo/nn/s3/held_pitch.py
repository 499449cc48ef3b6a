"""HiFT with the older source of sines: a frame's pitch holds for all of its samples, and the phases of all
harmonics but the first begin anywhere.

Source: chatterbox-tts 0.1.7, models/s3gen/hifigan.py, SineGen; THUDM/GLM-4-Voice at eb00ce9,
cosyvoice/hifigan/generator.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zoo.nn.s3 import hift
from zoo.nn.s3.hift import UNVOICED, Place


class Vocoder(hift.Vocoder):
    """HiFT whose source holds the pitch of a frame."""

    def source(self, f0: Tensor, place: Place, phase: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the source [B, W * mel_samples] between the middles of the first and the last frame, and
        phases.

        f0 [B, W + 1]; phase [B, H]: fp64, in turns, where the first of these frames begins; noise [B, W + 1,
        mel_samples, H]. The phases [B, W + 2, H] are those where each frame begins, and where the last one
        ends.
        """
        config, size = self.config, self.config.mel_samples
        harmonic = torch.arange(1, config.harmonics + 1, device=f0.device)
        turns = f0[..., None].double() * harmonic / config.rate_hz  # [B, W + 1, H], per sample
        ends = phase[:, None] + size * turns.cumsum(1)
        way = torch.arange(1 - size, 1, device=f0.device, dtype=torch.float64)[:, None]  # to the end
        angle = (ends[:, :, None] + way * turns[:, :, None]) % 1  # [B, W + 1, size, H]
        sines = (2 * math.pi * angle).to(f0.dtype).sin()
        is_voiced = (f0 > config.voiced_hz).to(f0.dtype)[..., None, None]
        loudness = config.alpha * UNVOICED + (config.sigma - config.alpha * UNVOICED) * is_voiced
        source = config.alpha * is_voiced * sines + loudness * noise.to(f0.dtype)
        source = source.flatten(1, 2)[:, size // 2 : -(size // 2)]  # [B, W * size, H]
        phases = torch.cat((phase[:, None], ends), 1) % 1
        return self.mix(source).tanh()[..., 0], phases
