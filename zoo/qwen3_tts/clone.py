"""What a clone needs of its reference: the sound of the voice, and for cloning with a transcript the codes
and where the codec stands after them. All of it is encoded once, in fp32, and kept.

    clip ─ mono, 24 kHz ─┬─ log mel ─ speaker encoder ─────────> speaker [D]
                         └─ codec encoder ─> codes [F, K] ─ prime ─> codec_state: new frames go on from the reference without a seam
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.encoded_files import EncodedFiles, encoder_key
from zoo.nn.mel import LogMel
from zoo.qwen3_tts.codec import Codec
from zoo.qwen3_tts.config import SAMPLE_RATE_HZ, SpeakerConfig
from zoo.qwen3_tts.speaker import SpeakerEncoder
from zoo.references import References, content, mono
from zoo.request import AudioClip

FAMILY = "qwen3_tts"
FFT, HOP = 1024, 256  # samples of a mel frame, and between two
LONGEST_S = 60.0  # the talker reads 12.5 positions a second; the model was made for a few seconds


def reference_s(config: SpeakerConfig) -> tuple[float, float]:
    """The shortest and the longest reference."""
    return math.ceil(1000 * config.min_frames * HOP / SAMPLE_RATE_HZ) / 1000, LONGEST_S


@dataclass(frozen=True)
class EncodedReference:
    """codes and codec_state are there where the reference is cloned with its transcript."""

    name: bytes  # equal for equal clips
    speaker: Tensor  # [D] fp32
    codes: Tensor  # [F, K]; F is 0 for the sound of the voice alone
    codec_state: Tensor | None  # [values], the codec decoder's after these codes

    def tensors(self) -> dict[str, Tensor]:
        state = {} if self.codec_state is None else {"codec_state": self.codec_state}
        return {"speaker": self.speaker, "codes": self.codes, **state}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())


class Cloner:
    """AudioClip -> EncodedReference. May be called from several threads."""

    def __init__(self, speaker: SpeakerEncoder, codec: Codec, device: torch.device):
        self.speaker, self.codec, self.device = speaker, codec, device
        self.mel = LogMel(SAMPLE_RATE_HZ, FFT, HOP, speaker.config.mels, device)
        self.reference_s = reference_s(speaker.config)
        self.references: References[EncodedReference] = References()
        modules = (speaker, codec) if codec.encoder is not None else (speaker,)
        self.files = EncodedFiles(FAMILY, encoder_key(FAMILY, speaker.config, *modules))

    def __call__(self, clip: AudioClip, x_vector_only: bool) -> EncodedReference:
        """Raises ValueError (`param` "references") for audio that is no reference."""
        name = content(clip, x_vector_only)
        file = self.files.of(clip, name, lambda tensors: self._restored(name, tensors))
        return self.references.get(name, lambda: self._encode(name, clip, x_vector_only), file)

    def _restored(self, name: bytes, tensors: dict[str, Tensor]) -> EncodedReference:
        there = {key: tensor.to(self.device) for key, tensor in tensors.items()}
        return EncodedReference(name, there["speaker"], there["codes"], there.get("codec_state"))

    @torch.inference_mode()
    def _encode(self, name: bytes, clip: AudioClip, x_vector_only: bool) -> EncodedReference:
        # [1, N]
        samples = torch.tensor(mono(clip, SAMPLE_RATE_HZ, self.reference_s), device=self.device)[None]
        speaker = self.speaker(self.mel(samples))[0]
        if x_vector_only:
            none = torch.empty(0, self.codec.decoder.config.codebooks, dtype=torch.int64, device=self.device)
            return EncodedReference(name, speaker, none, None)
        assert self.codec.encoder is not None, "a model that clones keeps its codec's encoder"
        codes = self.codec.encoder(samples)  # [1, F, K]
        return EncodedReference(name, speaker, codes[0], self.codec.decoder.prime(codes)[0])
