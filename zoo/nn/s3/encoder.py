"""The flow's encoder: codes at 25 Hz to the flow's condition at 50 Hz.

    codes ─ table ─ embed ─ lookahead 3 ─ conformer layers ─ upsample x2 ─ embed ─ 4 conformer layers ─ norm ─> [B, 2T, D]

Source: FunAudioLLM/CosyVoice, cosyvoice/transformer/upsample_encoder.py, UpsampleConformerEncoder. Attention
with relative positions follows Transformer-XL (arXiv 1901.02860), section 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.nn.conv import CausalConv1d, CodecState, StateLayout
from zoo.nn.s3.sizes import LOOKAHEAD, NUM_UP_LAYERS, TOKEN_FRAMES, EncoderSizes
from zoo.nn.s3.stretch import PagedLayer, Seen

EMBED_EPS, LAYER_EPS = 1e-5, 1e-12
LOOKBACK = 2  # of the second lookahead convolution
UP_LOOKBACK = 4  # of the convolution after the upsampling
SLOPE = 0.01


def relative_table(first: int, last: int, width: int, like: Tensor) -> Tensor:
    """Return alternating sines and cosines of the distances first .. last [last - first + 1, D]."""
    distance = torch.arange(first, last + 1, device=like.device, dtype=torch.float32)
    rate = torch.exp(
        torch.arange(0, width, 2, device=like.device, dtype=torch.float32) * -(math.log(10000.0) / width)
    )
    angle = distance[:, None] * rate
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1).to(like.dtype)


class Distances:
    """How far apart the positions of a stretch are, for all layers of a stack.

    table [distances, D]: from the farthest position ahead to the farthest behind.
    """

    def __init__(self, seen: Seen, like: Tensor):
        """like [..., D]: of the rows' width and dtype."""
        self.seen, self.first = seen, 1 - seen.grid
        self.table = relative_table(self.first, seen.max_distance, like.shape[-1], like)

    @cached_property
    def column(self) -> Tensor:
        """Of each pair's distance in the table [B, 1, Q, K]."""
        return (self.seen.distance - self.first)[:, None]

    @cached_property
    def is_hidden(self) -> Tensor:
        """Which pairs do not see each other [B, 1, Q, K]."""
        return ~self.seen.mask[:, None]

    @cached_property
    def layer(self) -> Tensor:
        """The number of a layer that begins where its cache does [1]."""
        return self.seen.start.new_zeros(1)


class RelativeAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.position = nn.Linear(width, width, bias=False)
        self.content_bias = nn.Parameter(torch.empty(heads, width // heads))
        self.position_bias = nn.Parameter(torch.empty(heads, width // heads))

    def forward(self, x: Tensor, seen: Seen, cache: Tensor | PagedLayer, distances: Distances) -> Tensor:
        """Attend from x [B, Q, D] to the cache [S, capacity + 1, 2D], or its pages, and to x, and update it."""
        q, k, v = self.q(x), self.k(x), self.v(x)
        heads = q.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, Q, dim]
        # the scale of published sizes is a power of two, so the smaller factor can take it
        scale = heads.shape[-1] ** -0.5
        p = self.position(distances.table).unflatten(-1, (self.heads, -1)).transpose(0, 1)
        by_distance = ((heads + self.position_bias[:, None]) * scale) @ p.mT  # [B, H, Q, distances]
        if isinstance(cache, PagedLayer):
            q = q + self.content_bias.flatten()
            paged = by_distance, cache.arena, cache.pages, distances.layer, 0, cache.first
            where = seen.index, seen.start, seen.count, seen.num_kept, seen.grid
            capacity = cache.num_chunks * seen.grid
            y = torch.ops.zoo.stretch_attention.default(q, k, v, *paged, *where, capacity, self.heads)
            return self.out(y)
        kv = seen.exchange(cache, torch.cat((k, v), -1))  # [B, K, 2D]
        k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in kv.chunk(2, -1))
        by_place = by_distance.gather(-1, distances.column.expand(-1, self.heads, -1, -1))  # [B, H, Q, K]
        by_place.masked_fill_(distances.is_hidden, -torch.inf)
        content = (heads + self.content_bias[:, None]) * scale
        flat = (part.flatten(0, 1) for part in (by_place, content, k.mT))
        weights = torch.baddbmm(*flat).softmax(-1).view_as(by_place)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class ConformerLayer(nn.Module):
    """A pre-norm transformer layer: the conformer without its convolution and second feed-forward."""

    def __init__(self, width: int, heads: int, inner: int, eps: float = LAYER_EPS):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, eps=eps)
        self.attention = RelativeAttention(width, heads)
        self.mlp_norm = nn.LayerNorm(width, eps=eps)
        self.widen = nn.Linear(width, inner)
        self.narrow = nn.Linear(inner, width)

    def forward(self, x: Tensor, seen: Seen, cache: Tensor | PagedLayer, distances: Distances) -> Tensor:
        x = x + self.attention(self.attention_norm(x), seen, cache, distances)
        return x + self.narrow(F.silu(self.widen(self.mlp_norm(x))))


class Embed(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=EMBED_EPS)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)) * x.shape[-1] ** 0.5


class FlowEncoder(nn.Module):
    def __init__(self, config: EncoderSizes):
        super().__init__()
        width = config.width
        sizes = width, config.heads, config.inner
        self.embed = Embed(width)
        self.ahead = nn.Conv1d(width, width, LOOKAHEAD + 1)
        self.behind = CausalConv1d(width, width, LOOKBACK + 1)
        self.layers = nn.ModuleList(ConformerLayer(*sizes) for _ in range(config.layers))
        self.up = CausalConv1d(width, width, UP_LOOKBACK + 1)
        self.up_embed = Embed(width)
        self.up_layers = nn.ModuleList(ConformerLayer(*sizes) for _ in range(NUM_UP_LAYERS))
        self.norm = nn.LayerNorm(width, eps=EMBED_EPS)
        self.layout = StateLayout(self)

    def forward(
        self,
        x: Tensor,
        is_there: Tensor,
        sights: tuple[Seen, Seen],
        state: CodecState,
        caches: Sequence[Tensor | PagedLayer],
    ) -> Tensor:
        """Return the condition [B, 2T, D] of code embeddings x [B, T + LOOKAHEAD, D].

        is_there [B, T + LOOKAHEAD]: whether the speech has that code; sights: what a token and what a frame
        sees; caches: one per layer.
        """
        by_token, by_frame = sights
        x = self.embed(x) * is_there[..., None]
        ahead = F.leaky_relu(self.ahead(x.mT), SLOPE)  # [B, D, T]
        x = x[:, : by_token.num] + self.behind(ahead, state).mT
        x = self._stack(self.layers, x, by_token, caches[: len(self.layers)])
        x = x.repeat_interleave(TOKEN_FRAMES, 1)
        x = self.up_embed(self.up(x.mT, state).mT)
        x = self._stack(self.up_layers, x, by_frame, caches[len(self.layers) :])
        return self.norm(x)

    def _stack(
        self, layers: nn.ModuleList, x: Tensor, seen: Seen, caches: Sequence[Tensor | PagedLayer]
    ) -> Tensor:
        distances = Distances(seen, x)
        for layer, cache in zip(layers, caches, strict=True):
            x = layer(x, seen, cache, distances)
        return x
