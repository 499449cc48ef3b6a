"""What the codecs' decoders spend most of a window in: a snake and a convolution across channels, in residual units, before
an upsampling, and at the end. Each in torch's operators, and on a CPU in one kernel.

    x ─┬─ snake ─ conv, `taps` wide ─ snake ─ conv, 1 wide ─┬─     nothing between is ever in memory
       └────────────────────────────────────────────────────+

The kernel's filters are short ones of sums of the signal (kernels_render.cpp), and hold more numbers than the weight: 17
for 7 taps, 6 for 2. `is_faster` says where they pay. What a layer remembers is the same either way.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn

from zoo.nn import kernels
from zoo.nn.conv import CausalConv1d, CausalConvTranspose1d, CodecState
from zoo.nn.snake import Snake, SnakeBeta

# Of a signal, of a dilated convolution each phase: the kernel computes 24 rows at least. Where the weight is in no cache, reading
# the filters, more than twice its bytes, is what takes long, and beyond the last size it always is.
LEAST_ROWS, LEAST_ROWS_OF_LARGE = 8, 16
LARGE_BYTES, MOST_BYTES = 4 << 20, 20 << 20


class ShortFilters:
    """Of a convolution behind a snake: its weight as the kernels read it."""

    weight: nn.Parameter  # [Cout, C / groups, kernel]
    bias: nn.Parameter
    groups: int

    @cached_property
    def filters(self) -> Tensor:
        """Of one that is more than 1 wide, the short filters; of one that is 1 wide, blocks of columns; of one whose channels are
        apart, [kernel, C]."""
        weight = self.weight.detach()
        if self.groups > 1:
            return weight[:, 0].T.contiguous()
        return kernels.nine_filters(weight) if weight.shape[2] > 1 else kernels.columns(weight[:, :, 0])


class UpsamplingFilters:
    """Of a transposed convolution behind a snake, whose kernel is two strides long: it is a convolution of two taps, the input
    before and its own, to `stride` times as many channels."""

    weight: nn.Parameter  # [C, Cout, kernel]
    bias: nn.Parameter

    @cached_property
    def filters(self) -> Tensor:
        taps = self.weight.detach().unflatten(2, (2, -1)).flip(2)  # [C, Cout, 2, stride]
        return kernels.nine_filters(taps.permute(3, 1, 0, 2).flatten(0, 1))

    @cached_property
    def biases(self) -> Tensor:
        """[stride * Cout]"""
        return self.bias.detach().repeat(self.weight.shape[2] // 2)


class SnakeConv1d(CausalConv1d, ShortFilters):
    """A causal convolution behind a snake."""


class SnakeConvTranspose1d(CausalConvTranspose1d, UpsamplingFilters):
    """An upsampling behind a snake."""


def prepare(model: nn.Module) -> int:
    """Make what the kernels read of a model's weights -> its bytes. On `meta` it is only counted."""
    layers = [layer for layer in model.modules() if isinstance(layer, ShortFilters | UpsamplingFilters)]
    return sum(layer.filters.nbytes for layer in layers if has_filters(layer))


def residual_unit(
    x: Tensor,
    snake1: Snake | SnakeBeta,
    conv1: SnakeConv1d,
    snake2: Snake | SnakeBeta,
    conv2: SnakeConv1d,
    state: CodecState,
) -> Tensor:
    """x + conv2(snake2(conv1(snake1(x)))), conv2 being 1 wide. x [B, C, N] -> [B, C, N]"""
    if not is_faster(x, conv1, conv1.dilation):
        return x + conv2(snake2(conv1(snake1(x), state)), state)
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
    """As `residual_unit`, of a conv1 that keeps the channels apart."""
    if not is_float(x, conv1):
        return x + conv2(snake2(conv1(snake1(x), state)), state)
    past, then = state.past(conv1, x, snake1), pointwise(snake2, conv2)
    return kernels.depthwise_unit(x, snake1.wave, conv1.filters, conv1.bias, conv1.dilation, past, then)


def convolve_snake(x: Tensor, snake: Snake | SnakeBeta, conv: SnakeConv1d, state: CodecState) -> Tensor:
    """conv(snake(x)): x [B, C, N] -> [B, Cout, N]"""
    if not is_faster(x, conv, conv.dilation):
        return conv(snake(x), state)
    past, width = state.past(conv, x, snake), conv.weight.shape[2]
    return kernels.convolve_snake(x, snake.wave, conv.filters, conv.bias, width, conv.dilation, past=past)


def upsample_snake(
    x: Tensor, snake: Snake | SnakeBeta, up: SnakeConvTranspose1d, state: CodecState
) -> Tensor:
    """up(snake(x)): x [B, C, N] -> [B, Cout, stride * N]"""
    if not is_faster(x, up):
        return up(snake(x), state)
    past = state.past(up, x, snake)
    return strides_apart(
        kernels.convolve_snake(x, snake.wave, up.filters, up.biases, 2, 1, past=past), up.stride
    )


def strides_apart(y: Tensor, stride: int) -> Tensor:
    """y [B, stride * C, N], channels side by side -> [B, C, N * stride], so too"""
    return y.mT.reshape(len(y), y.shape[2] * stride, -1).mT


def pointwise(snake: Snake | SnakeBeta, conv: ShortFilters) -> kernels.Pointwise:
    """A snake, and a convolution that is 1 wide, as a kernel takes them."""
    return kernels.Pointwise(conv.filters, conv.bias, *snake.wave)


def is_faster(x: Tensor, conv: ShortFilters | UpsamplingFilters, dilation: int = 1) -> bool:
    """Whether a CPU's kernel of a snake and a convolution is made for x [B, C, N], and is the faster way."""
    if not is_float(x, conv):
        return False
    least = LEAST_ROWS if conv.weight.nbytes <= LARGE_BYTES else LEAST_ROWS_OF_LARGE
    return has_filters(conv) and x.shape[2] >= least * dilation


def is_float(x: Tensor, conv: ShortFilters | UpsamplingFilters) -> bool:
    """Whether a CPU's kernels are to be used, and x and the convolution are what they take."""
    return kernels.know(x, conv.weight) and x.dtype == conv.weight.dtype == torch.float32


def has_filters(conv: ShortFilters | UpsamplingFilters) -> bool:
    """Whether the kernels ever read its weight."""
    return conv.weight.dtype == torch.float32 and conv.weight.nbytes <= MOST_BYTES
