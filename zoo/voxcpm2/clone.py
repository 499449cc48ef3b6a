"""Encode a reference recording for cloning: its latents, the rows that the language model reads, and, if
speech continues the recording, the decoder's state at its end. Each reference is encoded once and cached.

    clip ─ mono, 16 kHz ─ padded to whole patches ─ VAE encoder ─> patches [R, P, D] ─┬─ LocEnc ─> rows [R, H]
                                                                                     └─ prime ─> codec_state: no seam after the reference
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor, nn

from zoo.request import AudioClip
from zoo.voices.encoded_files import Encoded, EncodedFiles, encoder_key
from zoo.voices.references import References, content, mono, mono_by_sinc
from zoo.voxcpm2.config import Config
from zoo.voxcpm2.vae import Vae

FAMILY = "voxcpm2"
LONGEST_S = 60.0  # 375 positions; the model was trained with references of a few seconds


def reference_s(config: Config) -> tuple[float, float]:
    """Return the lengths of the shortest reference (one patch) and of the longest, in seconds."""
    return config.patch * config.vae.hop_samples / config.vae.rate_hz, LONGEST_S


@dataclass(frozen=True)
class EncodedReference(Encoded):
    """A reference as the model reads it."""

    name: bytes  # equal for equal clips with the same use
    patches: Tensor  # [R, P, D], rounded to the model's dtype, as the model reads them
    rows: Tensor  # [R, H], the model's dtype
    # [values], the decoder's state after these patches; None unless speech continues them
    codec_state: Tensor | None = None


class Cloner:
    """Turns an AudioClip into an EncodedReference. Can be called from several threads.

    rows: maps patches [R, P, D] to the rows that the language model reads [R, H]; heard_by: the modules that
    `rows` computes with, which become part of the key of the stored files.
    """

    def __init__(
        self,
        config: Config,
        vae: Vae,
        rows: Callable[[Tensor], Tensor],
        device: torch.device,
        dtype: torch.dtype,
        *heard_by: nn.Module,
    ):
        self.config, self.vae, self.rows, self.device, self.dtype = config, vae, rows, device, dtype
        self.reference_s = reference_s(config)
        self.references: References[EncodedReference] = References()
        self.files = EncodedFiles(FAMILY, encoder_key(FAMILY, (config, dtype), vae, *heard_by), device)

    def __call__(self, clip: AudioClip, continues: bool) -> EncodedReference:
        """Encode a clip, or return it from the cache. continues: speech continues the clip, so the padding
        comes before it and not after.

        Raises ValueError (`param` "references") for audio that cannot be a reference.
        """
        name = content(clip, continues)
        file = self.files.of(clip, name, lambda tensors: EncodedReference(name, **tensors))
        return self.references.get(name, lambda: self._encode(name, clip, continues), file)

    @torch.inference_mode()
    def _encode(self, name: bytes, clip: AudioClip, continues: bool) -> EncodedReference:
        samples = self._samples(clip)
        missing = -len(samples) % (self.config.patch * self.config.vae.hop_samples)
        samples = np.pad(samples, (missing, 0) if continues else (0, missing))
        latents = self.vae.encoder(torch.tensor(samples, device=self.device)[None])  # [1, D, F]
        patches = latents[0].to(self.dtype).T.unflatten(0, (-1, self.config.patch)).contiguous()  # [R, P, D]
        return self._heard(name, patches, continues)

    def _samples(self, clip: AudioClip) -> np.ndarray:
        """Return a clip [N] at the codec's rate. The first generation's code calls torchaudio, VoxCPM2's librosa."""
        rate_hz = self.config.vae.rate_hz
        if not self.config.is_first_generation:
            return mono(clip, rate_hz, self.reference_s)
        return mono_by_sinc(clip, rate_hz, self.reference_s).numpy()

    @torch.inference_mode()
    def spoken(self, frames: Tensor, continues: bool) -> EncodedReference:
        """Return patches that the model generated [R, P, D] as a reference."""
        name = blake2b(frames.float().numpy().tobytes(), digest_size=16).digest() + bytes([continues])
        return self._heard(name, frames.to(self.device, self.dtype), continues)

    def _heard(self, name: bytes, patches: Tensor, continues: bool) -> EncodedReference:
        codec_state = None
        if continues:
            latents = patches.flatten(0, 1).T[None].to(next(self.vae.parameters()).dtype)  # [1, D, F]
            codec_state = self.vae.decoder.prime(latents)[0]
        return EncodedReference(name, patches, self.rows(patches), codec_state)
