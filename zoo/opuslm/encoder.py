"""The encoder of ESPnet's "DAC" at 16 kHz: a whole clip to eight codes per frame, in fp32.

    samples [N] ─ conv ─ /2 ─ /4 ─ /5 ─ /8 ─ LSTM ─ conv ─ nearest code, eight times ─ codes [F, 8]
                  32     64   128  256  512  channels       each of what the codes before it left over

It mirrors the decoder (codec.py). Convolutions read beyond both ends of a clip as in a mirror, and the last frame
may be partly beyond the end. Source: espnet 202611, espnet2/gan_codec/shared.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.opuslm.codec import LSTM, Wave
from zoo.opuslm.config import CodecConfig


class MirroredConv(nn.Conv1d):
    """A convolution over a whole clip [B, C, N] -> [B, Cout, N / stride, rounded up]."""

    bias: nn.Parameter

    def __init__(self, channels: int, out_channels: int, kernel: int, stride: int = 1, dilation: int = 1):
        super().__init__(channels, out_channels, kernel, stride, dilation=dilation)
        self.edge = (kernel - 1) * dilation + 1 - stride

    def forward(self, x: Tensor) -> Tensor:
        right = self.edge // 2
        return super().forward(mirrored(x, self.edge - right, right + -x.shape[2] % self.stride[0]))


def mirrored(x: Tensor, left: int, right: int) -> Tensor:
    """Return x [B, C, N] with values before and behind it as in a mirror. A clip that is too short for them is
    continued by zeros first."""
    missing = max(left, right) - x.shape[2] + 1
    if missing <= 0:
        return F.pad(x, (left, right), "reflect")
    padded = F.pad(F.pad(x, (0, missing)), (left, right), "reflect")
    return padded[..., : padded.shape[2] - missing]


class Unit(nn.Module):
    """A residual unit: two convolutions after snakes, and one of kernel 1 next to them."""

    def __init__(self, channels: int, kernel: int, dilation: int, compress: int):
        super().__init__()
        inner = channels // compress
        self.wave1, self.conv1 = Wave(channels), MirroredConv(channels, inner, kernel, dilation=dilation)
        self.wave2, self.conv2 = Wave(inner), MirroredConv(inner, channels, 1)
        self.shortcut = MirroredConv(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.conv2(self.wave2(self.conv1(self.wave1(x))))


class Level(nn.Module):
    """The residual units, then downsampling by `rate`: [B, C, N] -> [B, 2 C, N / rate]."""

    def __init__(self, config: CodecConfig, channels: int, rate: int):
        super().__init__()
        self.units = nn.ModuleList(
            Unit(channels, config.unit_kernel, config.dilation**i, config.compress)
            for i in range(config.residuals)
        )
        self.wave = Wave(channels)
        self.down = MirroredConv(channels, 2 * channels, 2 * rate, rate)

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return self.down(self.wave(x))


class Encoder(nn.Module):
    """Samples to the vectors that the codes stand for."""

    def __init__(self, config: CodecConfig):
        super().__init__()
        width = config.channels << len(config.rates)
        self.stem = MirroredConv(1, config.channels, config.kernel)
        rates = reversed(config.rates)
        self.levels = nn.ModuleList(Level(config, config.channels << i, rate) for i, rate in enumerate(rates))
        self.lstm = LSTM(width, config.lstm)
        self.wave = Wave(width)
        self.tail = MirroredConv(width, config.width, config.last_kernel)

    def forward(self, samples: Tensor) -> Tensor:
        """samples [N] -> [F, D], F = N / 320, rounded up"""
        x = self.stem(samples[None, None])
        for level in self.levels:
            x = level(x)
        none = torch.zeros(1, dtype=torch.int64, device=x.device)
        state = x.new_zeros(1, len(self.lstm.layers), 2, x.shape[1])
        x, _ = self.lstm(x.mT, none, state, none)
        return self.tail(self.wave(x.mT))[0].mT


def quantized(x: Tensor, tables: nn.ModuleList) -> Tensor:
    """Return the codes [F, K] of vectors [F, D]: of each codebook [V, D], the nearest row to what is left."""
    codes = []
    for table in tables:
        assert isinstance(table, nn.Embedding), table
        code = nearest(x, table.weight)
        x = x - table.weight[code]
        codes.append(code)
    return torch.stack(codes, 1)


def nearest(x: Tensor, rows: Tensor) -> Tensor:
    """Return the number [N] of the row of rows [V, D] next to each x [N, D]. It is the formula of the reference,
    which decides between rows that are almost equally near."""
    distance = x.square().sum(1, keepdim=True) - 2 * x @ rows.T + rows.square().sum(1)
    return distance.argmin(1)
