"""The 25 Hz codec. Its decoder turns frames of 8 codes (40 ms) into 24 kHz samples. The samples do not depend
on how the frames are split into windows.

    codes [B, 10 + F + 10, K] ─ tables ─ conv ─ x8 ─ x5 ─ x4 ─ x2 ─ x3 ─ conv ─ samples [B, 960 F]
                                 256     1024   512  256  128   64   32     1    channels
                                         25 Hz  0.2    1    4    8   24   kHz

A frame affects the samples of ten frames before it and ten after it, so a window comes with ten extra frames
on both sides. Every convolution returns only the positions whose inputs are all present. The stretch gets
shorter from layer to layer, until only the window is left. Before and after the tape the layers see zeros,
like the padding of a decoder that gets the whole tape.
Source: transformers 5.23, models/higgs_audio_v2_tokenizer and models/dac; Kumar et al. 2023 (arXiv
2306.06546).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo import kernels
from zoo.higgs_v3.config import CodecConfig
from zoo.higgs_v3.encoder import Encoder
from zoo.higgs_v3.layers import DILATIONS, EDGES, KERNEL, Quantizer, Residual
from zoo.nn.residual import ShortFilters, UpsamplingFilters, is_faster, pointwise, strides_apart
from zoo.nn.snake import Snake
from zoo.nn.stretch import Stretch


class Conv(nn.Conv1d, ShortFilters):
    """A convolution after a snake, without padding."""

    weight: nn.Parameter
    bias: nn.Parameter


class Unit(Residual):
    """The decoder's residual unit. On a CPU that supports it, it is one kernel; the encoder gains nothing
    from that."""

    conv = Conv
    conv1: Conv
    conv2: Conv

    def forward(self, x: Tensor) -> Tensor:
        [dilation] = self.conv1.dilation
        if not is_faster(x, self.conv1, dilation):
            return super().forward(x)
        then, middle = pointwise(self.snake2, self.conv2), x[..., self.edge : x.shape[2] - self.edge]
        wave, filters, bias = self.snake1.wave, self.conv1.filters, self.conv1.bias
        return kernels.convolve_snake(x, wave, filters, bias, KERNEL, dilation, residual=middle, then=then)


class Upsampling(nn.ConvTranspose1d, UpsamplingFilters):
    """A transposed convolution after a snake."""

    weight: nn.Parameter
    bias: nn.Parameter


class Block(nn.Module):
    """An upsampling block with three residual units: [B, C, N] -> [B, C / 2, about rate N]."""

    def __init__(self, channels: int, rate: int):
        super().__init__()
        self.rate, self.padding = rate, -(-rate // 2)
        self.snake = Snake(channels)
        # The padding drops the ends of the output, which the missing neighbours of the first and last input
        # would share.
        self.up = Upsampling(channels, channels // 2, 2 * rate, rate, padding=rate)
        self.residuals = nn.ModuleList(Unit(channels // 2, dilation) for dilation in DILATIONS)

    def forward(self, x: Tensor, stretch: Stretch) -> Tensor:
        x = self.upsampled(x)
        stretch.upsample(self.rate, self.padding)
        for residual, edge in zip(self.residuals, EDGES, strict=True):
            x = residual(stretch.silence(x))
            stretch.shorten(edge)
        return stretch.silence(x)

    def upsampled(self, x: Tensor) -> Tensor:
        """[B, C, N] -> [B, C / 2, (N - 1) rate]"""
        if not is_faster(x, self.up):
            return self.up(self.snake(x))
        return strides_apart(
            kernels.convolve_snake(x, self.snake.wave, self.up.filters, self.up.biases, 2, 1), self.rate
        )


class Decoder(nn.Module):
    """Decodes codes to samples, in the dtype of its weights. Call `prepare` once after loading them."""

    tables: Tensor  # [K * V, C], set by prepare(): a code's row after project_out and project
    bias: Tensor  # [C, 1], set by prepare(): the bias of all codebooks and the projection

    def __init__(self, config: CodecConfig):
        super().__init__()
        channels = config.decoder_channels
        self.books, self.size = config.codebooks, config.codebook_size
        self.project = nn.Linear(config.width, config.latent)
        self.stem = nn.Conv1d(config.latent, channels, KERNEL)
        self.blocks = nn.ModuleList(Block(channels >> i, rate) for i, rate in enumerate(config.ratios))
        self.snake = Snake(channels >> len(config.ratios))
        self.tail = Conv(channels >> len(config.ratios), 1, KERNEL)
        need = KERNEL // 2  # extra positions on each side, computed from the samples back to the frames
        for rate in reversed(config.ratios):
            need, padding = need + sum(EDGES), -(-rate // 2)
            need = max(-(-(need - padding) // rate) + 1, -(-(need + padding) // rate))
        self.context = need + KERNEL // 2  # frames

    @torch.no_grad()
    def prepare(self, quantizer: Quantizer) -> None:
        """Fold each codebook, its project_out and the final projection into one row per code. All of them are
        linear. The product is computed in fp64 and rounded once."""
        project = self.project.weight.double()
        # [C, V] each
        tables = [project @ book.project_out.weight.double() @ book.rows.double().T for book in quantizer]
        bias = (
            project @ torch.stack([book.project_out.bias.double() for book in quantizer]).sum(0)
            + self.project.bias.double()
        )
        self.register_buffer(
            "tables", torch.cat(tables, 1).T.contiguous().to(self.project.weight.dtype), persistent=False
        )
        self.register_buffer("bias", bias[:, None].to(self.project.weight.dtype), persistent=False)

    def forward(self, codes: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """Return the samples [B, F * frame_samples] of frames start [B] .. start + F.

        codes [B, context + F + context, K] int64 has the codes of these frames in the middle. The tape holds
        frames 0 .. end [B]; codes outside of it are ignored.
        """
        frames = codes.shape[1] - 2 * self.context
        stretch = Stretch(start, end, frames, self.context)
        first = torch.arange(self.books, device=codes.device) * self.size
        x = F.embedding(codes + first, self.tables).sum(2).mT + self.bias  # [B, C, F + 2 context]
        x = self.stem(stretch.silence(x))
        stretch.shorten(KERNEL // 2)
        x = stretch.silence(x)
        for block in self.blocks:
            x = block(x, stretch)
        x = self.spoken(x).squeeze(1)
        stretch.shorten(KERNEL // 2)
        return x[:, stretch.before : x.shape[1] - stretch.after]

    def spoken(self, x: Tensor) -> Tensor:
        """[B, C, N] -> [B, 1, N - KERNEL + 1]"""
        if not is_faster(x, self.tail):
            return self.tail(self.snake(x))
        return kernels.convolve_snake(x, self.snake.wave, self.tail.filters, self.tail.bias, KERNEL, 1)


class Codec(nn.Module):
    """Decoder and encoder, which share the codebooks."""

    def __init__(self, config: CodecConfig):
        super().__init__()
        self.quantizer = Quantizer(config)
        self.decoder = Decoder(config)
        self.encoder = Encoder(config)

    def prepare(self) -> None:
        """Precompute the tensors that depend only on the weights."""
        self.decoder.prepare(self.quantizer)
        self.encoder.prepare()

    def encode(self, samples: Tensor) -> Tensor:
        """Encode samples [B, N] to codes [B, F, K]."""
        return self.quantizer.encode(self.encoder(samples))
