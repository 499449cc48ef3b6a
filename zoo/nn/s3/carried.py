"""HiFT over a stream's windows: its past, the phases of its source and the samples that were given out are rows
of a state."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.nn.eager import may_follow_values
from zoo.nn.s3.hift import NO_LIMIT, Place, Vocoder
from zoo.nn.s3.sizes import VocoderSizes
from zoo.nn.sampling import normal


class Carried(Protocol):
    """The rows of all slots: the vocoder's past [S+1, layout.size], phases in turns [S+1, H] fp64, and the
    samples given out so far [S+1]."""

    vocoder: Tensor
    phase: Tensor
    num_heard: Tensor


def heard(
    vocoder: Vocoder,
    state: Carried,
    slots: Tensor,
    mel: Tensor,
    start: Tensor,
    stop: Tensor,
    is_last: Tensor,
    noise: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Return samples [B, F * mel_samples + lag] of mel frames start .. stop [B], and how many are valid [B].

    mel [B, F, MELS]; noise: of frames [B, W] of the speech, [B, W, mel_samples, H]. The samples end before the
    last frame by the vocoder's lag. At the end of the speech silent frames follow until all samples are out.
    """
    plan, before = vocoder.plan, state.num_heard[slots]
    size = plan.mel_samples
    ends = torch.maximum(before, size * stop - torch.where(is_last, 0, plan.lag))
    count = stop - start + torch.where(is_last & (ends > before), plan.flush, 0)
    most, frames = mel.shape[1] * size + plan.lag, mel.shape[1] + plan.flush
    if may_follow_values(count):
        frames = max(1, int(count.max()))
    mel = F.pad(mel.to(state.vocoder.dtype), (0, 0, 0, plan.flush))[:, :frames]

    limit = torch.where(is_last, stop, NO_LIMIT)
    around = noise(Place(start, limit, frames).at(1, plan.f0_lag + 1, frames + 1))
    rows, phase = state.vocoder[slots], state.phase[slots]
    samples, phases, rows = vocoder(mel, start, limit, count, rows, phase, around)
    state.vocoder[slots] = rows
    state.phase[slots] = phases[torch.arange(len(slots), device=slots.device), count]
    state.num_heard[slots] = ends
    at = (before - size * start + plan.lag)[:, None] + torch.arange(most, device=slots.device)
    return samples.gather(1, at.clamp(max=samples.shape[1] - 1)).float(), ends - before


def source_noise(sizes: VocoderSizes, seed: Tensor, step: int, frame: Tensor) -> Tensor:
    """Return the noise of the vocoder's source [B, W, mel_samples, H] for mel frames of the speech [B, W].

    seed [B]; step: that of frame 0, apart from other draws. The noise of a frame does not depend on the window.
    """
    shape = sizes.mel_samples, sizes.harmonics
    seeds = seed[:, None].expand_as(frame)
    noise = normal(seeds.flatten(), step + frame.clamp(min=0).flatten(), math.prod(shape))
    return noise.view(*frame.shape, *shape)
