"""How an id is drawn from logits, with settings for each row.

    Chatterbox   penalty, temperature, min-p, top-p
    Turbo        temperature, top-k, top-p, penalty: it acts on logits that are already scaled and filtered

Source: chatterbox-tts 0.1.7, models/t3/t3.py, inference and inference_turbo.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.nn.sampling import GREEDY, draw, keep_likely, penalise


def draw_after_penalty(
    logits: Tensor,
    seen: Tensor,
    penalty: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    top_p: Tensor,
    noise: Tensor,
) -> Tensor:
    """Return ids [B] of logits [B, V] in fp32. seen [B, V]: the ids so far; noise [B, V]: Gumbel noise."""
    logits = penalise(logits, seen, penalty)
    heat = torch.where(temperature > GREEDY, temperature, 1.0)[:, None]
    below = (logits - logits.amax(1, keepdim=True)) / heat  # logarithm of the share of the likeliest one
    logits = logits.masked_fill(below < min_p.log()[:, None], -torch.inf)
    return draw(logits, temperature, torch.zeros_like(temperature, dtype=torch.int64), top_p, noise)


def draw_before_penalty(
    logits: Tensor,
    seen: Tensor,
    penalty: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    noise: Tensor,
) -> Tensor:
    """Return ids [B] of logits [B, V] in fp32, as above. A greedy draw ignores top_k and top_p."""
    hot = (temperature > GREEDY)[:, None]
    likely = keep_likely(logits / torch.where(hot, temperature[:, None], 1.0), top_k, top_p)
    return (penalise(torch.where(hot, likely, logits), seen, penalty) + torch.where(hot, noise, 0.0)).argmax(
        1
    )
