"""The networks within a patch. LocEnc encodes a patch of latents as one row for the language model. LocDiT
generates the next patch from the language models' hidden states, by flow matching.

    LocEnc   [special, z0 z1 z2 z3] ─ 12 blocks ─> output of the special token: the patch's code
    LocDiT   [lm, residual, time, c0 c1 c2 c3, x0 x1 x2 x3] ─ 12 blocks ─> output of the last four: the velocity of x
              └── mu ─────┘        └ patch before ┘  the patch so far

In the first generation lm, residual and time are one token, their sum.

Source: OpenBMB/VoxCPM, modules/locenc/local_encoder.py, modules/locdit/local_dit_v2.py and unified_cfm.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.nn.cfm import euler_steps, guided, sinusoid, sway_times
from zoo.nn.narrow import dtype_of
from zoo.voxcpm2.block import LocalStack
from zoo.voxcpm2.config import Config

# of the solver; every slot runs this many, so that requests that ask for fewer can share its launch
MAX_STEPS = 10


class PatchEncoder(nn.Module):
    """LocEnc: patches of latents [N, P, D] -> codes [N, h]."""

    def __init__(self, config: Config):
        super().__init__()
        width = config.encoder.hidden
        self.special = nn.Parameter(torch.empty(1, 1, 1, width))
        self.input = nn.Linear(config.vae.latent, width)
        self.rows_per_slot = 1 + config.patch
        self.stack = LocalStack(config.encoder, self.rows_per_slot, kept=slice(0, 1))

    def forward(self, patch: Tensor) -> Tensor:
        return self.stack.finish(*self._begin(patch))[:, 0]

    @torch.compiler.nested_compile_region
    def _begin(self, patch: Tensor) -> tuple[Tensor, Tensor]:
        special = self.special[0].expand(patch.shape[0], -1, -1)
        return self.stack.begin(torch.cat((special, self.input(patch)), 1))


class TimeProjection(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.fc1 = nn.Linear(width, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.silu(self.fc1(x)))


class PatchSolver(nn.Module):
    """LocDiT with its solver: hidden states to a patch of latents, without a device sync."""

    # [n + 1, n, h], after prepare(): the time token of each step, for schedules of 0 to n steps
    times: Tensor
    goes: Tensor  # [n + 1, n], the size of each step; 0 after the end of the schedule

    def __init__(self, config: Config):
        super().__init__()
        latent, width = config.vae.latent, config.dit.hidden
        self.patch, self.is_first_generation = config.patch, config.is_first_generation
        self.input = nn.Linear(latent, width)
        self.condition = nn.Linear(latent, width)
        self.time = TimeProjection(width)
        self.delta_time = TimeProjection(width)
        heads = 1 if config.is_first_generation else 3
        self.time_place, tokens = heads - 1, heads + 2 * config.patch
        self.stack = LocalStack(config.dit, tokens, kept=slice(tokens - config.patch, tokens))
        self.rows_per_slot = 2 * tokens  # with and without its condition
        self.output = nn.Linear(width, latent)

    @torch.no_grad()
    def prepare(self, most_steps: int) -> None:
        """Fill the tables of weights and schedules. Call once the weights are loaded.

        Schedules are computed on the host.
        """
        weight, dtype = self.input.weight, dtype_of(self.input)
        looks = torch.zeros(most_steps + 1, most_steps, dtype=dtype)
        goes = torch.zeros_like(looks)
        for steps in range(1, most_steps + 1):
            looks[steps, :steps], goes[steps, :steps] = euler_steps(sway_times(steps, dtype))
        width = weight.shape[0]
        rows = self.time(sinusoid(looks, width).to(weight.device))
        still = self.delta_time(sinusoid(torch.zeros(1, dtype=dtype), width).to(weight.device))
        self.register_buffer("times", rows + still, persistent=False)
        self.register_buffer("goes", goes.to(weight.device), persistent=False)

    def forward(self, mu: Tensor, before: Tensor, noise: Tensor, guidance: Tensor, steps: Tensor) -> Tensor:
        """Return a patch of latents [B, P, D].

        mu [B, M, h], where M is 2, or 1 in the first generation; before [B, P, D]: the previous patch; noise
        [B, P, D]; guidance [B] fp32; steps [B]. The net runs every row twice, with its mu and with zeros, for
        classifier-free guidance.
        """
        mu = torch.stack((mu, torch.zeros_like(mu)), 1)  # [B, 2, M, h]
        condition = self.condition(before)[:, None].expand(-1, 2, -1, -1)  # [B, 2, P, h]
        # the part that all evaluations share: zeros where x goes, and where the time is added
        place = self.time_place + 1 - mu.shape[2]
        told = F.pad(torch.cat((F.pad(mu, (0, 0, 0, place)), condition), 2), (0, 0, 0, self.patch))
        times, goes = self.times[steps], self.goes[steps]  # [B, n, h], [B, n]
        x = noise
        for k in range(1, self.times.shape[1]):  # the first step of every schedule has size 0
            y = self.stack.finish(*self._begin(told, times[:, k], x))  # [B, 2, P, h]
            velocity, null = self.output(y).unbind(1)  # [B, P, D] each
            x = x - goes[:, k, None, None] * guided(velocity, null, guidance)
        return x

    @torch.compiler.nested_compile_region
    def _begin(self, told: Tensor, time: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run the first block. told [B, 2, L, h]: shared by all evaluations; time [B, h]; x [B, P, D]."""
        length, place = told.shape[2], self.time_place
        time = F.pad(time[:, None], (0, 0, place, length - 1 - place))  # [B, L, h]
        x = F.pad(self.input(x), (0, 0, length - self.patch, 0))
        return self.stack.begin(told + (time + x)[:, None])
