"""The voice encoder: a recording to a vector of length 1.

    16 kHz, silence cut off ─ 40 mel energies, 100 Hz ─ stretches of 160, one every 77 ─ LSTM ─ mean ─> [256]

Source: chatterbox-tts 0.1.7, models/voice_encoder; CorentinJ/Real-Time-Voice-Cloning (GE2E, arXiv
1710.10467).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.chatterbox.config import SPEAKER
from zoo.nn.mel import slaney_filters

RATE_HZ, FFT, HOP, FILTERS, TOP_HZ = 16_000, 400, 160, 40, 8000.0
LAYERS = 3
STRETCH, STEP = 160, 77  # frames
LEAST_THERE = 0.8  # the last stretch is left out if less of it is there
SILENCE_DB = -20.0  # against the loudest frame
LOUDNESS_FRAME, LOUDNESS_HOP = 2048, 512


def trimmed(samples: Tensor) -> Tensor:
    """Cut the silence off both ends of samples [N]. Source: librosa, effects.trim."""
    if samples.is_meta:  # a memory plan knows lengths alone
        return samples
    edge = LOUDNESS_FRAME // 2
    power = F.pad(samples, (edge, edge)).unfold(0, LOUDNESS_FRAME, LOUDNESS_HOP).square().mean(1)
    loud = (power > power.max() * 10 ** (SILENCE_DB / 10)).nonzero()[:, 0]
    if len(loud) == 0:
        return samples
    return samples[int(loud[0]) * LOUDNESS_HOP : (int(loud[-1]) + 1) * LOUDNESS_HOP]


def stretches(mel: Tensor) -> Tensor:
    """Return overlapping stretches [N, STRETCH, M] of mel [T, M], cut or filled up with zeros at the end."""
    num, rest = divmod(max(len(mel) - STRETCH + STEP, 0), STEP)
    if num == 0 or (rest + STRETCH - STEP) / STRETCH >= LEAST_THERE:
        num += 1
    length = STRETCH + STEP * (num - 1)
    mel = F.pad(mel[:length], (0, 0, 0, max(0, length - len(mel))))
    return mel.unfold(0, STRETCH, STEP).mT


class VoiceEncoder(nn.Module):
    window: Tensor  # [FFT]
    filters: Tensor  # [FILTERS, FFT / 2 + 1]

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FILTERS, SPEAKER, LAYERS, batch_first=True)
        self.proj = nn.Linear(SPEAKER, SPEAKER)

    def prepare(self) -> None:
        """Fill the window and the filters, which are in no checkpoint."""
        device = self.proj.weight.device
        filters = slaney_filters(RATE_HZ, FFT, FILTERS, TOP_HZ).float()
        self.register_buffer("window", torch.hann_window(FFT, device=device), persistent=False)
        self.register_buffer("filters", filters.to(device), persistent=False)

    def forward(self, samples: Tensor) -> Tensor:
        """samples [N] at 16 kHz -> [SPEAKER]"""
        bins = torch.stft(trimmed(samples), FFT, HOP, window=self.window, return_complex=True)
        mel = (self.filters @ bins.abs().square()).T  # [T, FILTERS]
        _, (hidden, _) = self.lstm(stretches(mel))
        each = F.normalize(self.proj(hidden[-1]).relu(), dim=1)  # [N, SPEAKER]
        return F.normalize(each.mean(0), dim=0)
