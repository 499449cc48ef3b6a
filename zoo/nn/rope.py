"""Rotary position embedding."""

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
    """Rotate x [..., dim] by cos and sin, which broadcast against it. Value i rotates with value i + dim / 2
    (the pairing of GPT-NeoX)."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Do the same as `rotate`, but rotate value 2i with value 2i + 1."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return x * cos + torch.stack((-odd, even), -1).flatten(-2) * sin


def rotate_wide(x: Tensor, cos: Tensor, sin: Tensor, is_paired: bool = False) -> Tensor:
    """Rotate x in fp32, or in fp64 if that is its dtype, and round to its dtype. is_paired: `rotate_pairs`."""
    wide = x.float() if x.element_size() < 4 else x
    return (rotate_pairs if is_paired else rotate)(wide, cos, sin).to(x.dtype)
