"""Causal convolutions that stream: what a layer remembers is the end of its input, and comes in and goes out as a value.

    past of a stream [V]   ┌ conv 1: C x 6 ┬ conv 2: C x 54 ┬ keys and values: 71 x 2D ┬ ...      one row, read in the order of the layers
                           └───────────────┴────────────────┴──────────────────────────┴ ...

A stream that begins has a past of zeros, which is the zero padding of a causal convolution.
Source of the idea: kyutai-labs/moshi, moshi/modules/conv.py (one row of past per stream; streaming equals offline).
"""

from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Past:
    """The pasts of all layers during one forward: each layer takes its own in turn, and leaves what it will need next time.

    values [B, V]: the rows as the last forward left them. frames: the frames F of this forward. count [B]: how many of a row's frames are
    valid, 0 to F; the others are padding, and padding is never remembered.
    """

    def __init__(self, values: Tensor, frames: int, count: Tensor):
        self.values, self.frames, self.count = values, frames, count
        self.taken = 0
        self.left: list[Tensor] = []

    def extend(self, x: Tensor, length: int, dim: int) -> Tensor:
        """x, N long in `dim`, N a multiple of F -> the `length` values before it, then x. dim: 1 or 2, of x [B, _, _]."""
        if length == 0:
            return x
        shape = [length if i == dim else x.shape[i] for i in (1, 2)]
        past = self.values[:, self.taken : self.taken + prod(shape)].unflatten(1, shape)
        self.taken += prod(shape)
        whole = torch.cat((past, x), dim)
        valid = self.count * (x.shape[dim] // self.frames)
        index = valid[:, None] + torch.arange(length, device=x.device)  # [B, length], the last ones before the padding
        index = index[:, :, None] if dim == 1 else index[:, None]
        self.left.append(whole.gather(dim, index.expand(-1, *shape)).flatten(1))
        return whole

    def next(self) -> Tensor:
        """[B, V], for the forward that comes after this one."""
        assert self.taken == self.values.shape[1], f"the layers took {self.taken} values of {self.values.shape[1]}"
        return torch.cat(self.left, 1)


class CausalConv1d(nn.Module):
    """y[n] reads x[n - (kernel - 1) * dilation] ... x[n]. x [B, C, N] -> [B, Cout, N]."""

    def __init__(self, channels: int, out_channels: int, kernel: int, dilation: int = 1, groups: int = 1):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_channels, channels // groups, kernel))
        self.bias = nn.Parameter(torch.empty(out_channels))
        self.dilation, self.groups = dilation, groups
        self.past_length = (kernel - 1) * dilation
        self.past_values = channels * self.past_length

    def forward(self, x: Tensor, past: Past) -> Tensor:
        whole = past.extend(x, self.past_length, 2)
        if self.groups > 1 or not is_short(x):
            return F.conv1d(whole, self.weight, self.bias, dilation=self.dilation, groups=self.groups)
        reach = whole.unfold(2, self.past_length + 1, 1)[..., :: self.dilation]  # [B, C, N, kernel]
        return F.linear(reach.transpose(1, 2).flatten(2), self.weight.flatten(1), self.bias).mT


class CausalConvTranspose1d(nn.Module):
    """Upsampling: x [B, C, N] -> [B, Cout, N * stride]; the kernel is one or two strides long, so an output reads its own input and the one
    before. The past is that input rather than the output's tail: it is smaller, and every sample gets the bias once."""

    def __init__(self, channels: int, out_channels: int, kernel: int, stride: int):
        super().__init__()
        if kernel not in (stride, 2 * stride):
            raise ValueError(f"a kernel of {kernel} with a stride of {stride} cannot stream; possible kernels: {stride}, {2 * stride}")
        self.weight = nn.Parameter(torch.empty(channels, out_channels, kernel))
        self.bias = nn.Parameter(torch.empty(out_channels))
        self.stride = stride
        self.past_length = kernel // stride - 1
        self.past_values = channels * self.past_length

    def forward(self, x: Tensor, past: Past) -> Tensor:
        whole = past.extend(x, self.past_length, 2)
        if not is_short(x):
            y = F.conv_transpose1d(whole, self.weight, self.bias, stride=self.stride)
            edge = self.past_length * self.stride  # before it, outputs of the past; after it, outputs that wait for the next input
            return y[:, :, edge : y.shape[2] - edge]
        parts = F.linear(whole.mT.contiguous(), self.weight.flatten(1).T)  # [B, past_length + N, Cout * kernel]
        parts = parts.unflatten(2, (len(self.bias), -1, self.stride))  # what an input gives its own outputs, and the next input's
        y = parts[:, self.past_length :, :, 0]
        if self.past_length:
            y = y + parts[:, :-1, :, 1]  # [B, N, Cout, stride]
        return (y.transpose(1, 2) + self.bias[:, None, None]).flatten(2)


def is_short(x: Tensor) -> bool:
    """Whether x [B, C, N] has so few positions that reading the weights is most of a convolution's work. Then it is done as one matrix
    product: convolution kernels first rearrange the weights, and so need up to nine times as long (CPU, fp32, C = 1536, N = 4)."""
    return 4 * x.shape[2] < x.shape[1]
