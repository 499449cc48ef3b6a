"""Encodes a reference recording into the rows of codes that the LM reads. A clip is encoded once, in fp32,
and cached.

    clip ─ mono, 24 kHz, at least a second ─ codec encoder ─> codes [F, K] ─ stagger ─> rows [F + 7, K]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.higgs_v3.codec import Codec
from zoo.higgs_v3.config import SAMPLE_RATE_HZ, Config
from zoo.higgs_v3.delay import stagger
from zoo.nn.keys import prefix_key
from zoo.request import AudioClip
from zoo.voices.encoded_files import Encoded, EncodedFiles, encoder_key
from zoo.voices.references import References, content, mono

FAMILY = "higgs_v3"
# The upper limit and MIN_SAMPLES are those of sglang-omni 0.1.9, models/higgs_tts/stages.py. A clip below the
# lower limit is too short to contain a voice.
REFERENCE_S = (0.1, 100.0)
MIN_SAMPLES = SAMPLE_RATE_HZ  # shorter clips are padded with zeros at the end


@dataclass(frozen=True)
class EncodedReference(Encoded):
    rows: Tensor  # [F + K - 1, K]
    keys: tuple[int, ...]  # one per row; negative, unlike text ids

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + 40 * len(self.keys)


class Cloner:
    """Encodes an AudioClip to an EncodedReference. Thread-safe."""

    def __init__(self, config: Config, codec: Codec, device: torch.device):
        self.config, self.codec, self.device = config, codec, device
        self.references: References[EncodedReference] = References()
        self.files = EncodedFiles(FAMILY, encoder_key(FAMILY, config, codec))

    def __call__(self, clip: AudioClip) -> EncodedReference:
        """Return the clip's encoding, from the cache if possible. Raises ValueError (`param` "references")
        for unusable audio."""
        name = content(clip)
        file = self.files.of(clip, name, lambda tensors: self._keyed(tensors["rows"]))
        return self.references.get(name, lambda: self._encode(clip), file)

    @torch.inference_mode()
    def _encode(self, clip: AudioClip) -> EncodedReference:
        samples = torch.tensor(mono(clip, SAMPLE_RATE_HZ, REFERENCE_S), device=self.device)[None]  # [1, N]
        samples = F.pad(samples, (0, max(0, MIN_SAMPLES - samples.shape[1])))
        return self.rows(self.codec.encode(samples)[0])

    def rows(self, codes: Tensor) -> EncodedReference:
        """Return codes [F, K], on any device, as a reference."""
        return self._keyed(stagger(codes, self.config.begin, self.config.end))

    def _keyed(self, rows: Tensor) -> EncodedReference:
        return EncodedReference(rows.to(self.device), tuple(prefix_key(*row) for row in rows.tolist()))
