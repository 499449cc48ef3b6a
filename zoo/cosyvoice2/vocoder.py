"""HiFT: mel frames (50 Hz) to 24 kHz samples, by a source of sines and noise that is filtered (HiFT-Net,
arXiv 2309.09493).

    mel ─┬─ f0 ─ 9 harmonics + noise ─ STFT ──┬───────────┬───────────┐
         └─ conv ──────────────────── x8 ─────+──── x5 ───+──── x3 ───+─ conv ─ magnitude, phase ─ inverse
         STFT ─> samples

A sample reads at most CONTEXT frames on both sides, so a window of frames with as many around it gives what
the whole speech gives. Before
the speech and behind it every layer reads zeros, hence the masks. A sine's phase is the sum of all
frequencies before it, which is carried.
Source: FunAudioLLM/CosyVoice, cosyvoice/hifigan/generator.py (HiFTGenerator, SineGen2) and f0_predictor.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.cosyvoice2.config import MELS, RATE_HZ, VocoderConfig
from zoo.cosyvoice2.strategy import CONTEXT, MEL_SAMPLES
from zoo.nn.snake import snake

NUM_F0_CONVS, F0_KERNEL, KERNEL = 5, 3, 7
LAST_SLOPE = 0.01
UNVOICED = 1 / 3  # of alpha: how loud the noise is where there is no voice
PHASE_LAG = (
    CONTEXT - 4
)  # frames before a window's first new one at which the phase is carried: f0 there has all that it reads
MAX_MAGNITUDE = 100.0


@dataclass
class Place:
    """Where a window of frames lies in its speech."""

    first: Tensor  # [B], the speech's frame at the window's beginning; below 0 before the speech
    limit: Tensor  # [B], frames of the speech that are known

    def mask(self, num: int, rate: int, extra: int = 0) -> Tensor:
        """Which of the window's `num` positions are in the speech [B, 1, num]; `rate` positions a frame, and
        `extra` at the end."""
        at = self.first[:, None] * rate + torch.arange(num, device=self.first.device)
        return ((at >= 0) & (at < self.limit[:, None] * rate + extra))[:, None]


class Snake(nn.Module):
    """x + sin(a x)^2 / a, one a per channel."""

    def __init__(self, channels: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        return snake(x, self.alpha[:, None], 1 / (self.alpha[:, None] + 1e-9))


class ResBlock(nn.Module):
    def __init__(self, channels: int, kernel: int, dilations: tuple[int, ...]):
        super().__init__()

        def conv(dilation: int) -> nn.Conv1d:
            return nn.Conv1d(
                channels, channels, kernel, dilation=dilation, padding=(kernel - 1) * dilation // 2
            )

        self.convs1 = nn.ModuleList(conv(dilation) for dilation in dilations)
        self.convs2 = nn.ModuleList(conv(1) for _ in dilations)
        self.snakes1 = nn.ModuleList(Snake(channels) for _ in dilations)
        self.snakes2 = nn.ModuleList(Snake(channels) for _ in dilations)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for conv1, conv2, snake1, snake2 in zip(
            self.convs1, self.convs2, self.snakes1, self.snakes2, strict=True
        ):
            y = conv1(snake1(x) * mask)
            x = x + conv2(snake2(y) * mask)
        return x


class F0Predictor(nn.Module):
    """mel [B, MELS, W] -> the voice's pitch in Hz [B, W], about 0 where there is none."""

    def __init__(self, channels: int):
        super().__init__()
        convs = (
            nn.Conv1d(channels if i else MELS, channels, F0_KERNEL, padding=F0_KERNEL // 2)
            for i in range(NUM_F0_CONVS)
        )
        self.convs = nn.ModuleList(convs)
        self.out = nn.Linear(channels, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for conv in self.convs:
            x = F.elu(conv(x * mask))
        return self.out(x.mT)[..., 0].abs()


class Vocoder(nn.Module):
    window: Tensor  # [fft]
    waves: Tensor  # [fft, bins], the cosines and the negative sines that a frame is made of
    synthesis: Tensor  # [bins, fft], back from them

    def __init__(self, config: VocoderConfig):
        super().__init__()
        self.config = config
        bins = config.fft + 2  # real and imaginary parts
        self.f0 = F0Predictor(config.f0_channels)
        self.mix = nn.Linear(config.harmonics, 1)
        self.stem = nn.Conv1d(MELS, config.channels, KERNEL, padding=KERNEL // 2)
        self.ups, self.downs = nn.ModuleList(), nn.ModuleList()
        self.source_blocks, self.blocks = nn.ModuleList(), nn.ModuleList()
        strides = [
            math.prod(config.rates[i + 1 :]) for i in range(len(config.rates))
        ]  # STFT frames a position
        for i, (rate, kernel, stride) in enumerate(zip(config.rates, config.kernels, strides, strict=True)):
            channels = config.channels >> (i + 1)
            self.ups.append(
                nn.ConvTranspose1d(2 * channels, channels, kernel, rate, padding=(kernel - rate) // 2)
            )
            width = 2 * stride if stride > 1 else 1
            self.downs.append(nn.Conv1d(bins, channels, width, stride, padding=stride // 2))
            self.source_blocks.append(ResBlock(channels, config.source_kernels[i], config.resblock_dilations))
            self.blocks.extend(
                ResBlock(channels, size, config.resblock_dilations) for size in config.resblock_kernels
            )
        self.tail = nn.Conv1d(channels, bins, KERNEL, padding=KERNEL // 2)

    def prepare(self) -> None:
        """The Fourier transforms of a frame, as matrices: they are tiny."""
        fft, device = self.config.fft, self.mix.weight.device
        turns = torch.outer(torch.arange(fft), torch.arange(fft // 2 + 1)).double() * (2 * math.pi / fft)
        waves = torch.cat((turns.cos(), -turns.sin()), 1)
        weight = torch.full((fft // 2 + 1,), 2 / fft, dtype=torch.float64)
        weight[[0, -1]] = 1 / fft  # the bins that have no mirror image
        self.register_buffer(
            "window", torch.hann_window(fft, dtype=torch.float64).float().to(device), persistent=False
        )
        self.register_buffer("waves", waves.float().to(device), persistent=False)
        self.register_buffer(
            "synthesis", (waves * weight.repeat(2)).T.float().contiguous().to(device), persistent=False
        )

    def forward(
        self, mel: Tensor, place: Place, phase: Tensor, phase_index: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """mel [B, W, MELS]; phase [B, H] fp64, in turns, at the window's frame phase_index [B]; noise [B, W,
        MEL_SAMPLES, H]
        -> samples [B, W * MEL_SAMPLES], and the phase at each frame from there on [B, W, H]."""
        mask = place.mask(mel.shape[1], 1)
        f0 = self.f0(mel.mT, mask) * mask[:, 0]  # [B, W]
        sines, phases = self._sines(f0, place, phase, phase_index)
        return self.filter(mel, self._source(f0, sines, noise), place), phases

    def _sines(self, f0: Tensor, place: Place, phase: Tensor, phase_index: Tensor) -> tuple[Tensor, Tensor]:
        """-> [B, W, MEL_SAMPLES, H], and phases [B, W, H] in turns. The phase runs straight from one frame's
        middle to the next one's, and
        stands still before the first middle and behind the last. In fp64: it is a sum over the whole
        speech."""
        frame = torch.arange(f0.shape[1], device=f0.device)
        harmonic = torch.arange(1, self.config.harmonics + 1, device=f0.device)
        turns = f0.double()[..., None] * harmonic / RATE_HZ % 1  # [B, W, H], a sample
        phases = phase[:, None] + (turns * (frame > phase_index[:, None])[..., None]).cumsum(1)
        middle = (
            torch.arange(MEL_SAMPLES, device=f0.device, dtype=torch.float64) + 0.5
        ) / MEL_SAMPLES - 0.5  # frames from the middle
        is_first = (place.first[:, None] + frame == 0)[..., None]
        before, after = turns.masked_fill(is_first, 0), F.pad(turns, (0, 0, 0, 1))[:, 1:]
        slope = torch.where(
            middle[:, None] < 0, before[:, :, None], after[:, :, None]
        )  # [B, W, MEL_SAMPLES, H]
        angle = MEL_SAMPLES * (phases[:, :, None] + middle[:, None] * slope) % 1
        return self.config.alpha * (2 * math.pi * angle).sin().to(f0.dtype), phases % 1

    def _source(self, f0: Tensor, sines: Tensor, noise: Tensor) -> Tensor:
        """-> [B, W * MEL_SAMPLES]"""
        is_voiced = (f0 > self.config.voiced_hz)[:, :, None, None]
        loudness = torch.where(is_voiced, self.config.sigma, self.config.alpha * UNVOICED)
        waves = sines * is_voiced + loudness.to(sines.dtype) * noise.to(sines.dtype)
        return self.mix(waves).tanh().flatten(1)

    def filter(self, mel: Tensor, source: Tensor, place: Place) -> Tensor:
        """mel [B, W, MELS], source [B, W * MEL_SAMPLES] -> samples [B, W * MEL_SAMPLES]."""
        config, num, rate = self.config, mel.shape[1], 1
        spectrum = self._spectrum(source, place)  # [B, bins, STFT frames]
        x = self.stem(mel.mT * place.mask(num, 1))
        for i, (up, down) in enumerate(zip(self.ups, self.downs, strict=True)):
            x = up(F.leaky_relu(x, config.slope) * place.mask(x.shape[2], rate))
            rate *= config.rates[i]
            is_last = i == len(self.ups) - 1
            if is_last:
                x = self._with_reflection(x, place, rate)
            mask = place.mask(x.shape[2], rate, extra=int(is_last))
            x = x + self.source_blocks[i](down(spectrum), mask)
            size = len(config.resblock_kernels)
            x = (
                torch.stack([block(x, mask) for block in self.blocks[size * i : size * (i + 1)]]).sum(0)
                / size
            )
        magnitude, phase = self.tail(F.leaky_relu(x, LAST_SLOPE) * mask).chunk(2, 1)
        return self._samples(magnitude.exp().clamp(max=MAX_MAGNITUDE), phase.sin(), mask)

    def _with_reflection(self, x: Tensor, place: Place, rate: int) -> Tensor:
        """x [B, C, N] -> [B, C, N + 1], a position later, and before the speech's first one stands its
        second."""
        at = place.first[:, None] * rate + torch.arange(x.shape[2] + 1, device=x.device)
        return torch.where((at == 0)[:, None], F.pad(x[:, :, 1:], (0, 2)), F.pad(x, (1, 0)))

    def _spectrum(self, source: Tensor, place: Place) -> Tensor:
        """Frames around every hop; the speech's ends are mirrored."""
        config, edge = self.config, self.config.fft // 2
        first, num = MEL_SAMPLES * place.first[:, None], source.shape[1]
        at = first + torch.arange(-edge, num + edge, device=source.device)
        last = MEL_SAMPLES * place.limit[:, None] - 1
        at = torch.where(at > last, 2 * last - at, at.abs())
        reached = source.gather(1, (at - first).clamp(0, num - 1)).unfold(
            1, config.fft, config.hop
        )  # [B, STFT frames, fft]
        spectrum = ((reached * self.window) @ self.waves).mT
        return spectrum * place.mask(spectrum.shape[2], MEL_SAMPLES // config.hop, extra=1)

    def _samples(self, magnitude: Tensor, phase: Tensor, mask: Tensor) -> Tensor:
        """The inverse STFT: frames laid over one another, divided by what the windows add up to. [B, bins /
        2, frames] twice -> [B, N]"""
        bins = torch.cat((magnitude * phase.cos(), magnitude * phase.sin()), 1)
        frames = (bins.mT @ self.synthesis) * (self.window * mask.mT)  # [B, frames, fft]
        samples, weight = (
            self._overlap(frames),
            self._overlap((self.window.square() * mask.mT).expand_as(frames)),
        )
        limit = self.config.limit
        return (samples / weight.clamp(min=1e-11)).clamp(-limit, limit)

    def _overlap(self, frames: Tensor) -> Tensor:
        """frames [B, M, 4 hop] -> their sum [B, (M - 1) hop], without the half frame at both ends."""
        quarters = frames.unflatten(2, (4, -1)).unbind(2)  # 4 of [B, M, hop]
        size = frames.shape[1] + 3
        shifted = [F.pad(part, (0, 0, i, size - frames.shape[1] - i)) for i, part in enumerate(quarters)]
        return torch.stack(shifted).sum(0)[:, 2:-2].flatten(1)
