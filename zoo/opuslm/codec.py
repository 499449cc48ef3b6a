"""The decoder of ESPnet's "DAC" at 16 kHz: frames of eight codes to samples, exactly, for any cut into windows.

    codes [B, 7 + F + 7, 8] ─ sum ─ conv ─ LSTM ─ x8 ─ x5 ─ x4 ─ x2 ─ conv ─ samples [B, 320 F]
                              512   512    512    256  128  64   32    1          channels
                                    50 Hz         0.4  2    8    16   16          kHz

It is a SEANet, not Descript's DAC. The LSTM runs forward over the frames, so its state is carried: that four
frames before the next window, because the levels behind it read four frames on both sides. The first
convolution reads three more. The ends of a speech are reflected, in every convolution. Source: espnet 202611,
espnet2/gan_codec/shared.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo import kernels
from zoo.kernels.operator import operator
from zoo.nn import dac
from zoo.nn.eager import may_follow_values
from zoo.nn.residual import has_kernel, pointwise
from zoo.nn.snake import snake
from zoo.opuslm.config import CodecConfig
from zoo.opuslm.ids import BOOKS


class Stretch:
    """The positions of a window at one rate: first [B], the position of the window's first value, and end [B],
    the number of positions of the speech."""

    def __init__(self, first: Tensor, end: Tensor):
        self.first, self.end = first, end

    def at(self, x: Tensor) -> Tensor:
        """Return the positions [B, N] of x [B, C, N]."""
        return self.first[:, None] + torch.arange(x.shape[2], device=x.device)

    def is_inside(self, x: Tensor) -> Tensor:
        """Return which positions of x [B, C, N] belong to the speech [B, N]."""
        at = self.at(x)
        return (at >= 0) & (at < self.end[:, None])

    def shorten(self, edge: int) -> None:
        """A convolution dropped `edge` positions on both sides."""
        self.first = self.first + edge

    def upsample(self, rate: int) -> None:
        """A transposed convolution dropped `rate` outputs on both sides; the whole speech loses `rate`, the
        larger half on the left."""
        self.first = self.first * rate + rate // 2
        self.end = self.end * rate

    def silence(self, x: Tensor) -> Tensor:
        """Return x with zeros outside of the speech."""
        is_inside = self.is_inside(x)
        if may_follow_values(x) and bool(is_inside.all()):
            return x
        return x.masked_fill(~is_inside[:, None], 0)

    def reflect(self, x: Tensor, edge: int) -> Tensor:
        """Return x with up to `edge` positions beyond each end of the speech reflected from inside of it. A
        speech of at most `edge` positions is continued by zeros first."""
        if edge == 0 or (may_follow_values(x) and bool(self.is_inside(x).all())):
            return x
        at, end = self.at(x), self.end[:, None]
        last = end.clamp(min=edge + 1) - 1
        source = torch.where(at > last, 2 * last - at, at.abs())
        index = (source - self.first[:, None]).clamp(0, x.shape[2] - 1)
        x = x.gather(2, index[:, None].expand_as(x))
        return x.masked_fill((source >= end)[:, None], 0)


class Wave(nn.Module):
    """Snake with one frequency for all channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.alpha = nn.Parameter(torch.empty(1, 1, 1))

    @property
    def wave(self) -> tuple[Tensor, Tensor]:
        """Return frequency and gain [1, C, 1]."""
        alpha = self.alpha.expand(1, self.channels, 1).contiguous()
        return alpha, 1 / (alpha + 1e-9)

    def forward(self, x: Tensor) -> Tensor:
        return snake(x, *self.wave)


class Conv(dac.Conv):
    """A convolution of an odd kernel that reads `edge` positions on both sides."""

    def __init__(self, channels: int, out_channels: int, kernel: int, dilation: int = 1):
        super().__init__(channels, out_channels, kernel, dilation=dilation)
        self.edge = kernel // 2 * dilation

    def over(self, x: Tensor, stretch: Stretch) -> Tensor:
        """x [B, C, N] -> [B, Cout, N - 2 edge]"""
        y = self(stretch.reflect(x, self.edge))
        stretch.shorten(self.edge)
        return y


class Unit(nn.Module):
    """A residual unit: two convolutions after snakes, and one of kernel 1 next to them."""

    def __init__(self, channels: int, kernel: int, dilation: int, compress: int):
        super().__init__()
        inner = channels // compress
        self.wave1, self.conv1 = Wave(channels), Conv(channels, inner, kernel, dilation)
        self.wave2, self.conv2 = Wave(inner), Conv(inner, channels, 1)
        self.shortcut = Conv(channels, channels, 1)

    def forward(self, x: Tensor, stretch: Stretch) -> Tensor:
        edge = self.conv1.edge
        more = self.shortcut(x[..., edge : x.shape[2] - edge])
        if not has_kernel(x, self.conv1):
            return more + self.conv2(self.wave2(self.conv1.over(self.wave1(x), stretch)))
        x = stretch.reflect(x, edge)  # before the snake, which leaves zeros as they are
        stretch.shorten(edge)
        wave, filters, bias = self.wave1.wave, self.conv1.filters, self.conv1.bias
        [taps], [dilation], then = (
            self.conv1.kernel_size,
            self.conv1.dilation,
            pointwise(self.wave2, self.conv2),
        )
        return kernels.convolve_snake(x, wave, filters, bias, taps, dilation, residual=more, then=then)


class Level(nn.Module):
    """Upsampling by `rate` after a snake, then the residual units: [B, C, N] -> [B, C / 2, about rate N]."""

    def __init__(self, config: CodecConfig, channels: int, rate: int):
        super().__init__()
        self.rate, inner = rate, channels // 2
        self.wave = Wave(channels)
        self.up = dac.Upsampling(channels, inner, 2 * rate, rate, padding=rate)
        dilations = [config.dilation**i for i in range(config.residuals)]
        self.units = nn.ModuleList(
            Unit(inner, config.unit_kernel, dilation, config.compress) for dilation in dilations
        )

    def forward(self, x: Tensor, stretch: Stretch) -> Tensor:
        x = dac.upsample(stretch.silence(x), self.wave, self.up)
        stretch.upsample(self.rate)
        for unit in self.units:
            x = unit(x, stretch)
        return x


class LSTMLayer(nn.Module):
    """The tensors of one layer. torch's LSTM keeps a second list of them, and returns only its last state."""

    def __init__(self, width: int):
        super().__init__()
        self.weight_ih = nn.Parameter(torch.empty(4 * width, width))
        self.weight_hh = nn.Parameter(torch.empty(4 * width, width))
        self.bias_ih = nn.Parameter(torch.empty(4 * width))
        self.bias_hh = nn.Parameter(torch.empty(4 * width))

    def forward(self, x: Tensor, begin: Tensor, state: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        gates = F.linear(x, self.weight_ih, self.bias_ih + self.bias_hh)
        return torch.ops.zoo.lstm.default(gates, self.weight_hh, begin, state, at)


class LSTM(nn.Module):
    """Layers over a window, whose output is added to the input. The state is an argument and a result."""

    def __init__(self, width: int, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(LSTMLayer(width) for _ in range(layers))

    def forward(self, x: Tensor, begin: Tensor, state: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, N, D] -> the outputs [B, N, D], and the state [B, layers, 2, D] before position at [B].

        state: before the first position. begin [B]: earlier positions leave a state of zeros as it is.
        """
        y, kept = x, []
        for i, layer in enumerate(self.layers):
            y, last = layer(y, begin, state[:, i], at)
            kept.append(last)
        return x + y, torch.stack(kept, 1)


def _empty_states(
    gates: Tensor, weight: Tensor, begin: Tensor, state: Tensor, at: Tensor
) -> tuple[Tensor, Tensor]:
    return gates.new_empty(*gates.shape[:2], weight.shape[1]), torch.empty_like(state)


@operator("lstm", gives=_empty_states)
def lstm(gates: Tensor, weight: Tensor, begin: Tensor, state: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Run one layer: gates [B, N, 4 D] from its inputs, state [B, 2, D] -> the outputs [B, N, D] and the state
    before position at [B]. Positions before begin [B] do not change the state. A compiler must not trace it:
    it would unroll the loop."""
    h, c = state.unbind(1)
    kept, outputs = state.clone(), []
    for n in range(gates.shape[1]):
        i, f, g, o = (gates[:, n] + h @ weight.T).chunk(4, -1)
        is_past = (n < begin)[:, None]
        c = torch.where(is_past, c, f.sigmoid() * c + i.sigmoid() * g.tanh())
        h = torch.where(is_past, h, o.sigmoid() * c.tanh())
        outputs.append(h)
        kept = torch.where((at == n + 1)[:, None, None], torch.stack((h, c), 1), kept)
    return torch.stack(outputs, 1), kept


class Decoder(nn.Module):
    """Codes to samples, in the dtype of the weights.

    near: frames that the levels read on both sides; context: with those of the first convolution.
    """

    def __init__(self, config: CodecConfig):
        super().__init__()
        self.config = config
        width = config.channels << len(config.rates)
        self.tables = nn.ModuleList(nn.Embedding(config.num_codes, config.width) for _ in range(BOOKS))
        self.stem = Conv(config.width, width, config.kernel)
        self.lstm = LSTM(width, config.lstm)
        self.levels = nn.ModuleList(Level(config, width >> i, rate) for i, rate in enumerate(config.rates))
        self.wave = Wave(config.channels)
        self.tail = Conv(config.channels, 1, config.last_kernel)
        self.near, self.context = contexts(config)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The LSTM's state of one speech."""
        return self.config.lstm, 2, self.stem.out_channels

    def forward(
        self, codes: Tensor, start: Tensor, count: Tensor, end: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the samples [B, F * frame_samples] of frames start [B] .. start + F, and the LSTM's state
        [B, layers, 2, D] for a window that begins at start + count.

        codes [B, context + F + context, 8] has the codes of these frames in the middle. The tape holds frames
        0 .. end [B]; codes outside of it are ignored. state: as the window before returned it.
        """
        x = self.tables[0](codes[..., 0])
        for k in range(1, BOOKS):
            x = x + self.tables[k](codes[..., k])
        stretch = Stretch(start - self.context, end)
        x = self.stem.over(x.mT, stretch)  # [B, D, near + F + near]
        x, state = self.lstm(x.mT, -stretch.first, state, count)
        x = x.mT
        for level in self.levels:
            x = level(x, stretch)
        x = dac.convolve(stretch.reflect(x, self.tail.edge), self.wave, self.tail)[:, 0]
        stretch.shorten(self.tail.edge)
        frames, size = codes.shape[1] - 2 * self.context, self.config.frame_samples
        index = (start * size - stretch.first)[:, None] + torch.arange(frames * size, device=x.device)
        return x.gather(1, index), state


def contexts(config: CodecConfig) -> tuple[int, int]:
    """Return how many frames the levels read on both sides, and how many with the first convolution."""
    need = config.last_kernel // 2
    inside = sum(config.unit_kernel // 2 * config.dilation**i for i in range(config.residuals))
    for rate in reversed(config.rates):
        need, left = need + inside, rate // 2
        need = max(-(-(need + left) // rate), 1 - (left - need) // rate)
    return need, need + config.kernel // 2
