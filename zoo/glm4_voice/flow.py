"""Codes to mel frames by conditional flow matching (arXiv 2210.02747), in ten Euler steps.

    codes [B, N] ─ conformer, blocks of 10 codes ─ nearest frame, 6.89 per code ─ convs ─ mu [B, T, 80] ┐
    the speaker's constant, the mel of the codes before ────────────────────────────────────────────────┼─ 10 x estimator ─> mel
    noise, the same in every call of T frames ──────────────────────────────────────────────────────────┘

Source: THUDM/GLM-4-Voice at eb00ce9, cosyvoice/flow/{flow,flow_matching,length_regulator}.py and
cosyvoice/transformer/encoder.py (BlockConformerEncoder).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.glm4_voice.config import FlowConfig
from zoo.glm4_voice.estimator import Estimator, GroupNorm
from zoo.nn.cfm import cosine_times, solver_steps
from zoo.nn.narrow import dtype_of
from zoo.nn.s3.encoder import EMBED_EPS, ConformerLayer, Distances, Embed
from zoo.nn.s3.sizes import MELS
from zoo.nn.s3.stretch import Whole

STEPS, SEED = 10, 42
NUM_CONVS = 4  # of the regulator


class Blocks(Whole):
    """A code of a whole stretch sees the codes before it, and those of its block."""

    def __init__(self, count: Tensor, num: int, block: int):
        super().__init__(count, num)
        at = torch.arange(num, device=count.device)
        earlier = (at <= at[:, None]) | (at // block == at[:, None] // block)
        mask, distance = self._look()
        self._sight = mask & earlier, distance


class Encoder(nn.Module):
    def __init__(self, config: FlowConfig):
        super().__init__()
        self.block = config.block
        self.embed = Embed(config.width)
        sizes = config.width, config.heads, config.inner, EMBED_EPS
        self.layers = nn.ModuleList(ConformerLayer(*sizes) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, eps=EMBED_EPS)

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        """x [B, N, D], of which count [B] are there -> [B, N, D]"""
        x = self.embed(x)
        seen = Blocks(count, x.shape[1], self.block)
        distances = Distances(seen, x)
        for layer in self.layers:
            x = layer(x, seen, x, distances)
        return self.norm(x)


class Regulator(nn.Module):
    """Codes to frames: each frame copies a code, then convolutions smooth."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(MELS, MELS, 3, padding=1) for _ in range(NUM_CONVS))
        self.norms = nn.ModuleList(GroupNorm(1, MELS) for _ in range(NUM_CONVS))
        self.out = nn.Conv1d(MELS, MELS, 1)

    def forward(self, x: Tensor, count: Tensor, num_frames: Tensor, mask: Tensor) -> Tensor:
        """x [B, N, MELS] of count [B] codes -> [B, MELS, T], of which num_frames [B] are there: mask [B, 1, T]"""
        at = torch.arange(mask.shape[2], device=x.device)
        scale = count.float() / num_frames.clamp(min=1).float()  # as torch's own interpolation rounds
        code = torch.minimum(
            (at * scale[:, None]).floor().long(), (count[:, None] - 1).clamp(min=0)
        )  # [B, T]
        x = x.gather(1, code.clamp(max=x.shape[1] - 1)[..., None].expand(-1, -1, MELS)).mT * mask
        rounds: Iterator[Any] = zip(self.convs, self.norms, strict=True)
        for conv, norm in rounds:
            x = F.mish(norm.masked(conv(x), mask)) * mask
        return self.out(x) * mask


class Flow(nn.Module):
    noise: Tensor  # [values], after prepare(): what the reference's generator draws
    strides: Tensor  # [STEPS]

    def __init__(self, config: FlowConfig):
        super().__init__()
        self.config = config
        self.codes = nn.Embedding(config.codes, config.width)
        self.speaker = nn.Linear(config.speaker, MELS)
        self.encoder = Encoder(config)
        self.output = nn.Linear(config.width, MELS)
        self.regulator = Regulator()
        self.estimator = Estimator(config)

    def prepare(self, max_frames: int) -> None:
        """Fill the buffers that are in no checkpoint. max_frames: of one call."""
        device = self.output.weight.device
        generator = torch.Generator(device="cpu").manual_seed(SEED)
        noise = torch.randn(MELS * max_frames, generator=generator, device="cpu")
        self.register_buffer("noise", noise.to(device), persistent=False)
        times = torch.tensor(cosine_times(STEPS), dtype=torch.float64)
        self.register_buffer("strides", times.diff().float().to(device), persistent=False)
        self.estimator.prepare(times[:STEPS].float().to(device))

    def forward(self, codes: Tensor, count: Tensor, prompt: Tensor, num_prompt: Tensor) -> Tensor:
        """Return the mel [B, T, MELS] of codes [B, N], of which count [B] are there.

        prompt [B, T, MELS]: the mel of the first num_prompt [B] frames; T is at least that of all codes.
        """
        num = torch.div(441 * count, 64, rounding_mode="floor")
        at = torch.arange(prompt.shape[1], device=codes.device)
        mask = (at < num[:, None])[:, None].to(prompt.dtype)  # [B, 1, T]
        mu = self.regulator(self.output(self.encoder(self.codes(codes), count)), count, num, mask)
        known = (prompt * (at < num_prompt[:, None])[..., None]).mT * mask
        speaker = self.speaker.bias[:, None].expand_as(mu) * mask  # the speaker's vector is zero
        given = torch.cat((mu, speaker, known), 1)
        pairs = torch.stack((given, torch.zeros_like(given)))  # with the condition, and without it
        x = self._start(num, at) * mask
        for k in solver_steps(len(self.strides), x):
            x = self.advance(x, pairs, mask, self.estimator.shifts[k], self.strides[k])
        return x.mT

    def _start(self, num: Tensor, at: Tensor) -> Tensor:
        """Return the noise [B, MELS, T] that the reference draws for num [B] frames: a matrix [MELS, num]."""
        row = torch.arange(MELS, device=at.device)[:, None]
        index = row * num[:, None, None] + at  # [B, MELS, T]
        return self.noise[index.clamp(max=len(self.noise) - 1)].to(dtype_of(self.output))

    def advance(self, x: Tensor, pairs: Tensor, mask: Tensor, shifts: Tensor, stride: Tensor) -> Tensor:
        """Take a step of the solver of size stride []: x [B, MELS, T] -> [B, MELS, T].

        pairs [2, B, 3 MELS, T]: the condition, and zeros; mask [B, 1, T]: 1 for frames that are there; shifts [stages,
        channels]: the embeddings of the step's time.
        """
        levels = self.estimator.levels(mask.repeat(2, 1, 1), shifts.dtype)
        inputs = torch.cat((x.repeat(2, 1, 1), pairs.flatten(0, 1)), 1).to(shifts.dtype)
        velocities = self.estimator(inputs, levels, shifts).to(x.dtype)
        velocity, null = velocities.unflatten(0, (2, -1)).unbind(0)
        guidance = self.config.guidance
        return x + stride * ((1 + guidance) * velocity - guidance * null)
