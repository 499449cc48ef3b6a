"""Resampling by a windowed sinc, for models that were trained on the output of this resampler."""

from math import ceil, gcd, pi

import numpy as np
import soxr
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

# zero crossings of the sinc on each side; the low-pass's cutoff as a fraction of half the lower rate
ZEROS, ROLLOFF = 6, 0.99
# Values of a filter at most, 8 MB in fp64. Between all usual rates it has fewer, but 6 GB from 47,999 to 16,000 Hz.
MAX_VALUES = 1 << 20


class Resample(nn.Module):
    """samples [B, N] at one rate -> [B, ceil(N * to / from)] at another: a low-pass under a Hann window, one
    filter per output phase.

    Source: J. O. Smith, Digital Audio Resampling (ccrma.stanford.edu/~jos/resample); torchaudio 2.11,
    functional.resample, with its defaults. The filters are made on the CPU, wherever the model is built.
    """

    filters: Tensor  # [to, 1, taps]

    def __init__(self, from_hz: int, to_hz: int):
        super().__init__()
        shared = gcd(from_hz, to_hz)
        self.step, self.phases = from_hz // shared, to_hz // shared
        cutoff = min(self.step, self.phases) * ROLLOFF
        self.reach = ceil(ZEROS * self.step / cutoff)
        tap = torch.arange(-self.reach, self.reach + self.step, dtype=torch.float64, device="cpu") / self.step
        phase = torch.arange(self.phases, dtype=torch.float64, device="cpu") / self.phases
        t = ((tap - phase[:, None]) * cutoff).clamp(-ZEROS, ZEROS)  # [to, taps], in zero crossings
        filters = torch.sinc(t) * (t * pi / ZEROS / 2).cos().square() * cutoff / self.step
        self.register_buffer("filters", filters[:, None].float(), persistent=False)

    def forward(self, samples: Tensor) -> Tensor:
        padded = F.pad(samples, (self.reach, self.reach + self.step))[:, None]
        resampled = rearrange(F.conv1d(padded, self.filters, stride=self.step), "b phase n -> b (n phase)")
        return resampled[:, : -(-samples.shape[1] * self.phases // self.step)]


def resampled(samples: Tensor, from_hz: int, to_hz: int) -> Tensor:
    """Return samples [N] at another rate, on the same device. Between rates that would need a filter of more than
    MAX_VALUES values, soxr resamples."""
    if from_hz == to_hz:
        return samples
    if from_hz * to_hz // gcd(from_hz, to_hz) ** 2 > MAX_VALUES:
        return torch.from_numpy(by_soxr(samples.cpu().numpy(), from_hz, to_hz)).to(samples.device)
    return Resample(from_hz, to_hz).to(samples.device)(samples[None])[0]


def by_soxr(samples: np.ndarray, from_hz: int, to_hz: int) -> np.ndarray:
    """Return samples [N] at another rate in high quality. N is rounded up.

    Source: librosa, resample, which reference implementations use."""
    num = -(-len(samples) * to_hz // from_hz)
    samples = soxr.resample(samples, from_hz, to_hz, quality="HQ")[:num]
    return np.pad(samples, (0, num - len(samples)))
