"""The encodings of a recording that a clone needs: the vector of its voice and, to continue it, its codes.
Both are made once, in fp32, and kept.

    clip ─ mono ─ speaker encoder ──────────────> voice [128]
         └ 44.1 kHz ─ zeros up to a whole frame ─ DAC's encoder ─> codes [F, 9]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.nn.resample import resampled
from zoo.request import AudioClip
from zoo.voices.encoded_files import Encoded, EncodedFiles, encoder_key
from zoo.voices.references import References, content, mono
from zoo.zonos.codec import Codec
from zoo.zonos.config import SAMPLE_RATE_HZ
from zoo.zonos.speaker import SpeakerEncoder

FAMILY = "zonos"
REFERENCE_S = (0.1, 30.0)  # the original advises 5 to 30 s
SILENT_FRAMES = 10  # 116 ms, as many as those of the silence that the original's demonstration continues


@dataclass(frozen=True)
class EncodedReference(Encoded):
    voice: Tensor  # [128] bfloat16 on the CPU
    codes: Tensor  # [F, 9] on the CPU


class Cloner:
    """AudioClip -> EncodedReference. May be called from several threads."""

    def __init__(self, codec: Codec, speaker: SpeakerEncoder | None, device: torch.device):
        self.codec, self.speaker, self.device = codec, speaker, device
        self.references: References[EncodedReference] = References()
        modules = [module for module in (codec, speaker) if module is not None]
        self.files = EncodedFiles(FAMILY, encoder_key(FAMILY, None, *modules))
        self._silence: Tensor | None = None

    def __call__(self, clip: AudioClip) -> EncodedReference:
        """Raises ValueError (`param` "references") for audio that is not a reference."""
        name = content(clip)
        file = self.files.of(clip, name, lambda tensors: EncodedReference(**tensors))
        return self.references.get(name, lambda: self._encode(clip), file)

    @torch.inference_mode()
    def silence(self) -> Tensor:
        """Return the codes [SILENT_FRAMES, 9] of silence on the CPU."""
        if self._silence is None:
            samples = torch.zeros(1, SILENT_FRAMES * self.codec.frame_samples, device=self.device)
            self._silence = self.codec.encode(samples)[0].cpu()
        return self._silence

    @torch.inference_mode()
    def _encode(self, clip: AudioClip) -> EncodedReference:
        assert self.speaker is not None, "a reference, and no speaker encoder: the spec takes none"
        own = torch.tensor(mono(clip, clip.sample_rate_hz, REFERENCE_S), device=self.device)
        wide = resampled(own, clip.sample_rate_hz, SAMPLE_RATE_HZ)
        voice = self.speaker(own, clip.sample_rate_hz)
        return EncodedReference(voice.bfloat16().cpu(), self.codec.encode(wide[None])[0].cpu())
