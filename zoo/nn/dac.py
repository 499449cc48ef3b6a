"""The convolutions of DAC, a codec: latents to samples in windows whose result does not depend on the cut,
and samples to latents.

    codes [B, context + F + context, K] ─ tables ─ conv ─ (upsampling, residual x3) for each rate ─ conv ─ samples [B, F * frame]

Every convolution looks to both sides, so a window comes with `context` extra frames on both sides. Every
convolution returns only the positions whose inputs are all present. The stretch gets shorter from layer to
layer, until only the window is left. Before and after the tape the layers see zeros, like the padding of a
decoder that gets the whole tape. Source: Kumar et al. 2023 (arXiv 2306.06546); transformers 5.23, models/dac.
transformers' DacEncoder gives the same codes in as much memory. It is not used because it takes a third
longer: 4.4 s for five seconds of 44.1 kHz on one core, and 3.3 s here, where a snake is one operator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo import kernels
from zoo.nn.conv import convolve_rows, rows_of, strides_apart, upsampling_taps
from zoo.nn.residual import Activation, ConvFilters, UpsamplingFilters, has_kernel, pointwise
from zoo.nn.snake import Snake
from zoo.nn.stretch import Stretch

KERNEL = 7
DILATIONS = (1, 3, 9)  # one per residual unit of a block
# How many positions each unit reads on both sides.
EDGES = tuple(KERNEL // 2 * dilation for dilation in DILATIONS)


class Residual(nn.Module):
    """A residual unit, [B, C, N] -> [B, C, N - 2 edge]: it returns only positions whose inputs are all
    present. To keep the length, pad the input with `edge` zeros on both sides."""

    conv: type[nn.Conv1d] = nn.Conv1d

    def __init__(self, channels: int, dilation: int):
        super().__init__()
        self.edge = KERNEL // 2 * dilation
        self.snake1 = Snake(channels)
        self.conv1 = self.conv(channels, channels, KERNEL, dilation=dilation)
        self.snake2 = Snake(channels)
        self.conv2 = self.conv(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.snake2(self.conv1(self.snake1(x)))).add_(
            x[..., self.edge : x.shape[2] - self.edge]
        )


class Conv(nn.Conv1d, ConvFilters):
    """A convolution after a snake, without padding."""

    weight: nn.Parameter
    bias: nn.Parameter

    is_in_rows = False

    def to_rows(self, dtype: torch.dtype) -> None:
        """Let `forward` read and return rows in `dtype`."""
        self.is_in_rows, self.weight = True, rows_of(self.weight, dtype)

    def forward(self, x: Tensor) -> Tensor:
        [taps], [dilation] = self.kernel_size, self.dilation
        if self.is_in_rows:
            return convolve_rows(x, self.weight, self.bias, dilation)
        if has_kernel(x, self):
            return kernels.convolve_snake(x, None, self.filters, self.bias, taps, dilation)
        return super().forward(x)


class Unit(Residual):
    """The decoder's residual unit. On a CPU that supports it, it is one kernel; the encoder gains nothing
    from that."""

    conv = Conv
    conv1: Conv
    conv2: Conv

    def forward(self, x: Tensor) -> Tensor:
        [dilation] = self.conv1.dilation
        if not has_kernel(x, self.conv1):
            return super().forward(x)
        then, middle = pointwise(self.snake2, self.conv2), x[..., self.edge : x.shape[2] - self.edge]
        wave, filters, bias = self.snake1.wave, self.conv1.filters, self.conv1.bias
        return kernels.convolve_snake(x, wave, filters, bias, KERNEL, dilation, residual=middle, then=then)


class Upsampling(nn.ConvTranspose1d, UpsamplingFilters):
    """A transposed convolution after a snake. Its kernel is two strides long. It drops one stride at both ends of
    the output, which lack a neighbour's share."""

    weight: nn.Parameter
    bias: nn.Parameter

    is_in_rows = False

    @property
    def step(self) -> int:
        return self.stride[0]

    def to_rows(self, dtype: torch.dtype) -> None:
        """Let `forward` read and return rows in `dtype`. The weight becomes that of a convolution."""
        taps = upsampling_taps(self.weight, self.stride[0])
        self.is_in_rows, self.weight = True, rows_of(taps, dtype)

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        if not self.is_in_rows:
            return super().forward(x, output_size)
        [rate] = self.stride
        return strides_apart(convolve_rows(x, self.weight, self.bias.repeat(rate)), rate)


def convolve(x: Tensor, snake: Activation, conv: Conv) -> Tensor:
    """conv(snake(x)): x [B, C, N] -> [B, Cout, N - (kernel - 1) dilation]"""
    if not has_kernel(x, conv):
        return conv(snake(x))
    [taps], [dilation] = conv.kernel_size, conv.dilation
    return kernels.convolve_snake(x, snake.wave, conv.filters, conv.bias, taps, dilation)


def upsample(x: Tensor, snake: Activation, up: Upsampling) -> Tensor:
    """up(snake(x)): x [B, C, N] -> [B, Cout, (N - 1) rate]"""
    if not has_kernel(x, up):
        return up(snake(x))
    made = kernels.convolve_snake(x, snake.wave, up.filters, up.biases, up.taps, 1)
    return strides_apart(made, up.step)


class Block(nn.Module):
    """An upsampling block with three residual units: [B, C, N] -> [B, C / 2, about rate N]."""

    def __init__(self, channels: int, rate: int):
        super().__init__()
        self.rate, self.padding = rate, -(-rate // 2)
        self.snake = Snake(channels)
        self.up = Upsampling(channels, channels // 2, 2 * rate, rate, padding=rate)
        self.residuals = nn.ModuleList(Unit(channels // 2, dilation) for dilation in DILATIONS)

    def forward(self, x: Tensor, stretch: Stretch) -> Tensor:
        x = upsample(x, self.snake, self.up)
        stretch.upsample(self.rate, self.padding)
        for residual, edge in zip(self.residuals, EDGES, strict=True):
            x = residual(stretch.silence(x))
            stretch.shorten(edge)
        return stretch.silence(x)


class Decoder(nn.Module):
    """Decodes codes to samples, in the dtype of its weights. Call `keep` once after loading them.

    latent: channels of the latents. channels: of the first block; each block halves them. rates: the stride
    of each block. is_bounded: whether tanh keeps the samples below full scale.
    """

    tables: Tensor  # [K * V, C], set by keep(): the latent of each code
    bias: Tensor  # [C, 1], set by keep(): added to the sum of a frame's codes
    first: Tensor  # [K], set by keep(): the row at which each codebook begins

    def __init__(self, latent: int, channels: int, rates: Sequence[int], is_bounded: bool):
        super().__init__()
        self.is_bounded = is_bounded
        self.stem = nn.Conv1d(latent, channels, KERNEL)
        self.blocks = nn.ModuleList(Block(channels >> i, rate) for i, rate in enumerate(rates))
        self.snake = Snake(channels >> len(rates))
        self.tail = Conv(channels >> len(rates), 1, KERNEL)
        need = KERNEL // 2  # extra positions on each side, computed from the samples back to the frames
        for rate in reversed(rates):
            need, padding = need + sum(EDGES), -(-rate // 2)
            need = max(-(-(need - padding) // rate) + 1, -(-(need + padding) // rate))
        self.context = need + KERNEL // 2  # frames

    @torch.no_grad()
    def keep(self, tables: Sequence[Tensor], bias: Tensor) -> None:
        """Keep a table [V, C] per codebook, and a bias [C]. Codebook and projections are linear, so a caller
        multiplies them in fp64; they are rounded once, here."""
        dtype = self.stem.weight.dtype
        size = len(tables[0])
        first = torch.arange(len(tables), device=bias.device) * size
        self.register_buffer("tables", torch.cat(list(tables)).contiguous().to(dtype), persistent=False)
        self.register_buffer("bias", bias[:, None].to(dtype), persistent=False)
        self.register_buffer("first", first, persistent=False)

    def forward(self, codes: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """Return the samples [B, F * frame_samples] of frames start [B] .. start + F.

        codes [B, context + F + context, K] int64 has the codes of these frames in the middle. The tape holds
        frames 0 .. end [B]; codes outside of it are ignored.
        """
        frames = codes.shape[1] - 2 * self.context
        stretch = Stretch(start, end, frames, self.context)
        x = F.embedding(codes + self.first, self.tables).sum(2).mT + self.bias  # [B, C, F + 2 context]
        x = self.stem(stretch.silence(x))
        stretch.shorten(KERNEL // 2)
        x = stretch.silence(x)
        for block in self.blocks:
            x = block(x, stretch)
        x = convolve(x, self.snake, self.tail).squeeze(1)
        stretch.shorten(KERNEL // 2)
        x = x[:, stretch.before : x.shape[1] - stretch.after]
        return x.tanh() if self.is_bounded else x

    def to_rows(self, dtype: torch.dtype) -> None:
        """Compute the blocks' convolutions over rows in `dtype`; the rest stays in fp32."""
        for layer in self.blocks.modules():
            if isinstance(layer, Conv | Upsampling):
                layer.to_rows(dtype)


class EncoderBlock(nn.Module):
    """Three residual units and a strided convolution: [B, C, N] -> [B, 2C, about N / rate]."""

    def __init__(self, channels: int, rate: int):
        super().__init__()
        self.residuals = nn.ModuleList(Residual(channels, dilation) for dilation in DILATIONS)
        self.snake = Snake(channels)
        self.down = nn.Conv1d(channels, 2 * channels, 2 * rate, rate, padding=-(-rate // 2))

    def forward(self, x: Tensor) -> Tensor:
        for residual, edge in zip(self.residuals, EDGES, strict=True):
            x = residual(F.pad(x, (edge, edge)))
        return self.down(self.snake(x))


class Encoder(nn.Module):
    """Samples [B, 1, N] -> latents [B, C, F]. channels: of the first convolution; each block doubles them."""

    def __init__(self, latent: int, channels: int, rates: Sequence[int]):
        super().__init__()
        self.rates = rates
        self.stem = nn.Conv1d(1, channels, KERNEL, padding=KERNEL // 2)
        self.blocks = nn.ModuleList(EncoderBlock(channels << i, rate) for i, rate in enumerate(rates))
        self.snake = Snake(channels << len(rates))
        self.tail = nn.Conv1d(channels << len(rates), latent, 3, padding=1)

    def frames(self, samples: int) -> int:
        """Return the number of frames for `samples` samples."""
        for rate in self.rates:
            samples = (samples + 2 * -(-rate // 2) - 2 * rate) // rate + 1
        return samples

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.tail(self.snake(x))


def names(theirs: str, ours: str, blocks: int, sampling: tuple[str, str]) -> dict[str, str]:
    """Return transformers' names of a `Decoder` or an `Encoder` -> ours, by prefix (see
    `zoo.checkpoint.loading`).

    sampling: their name and our name of a block's strided convolution.
    """
    table: dict[str, str] = {}

    def both(a: str, b: str) -> None:
        table.update({f"{theirs}.{a}.{leaf}": f"{ours}.{b}.{leaf}" for leaf in ("weight", "bias")})

    def snake(a: str, b: str) -> None:
        table[f"{theirs}.{a}.alpha"] = f"{ours}.{b}.alpha"

    both("conv1", "stem")
    both("conv2", "tail")
    snake("snake1", "snake")
    for i in range(blocks):
        snake(f"block.{i}.snake1", f"blocks.{i}.snake")
        both(f"block.{i}.{sampling[0]}", f"blocks.{i}.{sampling[1]}")
        for j in range(len(DILATIONS)):
            for n in (1, 2):
                unit = f"block.{i}.res_unit{j + 1}", f"blocks.{i}.residuals.{j}"
                snake(f"{unit[0]}.snake{n}", f"{unit[1]}.snake{n}")
                both(f"{unit[0]}.conv{n}", f"{unit[1]}.conv{n}")
    return table


UP, DOWN = ("conv_t1", "up"), ("conv1", "down")  # of a decoder, of an encoder
