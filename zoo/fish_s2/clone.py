"""Encodes a reference recording into codes, which the LM reads as earlier speech. A clip is encoded once, in
fp32, and cached.

    clip ─ mono, 44.1 kHz ─ codec encoder ─> codes [F, K]

Source of the resampling: fish-speech 0.1.0, fish_speech/inference_engine/reference_loader.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.fish_s2.codec import Codec
from zoo.fish_s2.config import SAMPLE_RATE_HZ
from zoo.request import AudioClip
from zoo.voices.encoded_files import Codes, EncodedFiles, encoder_key
from zoo.voices.references import References, content, mono_by_sinc

FAMILY = "fish_s2"
REFERENCE_S = (0.1, 60.0)  # the model card advises 10 to 30 s
MAX_REFERENCES = 8


class Cloner:
    """Encodes an AudioClip to codes [F, K] on the CPU. Thread-safe."""

    def __init__(self, codec: Codec, device: torch.device):
        self.codec, self.device = codec, device
        self.references: References[Codes] = References()
        self.files = EncodedFiles(FAMILY, encoder_key(FAMILY, (), codec))

    def __call__(self, clip: AudioClip) -> Tensor:
        """Return the clip's codes, from the cache if possible. Raises ValueError (`param` "references") for
        unusable audio."""
        name = content(clip)
        file = self.files.of(clip, name, lambda tensors: Codes(**tensors))
        return self.references.get(name, lambda: self._encode(clip), file).codes

    @torch.inference_mode()
    def _encode(self, clip: AudioClip) -> Codes:
        samples = mono_by_sinc(clip, SAMPLE_RATE_HZ, REFERENCE_S).to(self.device)
        return Codes(self.codec.encode(samples[None])[0].cpu())
