"""What a clone needs of its reference: its codes, as the rows that the LM reads. They are encoded once, in
fp32, and kept.

clip ─ mono, 24 kHz, a second at least ─ codec encoder ─> codes [F, K] ─ staggered ─> rows [F + 7, K]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.encoded_files import EncodedFiles, encoder_key
from zoo.higgs_v3.codec import Codec
from zoo.higgs_v3.config import SAMPLE_RATE_HZ, Config
from zoo.higgs_v3.delay import stagger
from zoo.nn.keys import prefix_key
from zoo.references import References, content, mono
from zoo.request import AudioClip

FAMILY = "higgs_v3"
# the longest: sglang-omni 0.1.9, models/higgs_tts/stages.py; with less than the shortest there is no voice
REFERENCE_S = (0.1, 100.0)
MIN_SAMPLES = SAMPLE_RATE_HZ  # shorter clips are filled up with zeros at their end: likewise


@dataclass(frozen=True)
class EncodedReference:
    rows: Tensor  # [F + K - 1, K]
    keys: tuple[int, ...]  # one per row, negative: text ids are not

    def tensors(self) -> dict[str, Tensor]:
        return {"rows": self.rows}

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes + 40 * len(self.keys)


class Cloner:
    """AudioClip -> EncodedReference. May be called from several threads."""

    def __init__(self, config: Config, codec: Codec, device: torch.device):
        self.config, self.codec, self.device = config, codec, device
        self.references: References[EncodedReference] = References()
        self.files = EncodedFiles(FAMILY, encoder_key(FAMILY, config, codec))

    def __call__(self, clip: AudioClip) -> EncodedReference:
        """Raises ValueError (`param` "references") for audio that is no reference."""
        name = content(clip)
        file = self.files.of(clip, name, lambda tensors: self._keyed(tensors["rows"]))
        return self.references.get(name, lambda: self._encode(clip), file)

    @torch.inference_mode()
    def _encode(self, clip: AudioClip) -> EncodedReference:
        samples = torch.tensor(mono(clip, SAMPLE_RATE_HZ, REFERENCE_S), device=self.device)[None]  # [1, N]
        samples = F.pad(samples, (0, max(0, MIN_SAMPLES - samples.shape[1])))
        return self.rows(self.codec.encode(samples)[0])

    def rows(self, codes: Tensor) -> EncodedReference:
        """codes [F, K], wherever they are."""
        return self._keyed(stagger(codes, self.config.begin, self.config.end))

    def _keyed(self, rows: Tensor) -> EncodedReference:
        return EncodedReference(rows.to(self.device), tuple(prefix_key(*row) for row in rows.tolist()))
