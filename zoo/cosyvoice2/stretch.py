"""A stretch of a stream of tokens, and what attention keeps of the stream before it.

    cache     | prompt, kept for good | the latest tokens, a ring |         `capacity` tokens; frames are two
    a token
    stream    | prompt ...            | ... dropped ... | past    | stretch: chunks of GRID tokens |

A position sees its whole chunk, the prompt, and as many whole chunks of the past as the ring holds. What it
sees follows from its place in
the stream alone, so a stream cut into stretches on the grid gives what it gives at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.cosyvoice2.strategy import GRID


@dataclass
class Stretch:
    """Tokens start .. start + count of each row's stream, in `tokens` places. All but `slots` and sizes
    count tokens."""

    slots: Tensor  # [B], rows of the cache
    start: Tensor  # [B], a multiple of GRID
    count: Tensor  # [B]
    num_kept: Tensor  # [B], of the prompt: never dropped; a multiple of GRID
    tokens: int
    capacity: int  # of the cache; a multiple of GRID
    chunk: int = GRID


def may_follow_values(like: Tensor) -> bool:
    """Whether shapes may follow from values here, so that nothing is computed for padding: in plain calls on
    a CPU, where reading a value costs nothing."""
    return like.device.type == "cpu" and not torch.compiler.is_compiling()


class Seen:
    """Who sees whom in a stretch, at `rate` positions a token.

    mask [B, Q, held + Q] of the cache's positions, then the stretch's own; distance [B, Q, held + Q], how far
    back each lies, with what was dropped left out; index [B, Q], where the cache takes each position, and its
    last row where it does not. held: the cache's first positions, those of all that hold something; all of
    them where shapes do not follow from values.
    """

    def __init__(self, stretch: Stretch, rate: int):
        device = stretch.start.device
        grid, capacity = stretch.chunk * rate, stretch.capacity * rate
        self.held = capacity
        if may_follow_values(stretch.start):
            self.held = min(capacity, int(stretch.start.max()) * rate)
        self.slots, self.grid = stretch.slots, grid
        self.max_distance = min(capacity + grid, self.held + stretch.tokens * rate)
        kept, start, count = (
            value[:, None] * rate for value in (stretch.num_kept, stretch.start, stretch.count)
        )
        ring = capacity - kept  # [B, 1]

        place = torch.arange(self.held, device=device)
        latest = start - kept - 1  # the last one in the ring, counted from the prompt's end
        in_ring = latest - (latest - place + kept) % ring  # below 0 where the ring's place is empty
        held = torch.where(
            place < kept, place, kept + in_ring
        )  # [B, held], the position that each place holds
        is_held = torch.where(place < kept, place < start, in_ring >= 0)

        own = torch.arange(stretch.tokens * rate, device=device)
        query = start + own  # [B, Q]
        key = torch.cat((held, query), 1)[:, None]  # [B, 1, K]
        is_there = torch.cat((is_held, own < count), 1)[:, None]
        chunks_back = query[:, :, None] // grid - key // grid  # [B, Q, K]
        is_kept = key < kept[:, :, None]
        mask = is_there & (chunks_back >= 0) & (is_kept | (chunks_back <= (ring // grid)[:, :, None]))
        itself = torch.arange(self.held, self.held + len(own), device=device)
        self.mask = mask | (
            torch.arange(key.shape[2], device=device) == itself[:, None]
        )  # padding sees itself: a row of nothing is NaN

        dropped = ((query - kept) // grid * grid - ring).clamp(min=0)[
            :, :, None
        ]  # before the ring's first chunk
        distance = query[:, :, None] - key - torch.where(is_kept, dropped, 0)
        self.distance = distance.clamp(1 - grid, self.max_distance)

        is_new = (own < count) & ((query >= start + count - ring) | (query < kept))
        place = torch.where(query < kept, query, kept + (query - kept) % ring)
        self.index = torch.where(is_new, place, capacity)

    def exchange(self, cache: Tensor, new: Tensor) -> Tensor:
        """cache [S, capacity + 1, ...], new [B, Q, ...] -> the cache's positions and the new ones [B, held +
        Q, ...]; the new ones take their places in the cache."""
        whole = torch.cat((cache[self.slots, : self.held], new), 1)
        cache[self.slots[:, None], self.index] = new
        return whole
