"""Conditional flow matching: when to look, and what to make of two velocities. Time runs from 1 (noise) to 0
(data)."""

import math

import torch
from torch import Tensor

STILL = 0.04  # the part of a schedule's times at which nothing moves


def sway_times(steps: int, dtype: torch.dtype) -> Tensor:
    """-> [steps + 1], from 1 to 0 and densest near 1. Rounded to dtype at every operation, as the reference
    does it.

    Source: F5-TTS (arXiv 2410.06885), section 3.3, with a coefficient of 1; OpenBMB/VoxCPM,
    modules/locdit/unified_cfm.py.
    """
    even = torch.linspace(1, 0, steps + 1, dtype=dtype)
    return even + 1.0 * (torch.cos(torch.pi / 2 * even) - 1 + even)


def euler_steps(times: Tensor) -> tuple[Tensor, Tensor]:
    """times [n + 1] -> where each Euler step looks and how far it goes, [n] each, in the dtype of times and
    with the rounding of a solver that subtracts its way down. The first steps go nowhere: there the velocity
    is taken to be zero.

    Source of the still steps: CFG-Zero* (arXiv 2503.18886), section 4.2.
    """
    t, looks, goes = times[0], [], []
    for following in times[1:]:
        looks.append(t)
        goes.append(t - following)
        t = t - goes[-1]
    still = max(1, int(len(times) * STILL))
    return torch.stack(looks), torch.stack([dt * (k >= still) for k, dt in enumerate(goes)])


def guided(velocity: Tensor, null: Tensor, guidance: Tensor) -> Tensor:
    """Velocities with and without the condition [B, ...], guidance [B] fp32 -> what to follow [B, ...].

    The unconditional one is first scaled to lie as close as it can to the other. Source: CFG-Zero* (arXiv
    2503.18886), section 4.1.
    """
    flat, flat_null = velocity.flatten(1), null.flatten(1)
    scale = (flat * flat_null).sum(1) / (flat_null.square().sum(1) + 1e-8)
    shape = (-1, *(1,) * (velocity.dim() - 1))
    base = null * scale.view(shape)
    return base + (guidance.view(shape) * (velocity - base)).to(velocity.dtype)


def sinusoid(t: Tensor, width: int) -> Tensor:
    """t [...] -> [..., width], sines then cosines of 1000 t at falling frequencies. In the dtype of t: bf16
    gives quite other values.

    Source: OpenBMB/VoxCPM, modules/locdit/local_dit_v2.py, SinusoidalPosEmb.
    """
    half = width // 2
    frequency = torch.exp(
        torch.arange(half, dtype=t.dtype, device=t.device) * -(math.log(10000) / (half - 1))
    )
    angle = 1000 * t[..., None] * frequency
    return torch.cat((angle.sin(), angle.cos()), -1)
