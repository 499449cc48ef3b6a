"""A voice as the model reads it: from a recording, encoded once and kept, or from the directory's conds.pt.

    clip ─ 24 kHz ─┬─ 16 kHz (soxr) ─┬─ voice encoder ─────────────> speaker [256]  ┐ for the language model
                   │                 └─ 6 s ─ S3 tokenizer ────────> codes [T]      ┘
                   └─ 10 s ─┬─ log mel ────────────────────────────> mel [2P, 80]   ┐
                            └─ 16 kHz (torchaudio's) ─┬─ S3 tokenizer > flow_codes [P] │ for the flow
                                                      └─ CAM++ ────> timbre [192]   ┘

The two resamplers give different codes, so both are kept. Turbo first brings the clip to -27 LUFS, and reads
15 s. Source: chatterbox-tts 0.1.7, tts.py and tts_turbo.py, prepare_conditionals; models/s3gen/s3gen.py,
embed_ref.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zoo.chatterbox.config import SPEAKER, Config
from zoo.chatterbox.loudness import at_loudness
from zoo.chatterbox.voice_encoder import VoiceEncoder
from zoo.checkpoint.tensor_files import read_pickle
from zoo.nn.mel import LogMel
from zoo.nn.resample import Resample, by_soxr
from zoo.nn.s3.campplus import CamPlus, Fbank
from zoo.nn.s3.sizes import MEL_FFT, MEL_SAMPLES, MEL_TOP_HZ, MELS, NUM_CODES, RATE_HZ, TOKEN_FRAMES
from zoo.nn.s3.tokenizer import RATE_HZ as SPEECH_HZ
from zoo.nn.s3.tokenizer import S3Tokenizer, WhisperMel
from zoo.request import AudioClip
from zoo.voices.encoded_files import Encoded, EncodedFiles, encoder_key
from zoo.voices.references import References, content, mono

FAMILY = "chatterbox"
VOICES_FILE = "conds.pt"
REFERENCE_S = (0.2, 60.0)
TURBO_REFERENCE_S = (5.0, 60.0)  # the reference refuses shorter ones
T3_S, TURBO_T3_S = 6, 15  # how much of a clip the language model's codes are of
MAX_PROMPT = 250  # codes that the flow reads: 10 s
CODES_PER_S = 25
LOUDNESS_LUFS = -27.0


@dataclass(frozen=True)
class Voice(Encoded):
    name: bytes  # equal for equal recordings
    speaker: Tensor  # [SPEAKER] fp32
    codes: Tensor  # [T] int64
    flow_codes: Tensor  # [P] int64
    mel: Tensor  # [2P, MELS] fp32
    timbre: Tensor  # [192] fp32


class Encoders(nn.Module):
    """The networks that read a recording, in fp32."""

    def __init__(self, config: Config):
        super().__init__()
        self.voice = VoiceEncoder()
        self.tokenizer = S3Tokenizer(config.tokenizer)
        self.timbre = CamPlus()


class Cloner:
    """Turns an AudioClip into a Voice. May be called from several threads."""

    def __init__(self, encoders: Encoders, is_turbo: bool, device: torch.device):
        self.encoders, self.device = encoders, device
        self.is_turbo = is_turbo
        self.whisper_mel = WhisperMel(encoders.tokenizer.config.mels, device)
        self.fbank = Fbank(device)
        self.mel = LogMel(RATE_HZ, MEL_FFT, MEL_SAMPLES, MELS, device, MEL_TOP_HZ)
        self.voices: References[Voice] = References()
        self.files = EncodedFiles(FAMILY, encoder_key(FAMILY, is_turbo, encoders), device)

    def __call__(self, clip: AudioClip) -> Voice:
        """Encode a clip, or return it from the cache. Raises RequestError for audio that cannot be a
        reference."""
        name = content(clip)
        file = self.files.of(clip, name, lambda tensors: Voice(name, **tensors))
        return self.voices.get(name, lambda: self._encode(name, clip), file)

    @torch.inference_mode()
    def _encode(self, name: bytes, clip: AudioClip) -> Voice:
        allowed, t3_s = (TURBO_REFERENCE_S, TURBO_T3_S) if self.is_turbo else (REFERENCE_S, T3_S)
        samples = mono(clip, RATE_HZ, allowed)
        if self.is_turbo:
            samples = at_loudness(samples, RATE_HZ, LOUDNESS_LUFS)
        speech = self._tensor(by_soxr(samples, RATE_HZ, SPEECH_HZ))
        first = self._tensor(samples[: MAX_PROMPT // CODES_PER_S * RATE_HZ])
        flow_speech = Resample(RATE_HZ, SPEECH_HZ).to(self.device)(first[None])[0]
        flow_codes = self._codes(flow_speech)
        mel = self.mel(first[None])[0].mT  # [F, MELS]
        num = min(len(flow_codes), len(mel) // TOKEN_FRAMES)
        return Voice(
            name=name,
            speaker=self.encoders.voice(speech),
            codes=self._codes(speech[: t3_s * SPEECH_HZ])[: t3_s * CODES_PER_S],
            flow_codes=flow_codes[:num],
            mel=mel[: TOKEN_FRAMES * num],
            timbre=self.encoders.timbre(self.fbank(flow_speech)[None])[0],
        )

    def _tensor(self, samples: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(samples)).to(self.device)

    def _codes(self, speech: Tensor) -> Tensor:
        return self.encoders.tokenizer(self.whisper_mel(speech)[None])[0]


def read_voice(directory: Path, config: Config, device: torch.device) -> Voice | None:
    """Return the voice in a directory's conds.pt, or None without that file. Raises ValueError."""
    path = directory / VOICES_FILE
    if not path.exists():
        return None
    found = read_pickle(path)
    if not isinstance(found, dict) or not {"t3", "gen"} <= found.keys():
        raise ValueError(f"{path} does not hold a voice: 't3' and 'gen' are needed")
    t3, flow = (Entry(path, part, found[part]) for part in ("t3", "gen"))
    codes, flow_codes = t3.codes("cond_prompt_speech_tokens"), flow.codes("prompt_token")
    mel = flow.row("prompt_feat", (-1, MELS))
    num = min(len(flow_codes), len(mel) // TOKEN_FRAMES, MAX_PROMPT)
    voice = Voice(
        name=VOICES_FILE.encode(),
        speaker=t3.row("speaker_emb", (SPEAKER,)),
        codes=codes[: (TURBO_T3_S if config.is_turbo else T3_S) * CODES_PER_S],
        flow_codes=flow_codes[:num],
        mel=mel[: TOKEN_FRAMES * num],
        timbre=flow.row("embedding", (config.flow.speaker,)),
    )
    return Voice(voice.name, **{key: tensor.to(device) for key, tensor in voice.tensors().items()})


@dataclass(frozen=True)
class Entry:
    """A part of conds.pt."""

    path: Path
    name: str
    values: Any

    def row(self, key: str, shape: tuple[int, ...]) -> Tensor:
        """Return the only row of a tensor [1, *shape] as fp32. -1 in shape: any number. Raises ValueError."""
        value = self.values.get(key) if isinstance(self.values, dict) else None
        if not isinstance(value, Tensor) or not fits(value, (1, *shape)):
            came = f"{list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{self.path}: {self.name}.{key} is {came}; a tensor {[1, *shape]} is needed")
        if not value.isfinite().all():
            raise ValueError(f"{self.path}: {self.name}.{key} has NaN or infinity; values must be finite")
        return value[0].float()

    def codes(self, key: str) -> Tensor:
        """Return the only row of codes [1, P] as int64. Raises ValueError."""
        row = self.row(key, (-1,)).long()
        if len(row) == 0 or not 0 <= row.min() <= row.max() < NUM_CODES:
            came = f"from {int(row.min())} to {int(row.max())}" if len(row) else "missing"
            raise ValueError(
                f"{self.path}: codes of {self.name}.{key} are {came}; 0 to {NUM_CODES - 1} are possible"
            )
        return row


def fits(value: Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor has a shape, in which -1 means any number."""
    return value.dim() == len(shape) and all(a in (-1, b) for a, b in zip(shape, value.shape, strict=True))
