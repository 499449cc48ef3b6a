"""A codec's convolutions, in torch's operators and, on a CPU, in one kernel, which also has the snake or ELU before
them. They occur in residual units, before upsamplings, and at both ends of a codec's decoder, and take most of
the time of a window.

    x ─┬─ snake ─ conv, `taps` wide ─ snake ─ conv, 1 wide ─┬─     intermediate results never reach memory
       └────────────────────────────────────────────────────+

The kernel convolves tap by tap or, where a signal is long, by nine short filters of sums of the signal
(kernels_snake.cpp), which have more values than the weight: 17 for 7 taps. They replace the weight, of which
`prepare` leaves shape and dtype. The layer's state is the same either way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo import kernels
from zoo.nn.conv import CausalConv1d, CausalConvTranspose1d, CodecState, strides_apart, upsampling_taps
from zoo.nn.snake import Snake, SnakeBeta


class ConvFilters:
    """Mixin for a convolution: its weight as the CPU's kernels read it."""

    weight: nn.Parameter  # [Cout, C / groups, kernel]
    bias: nn.Parameter
    groups: int

    @cached_property
    def filters(self) -> Tensor:
        """The weight as `convolve_snake` reads it; for a depthwise convolution, [kernel, C]."""
        weight = self.weight.detach()
        return kernels.convolution_filters(weight) if self.groups == 1 else weight[:, 0].T.contiguous()


class UpsamplingFilters(ABC):
    """Mixin for a transposed convolution whose kernel is one or two strides long. It equals a convolution with as
    many taps (the current input and the one before) to `stride` times as many channels."""

    weight: nn.Parameter  # [C, Cout, kernel]
    bias: nn.Parameter | None

    @property
    @abstractmethod
    def step(self) -> int:
        """The stride."""

    @property
    def taps(self) -> int:
        return self.weight.shape[2] // self.step

    @cached_property
    def filters(self) -> Tensor:
        return kernels.convolution_filters(upsampling_taps(self.weight, self.step))

    @cached_property
    def biases(self) -> Tensor:
        """[stride * Cout]"""
        assert self.bias is not None, "an upsampling in the kernels has a bias"
        return self.bias.detach().repeat(self.step)


class SnakeConv1d(CausalConv1d, ConvFilters):
    """A causal convolution, usually after an activation."""


class SnakeConvTranspose1d(CausalConvTranspose1d, UpsamplingFilters):
    """An upsampling, usually after an activation."""

    @property
    def step(self) -> int:
        return self.stride


class Identity:
    """No activation."""

    wave: kernels.Wave = None

    def __call__(self, x: Tensor) -> Tensor:
        return x


class Elu:
    """ELU, where others have a snake."""

    wave: kernels.Wave = kernels.ELU

    def __call__(self, x: Tensor) -> Tensor:
        return F.elu(x)


class Activation(Protocol):
    """A snake, an ELU, or nothing."""

    @property
    def wave(self) -> kernels.Wave: ...

    def __call__(self, x: Tensor) -> Tensor: ...


def prepare(model: nn.Module) -> int:
    """Make the filters that the kernels read, and free the weights that they replace: these layers then run in
    the kernels even in `kernels.plain`. Return how many bytes more the model has then. On `meta`, only count
    them."""
    growth = 0
    for layer in model.modules():
        if isinstance(layer, ConvFilters | UpsamplingFilters) and has_filters(layer):
            growth += layer.filters.nbytes - layer.weight.nbytes
            layer.weight = nn.Parameter(layer.weight.detach().to("meta"), requires_grad=False)
    return growth


def residual_unit(
    x: Tensor,
    snake1: Activation,
    conv1: SnakeConv1d,
    snake2: Activation,
    conv2: SnakeConv1d,
    state: CodecState,
) -> Tensor:
    """Return x + conv2(snake2(conv1(snake1(x)))), x [B, C, N]; conv2 is 1 wide."""
    if not has_kernel(x, conv1):
        return x + convolve_snake(conv1(snake1(x), state), snake2, conv2, state)
    past, then = state.past(conv1, x, snake1), pointwise(snake2, conv2)
    width, dilation, bias = conv1.weight.shape[2], conv1.dilation, conv1.bias
    return kernels.convolve_snake(x, snake1.wave, conv1.filters, bias, width, dilation, None, x, past, then)


def depthwise_unit(
    x: Tensor,
    snake1: Snake | SnakeBeta,
    conv1: SnakeConv1d,
    snake2: Snake | SnakeBeta,
    conv2: SnakeConv1d,
    state: CodecState,
) -> Tensor:
    """Do the same as `residual_unit`, for a depthwise conv1."""
    if not is_float(x, conv1):
        return x + conv2(snake2(conv1(snake1(x), state)), state)
    past, then = state.past(conv1, x, snake1), pointwise(snake2, conv2)
    return kernels.depthwise_unit(x, snake1.wave, conv1.filters, conv1.bias, conv1.dilation, past, then)


def convolve_snake(x: Tensor, snake: Activation, conv: SnakeConv1d, state: CodecState) -> Tensor:
    """conv(snake(x)): x [B, C, N] -> [B, Cout, N]"""
    if not has_kernel(x, conv):
        return conv(snake(x), state)
    past = state.past(conv, x, snake) if conv.state_length > 0 else None
    width = conv.weight.shape[2]
    return kernels.convolve_snake(x, snake.wave, conv.filters, conv.bias, width, conv.dilation, past=past)


def upsample_snake(x: Tensor, snake: Activation, up: SnakeConvTranspose1d, state: CodecState) -> Tensor:
    """up(snake(x)): x [B, C, N] -> [B, Cout, stride * N]"""
    if not has_kernel(x, up):
        return up(snake(x), state)
    past = state.past(up, x, snake) if up.state_length > 0 else None
    made = kernels.convolve_snake(x, snake.wave, up.filters, up.biases, up.taps, 1, past=past)
    return strides_apart(made, up.stride)


def pointwise(snake: Activation, conv: ConvFilters) -> kernels.Pointwise:
    """Return an activation and a convolution that is 1 wide, as the kernels take them."""
    return kernels.Pointwise(conv.filters, conv.bias, snake.wave)


def has_kernel(x: Tensor, conv: ConvFilters | UpsamplingFilters) -> bool:
    """Return whether a CPU kernel computes the convolution of x [B, C, N]; it is faster than torch."""
    return is_float(x, conv) and has_filters(conv)


def is_float(x: Tensor, conv: ConvFilters | UpsamplingFilters) -> bool:
    """Return whether to use CPU kernels for x and the convolution, which must be float32. A convolution whose
    weight was freed has no other form."""
    is_freed = conv.weight.is_meta and not x.is_meta
    return (is_freed or kernels.know(x)) and x.dtype == conv.weight.dtype == torch.float32


def has_filters(conv: ConvFilters | UpsamplingFilters) -> bool:
    """Return whether the kernels can be used for a convolution's weight at all."""
    return conv.weight.dtype == torch.float32


class ResidualUnit(nn.Module):
    """x + conv(snake(conv(snake(x)))), [B, C, N] -> [B, C, N]; the second convolution is 1 wide."""

    def __init__(self, channels: int, kernel: int, dilation: int, snake: type[Snake] | type[SnakeBeta]):
        super().__init__()
        self.snake1 = snake(channels)
        self.conv1 = SnakeConv1d(channels, channels, kernel, dilation)
        self.snake2 = snake(channels)
        self.conv2 = SnakeConv1d(channels, channels, 1)

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        return residual_unit(x, self.snake1, self.conv1, self.snake2, self.conv2, state)


class UpBlock(nn.Module):
    """A snake and a transposed convolution, then residual units: [B, C, N] -> [B, C / 2, rate N]."""

    def __init__(self, snake: Snake | SnakeBeta, channels: int, rate: int, units: Iterable[nn.Module]):
        super().__init__()
        self.snake = snake
        self.up = SnakeConvTranspose1d(channels, channels // 2, 2 * rate, rate)
        self.residuals = nn.ModuleList(units)

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        x = upsample_snake(x, self.snake, self.up, state)
        for residual in self.residuals:
            x = residual(x, state)
        return x
