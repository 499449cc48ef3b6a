"""Causal convolutions that stream. A layer remembers the end of its input, and this state is an argument and
a result.

    a stream's state [V] ┌ conv: 6 x C ┬ up: 1 x C ┬ layers.0: 71 x 2D ┬ ...   one row, one place per layer
                         └─────────────┴───────────┴───────────────────┴ ...

Places are assigned by layer name when a decoder is built, so the order in which its layers run does not
matter. A new stream begins with a state of zeros, which is the zero padding of a causal convolution. Source
of the idea: kyutai-labs/moshi, moshi/modules/conv.py (one row of state per stream; streaming equals offline).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import ceil

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from zoo import kernels
from zoo.nn import row_convolution


class Stateful(nn.Module):
    """A layer that keeps the last `state_length` positions of its input, `channels` values each. Positions
    are dimension `state_dim` of [B, _, _]."""

    state_name: str | None = None  # key of its place in the row, set by StateLayout
    rows_dtype: torch.dtype | None = None  # set by `to_rows` of the layers that have it

    def __init__(self, channels: int, length: int, dim: int = 2):
        super().__init__()
        self.state_length, self.state_dim = length, dim
        self.state_shape = length, channels

    @property
    def state_size(self) -> int:
        """The number of values in a stream's row."""
        length, channels = self.state_shape
        return length * channels


class StateLayout:
    """The place of each layer of a decoder in a stream's row, by the layer's name. `size` is the size of a
    row in values."""

    def __init__(self, decoder: nn.Module):
        self.places: dict[str, slice] = {}
        self.size = 0
        for name, layer in decoder.named_modules():
            if isinstance(layer, Stateful) and layer.state_size > 0:
                layer.state_name = name
                self.places[name] = slice(self.size, self.size + layer.state_size)
                self.size += layer.state_size


class CodecState:
    """The state of a decoder's layers during one forward pass. Each layer reads its past and stores that of
    the next pass.

    rows [B, V]: the state after the last pass. frames: the frames F of this pass. count [B]: how many of a
    row's frames are valid, 0 to F; the others are padding, which is never remembered.
    """

    def __init__(self, layout: StateLayout, rows: Tensor, frames: int, count: Tensor):
        self.layout, self.rows, self.frames, self.count = layout, rows, frames, count
        self.kept: dict[str, Tensor] = {}  # layer -> its state for the next pass [B, values]

    def extend(self, layer: Stateful, x: Tensor, kept: Tensor | None = None) -> Tensor:
        """Return the layer's past followed by x. x has N positions, a multiple of F; the result has
        state_length + N.

        kept [B, state_length]: which of them the next pass finds, if the positions are dimension 1. Default:
        the last ones.
        """
        if layer.state_length == 0:
            return x
        self._check(layer)
        if layer.state_dim == 1:
            return self._extend_rows(layer, x, kept)
        past = self._past(layer).to(x.dtype)
        whole = torch.cat((past, x.mT), 1).mT if is_turned(x) else torch.cat((past.mT, x), 2)
        index = self._last_valid(layer, x)
        self._keep(layer, whole.gather(2, index[:, None].expand(-1, x.shape[1], -1)).mT)
        return whole

    def _extend_rows(self, layer: Stateful, x: Tensor, kept: Tensor | None) -> Tensor:
        """Extend x [B, N, C], whose positions are contiguous rows."""
        whole = torch.cat((self._past(layer), x), 1)
        first = torch.arange(len(x), device=x.device)[:, None] * whole.shape[1]
        index = self._last_valid(layer, x) if kept is None else kept
        self._keep(layer, F.embedding(first + index, whole.flatten(0, 1)))
        return whole

    def _check(self, layer: Stateful) -> None:
        name = layer.state_name
        assert name is not None, (
            f"a {type(layer).__name__} has no place in the state: no StateLayout was made of its decoder"
        )
        assert name not in self.kept, (
            f"layer {name!r} ran twice in one forward; it has one place in the state"
        )

    def _last_valid(self, layer: Stateful, x: Tensor) -> Tensor:
        """Return the last positions before the padding [B, length], counted from the past's first one."""
        valid = self.count * (x.shape[layer.state_dim] // self.frames)
        return valid[:, None] + torch.arange(layer.state_length, device=x.device)

    def _past(self, layer: Stateful) -> Tensor:
        """Return the layer's past [B, *state_shape]."""
        return self.rows[:, self.layout.places[str(layer.state_name)]].unflatten(1, layer.state_shape)

    def _keep(self, layer: Stateful, kept: Tensor) -> None:
        """Store the layer's past [B, *state_shape] of the next pass."""
        self.kept[str(layer.state_name)] = kept.flatten(1).to(self.rows.dtype)

    def past(self, layer: Stateful, x: Tensor, before: Callable[[Tensor], Tensor]) -> Tensor | kernels.Past:
        """Return the layer's past [B, C, length], and keep the end of before(x), x [B, C, N], for the next
        pass. `extend` with before(x) keeps the same, but computes all of it. A kernel of ours reads the past."""
        length, channels = layer.state_shape
        assert layer.state_dim == 2, f"{layer.state_name!r} has its positions in dimension {layer.state_dim}"
        self._check(layer)
        past = self._past(layer)
        valid = self.count * (x.shape[2] // self.frames)
        # [B, length], positions in x; those below 0 are in the past
        index = valid[:, None] - length + torch.arange(length, device=x.device)
        stream = torch.arange(len(x), device=x.device)[:, None] * x.shape[2]
        ends = F.embedding(stream + index.clamp(min=0), x.mT.reshape(-1, channels)).mT  # [B, C, length]
        old = (index + length).clamp(max=length - 1)[..., None].expand(-1, -1, channels)
        self._keep(layer, torch.where(index[..., None] < 0, past.gather(1, old), before(ends).mT))
        return past.mT

    def _check_all(self) -> None:
        missing = [name for name in self.layout.places if name not in self.kept]
        assert not missing, f"layers {missing} did not run, so they have no state for the next pass"

    def next(self) -> Tensor:
        """Return the rows [B, V] for the next pass."""
        self._check_all()
        return torch.cat([self.kept[name] for name in self.layout.places], 1)

    def store(self, rows: Tensor, slots: Tensor) -> None:
        """Write the state for the next pass to the rows [S+1, V] of all slots."""
        rows[slots] = self.next()


class SlotsState(CodecState):
    """The same on a CPU, over the rows of all slots: each layer changes its part of them in place.

    rows [S+1, V]: the state of all slots. slots [B]: those of this pass. The past of Mimi's layers has 65 MB
    for eight streams, which would be copied five times.
    """

    def __init__(self, layout: StateLayout, rows: Tensor, slots: Tensor, frames: int, count: Tensor):
        super().__init__(layout, rows, frames, count)
        self.slots = slots

    def changed_in_place(self, layer: Stateful) -> int:
        """Note that an operator reads and changes the layer's past in `rows`. Return where it begins in a row."""
        if layer.state_length == 0:
            return 0
        self._check(layer)
        self.kept[str(layer.state_name)] = self.rows
        return self.layout.places[str(layer.state_name)].start

    def past(self, layer: Stateful, x: Tensor, before: Callable[[Tensor], Tensor]) -> Tensor | kernels.Past:
        self.changed_in_place(layer)
        return kernels.Past(
            super()._past(layer), self.slots, self.count * (x.shape[layer.state_dim] // self.frames)
        )

    def _past(self, layer: Stateful) -> Tensor:
        return super()._past(layer)[self.slots]

    def _keep(self, layer: Stateful, kept: Tensor) -> None:
        super()._past(layer)[self.slots] = kept.to(self.rows.dtype)
        super()._keep(layer, kept)

    def next(self) -> Tensor:
        self._check_all()
        return self.rows[self.slots]

    def store(self, rows: Tensor, slots: Tensor) -> None:
        self._check_all()
        assert rows is self.rows and slots is self.slots, "the rows of another pass"


def slots_state(layout: StateLayout, rows: Tensor, slots: Tensor, frames: int, count: Tensor) -> CodecState:
    """Return the state of the slots [B] for one pass, from the rows [S+1, V] of all slots. `store` ends the
    pass."""
    if rows.device.type == "cpu" and not torch.compiler.is_compiling():
        return SlotsState(layout, rows, slots, frames, count)
    return CodecState(layout, rows[slots], frames, count)


class CausalConv1d(Stateful):
    """y[n] reads x[n - (kernel - 1) * dilation] ... x[n]. x [B, C, N] -> [B, Cout, N]."""

    def __init__(self, channels: int, out_channels: int, kernel: int, dilation: int = 1, groups: int = 1):
        super().__init__(channels, (kernel - 1) * dilation)
        self.weight = nn.Parameter(torch.empty(out_channels, channels // groups, kernel))
        self.bias = nn.Parameter(torch.empty(out_channels))
        self.dilation, self.groups = dilation, groups

    def to_rows(self, dtype: torch.dtype) -> None:
        """Let `forward` read and return rows in `dtype`."""
        self.rows_dtype = dtype
        if self.groups == 1:
            self.weight = rows_of(self.weight, dtype)

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        if self.rows_dtype is not None:
            whole = state.extend(self, x.to(self.rows_dtype))
            if self.groups == 1:
                return convolve_rows(whole, self.weight, self.bias, self.dilation)
            return self._tap_by_tap(whole, x.shape[2]).to(self.rows_dtype)
        whole = state.extend(self, x)
        if self.groups == x.shape[1] and x.device.type == "cuda" and torch.compiler.is_compiling():
            return self._tap_by_tap(whole, x.shape[2])
        if self.groups > 1 or not is_short(x):
            return F.conv1d(whole, self.weight, self.bias, dilation=self.dilation, groups=self.groups)
        reach = whole.unfold(2, self.state_length + 1, 1)[..., :: self.dilation]  # [B, C, N, kernel]
        return F.linear(rearrange(reach, "b c n k -> b n (c k)"), self.weight.flatten(1), self.bias).mT

    def _tap_by_tap(self, whole: Tensor, num: int) -> Tensor:
        """Convolve each channel separately. Compiled, this is one launch limited by memory bandwidth; torch's
        kernel takes four times as long on an H200."""
        y = self.bias[:, None]
        for tap in range(self.weight.shape[2]):
            start = tap * self.dilation
            y = y + self.weight[:, :, tap] * whole[:, :, start : start + num]
        return y


class CausalConvTranspose1d(Stateful):
    """Upsampling: x [B, C, N] -> [B, Cout, N * stride]. The kernel is one or two strides long, so an output
    reads its own input and at most the one before. The state is that input rather than the output's tail: it
    is smaller, and every sample gets the bias once."""

    def __init__(
        self, channels: int, out_channels: int, kernel: int, stride: int, groups: int = 1, bias: bool = True
    ):
        if kernel not in (stride, 2 * stride):
            raise ValueError(
                f"a kernel of {kernel} with a stride of {stride} cannot stream;"
                f" possible kernels: {stride}, {2 * stride}"
            )
        super().__init__(channels, kernel // stride - 1)
        self.weight = nn.Parameter(torch.empty(channels, out_channels // groups, kernel))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.stride, self.groups = stride, groups

    def to_rows(self, dtype: torch.dtype) -> None:
        """Let `forward` read and return rows in `dtype`. The weight becomes that of a convolution."""
        assert self.groups == 1, "a depthwise upsampling has no form in rows"
        self.rows_dtype = dtype
        self.weight = rows_of(upsampling_taps(self.weight, self.stride), dtype)

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        if self.rows_dtype is not None:
            whole = state.extend(self, x.to(self.rows_dtype))
            bias = None if self.bias is None else self.bias.repeat(self.stride)
            return strides_apart(convolve_rows(whole, self.weight, bias), self.stride)
        whole = state.extend(self, x)
        if self.groups > 1 or not is_short(x):
            y = F.conv_transpose1d(whole, self.weight, self.bias, stride=self.stride, groups=self.groups)
            # The first `edge` outputs belong to the past, and the last ones also need the next input.
            edge = self.state_length * self.stride
            return y[:, :, edge : y.shape[2] - edge]
        # [B, state_length + N, Cout * kernel]
        parts = F.linear(whole.mT.contiguous(), self.weight.flatten(1).T)
        # the share of each input in its own outputs, and in those of the next input
        parts = parts.unflatten(2, (self.weight.shape[1], -1, self.stride))
        y = parts[:, self.state_length :, :, 0]
        if self.state_length:
            y = y + parts[:, :-1, :, 1]  # [B, N, Cout, stride]
        if self.bias is not None:
            y = y + self.bias[:, None]
        return rearrange(y, "b n c stride -> b c (n stride)")


def to_rows(parts: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Let all causal convolutions in `parts` read and return rows in `dtype`."""
    for part in parts:
        for layer in part.modules():
            if isinstance(layer, CausalConv1d | CausalConvTranspose1d):
                layer.to_rows(dtype)


def rows_of(weight: Tensor, dtype: torch.dtype) -> nn.Parameter:
    """Return a convolution's weight [Cout, C, kernel] in `dtype`, laid out in memory as [Cout, kernel, C]."""
    return nn.Parameter(weight.detach().to(dtype).mT.contiguous().mT, requires_grad=False)


def upsampling_taps(weight: Tensor, stride: int) -> Tensor:
    """Return the weight [stride * Cout, C, taps] of the convolution that equals an upsampling with weight
    [C, Cout, taps * stride]: its taps read the previous input and the current one. See `strides_apart`."""
    taps = weight.detach().unflatten(2, (-1, stride)).flip(2)  # [C, Cout, taps, stride]
    return taps.permute(3, 1, 0, 2).flatten(0, 1)


def strides_apart(y: Tensor, stride: int) -> Tensor:
    """y [B, stride * C, N] -> [B, C, N * stride]; channels are contiguous in both."""
    return y.mT.reshape(len(y), y.shape[2] * stride, -1).mT


def convolve_rows(x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int = 1) -> Tensor:
    """Convolve x [B, C, N] without padding -> [B, Cout, N - (kernel - 1) dilation], in the weight's dtype.

    Results are laid out in memory as rows [B, N, Cout], as tensor cores read them. A GPU's kernels for
    [B, C, N] turn every input and output, 7 % of a render of Qwen3-TTS in TF32 on an H200. weight: from
    `rows_of`. The bias is fp32, and the sum is rounded once more.
    """
    x, kernel = x.to(weight.dtype), weight.shape[2]
    if kernel == 1:
        y = F.linear(x.mT, weight[:, :, 0]).mT
    elif is_short(x):
        reach = x.mT.unfold(1, (kernel - 1) * dilation + 1, 1)[..., ::dilation]  # [B, N, C, kernel]
        y = F.linear(rearrange(reach, "b n c k -> b n (k c)"), weight.mT.flatten(1)).mT
    elif row_convolution.is_fit(x):
        y = torch.ops.zoo.convolve_rows.default(x.mT.contiguous(), weight.mT, dilation).mT
    else:
        y = F.conv2d(x[:, :, None], weight[:, :, None], dilation=(1, dilation))[:, :, 0]
    return y if bias is None else (y + bias[:, None]).to(y.dtype)


def is_turned(x: Tensor) -> bool:
    """Return whether x [B, C, N] is laid out as [B, N, C] on a CPU; torch.cat would not keep that layout."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and x.stride(1) == 1 < x.stride(2)


def reach(layers: Iterable[nn.Module]) -> int:
    """Return how many frames the convolutions among `layers` look back from the first sample of a frame.
    layers: in the order in which audio passes through them."""
    rate, frames = 1, 0.0  # positions per frame so far; frames looked back
    for layer in layers:
        if isinstance(layer, CausalConv1d | CausalConvTranspose1d):
            frames += layer.state_length / rate
            rate *= layer.stride if isinstance(layer, CausalConvTranspose1d) else 1
    return ceil(frames)


def is_short(x: Tensor) -> bool:
    """Return whether x [B, C, N] has few positions, so that a convolution mostly reads weights. It is then
    computed as one matrix product, because convolution kernels first rearrange the weights, which takes up to
    nine times as long (CPU, fp32, C = 1536, N = 4)."""
    return 4 * x.shape[2] < x.shape[1]
