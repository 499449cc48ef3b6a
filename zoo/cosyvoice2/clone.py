"""Encode a recording as a voice: its codes, its mel and its speaker vector, in fp32. Each recording is
encoded once and cached.

    clip ─┬─ 16 kHz ─┬─ S3 tokenizer ─> codes [P]          codes and mel are cut to equal length: 2 frames a code
          │          └─ CAM++ ────────> speaker [192]
          └─ 24 kHz ─── log mel ──────> mel [2P, 80]

Source: FunAudioLLM/CosyVoice, cosyvoice/cli/frontend.py, frontend_zero_shot.
"""

from __future__ import annotations

import torch

from zoo.cosyvoice2.voices import Voice
from zoo.nn.mel import LogMel
from zoo.nn.resample import resampled
from zoo.nn.s3.campplus import CamPlus, Fbank
from zoo.nn.s3.sizes import MEL_FFT, MEL_SAMPLES, MEL_TOP_HZ, MELS, RATE_HZ, TOKEN_FRAMES
from zoo.nn.s3.tokenizer import RATE_HZ as SPEECH_HZ
from zoo.nn.s3.tokenizer import S3Tokenizer, WhisperMel
from zoo.request import AudioClip
from zoo.voices.encoded_files import EncodedFiles, encoder_key
from zoo.voices.references import References, content, mono

FAMILY = "cosyvoice2"
REFERENCE_S = (0.2, 30.0)  # the reference accepts at most 30 s


class Cloner:
    """Turns an AudioClip into a Voice. Can be called from several threads."""

    def __init__(self, tokenizer: S3Tokenizer, speaker: CamPlus, device: torch.device):
        self.tokenizer, self.speaker, self.device = tokenizer, speaker, device
        self.whisper_mel = WhisperMel(tokenizer.config.mels, device)
        self.fbank = Fbank(device)
        self.mel = LogMel(RATE_HZ, MEL_FFT, MEL_SAMPLES, MELS, device, MEL_TOP_HZ)
        self.voices: References[Voice] = References()
        self.files = EncodedFiles(FAMILY, encoder_key(FAMILY, tokenizer.config, tokenizer, speaker), device)

    def __call__(self, clip: AudioClip) -> Voice:
        """Encode a clip, or return it from the cache.

        Raises RequestError for audio that cannot be a reference.
        """
        name = content(clip)
        file = self.files.of(
            clip, name, lambda found: Voice(name, found["codes"], found["mel"], found["speaker"])
        )
        return self.voices.get(name, lambda: self._encode(name, clip), file)

    @torch.inference_mode()
    def _encode(self, name: bytes, clip: AudioClip) -> Voice:
        samples = torch.from_numpy(mono(clip, clip.sample_rate_hz, REFERENCE_S)).to(self.device)
        speech = resampled(samples, clip.sample_rate_hz, SPEECH_HZ)
        codes = self.tokenizer(self.whisper_mel(speech)[None])[0]
        mel = self.mel(resampled(samples, clip.sample_rate_hz, RATE_HZ)[None])[0].mT  # [F, MELS]
        speaker = self.speaker(self.fbank(speech)[None])[0]
        num = min(len(codes), len(mel) // TOKEN_FRAMES)
        return Voice(name, codes[:num], mel[: TOKEN_FRAMES * num], speaker)
