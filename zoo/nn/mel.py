"""Log mel spectrograms."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
    (default: half the rate), evenly spaced in Slaney's mel."""
    from transformers.audio_utils import mel_filter_bank

    bank = mel_filter_bank(fft // 2 + 1, mels, 0, top_hz or rate_hz / 2, rate_hz, "slaney", "slaney")
    return torch.from_numpy(bank).T.contiguous()
