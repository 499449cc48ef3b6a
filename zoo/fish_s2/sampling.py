"""How this model draws: its own order of top-p, top-k and temperature, and a second draw where the first
repeats what was just said.

Source: facts of fishaudio/fish-speech, models/text2semantic/inference.py (logits_to_probs,
decode_one_token_ar).
"""

from __future__ import annotations

import torch
from torch import Tensor

RAS_WINDOW = 10  # semantic codes that a draw may not repeat
RAS_TEMPERATURE, RAS_TOP_P = 1.0, 0.9  # of the draw that takes its place


def keep_likely(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """logits [B, V], the rest at -inf: by rank less than top_k (0: all), and at most top_p of probability
    before the temperature.

    The entry that crosses top_p goes too; the likeliest one always stays.
    """
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    mass = ranked.softmax(-1).cumsum(-1)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    beyond_p = (mass > top_p[:, None]) & (top_p[:, None] < 1)  # a sum in fp32 can pass 1
    beyond_k = (rank >= top_k[:, None]) & (top_k[:, None] > 0)
    dropped = (beyond_p | beyond_k) & (rank > 0)
    return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -torch.inf)


@torch.compiler.nested_compile_region
def draw(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, noise: Tensor) -> Tensor:
    """One token per row: logits and Gumbel noise [B, V] float32 -> [B]. Temperature 0 takes the largest."""
    hot = temperature > 0
    scaled = keep_likely(logits, top_k, top_p) / torch.where(hot, temperature, 1.0)[:, None]
    return torch.where(hot[:, None], scaled + noise, logits).argmax(-1)


def draw_semantic(
    logits: Tensor, recent: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, noise: Tensor
) -> Tensor:
    """One token per row: logits [B, V] float32, noise [B, 2, V] -> [B]. A code that is among the `recent`
    ones [B, RAS_WINDOW] gives way to a second draw, whatever that is; the end of speech is in no window."""
    token = draw(logits, temperature, top_k, top_p, noise[:, 0])
    temperature = torch.where(temperature > 0, RAS_TEMPERATURE, 0.0)
    again = draw(logits, temperature, top_k, torch.full_like(top_p, RAS_TOP_P), noise[:, 1])
    return torch.where((recent == token[:, None]).any(-1), again, token)


def remember(recent: Tensor, token: Tensor, is_kept: Tensor) -> Tensor:
    """The window for the next draw: the latest token joins it where is_kept [B], and the oldest leaves."""
    moved = torch.cat((recent[:, 1:], token[:, None]), 1)
    return torch.where(is_kept[:, None], moved, recent)
