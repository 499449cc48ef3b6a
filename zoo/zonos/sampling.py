"""From logits to codes, in the reference's order: penalty, temperature, unified sampler, top-p, top-k, min-p, draw.

Source: Zyphra/Zonos at bc40d98, sampling.py.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from zoo.nn.sampling import GREEDY, draw, drop_unlikely, keep_likely

LEAST = math.log(1e-20)  # of a code's log probability, for the unified sampler


class Settings(NamedTuple):
    """How to sample each row, all [N]."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    linear: Tensor
    conf: Tensor
    quad: Tensor


def choose(logits: Tensor, how: Settings, noise: Tensor) -> Tensor:
    """Draw a code for each row: logits and Gumbel noise [N, V] float32 -> [N]."""
    logits, temperature, noise = weigh(logits, how, noise)
    return draw(logits, temperature, how.top_k, torch.ones_like(how.top_p), noise)


def weigh(logits: Tensor, how: Settings, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits [N, V], temperature [N] and noise [N, V] for a draw with top-k alone. The noise is -inf for codes
    that top-p and min-p drop. `draw` would take top-p of what top-k leaves, and the reference takes it of all codes."""
    logits, temperature = unify(logits, how)
    scaled = logits / temperature.clamp(min=GREEDY)[:, None]
    likely = keep_likely(scaled, torch.zeros_like(how.top_k), how.top_p)
    noise = noise.masked_fill(likely == -torch.inf, -torch.inf)
    return logits, temperature, drop_unlikely(noise, logits, temperature, how.min_p)


def unify(logits: Tensor, how: Settings) -> tuple[Tensor, Tensor]:
    """Return the logits [N, V] and the temperature [N] after the unified sampler, in rows whose `linear` is above 0.

    It replaces a log probability l by l (linear + conf H) - quad l², where H is the row's entropy. Codes that may
    not follow stay at -inf; the reference would make them the likeliest ones if quad is negative.
    """
    temperature, linear, conf, quad = (
        value[:, None] for value in (how.temperature, how.linear, how.conf, how.quad)
    )
    is_used = (linear > 0) & (temperature > GREEDY)
    likely = (logits / temperature.clamp(min=GREEDY)).log_softmax(-1)
    least = likely.clamp(min=LEAST)
    entropy = -(likely.exp() * least).sum(-1, keepdim=True)
    unified = least * (linear + conf * entropy) - quad * least.square()
    unified = torch.where(is_used & (logits > -torch.inf), unified, logits)
    return unified, torch.where(is_used, 1.0, temperature)[:, 0]


def penalise_recent(logits: Tensor, recent: tuple[Tensor, ...], penalty: Tensor) -> Tensor:
    """Make the codes of recent columns less likely, once for each column that has them.

    logits [B, K, V], each column [B, K], penalty [B]. Ids outside the head's vocabulary are ignored.
    """
    ids = torch.arange(logits.shape[-1], device=logits.device)
    factor = torch.ones_like(logits)
    for column in recent:
        factor = torch.where(column[..., None] == ids, factor * penalty[:, None, None], factor)
    return torch.where(logits <= 0, logits * factor, logits / factor)
