"""Encodes a reference recording for cloning. Every clone needs the speaker vector; a clone with a transcript
also needs the codes, and the codec decoder's state after them. A clip is encoded once, in fp32, and cached.

    clip ─ mono, 24 kHz ─┬─ log mel ─ speaker encoder ─────────> speaker [D]
                         └─ codec encoder ─> codes [F, K] ─ prime ─> codec_state: new frames continue the reference without a seam
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.nn.mel import LogMel
from zoo.qwen3_tts.codec import Codec
from zoo.qwen3_tts.config import SAMPLE_RATE_HZ, SpeakerConfig
from zoo.qwen3_tts.speaker import SpeakerEncoder
from zoo.request import AudioClip
from zoo.voices.encoded_files import Encoded, EncodedFiles, encoder_key
from zoo.voices.references import References, content, mono

FAMILY = "qwen3_tts"
FFT, HOP = 1024, 256  # samples in a mel frame, and from one mel frame to the next
LONGEST_S = 60.0  # the talker reads 12.5 positions per second; the model is meant for a few seconds


def reference_s(config: SpeakerConfig) -> tuple[float, float]:
    """Return the shortest and the longest accepted reference, in seconds."""
    return math.ceil(1000 * config.min_frames * HOP / SAMPLE_RATE_HZ) / 1000, LONGEST_S


@dataclass(frozen=True)
class EncodedReference(Encoded):
    """An encoded clip. Without a transcript `codes` is empty and `codec_state` is None."""

    name: bytes  # equal for equal clips
    speaker: Tensor  # [D] fp32
    codes: Tensor  # [F, K]; F is 0 without a transcript
    codec_state: Tensor | None = None  # [values], the codec decoder's state after these codes


class Cloner:
    """Encodes an AudioClip to an EncodedReference. Thread-safe."""

    def __init__(self, speaker: SpeakerEncoder, codec: Codec, device: torch.device):
        self.speaker, self.codec, self.device = speaker, codec, device
        self.mel = LogMel(SAMPLE_RATE_HZ, FFT, HOP, speaker.config.mels, device)
        self.reference_s = reference_s(speaker.config)
        self.references: References[EncodedReference] = References()
        modules = (speaker, codec) if codec.encoder is not None else (speaker,)
        self.files = EncodedFiles(FAMILY, encoder_key(FAMILY, speaker.config, *modules), device)

    def __call__(self, clip: AudioClip, x_vector_only: bool) -> EncodedReference:
        """Return the clip's encoding, from the cache if possible. Raises ValueError (`param` "references")
        for unusable audio."""
        name = content(clip, x_vector_only)
        file = self.files.of(clip, name, lambda tensors: EncodedReference(name, **tensors))
        return self.references.get(name, lambda: self._encode(name, clip, x_vector_only), file)

    @torch.inference_mode()
    def _encode(self, name: bytes, clip: AudioClip, x_vector_only: bool) -> EncodedReference:
        # [1, N]
        samples = torch.tensor(mono(clip, SAMPLE_RATE_HZ, self.reference_s), device=self.device)[None]
        speaker = self.speaker(self.mel(samples))[0]
        if x_vector_only:
            none = torch.empty(0, self.codec.decoder.config.codebooks, dtype=torch.int64, device=self.device)
            return EncodedReference(name, speaker, none)
        assert self.codec.encoder is not None, "a model that clones must keep its codec's encoder"
        codes = self.codec.encoder(samples)  # [1, F, K]
        return EncodedReference(name, speaker, codes[0], self.codec.decoder.prime(codes)[0])
