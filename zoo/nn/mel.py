"""Log mel spectrograms."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LINEAR_HZ = 1000.0  # the mel scale is linear below and logarithmic above
HZ_PER_MEL = 200 / 3
LOG_STEP = math.log(6.4) / 27


class LogMel(nn.Module):
    """Log mel energies of samples, in fp32. A frame is `hop` samples; the ends are mirrored, so that N
    samples give `N // hop` whole frames.

    The window and the filters are made once and stay on the device. Build this module there, not on `meta`.
    """

    window: Tensor  # [fft]
    filters: Tensor  # [M, fft / 2 + 1]

    def __init__(
        self, rate_hz: int, fft: int, hop: int, mels: int, device: torch.device, top_hz: float | None = None
    ):
        super().__init__()
        self.fft, self.hop = fft, hop
        self.register_buffer("window", torch.hann_window(fft, device=device), persistent=False)
        self.register_buffer(
            "filters", slaney_filters(rate_hz, fft, mels, top_hz).float().to(device), persistent=False
        )

    def forward(self, samples: Tensor) -> Tensor:
        """samples [B, N] float32, N above (fft - hop) / 2 -> [B, M, N // hop]. Source: QwenLM/Qwen3-TTS,
        mel_spectrogram (HiFi-GAN's)."""
        edge = (self.fft - self.hop) // 2
        padded = F.pad(samples[:, None], (edge, edge), mode="reflect")[:, 0]
        bins = torch.stft(padded, self.fft, self.hop, window=self.window, center=False, return_complex=True)
        energy = (torch.view_as_real(bins).square().sum(-1) + 1e-9).sqrt()  # [B, fft / 2 + 1, F]
        return (self.filters @ energy).clamp(min=1e-5).log()


def slaney_filters(rate_hz: int, fft: int, mels: int, top_hz: float | None = None) -> Tensor:
    """Return the filters [mels, fft / 2 + 1] float64: triangles of equal area between 0 Hz and top_hz
    (default: half the rate), evenly spaced in mel.
    Source: M. Slaney, Auditory Toolbox (1998); librosa.filters.mel computes the same."""
    top = LINEAR_HZ / HZ_PER_MEL + math.log((top_hz or rate_hz / 2) / LINEAR_HZ) / LOG_STEP
    mel = torch.linspace(0, top, mels + 2, dtype=torch.float64)
    edges = torch.where(
        mel < LINEAR_HZ / HZ_PER_MEL,
        mel * HZ_PER_MEL,
        LINEAR_HZ * ((mel - LINEAR_HZ / HZ_PER_MEL) * LOG_STEP).exp(),
    )
    low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]  # [mels, 1] each, in Hz
    hz = torch.linspace(0, rate_hz / 2, fft // 2 + 1, dtype=torch.float64)
    triangles = torch.minimum((hz - low) / (middle - low), (high - hz) / (high - middle)).clamp(min=0)
    return triangles * 2 / (high - low)
