"""SNAC's decoder: frames of seven codes to 24 kHz samples, the same samples however the frames are cut into
windows.

    codes [B, 3 + F + 3, 7] ─ tables ─ conv ─ conv ─ x8 ─ x8 ─ x4 ─ x2 ─ conv ─ tanh ─ samples [B, 2048 F]
                              768      768    1024   512  256  128  64    1      channels
                              46.9 Hz                0.4  3    12   24    kHz

A frame reaches 4,757 samples to both sides, so a window comes with three more frames on each side. Behind
each upsampling the decoder adds noise, one draw a position, scaled by channel. The draws follow from the
request's seed and the position on the tape alone. Source: snac 1.2.1, snac/layers.py and vq.py; Siuzdak et
al. 2024 (arXiv 2410.14411).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo import kernels
from zoo.nn.conv import is_turned
from zoo.nn.dac import Conv, Upsampling, convolve, upsample
from zoo.nn.residual import has_kernel, pointwise
from zoo.nn.sampling import normal
from zoo.nn.snake import Snake
from zoo.nn.stretch import Stretch
from zoo.orpheus.config import SnacConfig
from zoo.orpheus.encoder import Encoder
from zoo.orpheus.quantizer import Quantizer
from zoo.orpheus.tokens import CODES, COLUMNS

KERNEL = 7
EDGE = KERNEL // 2
DILATIONS = (1, 3, 9)  # of a block's residual units
NOISE_SALT = 0x5A4E4143  # keeps the noise apart from what the sampler draws of the same seed


class Residual(nn.Module):
    """x [B, C, N] -> [B, C, N - 2 edge], the positions that it knows in full."""

    def __init__(self, channels: int, dilation: int):
        super().__init__()
        self.edge = EDGE * dilation
        self.snake1 = Snake(channels)
        self.conv1 = Conv(channels, channels, KERNEL, dilation=dilation, groups=channels)
        self.snake2 = Snake(channels)
        self.conv2 = Conv(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        if has_kernel(x, self.conv2):
            wave, then = self.snake1.wave, pointwise(self.snake2, self.conv2)
            filters, bias, [dilation] = self.conv1.filters, self.conv1.bias, self.conv1.dilation
            return kernels.depthwise_unit(x, wave, filters, bias, dilation, None, then)
        y = self.conv2(self.snake2(self.conv1(self.snake1(x))))
        return y.add_(x[..., self.edge : x.shape[2] - self.edge])


class Block(nn.Module):
    """[B, C, N] -> [B, C / 2, about rate N]"""

    def __init__(self, channels: int, rate: int, has_noise: bool):
        super().__init__()
        self.rate = rate
        self.snake = Snake(channels)
        self.up = Upsampling(channels, channels // 2, 2 * rate, rate, padding=rate)
        self.noise = nn.Conv1d(channels // 2, channels // 2, 1, bias=False) if has_noise else None
        self.residuals = nn.ModuleList(Residual(channels // 2, dilation) for dilation in DILATIONS)

    def forward(self, x: Tensor, stretch: Stretch, draws: Tensor | None) -> Tensor:
        """draws [B, frames * positions per frame] of this rate, all frames of the window and around it."""
        x = upsample(x, self.snake, self.up)
        stretch.upsample(self.rate, self.rate // 2)
        if self.noise is not None and draws is not None:
            first = (draws.shape[1] - stretch.frames * stretch.rate) // 2 - stretch.before
            # a product of rows, which on a CPU is how x lies in memory
            noise = F.linear(x.mT, self.noise.weight[..., 0]).mT if is_turned(x) else self.noise(x)
            x = torch.addcmul(x, draws[:, None, first : first + x.shape[2]], noise)
        for residual, dilation in zip(self.residuals, DILATIONS, strict=True):
            x = residual(stretch.silence(x))
            stretch.shorten(EDGE * dilation)
        return stretch.silence(x)


class Decoder(nn.Module):
    """Codes to samples, in the dtype of its weights. Call `prepare` once they are in place."""

    tables: Tensor  # [3 * 4096, C], after prepare(): a code's row behind its way out
    bias: Tensor  # [C, 1], of the three ways out
    places: Tensor  # [12], the places of the frame whose codes each latent column is the sum of

    def __init__(self, config: SnacConfig):
        super().__init__()
        self.config = config
        width = config.decoder_width
        self.stem = nn.Conv1d(config.latent, config.latent, KERNEL, groups=config.latent)
        self.widen = nn.Conv1d(config.latent, width, 1)
        self.blocks = nn.ModuleList(
            Block(width >> i, rate, config.has_noise) for i, rate in enumerate(config.decoder_rates)
        )
        self.snake = Snake(width >> len(config.decoder_rates))
        self.tail = Conv(width >> len(config.decoder_rates), 1, KERNEL)
        need = EDGE  # positions on each side, from the samples back to the latent columns
        for rate in reversed(config.decoder_rates):
            need += sum(EDGE * dilation for dilation in DILATIONS)
            need = -(-(need + rate // 2) // rate)
        self.context = -(-(need + EDGE) // len(COLUMNS))  # frames

    @torch.no_grad()
    def prepare(self, quantizer: Quantizer) -> None:
        """Codebook and way out are linear: one row per code is left of them. In fp64, then rounded once."""
        dtype = self.stem.weight.dtype
        tables, biases = zip(*(book.folded() for book in quantizer), strict=True)
        bias = torch.stack(biases).sum(0)
        self.register_buffer("tables", torch.cat(tables).to(dtype), persistent=False)
        self.register_buffer("bias", bias[:, None].to(dtype), persistent=False)
        places = torch.tensor(COLUMNS, device=bias.device).flatten()
        self.register_buffer("places", places, persistent=False)

    def forward(self, codes: Tensor, start: Tensor, end: Tensor, seed: Tensor | None) -> Tensor:
        """Decode frames start [B] .. start + F of tapes that hold frames 0 .. end [B] -> samples [B, F *
        2048].

        codes [B, context + F + context, 7] int64. seed [B] int64 of the noise; None: no noise.
        """
        frames = codes.shape[1] - 2 * self.context
        draws = None if seed is None else self._draws(seed, start, codes.shape[1])
        stretch = Stretch(start, end, frames, self.context)
        x = self._latent(codes)  # [B, C, 4 (F + 2 context)]
        stretch.repeat(len(COLUMNS))
        x = self.stem(stretch.silence(x))
        stretch.shorten(EDGE)
        x = stretch.silence(self.widen(x))
        for block in self.blocks:
            draw = None if draws is None else draws.pop(0)
            x = block(x, stretch, draw)
        x = convolve(x, self.snake, self.tail).tanh().squeeze(1)
        stretch.shorten(EDGE)
        return x[:, stretch.before : x.shape[1] - stretch.after]

    def _latent(self, codes: Tensor) -> Tensor:
        """codes [B, F, 7] -> [B, C, 4 F]: each latent column is the sum of a code of each level."""
        level = torch.arange(len(COLUMNS[0]), device=codes.device) * CODES
        chosen = codes[:, :, self.places].unflatten(2, (len(COLUMNS), -1))  # [B, F, 4, 3]
        rows = F.embedding(chosen + level, self.tables).sum(3)  # [B, F, 4, C]
        return rows.flatten(1, 2).mT + self.bias

    def _draws(self, seed: Tensor, start: Tensor, num_frames: int) -> list[Tensor]:
        """Return the noise of each block for all frames of a launch [B, num_frames * positions per frame].

        A frame's draws depend on (seed, its place on the tape), so each window sees the same ones.
        """
        config = self.config
        if not config.has_noise:
            return [torch.zeros(0)] * len(config.decoder_rates)
        frame = start[:, None] - self.context + torch.arange(num_frames, device=start.device)  # [B, F]
        salted = (seed ^ NOISE_SALT)[:, None].expand_as(frame)
        noise = normal(salted.flatten(), frame.flatten(), config.noise_per_frame)  # [B F, draws]
        widths, rate = [], len(COLUMNS)
        for stride in config.decoder_rates:
            rate *= stride
            widths.append(rate)
        parts = noise.unflatten(0, (-1, num_frames)).split(widths, -1)
        return [part.flatten(1).to(self.stem.weight.dtype) for part in parts]


class Snac(nn.Module):
    """Decoder and encoder over the same codebooks."""

    def __init__(self, config: SnacConfig):
        super().__init__()
        self.quantizer = Quantizer(config)
        self.decoder = Decoder(config)
        self.encoder = Encoder(config)

    def prepare(self) -> None:
        """Compute what follows from the weights alone. Call once, with the weights in place."""
        self.decoder.prepare(self.quantizer)

    def encode(self, samples: Tensor) -> Tensor:
        """samples [B, N], N a multiple of a frame -> codes [B, F, 7]"""
        return self.encoder(samples, self.quantizer)
