"""HiFT: mel frames to samples, by filtering a source of sines and noise (HiFT-Net, arXiv
2309.09493).

    mel ─┬─ f0 ─ 9 harmonics + noise ─ STFT ──┬───────────┬───────────┐
         └─ conv ──────────────────── x8 ─────+──── x5 ───+──── x3 ───+─ conv ─ magnitude, phase ─ inverse STFT ─> samples

The convolutions look ahead, so the samples lag `Plan.lag` behind the mel frames. The state that is carried
from window to window is the end of each stage's input, and the phase of the source. Only inside the residual
blocks are up to `reach` positions on each side of a window computed again.

Before and after the speech every layer reads zeros. The masks make sure of that.
Source: FunAudioLLM/CosyVoice, cosyvoice/hifigan/generator.py (HiFTGenerator, SineGen2) and f0_predictor.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo import kernels
from zoo.nn.conv import CodecState, Stateful, StateLayout
from zoo.nn.eager import may_follow_values
from zoo.nn.residual import ConvFilters, has_kernel
from zoo.nn.s3.sizes import MELS, VocoderSizes
from zoo.nn.snake import snake

NUM_F0_CONVS, F0_KERNEL, KERNEL = 5, 3, 7
LAST_SLOPE = 0.01
UNVOICED = 1 / 3  # of alpha: the amplitude of the noise in unvoiced frames
MAX_MAGNITUDE = 100.0


@dataclass(frozen=True)
class StagePlan:
    """The plan of a stage: an upsampling and its residual blocks.

    A lag is the number of positions that a signal is behind the newest frame.
    """

    rate: int  # positions per frame, after upsampling
    stride: int  # STFT frames per position
    lag_in: int  # of the input, at the input's rate
    up_context: int  # positions of the input before the window that the upsampling reads
    lag: int  # of the input of the residual blocks
    reach: int  # of the residual blocks, on each side
    source_reach: int  # of the source's residual block

    @property
    def lag_out(self) -> int:
        return self.lag + self.reach


@dataclass(frozen=True)
class Plan:
    """The lag of each signal behind the newest mel frame, and the context that is carried of it."""

    f0_lag: int  # frames
    stem_lag: int  # frames
    mel_context: int  # frames
    stft_lag: int  # STFT frames
    spectrum_context: int  # STFT frames
    stages: tuple[StagePlan, ...]
    lag: int  # of the samples, in samples
    mel_samples: int

    @property
    def flush(self) -> int:
        """Number of mel frames that must follow the last one to get its samples out."""
        return -(-self.lag // self.mel_samples)

    @classmethod
    def of(cls, config: VocoderSizes) -> Plan:
        f0_lag = NUM_F0_CONVS * (F0_KERNEL // 2)
        # a sine runs from the middle of a frame to that of the next
        source_lag = config.mel_samples * f0_lag + config.mel_samples // 2
        stft_lag = -(-(source_lag + config.fft // 2) // config.hop) - 1
        per_frame = config.mel_samples // config.hop  # STFT frames
        stages: list[StagePlan] = []
        rate, spectrum_context = 1, 0
        for i, (up, kernel) in enumerate(zip(config.rates, config.kernels, strict=True)):
            padding, is_last = (kernel - up) // 2, i == len(config.rates) - 1
            rate *= up
            stride, width = per_frame // rate, down_width(per_frame // rate)
            source_reach = reach(config.source_kernels[i], config.resblock_dilations)
            late = stft_lag + width - stride - stride // 2
            lag = source_reach + max(0, -(-late // stride))  # as soon as the source is available
            if stages:
                lag_in = stages[-1].lag_out
                lag = max(lag, up * lag_in + padding)
            else:
                lag_in = stem_lag = max(KERNEL // 2, (lag - padding) // up)
                lag = max(lag, up * lag_in + padding)
            first = lag + 2 * is_last  # the reflection reads two more positions
            up_context = (first + kernel - 1 - padding) // up - lag_in
            lag += is_last
            stages.append(
                StagePlan(
                    rate=rate,
                    stride=stride,
                    lag_in=lag_in,
                    up_context=up_context,
                    lag=lag,
                    reach=max(reach(size, config.resblock_dilations) for size in config.resblock_kernels),
                    source_reach=source_reach,
                )
            )
            before = stride * (lag + source_reach) + stride // 2 - stft_lag
            spectrum_context = max(spectrum_context, before)
        return cls(
            f0_lag=f0_lag,
            stem_lag=stem_lag,
            mel_context=max(2 * f0_lag + 1, stem_lag + stages[0].up_context + KERNEL // 2),
            stft_lag=stft_lag,
            spectrum_context=spectrum_context,
            stages=tuple(stages),
            lag=config.hop * (stages[-1].lag_out + KERNEL // 2 + 2),
            mel_samples=config.mel_samples,
        )


def reach(kernel: int, dilations: tuple[int, ...]) -> int:
    """Return the number of positions that a residual block reads on each side."""
    return kernel // 2 * (sum(dilations) + len(dilations))


def down_width(stride: int) -> int:
    """Return the kernel size of the convolution that brings the source's spectrum to a stage's rate."""
    return 2 * stride if stride > 1 else 1


@dataclass
class Place:
    """The position of a window of mel frames in its speech."""

    first: Tensor  # [B], the number of the window's first frame
    limit: Tensor  # [B], frames of the speech; NO_LIMIT if its end is not known
    frames: int  # of the window

    def at(self, rate: int, lag: int, num: int) -> Tensor:
        """Return `num` positions [B, num] from `lag` before the window on, at `rate` positions per frame."""
        return self.first[:, None] * rate - lag + torch.arange(num, device=self.first.device)

    def mask(self, rate: int, lag: int, num: int, extra: int = 0) -> Tensor | None:
        """Return which positions of `at` are in the speech [B, 1, num], with `extra` ones at its end.

        If shapes may depend on values and all positions are in the speech, the result is None.
        """
        if may_follow_values(self.first):
            last = (self.first - self.limit).max().item() * rate - lag + num - extra
            if last <= 0 and self.first.min().item() * rate >= lag:
                return None
        at = self.at(rate, lag, num)
        return ((at >= 0) & (at < self.limit[:, None] * rate + extra))[:, None]


NO_LIMIT = 1 << 32


def middle(x: Tensor, num: int) -> Tensor:
    """Return the `num` positions in the middle of x [..., N]."""
    edge = (x.shape[-1] - num) // 2
    return x[..., edge : edge + num]


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x [B, C, N] with zeros where the mask [B, 1, M] is false.

    If M exceeds N, the middle of it counts.
    """
    return x if mask is None else x * middle(mask, x.shape[-1])


class Tail(Stateful):
    """Prepends the last positions of a signal before a window: x [B, C, N] -> [B, C, length + N]."""

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        return state.extend(self, x)


class Conv(nn.Conv1d):
    """A convolution: x [B, C, N] -> [B, Cout, M].

    On a CPU it runs as a 2d convolution of one line with channels last, which is a quarter faster. The output
    is in channels-last layout too.
    """

    def prepare(self) -> None:
        """Lay the weight out in memory as `forward` reads it. Its shape does not change."""
        self.weight.data = self.weight.data.mT.contiguous().mT

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return super().forward(x)
        [stride], [dilation] = self.stride, self.dilation
        image, weight = x[:, :, None], self.weight[:, :, None]
        return F.conv2d(image, weight, self.bias, (1, stride), dilation=(1, dilation))[:, :, 0]


class SnakeConv(Conv, ConvFilters):
    """A convolution that follows a snake."""

    weight: nn.Parameter
    bias: nn.Parameter

    def of_snake(self, snake: Snake, x: Tensor, mask: Tensor | None, more: Tensor | None = None) -> Tensor:
        """Return the convolution of snake(x), zeroed where the mask is false, plus the middle of `more`."""
        if not has_kernel(x, self):
            y = self(masked(snake(x), mask))
            return y if more is None else y.add_(middle(more, y.shape[2]))
        [taps], [dilation] = self.kernel_size, self.dilation
        is_there = None if mask is None else middle(mask, x.shape[2])[:, 0]
        more = None if more is None else middle(more, x.shape[2] - (taps - 1) * dilation)
        return kernels.convolve_snake(x, snake.wave, self.filters, self.bias, taps, dilation, is_there, more)


class ConvTranspose(nn.ConvTranspose1d):
    """A transposed convolution, of which `part` returns some positions.

    On a CPU it runs as a plain convolution, in a third of the time: an output reads a few inputs before it,
    with weights that depend on its place between two inputs. The output has the layout of a `Conv`.
    """

    _by_place: tuple[Tensor, Tensor] | None = None

    def prepare(self) -> None:
        """Prepare the weights that a CPU reads."""
        if self.weight.device.type == "cpu":
            self.by_place()

    def by_place(self) -> tuple[Tensor, Tensor]:
        """Return weight [stride * Cout, C, inputs] and bias [stride * Cout] of the plain convolution.

        Each input yields `stride` outputs, which read that input and those before it.
        """
        if self._by_place is None or self._by_place[0].dtype != self.weight.dtype:
            [kernel], [stride] = self.kernel_size, self.stride
            weight = F.pad(self.weight.detach(), (0, -kernel % stride)).unflatten(2, (-1, stride)).flip(2)
            assert self.bias is not None
            self._by_place = weight.permute(3, 1, 2, 0).flatten(0, 1).mT, self.bias.detach().repeat(stride)
        return self._by_place

    def part(self, x: Tensor, first: int, num: int) -> Tensor:
        """Return output positions first .. first + num [B, Cout, num] of x [B, C, N] with zeros around it."""
        if x.device.type != "cpu":
            return self(x)[:, :, first : first + num]
        (weight, bias), [stride] = self.by_place(), self.stride
        start, stop = first // stride, -(-(first + num) // stride)  # of the inputs that yield these outputs
        before = weight.shape[2] - 1 - start
        rows = F.pad(x.mT, (0, 0, before, stop - x.shape[2]))  # a negative pad drops unread inputs
        y = F.conv2d(rows.mT[:, :, None], weight[:, :, None], bias)[:, :, 0]
        y = y.mT.unflatten(2, (stride, -1)).flatten(1, 2)  # [B, (stop - start) * stride, Cout]
        return y[:, first - start * stride :][:, :num].mT


class Snake(nn.Module):
    """The activation x + sin(a x)^2 / a, with one a per channel."""

    def __init__(self, channels: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(channels))

    @property
    def wave(self) -> tuple[Tensor, Tensor]:
        """Frequency and gain [C]."""
        return self.alpha, 1 / (self.alpha + 1e-9)

    def forward(self, x: Tensor) -> Tensor:
        frequency, gain = self.wave
        return snake(x, frequency[:, None], gain[:, None])


class ResBlock(nn.Module):
    """A residual block: x [B, C, N] -> [B, C, N - 2 reach].

    The mask tells which positions are in the speech.
    """

    def __init__(self, channels: int, kernel: int, dilations: tuple[int, ...]):
        super().__init__()
        self.convs1 = nn.ModuleList(
            SnakeConv(channels, channels, kernel, dilation=dilation) for dilation in dilations
        )
        self.convs2 = nn.ModuleList(SnakeConv(channels, channels, kernel) for _ in dilations)
        self.snakes1 = nn.ModuleList(Snake(channels) for _ in dilations)
        self.snakes2 = nn.ModuleList(Snake(channels) for _ in dilations)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        rounds: Iterator[Any] = zip(self.convs1, self.convs2, self.snakes1, self.snakes2, strict=True)
        for conv1, conv2, snake1, snake2 in rounds:
            y = conv1.of_snake(snake1, x, mask)
            x = conv2.of_snake(snake2, y, mask, x)
        return x


class F0Predictor(nn.Module):
    """mel [B, MELS, W + 2 NUM_F0_CONVS] -> pitch in Hz [B, W], about 0 in unvoiced frames."""

    def __init__(self, channels: int):
        super().__init__()
        self.convs = nn.ModuleList(
            Conv(channels if i else MELS, channels, F0_KERNEL) for i in range(NUM_F0_CONVS)
        )
        self.out = nn.Linear(channels, 1)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        for conv in self.convs:
            x = F.elu(conv(masked(x, mask)))
        return masked(self.out(x.mT).abs().mT, mask)[:, 0]


class Vocoder(nn.Module):
    """HiFT over windows of mel frames."""

    window: Tensor  # [fft]
    waves: Tensor  # [fft, bins], cosines and negative sines: the Fourier transform of a frame
    synthesis: Tensor  # [bins, fft], its inverse

    def __init__(self, config: VocoderSizes):
        super().__init__()
        self.config, self.plan = config, Plan.of(config)
        bins = config.fft + 2  # real and imaginary parts
        self.f0 = F0Predictor(config.f0_channels)
        self.mix = nn.Linear(config.harmonics, 1)
        self.stem = Conv(MELS, config.channels, KERNEL)
        self.mel_tail = Tail(MELS, self.plan.mel_context)
        self.source_tail = Tail(1, config.fft)
        self.spectrum_tail = Tail(bins, self.plan.spectrum_context)
        self.ups, self.downs = nn.ModuleList(), nn.ModuleList()
        self.source_blocks, self.blocks = nn.ModuleList(), nn.ModuleList()
        self.up_tails, self.block_tails = nn.ModuleList(), nn.ModuleList()
        for i, (rate, kernel, plan) in enumerate(
            zip(config.rates, config.kernels, self.plan.stages, strict=True)
        ):
            channels = config.channels >> (i + 1)
            self.ups.append(ConvTranspose(2 * channels, channels, kernel, rate))
            self.downs.append(Conv(bins, channels, down_width(plan.stride), plan.stride))
            self.source_blocks.append(ResBlock(channels, config.source_kernels[i], config.resblock_dilations))
            self.blocks.extend(
                ResBlock(channels, size, config.resblock_dilations) for size in config.resblock_kernels
            )
            self.up_tails.append(Tail(2 * channels, plan.up_context if i else 0))
            self.block_tails.append(Tail(channels, 2 * plan.reach))
        self.tail = Conv(channels, bins, KERNEL)
        self.last_tail = Tail(channels, KERNEL - 1 + 3)
        self.layout = StateLayout(self)

    def prepare(self) -> None:
        """Fill the matrices of the Fourier transforms, and lay out the weights of the convolutions."""
        for module in self.modules():
            if isinstance(module, Conv | ConvTranspose):
                module.prepare()
        fft, device = self.config.fft, self.mix.weight.device
        turns = torch.outer(torch.arange(fft), torch.arange(fft // 2 + 1)).double() * (2 * math.pi / fft)
        waves = torch.cat((turns.cos(), -turns.sin()), 1)
        weight = torch.full((fft // 2 + 1,), 2 / fft, dtype=torch.float64)
        weight[[0, -1]] = 1 / fft  # these bins have no mirror image
        self.register_buffer(
            "window", torch.hann_window(fft, dtype=torch.float64).float().to(device), persistent=False
        )
        self.register_buffer("waves", waves.float().to(device), persistent=False)
        self.register_buffer(
            "synthesis", (waves * weight.repeat(2)).T.float().contiguous().to(device), persistent=False
        )

    def forward(
        self,
        mel: Tensor,
        first: Tensor,
        limit: Tensor,
        count: Tensor,
        rows: Tensor,
        phase: Tensor,
        noise: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return samples [B, W * mel_samples], plan.lag behind the window, phases [B, W + 1, H] and the next rows.

        mel [B, W, MELS]; first and limit [B]: those of the window's `Place`; count [B] and rows [B, V]: those of
        the layers' `CodecState`; phase [B, H]: fp64, in turns, in the middle of the frame f0_lag + 1 before the
        window; noise [B, W + 1, mel_samples, H]: of the frames from that one on. The phases are those in the
        middle of each of these frames.
        """
        # Sizes are taken from the mel, so that one graph holds for all.
        place = Place(first, limit, mel.shape[1])
        state = CodecState(self.layout, rows, mel.shape[1], count)
        mel = self.mel_tail(mel.mT, state)  # [B, MELS, mel_context + W]
        f0 = self.pitch(mel, place)
        source, phases = self.source(f0, place, phase, noise)
        return self.filter(mel, source, place, state), phases, state.next()

    def pitch(self, mel: Tensor, place: Place) -> Tensor:
        """Return the pitch in Hz [B, W + 1] of the frames from f0_lag + 1 before the window on.

        mel [B, MELS, mel_context + W].
        """
        context = 2 * self.plan.f0_lag + 1
        num = context + place.frames
        return self.f0(mel[:, :, -num:], place.mask(1, context, num))

    def source(self, f0: Tensor, place: Place, phase: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the source [B, W * mel_samples] between the middles of the first and the last frame, and
        phases.

        f0 [B, W + 1]; phases [B, W + 1, H]: in the middle of each frame, in turns. The phase is linear
        between the middles of frames, and constant before the first one and after the last one. It is fp64
        because it is a sum over the whole speech.
        """
        config, size = self.config, self.config.mel_samples
        harmonic = torch.arange(1, config.harmonics + 1, device=f0.device)
        turns = f0[:, 1:, None].double() * harmonic / config.rate_hz % 1  # [B, W, H], per sample
        phases = torch.cat((phase[:, None], phase[:, None] + turns.cumsum(1)), 1)
        way = (torch.arange(size, device=f0.device, dtype=torch.float64) + 0.5) / size
        # [B, W], before the first frame's middle
        is_before = place.at(1, self.plan.f0_lag, place.frames) == 0
        way = torch.where(is_before[..., None], 1, way)[..., None]  # [B, W, size, 1]
        angle = size * (phases[:, :-1, None] + way * turns[:, :, None]) % 1
        sines = (2 * math.pi * angle).to(f0.dtype).sin().flatten(1, 2)  # [B, W * size, H]

        is_voiced = (f0 > config.voiced_hz).to(f0.dtype).repeat_interleave(size, 1)
        is_voiced = is_voiced[:, size // 2 : -(size // 2), None]
        loudness = config.alpha * UNVOICED + (config.sigma - config.alpha * UNVOICED) * is_voiced
        noise = noise.flatten(1, 2)[:, size // 2 : -(size // 2)].to(f0.dtype)
        return self.mix(config.alpha * is_voiced * sines + loudness * noise).tanh()[..., 0], phases % 1

    def filter(self, mel: Tensor, source: Tensor, place: Place, state: CodecState) -> Tensor:
        """Return samples of mel [B, MELS, mel_context + W] and source; source and samples [B, W *
        mel_samples]."""
        config, plan = self.config, self.plan
        spectrum = self._spectrum(source, place, state)  # [B, bins, spectrum_context + W * STFT frames]
        x = self._stem(mel, place)
        for i, stage in enumerate(plan.stages):
            x = self._up(i, F.leaky_relu(x, config.slope), place).add_(self._from_source(i, spectrum, place))
            x = self.block_tails[i](x, state)  # [B, C, 2 reach + N]
            if x.device.type == "cpu":
                x = x.mT.contiguous().mT  # the layout that the convolutions and all later layers read
            mask = place.mask(stage.rate, stage.lag + 2 * stage.reach, x.shape[2], self._extra(i))
            blocks = self.blocks[len(config.resblock_kernels) * i :]
            parts = [
                block(middle(x, place.frames * stage.rate + 2 * reach(size, config.resblock_dilations)), mask)
                for block, size in zip(blocks, config.resblock_kernels, strict=False)
            ]
            x = parts[0]
            for part in parts[1:]:
                x = x.add_(part)
            x = x.mul_(1 / len(parts))  # [B, C, N]
            x = self.up_tails[i + 1](x, state) if i + 1 < len(plan.stages) else self.last_tail(x, state)
        lag = plan.stages[-1].lag_out + self.last_tail.state_length
        rate = plan.stages[-1].rate
        mask = place.mask(rate, lag, x.shape[2], extra=1)
        magnitude, phase = self.tail(masked(F.leaky_relu(x, LAST_SLOPE), mask)).chunk(2, 1)
        mask = place.mask(rate, lag - KERNEL // 2, magnitude.shape[2], extra=1)
        return self._samples(magnitude.exp().clamp(max=MAX_MAGNITUDE), phase.sin(), mask)

    def _stem(self, mel: Tensor, place: Place) -> Tensor:
        """Return the first convolution's output [B, C, up_context + W], stem_lag behind the window."""
        context = self.plan.stages[0].up_context + 2 * (KERNEL // 2)
        lag = self.plan.stem_lag - KERNEL // 2 + context  # of the first frame that is read
        num = context + place.frames
        first = self.plan.mel_context - lag
        return self.stem(masked(mel[:, :, first : first + num], place.mask(1, lag, num)))

    def _extra(self, i: int) -> int:
        """Return the positions of a stage after the last whole frame: 1 in the last stage, else 0."""
        return int(i == len(self.ups) - 1)

    def _up(self, i: int, x: Tensor, place: Place) -> Tensor:
        """Upsample x [B, 2C, up_context + N] to [B, C, N * stride] at the stage's lag."""
        stage, kernel, stride = self.plan.stages[i], self.config.kernels[i], self.config.rates[i]
        rate, lag = stage.rate // stride, stage.lag_in + stage.up_context
        x = masked(x, place.mask(rate, lag, x.shape[2]))
        up = self.ups[i]
        assert isinstance(up, ConvTranspose)
        begins = stride * lag + (kernel - stride) // 2  # positions from the beginning of y to the window
        num = place.frames * stage.rate
        if not self._extra(i):
            return up.part(x, begins - stage.lag, num)
        # left reflection: a copy of the second position comes before the first, which delays all by one
        y = up.part(x, begins - stage.lag - 1, num + 2)
        is_first = place.at(stage.rate, stage.lag, num) == 0
        return torch.where(is_first[:, None], y[:, :, 2:], y[:, :, :-2])

    def _from_source(self, i: int, spectrum: Tensor, place: Place) -> Tensor:
        """Return the source's contribution to a stage [B, C, W * rate] at the stage's lag."""
        plan, stage = self.plan, self.plan.stages[i]
        lag, width = stage.lag + stage.source_reach, down_width(stage.stride)
        first = plan.stft_lag + plan.spectrum_context - stage.stride * lag - stage.stride // 2
        num = place.frames * stage.rate + 2 * stage.source_reach
        stop = first + stage.stride * (num - 1) + width
        x = self.downs[i](spectrum[:, :, first:stop])  # [B, C, num]
        return self.source_blocks[i](x, place.mask(stage.rate, lag, num, self._extra(i)))

    def _spectrum(self, source: Tensor, place: Place, state: CodecState) -> Tensor:
        """Return the source's STFT [B, bins, spectrum_context + W * STFT frames], stft_lag behind the window.

        The source is mirrored at both ends of the speech.
        """
        config, edge = self.config, self.config.fft // 2
        source = self.source_tail(source[:, None], state)[:, 0]
        size = config.mel_samples
        held = self.plan.f0_lag * size + size // 2 + config.fft  # samples before the window
        lag = config.hop * self.plan.stft_lag + edge
        rate = size // config.hop
        num = config.hop * (place.frames * rate - 1) + config.fft
        is_inside = place.mask(size, lag, num) is None
        if is_inside:
            reached = source[:, held - lag :][:, :num]
        else:
            at, last = place.at(size, lag, num), size * place.limit[:, None] - 1
            at = torch.where(at > last, 2 * last - at, at.abs())
            first = place.at(size, held, 1)
            reached = source.gather(1, (at - first).clamp(0, source.shape[1] - 1))
        frames = reached.unfold(1, config.fft, config.hop)  # [B, STFT frames, fft]
        spectrum = ((frames * self.window) @ self.waves).mT
        mask = place.mask(rate, self.plan.stft_lag, spectrum.shape[2], extra=1)
        return self.spectrum_tail(masked(spectrum, mask), state)

    def _samples(self, magnitude: Tensor, phase: Tensor, mask: Tensor | None) -> Tensor:
        """Return samples [B, M * hop] by inverse STFT of magnitude and phase [B, bins / 2, 3 + M] each.

        The frames are added with overlap and divided by the sum of the squared windows.
        """
        bins = torch.cat((magnitude * phase.cos(), magnitude * phase.sin()), 1)
        frames = (bins.mT @ self.synthesis) * self.window  # [B, 3 + M, fft]
        weight = self.window.square().expand_as(frames)
        if mask is not None:
            frames, weight = frames * mask.mT, weight * mask.mT
        samples = self._overlap(frames) / self._overlap(weight).clamp(min=1e-11)
        return samples.clamp(-self.config.limit, self.config.limit)

    def _overlap(self, frames: Tensor) -> Tensor:
        """Overlap-add frames [B, 3 + M, 4 hop] to [B, M * hop], from the first frame's fourth quarter on."""
        num = frames.shape[1] - 3
        quarters = frames.unflatten(2, (4, -1)).unbind(2)  # 4 of [B, 3 + M, hop]
        return sum(part[:, 3 - i : 3 - i + num] for i, part in enumerate(quarters)).flatten(1)
