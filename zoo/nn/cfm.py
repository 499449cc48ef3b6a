"""Conditional flow matching: the times of the solver's steps, and guidance. Time runs from 1 (noise) to 0
(data)."""

import math

import torch
from torch import Tensor

STILL = 0.04  # the share of a schedule's times with zero velocity


def sway_times(steps: int, dtype: torch.dtype) -> Tensor:
    """Return the times [steps + 1] from 1 to 0, densest near 1. Every operation rounds to dtype, as in the
    reference.

    Source: F5-TTS (arXiv 2410.06885), section 3.3, with a coefficient of 1; OpenBMB/VoxCPM,
    modules/locdit/unified_cfm.py.
    """
    even = torch.linspace(1, 0, steps + 1, dtype=dtype)
    return even + 1.0 * (torch.cos(torch.pi / 2 * even) - 1 + even)


def cosine_times(steps: int) -> list[float]:
    """Return steps + 1 times from 0 (noise) to 1, densest near 0, for solvers that run upwards.

    Source: FunAudioLLM/CosyVoice, cosyvoice/flow/flow_matching.py.
    """
    return (1 - torch.cos(torch.linspace(0, 1, steps + 1, device="cpu") * 0.5 * math.pi)).tolist()


def solver_steps(num: int, like: Tensor) -> range:
    """Return the numbers of a solver's steps. On `meta`, where memory is counted, there are at most two: those that
    follow take the same."""
    return range(min(num, 2) if like.is_meta else num)


def euler_steps(times: Tensor) -> tuple[Tensor, Tensor]:
    """times [n + 1] -> the time and the length of each Euler step, [n] each, in the dtype of times. The
    rounding is that of a solver that subtracts step after step. The first steps have length 0: the velocity
    there is taken to be zero.

    Source of the zero steps: CFG-Zero* (arXiv 2503.18886), section 4.2.
    """
    t, looks, goes = times[0], [], []
    for following in times[1:]:
        looks.append(t)
        goes.append(t - following)
        t = t - goes[-1]
    still = max(1, int(len(times) * STILL))
    return torch.stack(looks), torch.stack([dt * (k >= still) for k, dt in enumerate(goes)])


def guided(velocity: Tensor, null: Tensor, guidance: Tensor) -> Tensor:
    """Return the guided velocity [B, ...] from those with and without the condition [B, ...] and guidance [B]
    fp32.

    The unconditional velocity is first scaled to be as close as possible to the conditional one. Source:
    CFG-Zero* (arXiv 2503.18886), section 4.1.
    """
    flat, flat_null = velocity.flatten(1), null.flatten(1)
    scale = (flat * flat_null).sum(1) / (flat_null.square().sum(1) + 1e-8)
    shape = (-1, *(1,) * (velocity.dim() - 1))
    base = null * scale.view(shape)
    return base + (guidance.view(shape) * (velocity - base)).to(velocity.dtype)


def sinusoid(t: Tensor, width: int) -> Tensor:
    """t [...] -> [..., width], sines then cosines of 1000 t at falling frequencies. Computed in the dtype of
    t; bf16 gives very different values.

    Source: OpenBMB/VoxCPM, modules/locdit/local_dit_v2.py, SinusoidalPosEmb.
    """
    half = width // 2
    frequency = torch.exp(
        torch.arange(half, dtype=t.dtype, device=t.device) * -(math.log(10000) / (half - 1))
    )
    angle = 1000 * t[..., None] * frequency
    return torch.cat((angle.sin(), angle.cos()), -1)
