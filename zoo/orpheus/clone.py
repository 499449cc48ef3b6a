"""The codes of a reference, which are all that a clone needs. The LM reads them as the speech of the
transcript. They are encoded once, in fp32, and kept.

    clip ─ mono, 24 kHz, zeros up to a whole frame ─ SNAC's encoder ─> codes [F, 7]
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.orpheus.config import SAMPLE_RATE_HZ, SnacConfig
from zoo.orpheus.snac import Snac
from zoo.request import AudioClip
from zoo.voices.encoded_files import Codes, EncodedFiles, encoder_key
from zoo.voices.references import References, content, mono

FAMILY = "orpheus"
REFERENCE_S = (0.1, 30.0)  # 30 s are 2,461 of 8,192 positions
MAX_REFERENCES = 4


class Cloner:
    """AudioClip -> codes [F, 7] on the CPU. May be called from several threads."""

    def __init__(self, config: SnacConfig, codec: Snac, device: torch.device):
        self.config = config
        self.codec = codec
        self.device = device
        self.references: References[Codes] = References()
        self.files = EncodedFiles(FAMILY, encoder_key(FAMILY, config, codec))

    def __call__(self, clip: AudioClip) -> Tensor:
        """Raises ValueError (`param` "references") for audio that is not a reference."""
        name = content(clip)
        file = self.files.of(clip, name, lambda tensors: Codes(**tensors))
        return self.references.get(name, lambda: self._encode(clip), file).codes

    @torch.inference_mode()
    def _encode(self, clip: AudioClip) -> Codes:
        samples = torch.tensor(mono(clip, SAMPLE_RATE_HZ, REFERENCE_S), device=self.device)[None]  # [1, N]
        samples = F.pad(samples, (0, -samples.shape[1] % self.config.frame_samples))
        return Codes(self.codec.encode(samples)[0].cpu())
