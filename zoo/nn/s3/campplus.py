"""CAM++, the speaker encoder: a recording to a vector (arXiv 2303.00332).

    16 kHz ─ 80 filters, 100 Hz ─ 2d convolutions /8 in frequency ─ conv /2 ─ dense blocks of 12, 24, 16
           ─ mean, deviation ─> [192]

In the published ONNX file most normalisations are folded into the convolution before them. The others are
applied as a scale and a shift.
Source: modelscope/3D-Speaker, speakerlab/models/campplus; Kaldi's filter banks as in torchaudio 2.11,
compliance/kaldi.py, fbank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

RATE_HZ, FILTERS, WIDTH = 16_000, 80, 192
FRAME, HOP, FFT = 400, 160, 512
PREEMPHASIS, LOW_HZ = 0.97, 20.0
HEAD, INITIAL, GROWTH, BOTTLENECK = 32, 128, 32, 128
BLOCKS = ((12, 1), (24, 2), (16, 2))  # layers, dilation
SEGMENT = 100  # frames that a layer's gate averages over
EPS = 1e-5


class Fbank(nn.Module):
    """Samples [N] in [-1, 1] to mean-subtracted log energies [1 + (N - 400) // 160, FILTERS]."""

    window: Tensor
    filters: Tensor

    def __init__(self, device: torch.device):
        super().__init__()
        window = torch.hann_window(FRAME, periodic=False, dtype=torch.float64) ** 0.85  # Povey's
        self.register_buffer("window", window.float().to(device), persistent=False)
        self.register_buffer("filters", kaldi_filters().float().to(device), persistent=False)

    def forward(self, samples: Tensor) -> Tensor:
        frames = samples.unfold(0, FRAME, HOP)
        frames = frames - frames.mean(1, keepdim=True)
        before = torch.cat((frames[:, :1], frames[:, :-1]), 1)
        power = torch.fft.rfft((frames - PREEMPHASIS * before) * self.window, FFT).abs().square()
        energies = (power @ self.filters.T).clamp(min=torch.finfo(torch.float32).eps).log()
        return energies - energies.mean(0)


def kaldi_filters() -> Tensor:
    """Return filters [FILTERS, FFT / 2 + 1] in float64: triangles, evenly spaced and linear in mel."""
    from transformers.audio_utils import mel_filter_bank

    size = FFT // 2 + 1, FILTERS
    bank = mel_filter_bank(*size, LOW_HZ, RATE_HZ / 2, RATE_HZ, None, "kaldi", True)
    return torch.from_numpy(bank).T.contiguous()


class Norm(nn.Module):
    """A batch normalisation with fixed statistics, over axis 1."""

    def __init__(self, channels: int, is_affine: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels)) if is_affine else None
        self.bias = nn.Parameter(torch.empty(channels)) if is_affine else None
        self.running_mean = nn.Parameter(torch.empty(channels))
        self.running_var = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=EPS)


class ResBlock(nn.Module):
    def __init__(self, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(HEAD, HEAD, 3, (stride, 1), padding=1)
        self.conv2 = nn.Conv2d(HEAD, HEAD, 3, padding=1)
        self.shortcut = nn.Conv2d(HEAD, HEAD, 1, (stride, 1)) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.conv1(x).relu())
        return (y + (x if self.shortcut is None else self.shortcut(x))).relu()


class Head(nn.Module):
    """The 2d convolutions: [B, FILTERS, T] -> [B, HEAD * FILTERS / 8, T]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, HEAD, 3, padding=1)
        self.blocks = nn.ModuleList(ResBlock(stride) for stride in (2, 1, 2, 1))
        self.conv2 = nn.Conv2d(HEAD, HEAD, 3, (2, 1), padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x[:, None]).relu()
        for block in self.blocks:
            x = block(x)
        return self.conv2(x).relu().flatten(1, 2)


class DenseLayer(nn.Module):
    """A layer that appends GROWTH channels, gated by the means over the recording and over each segment."""

    def __init__(self, channels: int, dilation: int):
        super().__init__()
        self.norm = Norm(channels)
        self.squeeze = nn.Conv1d(channels, BOTTLENECK, 1)
        self.local = nn.Conv1d(BOTTLENECK, GROWTH, 3, padding=dilation, dilation=dilation, bias=False)
        self.gate1 = nn.Conv1d(BOTTLENECK, BOTTLENECK // 2, 1)
        self.gate2 = nn.Conv1d(BOTTLENECK // 2, GROWTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.squeeze(self.norm(x).relu()).relu()
        segments = F.avg_pool1d(y, SEGMENT, SEGMENT, ceil_mode=True).repeat_interleave(SEGMENT, 2)[
            ..., : y.shape[2]
        ]
        gate = self.gate2(self.gate1(y.mean(2, keepdim=True) + segments).relu()).sigmoid()
        return torch.cat((x, self.local(y) * gate), 1)


class Transit(nn.Module):
    """A layer that halves the number of channels."""

    def __init__(self, channels: int, bias: bool):
        super().__init__()
        self.norm = Norm(channels)
        self.linear = nn.Conv1d(channels, channels // 2, 1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x).relu())


class CamPlus(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = Head()
        self.stem = nn.Conv1d(HEAD * FILTERS // 8, INITIAL, 5, stride=2, padding=2)
        self.blocks, self.transits = nn.ModuleList(), nn.ModuleList()
        channels = INITIAL
        for i, (num_layers, dilation) in enumerate(BLOCKS):
            layers = [DenseLayer(channels + GROWTH * k, dilation) for k in range(num_layers)]
            self.blocks.append(nn.Sequential(*layers))
            channels += num_layers * GROWTH
            is_last = i == len(BLOCKS) - 1
            self.transits.append(Transit(channels, bias=is_last))  # the last contains a folded normalisation
            channels //= 2
        self.out = nn.Conv1d(2 * channels, WIDTH, 1, bias=False)
        self.norm = Norm(WIDTH, is_affine=False)

    def forward(self, features: Tensor) -> Tensor:
        """Return speaker vectors [B, WIDTH] of features [B, T, FILTERS], where T is at least 3."""
        x = self.stem(self.head(features.mT)).relu()
        for block, transit in zip(self.blocks, self.transits, strict=True):
            x = transit(block(x))
        x = x.relu()
        x = torch.cat((x.mean(-1), x.std(-1)), -1)
        return self.norm(self.out(x[..., None])[..., 0])
