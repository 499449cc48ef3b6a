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
from torch.nn import functional as F

from zoo.cosyvoice2.strategy import GRID
from zoo.nn import kernels
from zoo.nn.operator import operator, written_in_regions


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

    start, count and num_kept [B]: the stretch's, in positions; index [B, Q], where the cache takes each position, and its
    last row where it does not. mask [B, Q, held + Q] of the cache's positions, then the stretch's own; distance
    [B, Q, held + Q], how far back each lies, with what was dropped left out. held: the cache's first positions, those
    of all that hold something; all of them where shapes do not follow from values.
    """

    def __init__(self, stretch: Stretch, rate: int):
        grid, capacity = stretch.chunk * rate, stretch.capacity * rate
        self.held = capacity
        if may_follow_values(stretch.start):
            self.held = min(capacity, int(stretch.start.max()) * rate)
        self.slots, self.grid, self.num = stretch.slots, grid, stretch.tokens * rate
        self.max_distance = min(capacity + grid, self.held + self.num)
        parts = (stretch.start, stretch.count, stretch.num_kept)
        self.start, self.count, self.num_kept = (part * rate for part in parts)

        own = torch.arange(self.num, device=self.start.device)
        start, count, kept = (part[:, None] for part in (self.start, self.count, self.num_kept))
        self.ring = capacity - kept  # [B, 1]
        self.query = query = start + own  # [B, Q]
        is_new = (own < count) & ((query >= start + count - self.ring) | (query < kept))
        place = torch.where(query < kept, query, kept + (query - kept) % self.ring)
        self.index = torch.where(is_new, place, capacity)
        self._sight: tuple[Tensor, Tensor] | None = None

    @property
    def mask(self) -> Tensor:
        return self._look()[0]

    @property
    def distance(self) -> Tensor:
        return self._look()[1]

    def _look(self) -> tuple[Tensor, Tensor]:
        """mask and distance: made when they are asked for, which a GPU's attention does not."""
        if self._sight is None:
            start, count, kept = (part[:, None] for part in (self.start, self.count, self.num_kept))
            place = torch.arange(self.held, device=start.device)
            latest = start - kept - 1  # the last one in the ring, counted from the prompt's end
            in_ring = latest - (latest - place + kept) % self.ring  # below 0 where the ring's place is empty
            # the position that each place holds [B, held]
            held = torch.where(place < kept, place, kept + in_ring)
            is_held = torch.where(place < kept, place < start, in_ring >= 0)

            own = torch.arange(self.num, device=start.device)
            key = torch.cat((held, self.query), 1)[:, None]  # [B, 1, K]
            is_there = torch.cat((is_held, own < count), 1)[:, None]
            chunks_back = self.query[:, :, None] // self.grid - key // self.grid  # [B, Q, K]
            is_kept = key < kept[:, :, None]
            mask = (
                is_there
                & (chunks_back >= 0)
                & (is_kept | (chunks_back <= (self.ring // self.grid)[:, :, None]))
            )
            place = torch.arange(key.shape[2], device=start.device)
            mask = mask | (
                place == (self.held + own)[:, None]
            )  # padding sees itself: a row of nothing is NaN

            # before the ring's first chunk
            dropped = ((self.query - kept) // self.grid * self.grid - self.ring).clamp(min=0)[:, :, None]
            distance = self.query[:, :, None] - key - torch.where(is_kept, dropped, 0)
            self._sight = mask, distance.clamp(1 - self.grid, self.max_distance)
        return self._sight

    def exchange(self, cache: Tensor, new: Tensor) -> Tensor:
        """cache [S, capacity + 1, ...], new [B, Q, ...] -> the cache's positions and the new ones [B, held +
        Q, ...]; the new ones take their places in the cache."""
        whole = torch.cat((cache[self.slots, : self.held], new), 1)
        cache[self.slots[:, None], self.index] = new
        return whole


def like_rows(q: Tensor, *others: object) -> Tensor:
    """Of q's shape, position by position: q may be a part of a product."""
    return q.new_empty(q.shape)


@operator("stretch_attention", gives=like_rows, writes=written_in_regions("caches"))
def stretch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    caches: Tensor,
    layers: Tensor,
    block: int,
    slots: Tensor,
    index: Tensor,
    start: Tensor,
    count: Tensor,
    num_kept: Tensor,
    chunk: int,
    heads: int,
) -> Tensor:
    """q, k, v [B * L, Q, H * D] over what the streams hold in one of the caches [layers, S, capacity + 1, L, 2 * H * D], as
    `Seen` says, and over themselves -> [B * L, Q, H * D]; then the new ones take their places there. layers [_] int64, of
    which the one at `block` says whose cache it is; the others are a `Seen`'s, chunk its grid. What padding gives is finite,
    and nobody's. An operator: a GPU reads a cache where it lies, as far as it is seen."""
    if kernels.use_gpu(q):
        where = caches, layers, block, slots, index, start, count, num_kept, chunk, heads
        return kernels.on_gpu("triton_stretch", "stretch_attention", q, k, v, *where)
    layer, lanes = layers[block], caches.shape[3]
    seen = Seen(Stretch(slots, start, count, num_kept, q.shape[1], caches.shape[2] - 1, chunk), 1)
    held = caches[layer, slots][:, : seen.held].masked_fill(~seen.mask.any(1)[:, : seen.held, None, None], 0)
    new = torch.cat((k, v), -1).unflatten(0, (-1, lanes)).transpose(1, 2)  # [B, Q, L, 2 * H * D]
    kv = torch.cat((held, new), 1).unflatten(-1, (2, heads, -1))
    keys, values = kv.permute(3, 0, 2, 4, 1, 5).flatten(1, 2)  # [B * L, H, K, D]
    queries = q.unflatten(-1, (heads, -1)).transpose(1, 2)
    mask = seen.mask.repeat_interleave(lanes, 0)[:, None]
    mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    caches[layer, slots[:, None], index] = new
    return mixed.transpose(1, 2).flatten(2).contiguous()
