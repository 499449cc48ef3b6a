"""Repetition-aware sampling: a nucleus draw, and where the code was just said, one from all codes but it.

Source: VALL-E 2 (arXiv 2406.05370), section 3.3; FunAudioLLM/CosyVoice, cosyvoice/utils/common.py,
ras_sampling (since 2026-02 the repeated code
cannot be drawn again).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from zoo.nn import kernels
from zoo.nn.operator import operator


def nucleus(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """logits [B, V] with all but the likeliest at -inf: the fewest that hold top_p of all probability [B],
    at most top_k [B] (0: any number).
    Unlike `zoo.nn.sampling.keep_likely` the share is of all tokens, not of the top_k."""
    if logits.device.type == "cpu":
        return torch.ops.zoo.nucleus.default(logits, top_k, top_p)
    return _nucleus(logits, top_k, top_p)


def _nucleus(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    width = logits.shape[-1]
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    mass = ranked.softmax(-1)
    before = mass.cumsum(-1) - mass
    rank = torch.arange(width, device=logits.device)
    top_k = torch.where(top_k > 0, top_k, width)[:, None]
    is_kept = ((before < top_p[:, None]) | (top_p[:, None] >= 1)) & (rank < top_k)
    is_kept = is_kept | (rank == 0)
    return logits.masked_fill(~torch.zeros_like(is_kept).scatter(1, order, is_kept), -torch.inf)


@operator("nucleus")
def nucleus_on_cpu(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Without a sort."""
    is_known = logits.dtype == torch.float32 and kernels.know(logits)
    return (kernels.keep_nucleus if is_known else _nucleus)(logits, top_k, top_p)


def repetition_aware(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    is_repeated: Callable[[Tensor], Tensor],
    noise: Tensor,
) -> Tensor:
    """logits [B, V] fp32; noise [B, 2, V], Gumbel, of the two draws -> [B]. At temperature 0 both draws take
    the likeliest.

    is_repeated: ids [B] -> whether each was said so lately, and so often, that it is drawn again [B] bool.
    """
    hot = (temperature > 0)[:, None]
    scaled = logits / torch.where(hot, temperature[:, None], 1.0)
    first = torch.where(hot, nucleus(scaled, top_k, top_p) + noise[:, 0], logits).argmax(-1)
    others = scaled.masked_fill(
        torch.arange(logits.shape[1], device=logits.device) == first[:, None], -torch.inf
    )
    second = torch.where(hot, others + noise[:, 1], others).argmax(-1)
    return torch.where(is_repeated(first), second, first)
