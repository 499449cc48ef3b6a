"""Causal convolutions that stream: what a layer remembers is the end of its input, and comes in and goes out
as a value.

    a stream's state [V] ┌ conv: C x 6 ┬ up: C x 1 ┬ layers.0: 71 x 2D ┬ ...   one row, a place a layer
                         └─────────────┴───────────┴───────────────────┴ ...

The places are dealt out once, when a decoder is built, by name: in what order its layers run does not matter.
A stream that begins has a state of zeros, which is the zero padding of a causal convolution. Source of the
idea: kyutai-labs/moshi, moshi/modules/conv.py (one row of state per stream; streaming equals offline).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import ceil

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F


class Stateful(nn.Module):
    """A layer that keeps the last `state_length` positions of its input, `channels` values each. They lie
    along `state_dim` of [B, _, _]."""

    state_name: str | None = None  # its place in the row; StateLayout gives it

    def __init__(self, channels: int, length: int, dim: int = 2):
        super().__init__()
        self.state_length, self.state_dim = length, dim
        self.state_shape = (length, channels) if dim == 1 else (channels, length)

    @property
    def state_size(self) -> int:
        """Values of a stream's row."""
        rows, columns = self.state_shape
        return rows * columns


class StateLayout:
    """Where each layer of a decoder has its place in a stream's row, by the layer's name; `size` is the
    row's, in values."""

    def __init__(self, decoder: nn.Module):
        self.places: dict[str, slice] = {}
        self.size = 0
        for name, layer in decoder.named_modules():
            if isinstance(layer, Stateful) and layer.state_size > 0:
                layer.state_name = name
                self.places[name] = slice(self.size, self.size + layer.state_size)
                self.size += layer.state_size


class CodecState:
    """What the layers of a decoder remember, during one forward: each takes what it kept, and leaves what it
    will need next time.

    rows [B, V]: as the last forward left them. frames: the frames F of this forward. count [B]: how many of a
    row's frames are valid, 0 to F; the others are padding, and padding is never remembered.
    """

    def __init__(self, layout: StateLayout, rows: Tensor, frames: int, count: Tensor):
        self.layout, self.rows, self.frames, self.count = layout, rows, frames, count
        self.kept: dict[str, Tensor] = {}  # for the next forward [B, values], by layer

    def extend(self, layer: Stateful, x: Tensor) -> Tensor:
        """x, N long in the layer's dim, N a multiple of F -> what the layer kept, then x: state_length + N
        long."""
        if layer.state_length == 0:
            return x
        name, dim, shape = layer.state_name, layer.state_dim, layer.state_shape
        assert name is not None, (
            f"a {type(layer).__name__} has no place in the state: no StateLayout was made of its decoder"
        )
        assert name not in self.kept, (
            f"layer {name!r} ran twice in one forward; it has one place in the state"
        )
        kept = self.rows[:, self.layout.places[name]].unflatten(1, shape)
        whole = torch.cat((kept.mT, x.mT), 3 - dim).mT if is_turned(x) else torch.cat((kept, x), dim)
        valid = self.count * (x.shape[dim] // self.frames)
        index = valid[:, None] + torch.arange(
            layer.state_length, device=x.device
        )  # [B, length], the last ones before the padding
        index = index[:, :, None] if dim == 1 else index[:, None]
        self.kept[name] = whole.gather(dim, index.expand(-1, *shape)).flatten(1)
        return whole

    def past(self, layer: Stateful, x: Tensor, before: Callable[[Tensor], Tensor]) -> Tensor:
        """What the layer kept [B, C, length]. For the next forward it keeps the end of before(x), x [B, C, N], as if
        `extend` had been given all of that."""
        channels, length = layer.state_shape
        assert layer.state_name is not None and layer.state_dim == 2 and layer.state_name not in self.kept
        past = self.rows[:, self.layout.places[layer.state_name]].unflatten(1, (channels, length))
        valid = self.count * (x.shape[2] // self.frames)
        index = (
            valid[:, None] - length + torch.arange(length, device=x.device)
        )  # [B, length], in x; below 0 in the past
        stream = torch.arange(len(x), device=x.device)[:, None] * x.shape[2]
        ends = F.embedding(stream + index.clamp(min=0), x.mT.reshape(-1, channels)).mT  # [B, C, length]
        old = (index + length).clamp(max=length - 1)[:, None].expand(-1, channels, -1)
        kept = torch.where(index[:, None] < 0, past.gather(2, old), before(ends))
        self.kept[layer.state_name] = kept.flatten(1)
        return past

    def next(self) -> Tensor:
        """The rows [B, V] for the forward that comes after this one."""
        missing = [name for name in self.layout.places if name not in self.kept]
        assert not missing, f"layers {missing} did not run; of what they heard nothing would be remembered"
        return torch.cat([self.kept[name] for name in self.layout.places], 1)


class CausalConv1d(Stateful):
    """y[n] reads x[n - (kernel - 1) * dilation] ... x[n]. x [B, C, N] -> [B, Cout, N]."""

    def __init__(self, channels: int, out_channels: int, kernel: int, dilation: int = 1, groups: int = 1):
        super().__init__(channels, (kernel - 1) * dilation)
        self.weight = nn.Parameter(torch.empty(out_channels, channels // groups, kernel))
        self.bias = nn.Parameter(torch.empty(out_channels))
        self.dilation, self.groups = dilation, groups

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        whole = state.extend(self, x)
        if self.groups == x.shape[1] and x.device.type == "cuda" and torch.compiler.is_compiling():
            return self._tap_by_tap(whole, x.shape[2])
        if self.groups > 1 or not is_short(x):
            return F.conv1d(whole, self.weight, self.bias, dilation=self.dilation, groups=self.groups)
        reach = whole.unfold(2, self.state_length + 1, 1)[..., :: self.dilation]  # [B, C, N, kernel]
        return F.linear(rearrange(reach, "b c n k -> b n (c k)"), self.weight.flatten(1), self.bias).mT

    def _tap_by_tap(self, whole: Tensor, num: int) -> Tensor:
        """Channels by themselves: a compiler makes one launch of it that takes as long as its bytes, and torch's kernel takes
        four times that on an H200."""
        y = self.bias[:, None]
        for tap in range(self.weight.shape[2]):
            start = tap * self.dilation
            y = y + self.weight[:, :, tap] * whole[:, :, start : start + num]
        return y


class CausalConvTranspose1d(Stateful):
    """Upsampling: x [B, C, N] -> [B, Cout, N * stride]; the kernel is one or two strides long, so an output
    reads its own input and the one before. What is kept is that input rather than the output's tail: it is
    smaller, and every sample gets the bias once."""

    def __init__(self, channels: int, out_channels: int, kernel: int, stride: int):
        if kernel not in (stride, 2 * stride):
            raise ValueError(
                f"a kernel of {kernel} with a stride of {stride} cannot stream;"
                f" possible kernels: {stride}, {2 * stride}"
            )
        super().__init__(channels, kernel // stride - 1)
        self.weight = nn.Parameter(torch.empty(channels, out_channels, kernel))
        self.bias = nn.Parameter(torch.empty(out_channels))
        self.stride = stride

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        whole = state.extend(self, x)
        if not is_short(x):
            y = F.conv_transpose1d(whole, self.weight, self.bias, stride=self.stride)
            edge = (
                self.state_length * self.stride
            )  # before it, outputs of what was kept; after it, outputs that wait for the next input
            return y[:, :, edge : y.shape[2] - edge]
        parts = F.linear(
            whole.mT.contiguous(), self.weight.flatten(1).T
        )  # [B, state_length + N, Cout * kernel]
        parts = parts.unflatten(
            2, (len(self.bias), -1, self.stride)
        )  # what an input gives its own outputs, and the next's
        y = parts[:, self.state_length :, :, 0]
        if self.state_length:
            y = y + parts[:, :-1, :, 1]  # [B, N, Cout, stride]
        return rearrange(y + self.bias[:, None], "b n c stride -> b c (n stride)")


def is_turned(x: Tensor) -> bool:
    """Whether x [B, C, N] lies in a CPU's memory as [B, N, C], which torch.cat would not keep so."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and x.stride(1) == 1 < x.stride(2)


def reach(layers: Iterable[nn.Module]) -> int:
    """Frames that the convolutions among `layers`, in the order of the audio's way, look back from the first
    sample of a new one."""
    rate, frames = 1, 0.0  # positions per frame so far; frames looked back
    for layer in layers:
        if isinstance(layer, CausalConv1d | CausalConvTranspose1d):
            frames += layer.state_length / rate
            rate *= layer.stride if isinstance(layer, CausalConvTranspose1d) else 1
    return ceil(frames)


def is_short(x: Tensor) -> bool:
    """Whether x [B, C, N] has so few positions that reading the weights is most of a convolution's work. Then
    it is done as one matrix product: convolution kernels first rearrange the weights, and so need up to nine
    times as long (CPU, fp32, C = 1536, N = 4)."""
    return 4 * x.shape[2] < x.shape[1]
