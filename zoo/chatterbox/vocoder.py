"""HiFT with the older source of sines: a frame's pitch holds for its 480 samples, and the phases of all harmonics
but the first begin anywhere.

Source: chatterbox-tts 0.1.7, models/s3gen/hifigan.py, SineGen.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zoo.nn.s3 import hift
from zoo.nn.s3.hift import HALF, UNVOICED, Place
from zoo.nn.s3.sizes import MEL_SAMPLES, RATE_HZ


class Vocoder(hift.Vocoder):
    """HiFT over a whole speech."""

    def source(self, f0: Tensor, place: Place, phase: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the source [B, W * MEL_SAMPLES] between the middles of the first and the last frame, and phases.

        f0 [B, W + 1]; phase [B, H]: fp64, in turns, where the speech begins; noise [B, W + 1, MEL_SAMPLES, H].
        The phases [B, W + 1, H] are those at the end of each frame.
        """
        config = self.config
        harmonic = torch.arange(1, config.harmonics + 1, device=f0.device)
        turns = f0[..., None].double() * harmonic / RATE_HZ  # [B, W + 1, H], per sample
        ends = phase[:, None] + MEL_SAMPLES * turns.cumsum(1)
        way = torch.arange(1 - MEL_SAMPLES, 1, device=f0.device, dtype=torch.float64)[:, None]  # to the end
        angle = (ends[:, :, None] + way * turns[:, :, None]) % 1  # [B, W + 1, MEL_SAMPLES, H]
        sines = (2 * math.pi * angle).to(f0.dtype).sin()
        is_voiced = (f0 > config.voiced_hz).to(f0.dtype)[..., None, None]
        loudness = config.alpha * UNVOICED + (config.sigma - config.alpha * UNVOICED) * is_voiced
        source = config.alpha * is_voiced * sines + loudness * noise.to(f0.dtype)
        source = source.flatten(1, 2)[:, HALF:-HALF]  # [B, W * MEL_SAMPLES, H]
        return self.mix(source).tanh()[..., 0], ends % 1
