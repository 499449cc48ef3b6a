"""The speaker encoder of the Base models. It turns a voice into one row that the talker reads. The network is
ECAPA-TDNN without batch norms.

    mel [B, 128, T] ─ conv ─ block ─ block ─ block ─ conv over all three ─ attentive mean and deviation ─ linear ─ [B, D]
                             └── each: conv, eight convs in a chain, conv, gate by channel, + its input

The output of every convolution is as long as its input, which has reflect padding. The vector is not
normalized.
Source: Desplanques et al. 2020 (arXiv 2005.07143); QwenLM/Qwen3-TTS, modeling_qwen3_tts.py,
Qwen3TTSSpeakerEncoder.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.qwen3_tts.config import SpeakerConfig


class Conv(nn.Conv1d):
    """[B, C, T] -> [B, Cout, T]. T must exceed (kernel - 1) * dilation / 2."""

    def __init__(self, channels: int, out_channels: int, kernel: int = 1, dilation: int = 1):
        super().__init__(
            channels, out_channels, kernel, dilation=dilation, padding="same", padding_mode="reflect"
        )


class Chain(nn.Module):
    """A Res2Net chain: it splits the channels into equal parts. Each part is added to the previous part's
    output and convolved, so later parts have a wider receptive field."""

    def __init__(self, channels: int, parts: int, kernel: int, dilation: int):
        super().__init__()
        self.parts = parts
        self.convs = nn.ModuleList(
            Conv(channels // parts, channels // parts, kernel, dilation) for _ in range(parts - 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        first, second, *rest = x.chunk(self.parts, 1)
        done = [first, self.convs[0](second).relu()]
        for conv, part in zip(self.convs[1:], rest, strict=True):
            done.append(conv(part + done[-1]).relu())
        return torch.cat(done, 1)


class Block(nn.Module):
    def __init__(self, channels: int, parts: int, gate: int, kernel: int, dilation: int):
        super().__init__()
        self.into = Conv(channels, channels)
        self.chain = Chain(channels, parts, kernel, dilation)
        self.out = Conv(channels, channels)
        self.squeeze = Conv(channels, gate)
        self.excite = Conv(gate, channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.out(self.chain(self.into(x).relu())).relu()
        gate = self.excite(self.squeeze(y.mean(2, keepdim=True)).relu()).sigmoid()  # [B, C, 1]
        return x + y * gate


class Pooling(nn.Module):
    """Attentive statistics pooling, [B, C, T] -> [B, 2C, 1]: each channel's weighted mean and standard
    deviation."""

    def __init__(self, channels: int, attention: int):
        super().__init__()
        self.squeeze = Conv(3 * channels, attention)
        self.attend = Conv(attention, channels)

    def forward(self, x: Tensor) -> Tensor:
        evenly = torch.full_like(x[:, :1], 1 / x.shape[2])
        context = torch.cat((x, *(value.expand_as(x) for value in moments(x, evenly))), 1)  # [B, 3C, T]
        weights = self.attend(self.squeeze(context).relu().tanh()).softmax(2)
        return torch.cat(moments(x, weights), 1)


def moments(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted mean and standard deviation over T of x [B, C, T], [B, C, 1] each."""
    mean = (weights * x).sum(2, keepdim=True)
    variance = (weights * (x - mean).square()).sum(2, keepdim=True)
    return mean, variance.clamp(min=1e-12).sqrt()


class SpeakerEncoder(nn.Module):
    """The whole network of the drawing above. Run it in fp32."""

    def __init__(self, config: SpeakerConfig):
        super().__init__()
        self.config = config
        width, wide = config.channels[0], config.channels[-1]
        kernel, *kernels, last_kernel = config.kernels
        dilation, *dilations, last_dilation = config.dilations
        self.stem = Conv(config.mels, width, kernel, dilation)
        self.blocks = nn.ModuleList(
            Block(width, config.parts, config.gate, k, d) for k, d in zip(kernels, dilations, strict=True)
        )
        self.join = Conv(wide, wide, last_kernel, last_dilation)
        self.pooling = Pooling(wide, config.attention)
        self.out = Conv(2 * wide, config.width)

    def forward(self, mel: Tensor) -> Tensor:
        """mel [B, M, T] -> speaker vectors [B, D]. T must be at least `config.min_frames`."""
        x = self.stem(mel).relu()
        seen = [x := block(x) for block in self.blocks]
        return self.out(self.pooling(self.join(torch.cat(seen, 1)).relu()))[:, :, 0]
