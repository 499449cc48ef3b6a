"""Repetition-aware sampling: a code is sampled from the nucleus, and if it is a repetition, from all other
codes.

Source: VALL-E 2 (arXiv 2406.05370), section 3.3; FunAudioLLM/CosyVoice, cosyvoice/utils/common.py,
ras_sampling (since 2026-02 it excludes the repeated code from the second draw).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from zoo import kernels
from zoo.kernels.operator import operator
from zoo.nn.sampling import GREEDY


def nucleus(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return logits [B, V] with all but the nucleus at -inf.

    The nucleus is the fewest tokens whose probabilities reach top_p [B], at most top_k [B] of them (0: no
    limit). Unlike in `zoo.nn.sampling.keep_likely`, top_p is a share of all tokens and not of the top_k.
    """
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
    """Compute `nucleus` without a sort if the kernels support the logits."""
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
    """Sample ids [B] from logits [B, V] in fp32. noise [B, 2, V]: Gumbel noise of the two draws.

    At a temperature up to GREEDY both draws take the likeliest id. is_repeated maps ids [B] to bools [B]:
    whether each occurred so often lately that another one must be sampled.
    """
    hot = (temperature > GREEDY)[:, None]
    scaled = logits / torch.where(hot, temperature[:, None], 1.0)
    first = torch.where(hot, nucleus(scaled, top_k, top_p) + noise[:, 0], logits).argmax(-1)
    others = scaled.masked_fill(
        torch.arange(logits.shape[1], device=logits.device) == first[:, None], -torch.inf
    )
    second = torch.where(hot, others + noise[:, 1], others).argmax(-1)
    return torch.where(is_repeated(first), second, first)
