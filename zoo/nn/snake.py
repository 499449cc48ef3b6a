"""Snake, the activation of codecs: x + sin^2(f x) g, where each channel has its own f and g.

Source: Ziyin et al. 2020 (arXiv 2006.08195).
"""

import torch
from torch import Tensor, nn

from zoo import kernels
from zoo.kernels.operator import operator


class Snake(nn.Module):
    """x + sin^2(alpha x) / alpha; zero stays zero. x [B, C, N]"""

    def __init__(self, channels: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(1, channels, 1))

    @property
    def wave(self) -> tuple[Tensor, Tensor]:
        """Return frequency and gain [1, C, 1]."""
        return self.alpha, 1 / (self.alpha + 1e-9)

    def forward(self, x: Tensor) -> Tensor:
        return snake(x, *self.wave)


class SnakeBeta(nn.Module):
    """x + sin^2(x e^alpha) / e^beta: BigVGAN's variant, with two parameters."""

    frequency: Tensor  # [C, 1], after prepare()
    gain: Tensor  # [C, 1]

    def __init__(self, channels: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(channels))
        self.beta = nn.Parameter(torch.empty(channels))

    @torch.no_grad()
    def prepare(self) -> None:
        """Precompute frequency and gain. Call this once, after the weights are loaded."""
        self.register_buffer("frequency", self.alpha.exp()[:, None], persistent=False)
        self.register_buffer("gain", (1 / (self.beta.exp() + 1e-9))[:, None], persistent=False)

    @property
    def wave(self) -> tuple[Tensor, Tensor]:
        """Return frequency and gain [C, 1]."""
        return self.frequency, self.gain

    def forward(self, x: Tensor) -> Tensor:
        return snake(x, *self.wave)


def snake(x: Tensor, frequency: Tensor, gain: Tensor) -> Tensor:
    """x [B, C, N], frequency and gain [C, 1] or [1, C, 1] -> [B, C, N]"""
    if x.device.type == "cpu":
        return torch.ops.zoo.snake.default(x, frequency, gain)
    return _snake(x, frequency, gain)


def _snake(x: Tensor, frequency: Tensor, gain: Tensor) -> Tensor:
    return (x * frequency).sin_().square_().mul_(gain).add_(x)  # in place: large allocations are expensive


@operator("snake")
def snake_on_cpu(x: Tensor, frequency: Tensor, gain: Tensor) -> Tensor:
    return (kernels.snake if x.dtype == torch.float32 and kernels.know(x) else _snake)(x, frequency, gain)
