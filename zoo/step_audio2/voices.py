"""Voices: recordings, as the flow reads them. The language model has no voice.

    clip ─┬─ first channel, 16 kHz ─┬─ S3 tokenizer ─> codes [P]        the mel is cut or repeated to 2 frames a code,
          │                         └─ CAM++ ────────> speaker [192]    and only the first 10 s are read
          └─ mean of channels, 24 kHz ─ log mel ─────> mel [2 P, 80]

The default voices are the WAV files assets/default_NAME.wav of the original's source, in the model's directory.
Source: stepfun-ai/Step-Audio2 at 7c58630, token2wav.py, _prepare_prompt and set_stream_cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.nn.mel import LogMel
from zoo.nn.resample import resampled
from zoo.nn.s3.campplus import CamPlus, Fbank
from zoo.nn.s3.sizes import LOOKAHEAD, MEL_FFT, MEL_SAMPLES, MEL_TOP_HZ, MELS, RATE_HZ, TOKEN_FRAMES
from zoo.nn.s3.tokenizer import S3Tokenizer, WhisperMel
from zoo.request import AudioClip
from zoo.step_audio2.config import SPEECH_HZ
from zoo.step_audio2.flow import Flow
from zoo.step_audio2.past import MAX_PROMPT, Past, PromptCell
from zoo.voices.encoded_files import Encoded, EncodedFiles, encoder_key
from zoo.voices.references import References, content, mono

FAMILY = "step_audio2"
FOLDER, PATTERN = "assets", "default_*.wav"
REFERENCE_S = (0.2, 30.0)


@dataclass(frozen=True)
class Voice(Encoded):
    """A recording as the flow reads it."""

    codes: Tensor  # [P] int64
    mel: Tensor  # [2 P, MELS]
    speaker: Tensor  # [D]


@dataclass(frozen=True)
class FlowPrompt:
    """The flow's past behind a voice of num_tokens tokens."""

    num_tokens: int
    speaker: Tensor
    past: Past

    @property
    def num_bytes(self) -> int:
        return self.past.num_bytes


def find(directory: Path) -> dict[str, Path]:
    """Return the files of the default voices by name."""
    return {path.stem.lower(): path for path in sorted((directory / FOLDER).glob(PATTERN))}


class Cloner:
    """AudioClip -> Voice. May be called from several threads."""

    def __init__(self, tokenizer: S3Tokenizer, speaker: CamPlus, device: torch.device):
        self.tokenizer, self.speaker, self.device = tokenizer, speaker, device
        self.whisper_mel = WhisperMel(tokenizer.config.mels, device)
        self.fbank = Fbank(device)
        self.mel = LogMel(RATE_HZ, MEL_FFT, MEL_SAMPLES, MELS, device, MEL_TOP_HZ)
        self.voices: References[Voice] = References()
        self.files = EncodedFiles(FAMILY, encoder_key(FAMILY, tokenizer.config, tokenizer, speaker), device)

    def __call__(self, clip: AudioClip) -> tuple[bytes, Voice]:
        """Return a clip's name, equal for equal clips, and its voice. Raises RequestError."""
        name = content(clip)
        file = self.files.of(clip, name, lambda tensors: Voice(**tensors))
        return name, self.voices.get(name, lambda: self._encode(clip), file)

    @torch.inference_mode()
    def _encode(self, clip: AudioClip) -> Voice:
        rate_hz = clip.sample_rate_hz
        mean = torch.from_numpy(mono(clip, rate_hz, REFERENCE_S)).to(self.device)
        first = mean if clip.samples.ndim == 1 else torch.from_numpy(clip.samples[0].copy()).to(self.device)
        speech = resampled(first, rate_hz, SPEECH_HZ)
        codes = self.tokenizer(self.whisper_mel(speech)[None])[0]
        mel = self.mel(resampled(mean, rate_hz, RATE_HZ)[None])
        missing = TOKEN_FRAMES * len(codes) - mel.shape[2]
        mel = F.pad(mel, (0, missing), mode="replicate")[0].mT  # a negative pad cuts
        speaker = self.speaker(self.fbank(speech)[None])[0]
        return Voice(codes[:MAX_PROMPT], mel[: TOKEN_FRAMES * MAX_PROMPT].contiguous(), speaker)


@torch.inference_mode()
def flow_prompt(flow: Flow, voice: Voice) -> FlowPrompt:
    """Run the flow over a voice. Its first codes follow it as lookahead, as in the reference."""
    num = len(voice.codes)
    past = flow.past(1, num)
    codes = torch.cat((voice.codes, voice.codes[torch.arange(LOOKAHEAD, device=voice.codes.device) % num]))
    there = torch.full((1,), num + LOOKAHEAD, device=codes.device)
    cell = PromptCell(num, codes.device)
    flow(codes[None], there, voice.mel[None], voice.speaker[None], cell, past)
    return FlowPrompt(num, voice.speaker, past)
