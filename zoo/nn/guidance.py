"""Classifier-free guidance: the two lanes of a slot become one."""

from torch import Tensor


def merge(scores: Tensor, weight: Tensor) -> Tensor:
    """weight * cond + (1 - weight) * null: scores [2 B, ...] in blocks [cond, null], before anything is
    masked out of them; weight [B], or [B, K] for scores [2 B, K, ...] -> [B, ...]. A weight of 1 is cond to
    the last bit: a stream that is not guided has that.

    Source: classifier-free guidance (arXiv 2207.12598), section 3.2, with weight = 1 + w.
    """
    cond, null = scores.unflatten(0, (2, -1)).unbind(0)
    weight = weight.view(*weight.shape, *(1,) * (cond.dim() - weight.dim()))
    return weight * cond + (1 - weight) * null
