"""A stretch of a stream of tokens, and the cache of the stream before it, for attention.

    cache     | prompt, never dropped | the latest tokens, a ring |         `capacity` tokens, of two frames each
    stream    | prompt ...            | ... dropped ... | past    | stretch: chunks of GRID tokens |

A position sees its whole chunk, the prompt, and as many whole chunks of the past as the ring holds. That
depends only on its position in the stream. So a stream gives the same result at once and in stretches that
end on the grid.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from zoo import kernels
from zoo.kernels.operator import operator, written_in_regions
from zoo.nn.eager import may_follow_values
from zoo.nn.s3.sizes import GRID


@dataclass
class Stretch:
    """Tokens start .. start + count of each row's stream, padded to `tokens`.

    All fields but `slots` are in tokens.
    """

    slots: Tensor  # [B], rows of the cache
    start: Tensor  # [B], a multiple of GRID
    count: Tensor  # [B]
    num_kept: Tensor  # [B], tokens of the prompt, which are never dropped; a multiple of GRID
    tokens: int
    capacity: int  # of the cache; a multiple of GRID
    chunk: int = GRID


class Seen:
    """Which positions attend to which in a stretch, at `rate` positions per token.

    - start, count and num_kept [B]: those of the stretch, in positions
    - index [B, Q]: the place in the cache of each position; the last place if it is not stored
    - mask [B, Q, held + Q]: which positions of the cache, then of the stretch, are seen
    - distance [B, Q, held + Q]: how far back each of them is, not counting dropped positions
    - held: the number of places of the cache that are read; all, unless shapes may depend on values
    """

    def __init__(self, stretch: Stretch, rate: int):
        self.grid, self.capacity = stretch.chunk * rate, stretch.capacity * rate
        self.held = self.capacity
        if may_follow_values(stretch.start):
            self.held = min(self.capacity, int(stretch.start.max()) * rate)
        self.slots = stretch.slots
        parts = (stretch.start, stretch.count, stretch.num_kept)
        self.start, self.count, self.num_kept = (part * rate for part in parts)

        own = torch.arange(stretch.tokens * rate, device=self.start.device)
        start, count, kept = (part[:, None] for part in (self.start, self.count, self.num_kept))
        ring, query = self.capacity - kept, start + own  # [B, 1], [B, Q]
        is_new = (own < count) & ((query >= start + count - ring) | (query < kept))
        place = torch.where(query < kept, query, kept + (query - kept) % ring)
        self.index = torch.where(is_new, place, self.capacity)
        self._sight: tuple[Tensor, Tensor] | None = None

    # Values that follow from the window's size are properties, so that one graph holds for all sizes.
    @property
    def num(self) -> int:
        return self.index.shape[1]

    @property
    def max_distance(self) -> int:
        return min(self.capacity + self.grid, self.held + self.num)

    @property
    def mask(self) -> Tensor:
        return self._look()[0]

    @property
    def distance(self) -> Tensor:
        return self._look()[1]

    def _look(self) -> tuple[Tensor, Tensor]:
        """Return mask and distance, computed at first use: attention on a GPU needs neither."""
        if self._sight is None:
            start, count, kept = (part[:, None] for part in (self.start, self.count, self.num_kept))
            own, place = (torch.arange(num, device=start.device) for num in (self.num, self.held))
            ring, query = self.capacity - kept, start + own
            latest = start - kept - 1  # the last position in the ring, counted from the end of the prompt
            in_ring = latest - (latest - place + kept) % ring  # negative if the place is empty
            # the position at each place [B, held]
            held = torch.where(place < kept, place, kept + in_ring)
            is_held = torch.where(place < kept, place < start, in_ring >= 0)

            key = torch.cat((held, query), 1)[:, None]  # [B, 1, K]
            is_there = torch.cat((is_held, own < count), 1)[:, None]
            chunks_back = query[:, :, None] // self.grid - key // self.grid  # [B, Q, K]
            is_kept = key < kept[:, :, None]
            reach = (ring // self.grid)[:, :, None]
            mask = is_there & (chunks_back >= 0) & (is_kept | (chunks_back <= reach))
            place = torch.arange(key.shape[2], device=start.device)
            # every position sees itself, padding too: a fully masked row would give NaN
            mask = mask | (place == (self.held + own)[:, None])

            # the number of positions between the prompt and the first chunk in the ring
            dropped = ((query - kept) // self.grid * self.grid - ring).clamp(min=0)[:, :, None]
            distance = query[:, :, None] - key - torch.where(is_kept, dropped, 0)
            self._sight = mask, distance.clamp(1 - self.grid, self.max_distance)
        return self._sight

    def exchange(self, cache: Tensor, new: Tensor) -> Tensor:
        """Return the cached and the new positions [B, held + Q, ...], and write the new ones to the cache.

        cache [S, capacity + 1, ...]; new [B, Q, ...].
        """
        whole = torch.cat((cache[self.slots, : self.held], new), 1)
        cache[self.slots[:, None], self.index] = new
        return whole


@dataclass
class PagedLayer:
    """One layer of the past of a launch's rows, in pages of an arena.

    Every chunk of a past has the same number of pages, which hold the layers one behind the other. The last
    page in `pages` belongs to no chunk: it takes the writes of positions that are not stored.
    """

    arena: Tensor  # [_, page_values]
    pages: Tensor  # [B, chunks * pages of a chunk + 1]
    num_chunks: int  # of a past
    first: int | Tensor  # values of a chunk before this layer

    def rows(self, place: Tensor, grid: int, width: int) -> Tensor:
        """Return where places [B, N] of the past lie in the arena, in rows of `width` values, of which a
        chunk has `grid`. The place after the last one belongs to no chunk."""
        page_values, per_chunk = self.arena.shape[1], (self.pages.shape[1] - 1) // self.num_chunks
        value = self.first + place % grid * width
        column = place // grid * per_chunk + value // page_values
        page = self.pages.gather(1, column.clamp(max=self.pages.shape[1] - 1))
        return (page * page_values + value % page_values) // width

    def exchange(self, seen: Seen, new: Tensor) -> Tensor:
        """Return the held positions [B, held, ...], with zeros for those that are not seen, and write new
        ones [B, Q, ...]."""
        width = new[0, 0].numel()
        values = self.arena.view(-1, *new.shape[2:])
        place = torch.arange(seen.held, device=new.device).expand(len(new), -1)
        is_seen = seen.mask.any(1)[:, : seen.held]  # the others may be NaN
        held = values[self.rows(place, seen.grid, width)]
        held = held.masked_fill(~is_seen.view(*is_seen.shape, *(1,) * (new.dim() - 2)), 0)
        values[self.rows(seen.index, seen.grid, width)] = new
        return held


class Whole(Seen):
    """A whole stream at once: every position sees every other one, and nothing is kept.

    Its caches have one place per row, which nothing reads: `scratch`.
    """

    def __init__(self, count: Tensor, num: int):
        """count [B]: the positions of each row, padded to num."""
        self.start = torch.zeros_like(count)
        self.count, self.num_kept = count, self.start
        self.slots = torch.arange(len(count), device=count.device)
        self.held, self.grid = 0, num
        self.index = self.start[:, None].expand(-1, num)
        self._sight = None

    @property
    def max_distance(self) -> int:
        return self.num - 1

    def _look(self) -> tuple[Tensor, Tensor]:
        if self._sight is None:
            own = torch.arange(self.num, device=self.count.device)
            # every position sees itself, padding too: a fully masked row would give NaN
            itself = torch.eye(self.num, dtype=torch.bool, device=own.device)
            mask = (own < self.count[:, None])[:, None] | itself
            distance = (own[:, None] - own).expand(len(self.count), -1, -1)
            self._sight = mask, distance  # [B, Q, Q] each
        return self._sight

    def scratch(self, like: Tensor, layers: int, lanes: int, width: int) -> Tensor:
        """Return caches of `layers` layers, all in the same memory, [layers, B, 1, lanes, width]."""
        place = like.new_zeros(1, len(self.slots), 1, lanes, width)
        return place.expand(layers, -1, -1, -1, -1)

    def exchange(self, cache: Tensor, new: Tensor) -> Tensor:
        return new


def like_rows(q: Tensor, *others: object) -> Tensor:
    """Return an empty, contiguous tensor of q's shape. q itself may be a strided part of a product."""
    return q.new_empty(q.shape)


@operator("stretch_attention", gives=like_rows, writes=written_in_regions("arena"))
def stretch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    by_distance: Tensor | None,
    arena: Tensor,
    pages: Tensor,
    layers: Tensor,
    block: int,
    first: int,
    index: Tensor,
    start: Tensor,
    count: Tensor,
    num_kept: Tensor,
    chunk: int,
    capacity: int,
    heads: int,
) -> Tensor:
    """Attend over cached and new positions, as `Seen` defines, and write the new ones to the cache.

    q, k, v [B * L, Q, H * D]. by_distance [B * L, H, Q, distances]: scores that are added, from chunk - 1
    positions ahead to the farthest behind (`encoder.Distances`). arena and pages are those of a `PagedLayer`, of
    which layer number layers[block] is used; layers [_] int64; first: values of a chunk before layer 0. The
    other arguments are those of a `Seen`, with chunk its grid; capacity: places of a past. Returns
    [B * L, Q, H * D], finite and meaningless for padding. This is an operator so that a GPU reads the cache in
    place, and only what is seen.
    """
    if kernels.use_gpu(q):
        where = arena, pages, layers, block, first, index, start, count, num_kept, chunk, capacity, heads
        return kernels.on_gpu("triton_stretch", "stretch_attention", q, k, v, by_distance, *where)
    lanes = len(q) // len(start)
    slots = torch.arange(len(start), device=q.device)
    seen = Seen(Stretch(slots, start, count, num_kept, q.shape[1], capacity, chunk), 1)
    seen.index = index
    new = torch.cat((k, v), -1).unflatten(0, (-1, lanes)).transpose(1, 2)  # [B, Q, L, 2 * H * D]
    before = first + layers[block] * chunk * new[0, 0].numel()
    held = PagedLayer(arena, pages, capacity // chunk, before).exchange(seen, new)
    kv = torch.cat((held, new), 1)
    keys, values = rearrange(kv, "b k l (two h d) -> two (b l) h k d", two=2, h=heads)  # [B * L, H, K, D]
    queries = q.unflatten(-1, (heads, -1)).transpose(1, 2)
    mask = seen.mask.repeat_interleave(lanes, 0)[:, None]
    if by_distance is not None:
        column = (seen.distance + chunk - 1).repeat_interleave(lanes, 0)[:, None]
        by_place = by_distance.gather(-1, column.expand(-1, heads, -1, -1))
        mask = by_place.masked_fill(~mask, -torch.inf)
    mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    return mixed.transpose(1, 2).flatten(2).contiguous()
