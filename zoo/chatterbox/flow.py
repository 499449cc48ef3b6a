"""Codes to mel frames by conditional flow matching (arXiv 2210.02747), over the whole speech at once.

    codes of the voice, then of the speech ─ encoder ─ mu [B, 2T, 80] ┐
    speaker, the voice's mel ─────────────────────────────────────────┼─ estimator, step after step ─> mel [B, 2T, 80]
    noise ────────────────────────────────────────────────────────────┘

The networks are those of CosyVoice 2, without its chunks: every position attends to every other one, so the
last code changes the first frame. Ten steps with guidance; Turbo's mean flow takes two steps without. Source:
chatterbox-tts 0.1.7, models/s3gen/flow.py and flow_matching.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.nn.cfm import solver_steps
from zoo.nn.conv import CodecState
from zoo.nn.s3.encoder import FlowEncoder
from zoo.nn.s3.estimator import Estimator
from zoo.nn.s3.sizes import LOOKAHEAD, MELS, NUM_UP_LAYERS, TOKEN_FRAMES, FlowSizes
from zoo.nn.s3.stretch import Whole

STEPS, MEAN_STEPS = 10, 2


def solver_times(config: FlowSizes) -> Tensor:
    """Return the times of the solver's steps from 0 (noise) to 1, [steps + 1] float64."""
    if config.is_meanflow:
        return torch.linspace(0, 1, MEAN_STEPS + 1, dtype=torch.float64, device="cpu")
    even = torch.linspace(0, 1, STEPS + 1, device="cpu")
    return (1 - torch.cos(even * 0.5 * math.pi)).double()


class Flow(nn.Module):
    """The encoder and the estimator with its solver."""

    strides: Tensor  # [steps] fp64, the sizes of the solver's steps

    def __init__(self, config: FlowSizes):
        super().__init__()
        self.config = config
        self.codes = nn.Embedding(config.num_codes, config.width)
        self.speaker = nn.Linear(config.speaker, MELS)
        self.encoder = FlowEncoder(config)
        self.output = nn.Linear(config.width, MELS)
        self.estimator = Estimator(config)

    @property
    def lanes(self) -> int:
        """The rows of the estimator per speech: with the condition, and without it."""
        return 1 if self.config.is_meanflow else 2

    def prepare(self) -> None:
        """Fill the buffers that are in no checkpoint, and lay out the weights."""
        times, device = solver_times(self.config), self.output.weight.device
        self.register_buffer("strides", times.diff().to(device), persistent=False)
        looks = times.float().to(device)
        self.estimator.prepare(looks[:-1], looks[1:])

    def forward(self, codes: Tensor, num: Tensor, prompt: Tensor, speaker: Tensor, x: Tensor) -> Tensor:
        """Return the mel [B, 2T, MELS] of codes [B, T], of which the first num [B] are there.

        prompt [B, 2T, MELS]: the voice's mel, then zeros; speaker [B, D]; x [B, 2T, MELS]: noise.
        """
        mu = self.condition(codes, num)  # [B, 2T, MELS]
        speaker = self.speaker(F.normalize(speaker, dim=1).to(mu.dtype))
        given = torch.cat((mu, speaker[:, None].expand_as(mu), prompt.to(mu.dtype)), -1)  # [B, 2T, 3 MELS]
        given = torch.stack((given, torch.zeros_like(given))[: self.lanes], 1)  # [B, L, 2T, 3 MELS]
        for k in solver_steps(len(self.strides), x):
            x = self.advance(x, given, TOKEN_FRAMES * num, self.estimator.shifts[k], self.strides[k])
        return x

    def condition(self, codes: Tensor, num: Tensor) -> Tensor:
        """Return the encoder's output as mel channels [B, 2T, MELS]."""
        batch, tokens = codes.shape
        sights = Whole(num, tokens), Whole(TOKEN_FRAMES * num, TOKEN_FRAMES * tokens)
        embedded = F.pad(self.codes(codes), (0, 0, 0, LOOKAHEAD))
        is_there = torch.arange(tokens + LOOKAHEAD, device=codes.device) < num[:, None]
        layout = self.encoder.layout
        state = CodecState(layout, embedded.new_zeros(batch, layout.size), tokens, num)
        unused = [embedded[:0]] * (self.config.layers + NUM_UP_LAYERS)  # nothing is kept
        return self.output(self.encoder(embedded, is_there, sights, state, unused))

    def advance(self, x: Tensor, given: Tensor, count: Tensor, shifts: Tensor, stride: Tensor) -> Tensor:
        """Take a step of the solver of size stride []: x [B, Q, MELS] -> [B, Q, MELS].

        given [B, L, Q, 3 MELS]: the condition, and zeros unless it is a mean flow; count [B]: the valid
        frames; shifts [stages, channels]: the embeddings of the step's times. States and velocities are fp32.
        """
        config, lanes = self.config, self.lanes
        seen = Whole(count, x.shape[1])
        mask = given.new_zeros(seen.mask.shape).masked_fill(~seen.mask, -torch.inf)
        mask = mask.repeat_interleave(lanes, 0)[:, None]  # [L * B, 1, Q, Q]
        inner = config.estimator_heads * config.head_dim
        caches = seen.scratch(given, (config.num_mid + 2) * config.num_blocks, lanes, 2 * inner)
        rows = given.new_zeros(len(x) * lanes, self.estimator.layout.size)
        state = CodecState(self.estimator.layout, rows, x.shape[1], count.repeat_interleave(lanes))
        inputs = torch.cat((x.repeat_interleave(lanes, 0).to(given.dtype), given.flatten(0, 1)), -1)
        numbers = self.estimator.numbers[0]  # nothing is kept
        velocities = self.estimator(inputs, shifts, state, seen, mask, caches, numbers).unflatten(
            0, (-1, lanes)
        )
        velocity, *null = (one.to(x.dtype) for one in velocities.unbind(1))
        if null:
            velocity = (1 + config.guidance) * velocity - config.guidance * null[0]
        return x + stride * velocity
