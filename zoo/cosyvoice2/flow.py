"""Codes to mel frames by conditional flow matching (arXiv 2210.02747), in ten Euler steps. The starting noise
of a frame depends only on its position.

    codes [B, T] ─ encoder ─ mu [B, 2T, 80] ┐
    speaker, the prompt's mel ──────────────┼─ 10 x estimator, with and without all of it ─> mel [B, 2T, 80]
    noise of these frames ──────────────────┘

A FlowCache holds everything that a stretch reads of the stream before it. Nothing is computed twice, and a
stretch costs the same anywhere in the speech. Source: FunAudioLLM/CosyVoice, cosyvoice/flow/flow.py and
flow_matching.py, with the streaming attention mask in every chunk. The original recomputes all frames for
every chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.contract import Past
from zoo.cosyvoice2.config import FlowConfig
from zoo.cosyvoice2.strategy import MAX_FRAMES
from zoo.nn.cfm import cosine_times, solver_steps
from zoo.nn.conv import CodecState
from zoo.nn.rows import zeros
from zoo.nn.s3.encoder import FlowEncoder
from zoo.nn.s3.estimator import PAIR, Estimator
from zoo.nn.s3.sizes import GRID, LOOKAHEAD, MELS, NUM_UP_LAYERS, TOKEN_FRAMES
from zoo.nn.s3.stretch import PagedLayer, Seen, Stretch

STEPS = 10
NOISE_BLOCK = 15_000  # frames in the reference's buffer
PAST_TOKENS = 500  # the past that a stretch can see, including the prompt: 20 s


def fixed_noise(num_frames: int) -> Tensor:
    """Return noise [F, MELS]: the reference's buffer, then further blocks of its generator (CPU, seed 0)."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    blocks = -(-num_frames // NOISE_BLOCK)
    noise = [torch.randn(MELS, NOISE_BLOCK, generator=generator, device="cpu") for _ in range(blocks)]
    return torch.cat(noise, 1).mT[:num_frames].contiguous()


class FlowCache:
    """The past of streams, one row each: keys, values and the ends of the convolutions.

    `capacity` is in tokens. Keys and values take no memory before their first use: on a GPU they are in pages.
    """

    def __init__(self, flow: Flow, rows: int, capacity: int):
        self.config, self.like, self.rows = flow.config, flow.output.bias, rows
        self.capacity = capacity
        self.encoder_past = self.like.new_zeros(rows, flow.encoder.layout.size)
        self.estimator_past = self.like.new_zeros(STEPS, rows, PAIR, flow.estimator.layout.size)

    @cached_property
    def encoder(self) -> list[Tensor]:
        """Of each layer [rows, positions + 1, 2 * width]: padding is written to the last place."""
        width, rows = 2 * self.config.width, self.rows
        tokens, frames = self.capacity + 1, TOKEN_FRAMES * self.capacity + 1
        by_token = [zeros(self.like, rows, tokens, width) for _ in range(self.config.layers)]
        return by_token + [zeros(self.like, rows, frames, width) for _ in range(NUM_UP_LAYERS)]

    @cached_property
    def estimator(self) -> list[Tensor]:
        """Of each step [layers, rows, positions + 1, PAIR, 2 * inner]."""
        config, places = self.config, TOKEN_FRAMES * self.capacity + 1
        shape = num_layers(config), self.rows, places, PAIR, 2 * inner_width(config)
        return [zeros(self.like, *shape) for _ in range(STEPS)]

    def clear(self, row: int) -> None:
        """Clear the convolutions' past of a row.

        Attention ignores entries that the row's stream has not written.
        """
        self.encoder_past[row] = 0
        self.estimator_past[:, row] = 0

    def put_ends(self, row: int, other: FlowCache) -> None:
        """Copy the ends of the convolutions of the only row of another cache into a row."""
        self.encoder_past[row] = other.encoder_past[0]
        self.estimator_past[:, row] = other.estimator_past[:, 0]

    def put(self, row: int, other: FlowCache) -> None:
        """Copy the only row of a cache of a whole prompt into a row."""
        for mine, theirs in zip(self.encoder, other.encoder, strict=True):
            mine[row, : theirs.shape[1] - 1] = theirs[0, :-1]
        for mine, theirs in zip(self.estimator, other.estimator, strict=True):
            mine[:, row, : theirs.shape[2] - 1] = theirs[:, 0, :-1]
        self.put_ends(row, other)

    def chunk_of(self, row: int, i: int) -> Tensor:
        """Return chunk i of a row [values], in the layout of pages."""
        layers = [layer[row] for layer in self.encoder]
        for step in self.estimator:
            layers += step[:, row].unbind(0)
        num = self.capacity // GRID
        return torch.cat([layer[:-1].unflatten(0, (num, -1))[i].flatten() for layer in layers])

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (*self.encoder, *self.estimator, self.encoder_past, self.estimator_past))


def num_layers(config: FlowConfig) -> int:
    """Return the number of the estimator's transformer blocks."""
    return (config.num_mid + 2) * config.num_blocks


def inner_width(config: FlowConfig) -> int:
    return config.estimator_heads * config.head_dim


def past_of(config: FlowConfig) -> Past:
    """Return the size of a stream's past: in a chunk one layer is behind the other, first the encoder's, then
    those of each of the estimator's steps."""
    row, pair = 2 * config.width, PAIR * 2 * inner_width(config)
    encoder = GRID * row * (config.layers + TOKEN_FRAMES * NUM_UP_LAYERS)
    values = encoder + STEPS * num_layers(config) * TOKEN_FRAMES * GRID * pair
    return Past(GRID, values, math.lcm(row, pair), PAST_TOKENS // GRID)


@dataclass
class PagedCache:
    """The past of the rows of a launch, of which `ends` has the ends of convolutions, and pages the rest."""

    ends: FlowCache
    arena: Tensor  # [_, page_values]
    pages: Tensor  # [B, P]

    @property
    def encoder_past(self) -> Tensor:
        return self.ends.encoder_past

    @property
    def estimator_past(self) -> Tensor:
        return self.ends.estimator_past

    def _layer(self, first: int) -> PagedLayer:
        return PagedLayer(self.arena, self.pages, self.ends.capacity // GRID, first)

    @cached_property
    def encoder(self) -> list[PagedLayer]:
        config, first, layers = self.ends.config, 0, []
        for rate in [1] * config.layers + [TOKEN_FRAMES] * NUM_UP_LAYERS:
            layers.append(self._layer(first))
            first += GRID * rate * 2 * config.width
        return layers

    @cached_property
    def estimator(self) -> list[PagedLayer]:
        """Of each step the same: its layers have numbers."""
        config = self.ends.config
        first = GRID * 2 * config.width * (config.layers + TOKEN_FRAMES * NUM_UP_LAYERS)
        return [self._layer(first)] * STEPS


class Flow(nn.Module):
    """The encoder and the estimator with its solver."""

    noise: Tensor  # [F, MELS]
    strides: Tensor  # [STEPS] fp64, the sizes of the solver's steps

    def __init__(self, config: FlowConfig):
        super().__init__()
        self.config = config
        self.codes = nn.Embedding(config.num_codes, config.width)
        self.speaker = nn.Linear(config.speaker, MELS)
        self.encoder = FlowEncoder(config)
        self.output = nn.Linear(config.width, MELS)
        self.estimator = Estimator(config)

    def prepare(self) -> None:
        """Fill the buffers that are in no checkpoint, and lay out the weights."""
        noise = fixed_noise(TOKEN_FRAMES * (MAX_FRAMES + PAST_TOKENS + GRID)).to(self.output.weight.device)
        self.register_buffer("noise", noise, persistent=False)
        times = torch.tensor(cosine_times(STEPS), dtype=torch.float64)
        self.register_buffer("strides", times.diff().to(noise.device), persistent=False)
        self.estimator.prepare(times[:STEPS].float().to(noise.device))

    def forward(
        self,
        codes: Tensor,
        num_there: Tensor,
        prompt: Tensor,
        speaker: Tensor,
        stretch: Stretch,
        cache: FlowCache | PagedCache,
        start: Tensor | None = None,
    ) -> Tensor:
        """Return the mel [B, 2T, MELS] of a stretch, and advance the cache by stretch.count tokens.

        codes [B, T + LOOKAHEAD], of which the first num_there [B] belong to the speech; prompt [B, 2T, MELS]:
        the prompt's mel, then zeros; speaker [B, D]; start [B, 2T, MELS]: replaces the noise of `noise_of`.
        """
        assert codes.shape[1] == stretch.tokens + LOOKAHEAD, (
            f"{codes.shape[1]} codes for a stretch of {stretch.tokens}"
        )
        is_there = torch.arange(codes.shape[1], device=codes.device) < num_there[:, None]
        rows = cache.encoder_past[stretch.slots]
        state = CodecState(self.encoder.layout, rows, stretch.tokens, stretch.count)
        sights = Seen(stretch, 1), Seen(stretch, TOKEN_FRAMES)
        mu = self.output(self.encoder(self.codes(codes), is_there, sights, state, cache.encoder))
        cache.encoder_past[stretch.slots] = state.next()
        speaker = self.speaker(F.normalize(speaker, dim=1).to(mu.dtype))
        given = torch.cat((mu, speaker[:, None].expand_as(mu), prompt.to(mu.dtype)), -1)  # [B, 2T, 3 MELS]
        return self._solve(given, self.noise_of(stretch) if start is None else start, sights[1], cache)

    def noise_of(self, stretch: Stretch) -> Tensor:
        """Return the fixed noise of a stretch's positions [B, 2T, MELS]."""
        frames = torch.arange(TOKEN_FRAMES * stretch.tokens, device=self.noise.device)
        place = TOKEN_FRAMES * stretch.start[:, None] + frames
        return self.noise[place.clamp(max=len(self.noise) - 1)]

    def _solve(self, given: Tensor, x: Tensor, seen: Seen, cache: FlowCache | PagedCache) -> Tensor:
        """Solve from noise x [B, Q, MELS] with the condition given [B, Q, 3 MELS]. Returns [B, Q, MELS].

        The state and the velocities are fp32.
        """
        pairs = torch.stack((given, torch.zeros_like(given)), 1)  # [B, PAIR, Q, 3 MELS]
        mask = None
        if isinstance(cache, FlowCache):  # pages are read in place by an operator, which needs no mask
            mask = given.new_zeros(seen.mask.shape).masked_fill_(~seen.mask, -torch.inf)
            mask = mask.repeat_interleave(PAIR, 0)[:, None]
        for k in solver_steps(STEPS, x):
            shifts, past, caches = self.estimator.shifts[k], cache.estimator_past[k], cache.estimator[k]
            numbers = self.estimator.numbers[k]
            x = self.advance(x, pairs, shifts, self.strides[k], seen, mask, past, caches, numbers)
        return x

    def advance(
        self,
        x: Tensor,
        pairs: Tensor,
        shifts: Tensor,
        stride: Tensor,
        seen: Seen,
        mask: Tensor | None,
        past: Tensor,
        caches: Tensor | PagedLayer,
        numbers: Tensor,
    ) -> Tensor:
        """Take a step of the solver of size stride []: x [B, Q, MELS] -> [B, Q, MELS].

        pairs [B, PAIR, Q, 3 MELS]: the condition and zeros. Advances the estimator's past [S, PAIR, V] and
        its caches. The other arguments are the estimator's.
        """
        rows, count = past[seen.slots].flatten(0, 1), seen.count.repeat_interleave(PAIR)
        state = CodecState(self.estimator.layout, rows, x.shape[1], count)
        inputs = torch.cat((x.repeat_interleave(PAIR, 0).to(pairs.dtype), pairs.flatten(0, 1)), -1)
        velocities = self.estimator(inputs, shifts, state, seen, mask, caches, numbers).unflatten(
            0, (-1, PAIR)
        )
        past[seen.slots] = state.next().unflatten(0, (-1, PAIR))
        velocity, null = (one.to(x.dtype) for one in velocities.unbind(1))
        return x + stride * ((1 + self.config.guidance) * velocity - self.config.guidance * null)
