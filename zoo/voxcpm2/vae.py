"""The AudioVAE, always in fp32. The decoder turns latent frames (40 ms) into 48 kHz samples; its output does
not depend on how the frames are split into calls. The encoder turns reference audio into latent frames.

    latents [B, D, F] ─ conv ─ x8 ─ x6 ─ x5 ─ x2 ─ x2 ─ x2 ─ conv, tanh ─ samples [B, 1920 F]
                        2048  1024  512  256  128   64   32  channels

Every layer is causal. The decoder's state for a stream, the ends of its layers' inputs, is one row of
`state_size` values, zeros for a new stream. Source: OpenBMB/VoxCPM,
modules/audiovae/audio_vae_v2.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.nn.conv import CausalConv1d, CodecState, StateLayout, reach, to_rows
from zoo.nn.residual import Identity, SnakeConv1d, UpBlock, convolve_snake, depthwise_unit
from zoo.nn.snake import Snake
from zoo.voxcpm2.config import VaeConfig

DILATIONS = (1, 3, 9)  # of the residual units in a block
KERNEL = 7  # of all convolutions except resampling and pointwise ones
LATENT_KERNEL = 3  # of the encoder's last convolution


class Residual(nn.Module):
    """A residual unit: a depthwise convolution, then a pointwise one."""

    def __init__(self, channels: int, dilation: int):
        super().__init__()
        self.snake1 = Snake(channels)
        self.conv1 = SnakeConv1d(channels, channels, KERNEL, dilation, groups=channels)
        self.snake2 = Snake(channels)
        self.conv2 = SnakeConv1d(channels, channels, 1)

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        return depthwise_unit(x, self.snake1, self.conv1, self.snake2, self.conv2, state)


class Rate(nn.Module):
    """The decoder's condition on its output rate: scale and bias per channel, from tables by rate class."""

    def __init__(self, classes: int, which: int, channels: int):
        super().__init__()
        self.which = which
        self.scale = nn.Embedding(classes, channels)
        self.bias = nn.Embedding(classes, channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias.weight[self.which][:, None], x, self.scale.weight[self.which][:, None])


class Block(UpBlock):
    """A decoder block: [B, C, N] -> [B, C / 2, stride N]."""

    def __init__(self, channels: int, stride: int, config: VaeConfig):
        units = (Residual(channels // 2, dilation) for dilation in DILATIONS)
        super().__init__(Snake(channels), channels, stride, units)
        self.rate = (
            Rate(len(config.boundaries) + 1, config.rate_class, channels)
            if config.boundaries
            else nn.Identity()
        )

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        return super().forward(self.rate(x), state)


class Decoder(nn.Module):
    """Decodes latents to samples, in the dtype of its weights."""

    def __init__(self, config: VaeConfig):
        super().__init__()
        width, last = config.decoder_width, config.decoder_width >> len(config.decoder_rates)
        self.conv = CausalConv1d(config.latent, config.latent, KERNEL, groups=config.latent)
        self.widen = SnakeConv1d(config.latent, width, 1)
        self.blocks = nn.ModuleList(
            Block(width >> i, stride, config) for i, stride in enumerate(config.decoder_rates)
        )
        self.snake = Snake(last)
        self.tail = SnakeConv1d(last, 1, KERNEL)
        self.layout = StateLayout(self)

    @property
    def state_size(self) -> int:
        """Number of values that a stream carries from call to call."""
        return self.layout.size

    @property
    def reach(self) -> int:
        """Number of earlier latent frames that the first sample of a frame depends on."""
        return reach(self.modules())

    @property
    def dtype(self) -> torch.dtype:
        return self.tail.weight.dtype

    def to_rows(self, dtype: torch.dtype) -> None:
        """Compute the convolutions of the blocks and the one before over rows in `dtype`. Snakes, biases, the
        last convolution, a stream's state and all layers before stay in fp32."""
        to_rows((self.widen, self.blocks), dtype)

    def forward(self, latents: Tensor, state: CodecState) -> Tensor:
        """Decode latents [B, D, N], N a multiple of the pass's frames, to samples in [-1, 1].

        state: of these streams, zeros for a new one, and how many frames are valid; ignore the samples of the
        others.
        """
        x = convolve_snake(self.conv(latents, state), Identity(), self.widen, state)
        for block in self.blocks:
            x = block(x, state)
        x = convolve_snake(x, self.snake, self.tail, state)  # [B, 1, N]
        return x.squeeze(1).tanh()

    def prime(self, latents: Tensor) -> Tensor:
        """Return the rows [B, state_size] of streams that have decoded latents [B, D, F].

        Only the last `reach` frames are decoded, because the state depends on no earlier ones.
        """
        latents = latents[:, :, -self.reach :]
        batch, _, frames = latents.shape
        count = torch.full((batch,), frames, device=latents.device)
        state = CodecState(self.layout, latents.new_zeros(batch, self.state_size), frames, count)
        self(latents, state)
        return state.next()


class EncoderConv(nn.Module):
    """A causal convolution over its whole input at once: [B, C, N] -> [B, Cout, N / stride].

    A strided one has a kernel of two strides.
    """

    def __init__(
        self,
        channels: int,
        out_channels: int,
        kernel: int,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
        more: int = 0,
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_channels, channels // groups, kernel))
        self.bias = nn.Parameter(torch.empty(out_channels))
        self.stride, self.dilation, self.groups = stride, dilation, groups
        self.pad = (kernel - 1) * dilation + 1 - stride + more

    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(
            F.pad(x, (self.pad, 0)), self.weight, self.bias, self.stride, 0, self.dilation, self.groups
        )


class EncoderResidual(nn.Module):
    def __init__(self, channels: int, dilation: int):
        super().__init__()
        self.snake1 = Snake(channels)
        self.conv1 = EncoderConv(channels, channels, KERNEL, dilation=dilation, groups=channels)
        self.snake2 = Snake(channels)
        self.conv2 = EncoderConv(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.snake2(self.conv1(self.snake1(x))))


class EncoderBlock(nn.Module):
    """An encoder block: [B, C, N] -> [B, 2 C, N / stride]."""

    def __init__(self, channels: int, stride: int, pads_odd: bool):
        super().__init__()
        self.residuals = nn.Sequential(*(EncoderResidual(channels, dilation) for dilation in DILATIONS))
        self.snake = Snake(channels)
        self.down = EncoderConv(
            channels, 2 * channels, 2 * stride, stride, more=stride % 2 if pads_odd else 0
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.snake(self.residuals(x)))


class Encoder(nn.Module):
    """Encodes samples as latents, in the dtype of its weights. The latent is the mean; nothing is sampled."""

    def __init__(self, config: VaeConfig):
        super().__init__()
        width, last = config.encoder_width, config.encoder_width << len(config.encoder_rates)
        self.conv = EncoderConv(1, width, KERNEL)
        self.blocks = nn.Sequential(
            *(EncoderBlock(width << i, rate, config.pads_odd) for i, rate in enumerate(config.encoder_rates))
        )
        self.mean = EncoderConv(last, config.latent, LATENT_KERNEL)
        self.log_variance = EncoderConv(last, config.latent, LATENT_KERNEL)  # published but unused

    def forward(self, samples: Tensor) -> Tensor:
        """Return latents [B, D, N / hop] of samples [B, N], where N is a multiple of hop."""
        return self.mean(self.blocks(self.conv(samples[:, None])))


class Vae(nn.Module):
    """The networks in audiovae.pth, with weight norm folded into the weights."""

    def __init__(self, config: VaeConfig):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
