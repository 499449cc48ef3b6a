"""The codec's encoder. It turns a whole reference recording into codes in one call.

    samples ─ conv ─ (residual x3, strided conv) x4 ─ transformer ─ conv ─┐
    [B, N]     64        128, 256, 512, 1024           4 layers     1024  │
            44.1 kHz                                    86.1 Hz           │
          ┌───────────────────────────────────────────────────────────────┘
          └ (strided conv, ConvNeXt) x2 ─ transformer ─ codebooks ─ codes [B, F, K]
                      1024                 8 layers        10
                                21.5 Hz

Run it in fp32 without TF32: with less precision, near ties between codebook rows resolve differently.
Source: facts of vllm-omni 0.30.0, model_executor/models/fish_speech (the modified DAC); Kumar et al. 2023
(arXiv 2306.06546).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.fish_s2.config import CodecConfig
from zoo.fish_s2.layers import DILATIONS, KERNEL, Residual, Transformer, WholeLayer
from zoo.nn.conv import CausalConv1d, CodecState, StateLayout
from zoo.nn.convnext import ConvNeXt
from zoo.nn.snake import Snake


class StridedConv(nn.Module):
    """A causal strided convolution with zeros before the start: [B, C, N] -> [B, Cout, N / stride]. N must be
    a multiple of the stride."""

    def __init__(self, channels: int, out_channels: int, kernel: int, stride: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_channels, channels, kernel))
        self.bias = nn.Parameter(torch.empty(out_channels))
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        past = self.weight.shape[2] - self.stride
        return F.conv1d(F.pad(x, (past, 0)), self.weight, self.bias, self.stride)


class DownBlock(nn.Module):
    """Three residual units and a strided convolution: [B, C, N] -> [B, 2C, N / stride]."""

    def __init__(self, channels: int, stride: int):
        super().__init__()
        self.residuals = nn.ModuleList(Residual(channels, dilation) for dilation in DILATIONS)
        self.snake = Snake(channels)
        self.down = StridedConv(channels, 2 * channels, 2 * stride, stride)

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        for residual in self.residuals:
            x = residual(x, state)
        return self.down(self.snake(x))


class Downsample(nn.Module):
    """A strided convolution and a ConvNeXt block: [B, C, N] -> [B, C, N / ratio]."""

    def __init__(self, channels: int, ratio: int):
        super().__init__()
        self.down = StridedConv(channels, channels, ratio, ratio)
        self.block = ConvNeXt(channels)

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        return self.block(self.down(x), state)


class Codebook(nn.Module):
    """A codebook of short rows with an input and an output projection. The nearest row has the most similar
    direction; the output is the row itself, not normalized. Source: improved VQGAN (arXiv 2110.04627),
    section 3.2. vector-quantize-pytorch's VectorQuantize finds rows by direction, too, but needs rows of
    length one."""

    def __init__(self, size: int, dim: int, latent: int):
        super().__init__()
        self.rows = nn.Embedding(size, dim)
        self.into = nn.Conv1d(latent, dim, 1)
        self.out = nn.Conv1d(dim, latent, 1)

    def forward(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize latent [B, C, F]. Return the codes [B, F] and their latent vectors [B, C, F]."""
        into = self.into(latent)  # [B, dim, F]
        direction, rows = F.normalize(into.mT.flatten(0, 1)), F.normalize(self.rows.weight)
        distance = direction.square().sum(1, keepdim=True) - 2 * direction @ rows.T + rows.square().sum(1)
        codes = (-distance).argmax(1).unflatten(0, (len(latent), -1))  # [B, F]
        row = self.rows(codes).mT
        return codes, self.out(into + (row - into))  # this sum rounds as in training

    def table(self) -> Tensor:
        """Return the latent vector of each row, [V, C]."""
        return F.linear(self.rows.weight, self.out.weight[:, :, 0], self.out.bias)


class Encoder(nn.Module):
    def __init__(self, config: CodecConfig):
        super().__init__()
        channels, last = config.channels, config.channels << len(config.strides)
        self.config = config
        self.stem = CausalConv1d(1, channels, KERNEL)
        self.blocks = nn.ModuleList(
            DownBlock(channels << i, stride) for i, stride in enumerate(config.strides)
        )
        self.hear = Transformer(config.hear, WholeLayer) if config.hear else None
        self.snake = Snake(last)
        self.tail = CausalConv1d(last, config.latent, 3)
        self.downsample = nn.ModuleList(Downsample(config.latent, ratio) for ratio in config.ratios)
        self.pre = Transformer(config.pre, WholeLayer)
        self.layout = StateLayout(self)

    def forward(self, samples: Tensor) -> Tensor:
        """Encode samples [B, N] at 44.1 kHz to latents [B, C, F], with F = ceil(N / 2048)."""
        samples = F.pad(samples, (0, -samples.shape[1] % self.config.frame_samples))
        num_frames = samples.shape[1] // self.config.frame_samples
        start = torch.zeros(len(samples), dtype=torch.int64, device=samples.device)
        state = CodecState(
            self.layout, samples.new_zeros(len(samples), self.layout.size), num_frames, start + num_frames
        )
        x = self.stem(samples[:, None], state)
        for block in self.blocks:
            x = block(x, state)
        if self.hear is not None:
            x = self.hear(x, start, state)
        x = self.tail(self.snake(x), state)
        for downsample in self.downsample:
            x = downsample(x, state)
        return self.pre(x, start, state)
