"""Sampling in this model's own order (top-p, top-k, temperature), and a second draw if the first one repeats
a recent code.

Source: facts of fishaudio/fish-speech, models/text2semantic/inference.py (logits_to_probs,
decode_one_token_ar).
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo import kernels
from zoo.kernels.operator import operator
from zoo.nn.sampling import GREEDY

# RAS: repetition-aware sampling
RAS_WINDOW = 10  # latest semantic codes; a draw that repeats one is replaced
RAS_TEMPERATURE, RAS_TOP_P = 1.0, 0.9  # for the second draw


def keep_likely(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return logits [B, V] with all unlikely entries at -inf.

    An entry stays if its rank is below top_k (0 keeps all) and the probability up to it, before the
    temperature, is at most top_p. The entry that crosses top_p is dropped too; the likeliest one always
    stays. Among equal entries, a lower index ranks higher.
    """
    if logits.device.type == "cpu":
        return torch.ops.zoo.keep_likely_before_temperature.default(logits, top_k, top_p)
    return _keep_likely(logits, top_k, top_p, logits.shape[1])


@operator("keep_likely_before_temperature")
def keep_likely_on_cpu(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the same as `keep_likely`. It ranks only as many entries as top_k needs; a full sort of eight
    rows of 4,096 takes 4.5 ms."""
    if kernels.know(logits):
        return kernels.keep_likely_before_temperature(logits, top_k, top_p)
    has_limit = bool((top_k > 0).all())
    num_ranked = min(int(top_k.max()), logits.shape[1]) if has_limit else logits.shape[1]
    return _keep_likely(logits, top_k, top_p, num_ranked)


def _keep_likely(logits: Tensor, top_k: Tensor, top_p: Tensor, num_ranked: int) -> Tensor:
    """num_ranked: how many entries to rank; at least as many as any row keeps."""
    ranked = logits.topk(num_ranked, -1).values
    largest = ranked[:, :1]
    # torch.logsumexp, written out: its GPU lowering tests whether there are any rows, which a graph for any B
    # cannot do.
    total = (logits - largest).exp().sum(-1, keepdim=True).log() + largest
    mass = (ranked - total).exp().cumsum(-1)
    within_p = (mass <= top_p[:, None]) | (top_p[:, None] >= 1)  # a sum in fp32 can exceed 1
    within_k = (torch.arange(num_ranked, device=logits.device) < top_k[:, None]) | (top_k[:, None] == 0)
    num_kept = (within_p & within_k).sum(-1, keepdim=True).clamp(min=1)  # [B, 1]
    edge = ranked.gather(-1, num_kept - 1)
    above, equal = logits > edge, logits == edge
    is_kept = above | (equal & (equal.cumsum(-1) <= num_kept - above.sum(-1, keepdim=True)))
    return logits.masked_fill(~is_kept, -torch.inf)


@torch.compiler.nested_compile_region
def draw(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, noise: Tensor) -> Tensor:
    """Draw one token per row: logits and Gumbel noise [B, V] float32 -> [B]. A temperature up to
    GREEDY takes the likeliest."""
    hot = temperature > GREEDY
    scaled = keep_likely(logits, top_k, top_p) / torch.where(hot, temperature, 1.0)[:, None]
    return torch.where(hot[:, None], scaled + noise, logits).argmax(-1)


def draw_semantic(
    logits: Tensor, recent: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, noise: Tensor
) -> Tensor:
    """Draw one token per row: logits [B, V] float32, noise [B, 2, V] -> [B]. If it is among the `recent`
    codes [B, RAS_WINDOW], a second draw replaces it, even if that repeats a code too. The end of speech is
    never recent."""
    token = draw(logits, temperature, top_k, top_p, noise[:, 0])
    temperature = torch.where(temperature > GREEDY, RAS_TEMPERATURE, 0.0)
    again = draw(logits, temperature, top_k, torch.full_like(top_p, RAS_TOP_P), noise[:, 1])
    return torch.where((recent == token[:, None]).any(-1), again, token)


def remember(recent: Tensor, token: Tensor, is_kept: Tensor) -> Tensor:
    """Return the window for the next draw. In rows with is_kept [B] the latest token replaces the oldest
    one."""
    moved = torch.cat((recent[:, 1:], token[:, None]), 1)
    return torch.where(is_kept[:, None], moved, recent)
