"""Classifier-free guidance: merge the two lanes of a slot."""

from torch import Tensor


def merge(scores: Tensor, weight: Tensor) -> Tensor:
    """Return weight * cond + (1 - weight) * null [B, ...]. scores [2 B, ...] are blocks [cond, null] before
    any masking; weight [B], or [B, K] for scores [2 B, K, ...]. A weight of 1, which streams without guidance
    have, gives exactly cond.

    Source: classifier-free guidance (arXiv 2207.12598), section 3.2, with weight = 1 + w.
    """
    cond, null = scores.unflatten(0, (2, -1)).unbind(0)
    weight = weight.view(*weight.shape, *(1,) * (cond.dim() - weight.dim()))
    return weight * cond + (1 - weight) * null
