"""Rotary position embedding over halves (the GPT-NeoX pairing: value i rotates with value i + dim/2)."""

import torch
from torch import Tensor


def rope_table(positions: Tensor, dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """positions [...] -> cos, sin, each [..., dim]. Angles are computed in fp32 and rounded to `dtype` at the
    end."""
    # [dim/2]
    frequency = theta ** -(torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim)
    angle = positions.float()[..., None] * frequency
    angle = torch.cat((angle, angle), -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..., dim] by cos and sin, which broadcast against it."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin
