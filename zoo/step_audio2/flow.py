"""Codes to mel frames by conditional flow matching (arXiv 2210.02747), in ten Euler steps.

    codes [B, N] ─ conformer, x2 ─ mu [B, 2 N, 80] ┐
    the speaker, the prompt's mel ─────────────────┼─ 10 x estimator, with and without all of it ─> mel [B, 2 N, 80]
    noise of these frames ─────────────────────────┘

Source: stepfun-ai/Step-Audio2 at 7c58630, cosyvoice2/flow/{flow,flow_matching}.py, setup_cache and inference_chunk. The
original draws its noise anew in each process; here a generator with a fixed seed does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.nn.cfm import cosine_times, solver_steps
from zoo.nn.conv import CodecState
from zoo.nn.s3.encoder import FlowEncoder
from zoo.nn.s3.estimator import PAIR
from zoo.nn.s3.sizes import LOOKAHEAD, MELS, TOKEN_FRAMES
from zoo.step_audio2.config import FlowConfig
from zoo.step_audio2.estimator import Estimator
from zoo.step_audio2.past import STEPS, Cell, CellFrames, Past, PromptCell, PromptFrames

NOISE_FRAMES, SEED = 30_000, 0


def fixed_noise() -> Tensor:
    """Return the noise [frames, MELS] that the solver starts from."""
    generator = torch.Generator(device="cpu").manual_seed(SEED)
    return torch.randn(MELS, NOISE_FRAMES, generator=generator, device="cpu").mT.contiguous()


class Flow(nn.Module):
    noise: Tensor  # [NOISE_FRAMES, MELS], after prepare()
    strides: Tensor  # [STEPS]

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
        device = self.output.weight.device
        self.register_buffer("noise", fixed_noise().to(device), persistent=False)
        times = torch.tensor(cosine_times(STEPS), dtype=torch.float64)
        self.register_buffer("strides", times.diff().float().to(device), persistent=False)
        self.estimator.prepare(times[:STEPS].float().to(device))

    def past(self, rows: int, prompt: int) -> Past:
        """Return the past of `rows` streams behind prompts of up to `prompt` tokens."""
        return Past(self.config, self.encoder, self.estimator, self.output.bias, rows, prompt)

    def forward(
        self,
        codes: Tensor,
        num_there: Tensor,
        prompt: Tensor,
        speaker: Tensor,
        cell: Cell | PromptCell,
        past: Past,
    ) -> Tensor:
        """Return the mel [B, 2 N, MELS] of a cell of N tokens, and advance the past.

        codes [B, N + LOOKAHEAD], of which the first num_there [B] belong to the answer; prompt [B, 2 N, MELS]: the mel
        that is known, or zeros; speaker [B, D].
        """
        assert codes.shape[1] == cell.tokens + LOOKAHEAD, f"{codes.shape[1]} codes for {cell.tokens} tokens"
        is_there = torch.arange(codes.shape[1], device=codes.device) < num_there[:, None]
        state = CodecState(self.encoder.layout, past.ends[cell.slots], cell.tokens, cell.count)
        x = self.encoder(self.codes(codes), is_there, cell.sights, state, past.encoder_caches())
        past.ends[cell.slots] = state.next()
        mu = self.output(x)
        known = self.speaker(F.normalize(speaker, dim=1))[:, None].expand_as(mu)
        given = torch.cat((mu, known, prompt), -1)  # [B, 2 N, 3 MELS]
        pairs = torch.stack((given, torch.zeros_like(given)), 1)  # [B, PAIR, 2 N, 3 MELS]
        x = self._start(cell)
        for step in solver_steps(STEPS, x):
            parts, last_parts = self.estimator.parts[step], self.estimator.last_parts[step]
            turns = past.turns[cell.slots, step]  # [B, PAIR, V]
            caches = past.velocities[:, step].transpose(0, 1)  # [depth, rows, PAIR, places + 1, 2 I]
            x, turns, new = self.advance(
                x, pairs, parts, last_parts, self.strides[step], cell.count, cell.frames, turns, caches
            )
            past.turns[cell.slots, step] = turns
            cell.frames.keep(caches, new)
        return x

    def _start(self, cell: Cell | PromptCell) -> Tensor:
        """Return the noise of a cell's frames [B, 2 N, MELS]."""
        at = cell.first_frame[:, None] + torch.arange(TOKEN_FRAMES * cell.tokens, device=self.noise.device)
        return self.noise[at.clamp(max=len(self.noise) - 1)]

    def advance(
        self,
        x: Tensor,
        pairs: Tensor,
        parts: Tensor,
        last_parts: Tensor,
        stride: Tensor,
        count: Tensor,
        frames: CellFrames | PromptFrames,
        turns: Tensor,
        caches: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Take a step of the solver of size stride [].

        x [B, 2 N, MELS] -> [B, 2 N, MELS], the next turns [B, PAIR, V], and new keys and values [depth, B * PAIR, 2 N,
        2 I]. pairs [B, PAIR, 2 N, 3 MELS]: the condition and zeros; count [B]: tokens of each row; turns: the ends of
        the convolutions. The other arguments are the estimator's. It writes to no cache, so the compiler copies none.
        """
        count = (TOKEN_FRAMES * count).repeat_interleave(PAIR)
        state = CodecState(self.estimator.layout, turns.flatten(0, 1), x.shape[1], count)
        inputs = torch.cat((x.repeat_interleave(PAIR, 0), pairs.flatten(0, 1)), -1).to(parts.dtype)
        mask = None if frames.mask is None else frames.mask.repeat_interleave(PAIR, 0)
        made, new = self.estimator(inputs, parts, last_parts, state, frames, mask, caches)
        velocity, null = made.to(x.dtype).unflatten(0, (-1, PAIR)).unbind(1)
        guidance = self.config.guidance
        x = x + stride * ((1 + guidance) * velocity - guidance * null)
        return x, state.next().unflatten(0, (-1, PAIR)), new
