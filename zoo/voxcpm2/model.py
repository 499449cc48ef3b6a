"""VoxCPM2 as a family: embed, hidden, emit, render.

    slot ─ embed ─> [B, H + 1] ─ hidden: 28 + 8 paged blocks ─> [B, 2 H] ─ emit ─> a patch of 4 latents on the tape ─ render ─> 48 kHz
            │ LocEnc of the last patch    │ base, FSQ, fusion, residual      │ LocDiT: flow matching, 9 evaluations on 2B rows
            │ and a 1: it is audio        │ one page table for both          │ stop head

Source: OpenBMB/VoxCPM, model/voxcpm2.py, _inference.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.contract import Batch, Family, Prompt, Request, Spec, State, View, refuse
from zoo.nn.sampling import normal
from zoo.voxcpm2.block import LanguageModel
from zoo.voxcpm2.clone import Reference
from zoo.voxcpm2.config import Config
from zoo.voxcpm2.latent import MOST_STEPS, PatchEncoder, PatchSolver
from zoo.voxcpm2.prompt import AUDIO, PromptWriter, Script
from zoo.voxcpm2.strategy import STRATEGY
from zoo.voxcpm2.vae import Vae

GUIDANCE = 2.0
STOP_AFTER = 2  # the step (from 0) after which the stop head is believed: four patches are the least
PATCHES_PER_TEXT_TOKEN, MORE_PATCHES = 6, 10  # the guard against a voice that never ends, where the request sets no cap
MAX_PATCHES = 4096


class FSQ(nn.Module):
    """Finite scalar quantisation (arXiv 2309.15505): a narrow middle of which each value is rounded to one of 2 scale + 1 levels."""

    def __init__(self, width: int, middle: int, scale: int):
        super().__init__()
        self.narrow = nn.Linear(width, middle)
        self.widen = nn.Linear(middle, width)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.widen(torch.round(self.narrow(x).tanh() * self.scale) / self.scale)


class Net(nn.Module):
    """All of model.safetensors."""

    def __init__(self, config: Config):
        super().__init__()
        width, local = config.lm.hidden, config.dit.hidden
        self.embedding = nn.Embedding(config.vocab, width)
        self.base = LanguageModel(config.lm, first_layer=0)
        self.fsq = FSQ(width, config.fsq_width, config.fsq_scale)
        self.fusion = None if config.adds else nn.Linear(2 * width, width)
        self.residual = LanguageModel(config.residual, first_layer=config.lm.layers)
        self.encoder = PatchEncoder(config)
        self.from_code = nn.Linear(config.encoder.hidden, width)
        self.lm_to_solver = nn.Linear(width, local)
        self.residual_to_solver = nn.Linear(width, local)
        self.solver = PatchSolver(config)
        self.stop_input = nn.Linear(width, width)
        self.stop = nn.Linear(width, 2, bias=False)

    def finish(self) -> None:
        """Call once, with the weights in place."""
        weight = self.embedding.weight
        for stack in (self.base, self.residual, self.encoder.stack, self.solver.stack):
            stack.finish(weight.device, weight.dtype)
        self.solver.finish(MOST_STEPS)

    def rows(self, patches: Tensor) -> Tensor:
        """patches [N, P, D] -> what the language model reads of them [N, H]."""
        return self.from_code(self.encoder(patches))

    def join(self, base: Tensor, heard: Tensor) -> Tensor:
        """The base model's hidden states and the rows of audio, zero elsewhere [T, H] each -> what the residual model reads [T, H]."""
        return base + heard if self.fusion is None else self.fusion(torch.cat((base, heard), 1))

    def mu(self, base: Tensor, residual: Tensor) -> Tensor:
        """Both models' hidden states [B, H] -> what the solver is told of them [B, 2, h], or their sum [B, 1, h]."""
        mu = torch.stack((self.lm_to_solver(base), self.residual_to_solver(residual)), 1)
        return mu.sum(1, keepdim=True) if self.fusion is None else mu

    def stops(self, h: Tensor) -> Tensor:
        """The base model's hidden states [B, H] -> whether the patch that is made of each is the last [B]."""
        return self.stop(F.silu(self.stop_input(h))).argmax(-1) == 1


class VoxState(State):
    """Adds: the patch before the first [S+1, P, D]; guidance [S+1]; solver steps [S+1]; the decoder's past [S+1, values]."""

    def __init__(self, family: VoxCPM2, slots: int, max_frames: int):
        spec, decoder, dtype, device = family.spec, family.vae.decoder, family.dtype, family.device
        super().__init__(spec, slots, max_frames, dtype, device)
        rows = slots + 1
        self.before = torch.zeros(rows, *spec.frame_shape, dtype=spec.frame_dtype, device=device)
        self.guidance = torch.zeros(rows, device=device)
        self.solver_steps = torch.full((rows,), MOST_STEPS, dtype=torch.int64, device=device)
        self.past = torch.zeros(rows, decoder.past_values, dtype=decoder.dtype, device=device)


class VoxCPM2(Family):
    def __init__(self, config: Config, spec: Spec, net: Net, vae: Vae, writer: PromptWriter):
        super().__init__()
        self.config, self.spec, self.strategy = config, spec, STRATEGY
        self.net, self.vae, self.writer = net, vae, writer
        self.dtype, self.device = net.embedding.weight.dtype, net.embedding.weight.device

    # host, off the loop

    @torch.inference_mode()
    def prompt(self, request: Request) -> Prompt:
        script = self.writer(request)
        ids = torch.tensor(script.ids, device=self.device)  # [T]
        is_audio = ids == AUDIO
        rows = self.net.embedding(ids.clamp(min=0))  # [T, H]
        reference, values = script.reference, {}
        if reference is not None:
            rows[is_audio] = reference.rows
            if script.continues:
                values = {"before": reference.patches[-1], "past": reference.past}
        return Prompt(
            inputs=torch.cat((rows, is_audio[:, None].to(self.dtype)), 1),
            keys=keys(script),
            max_frames=self._cap(request, script),
            slot={
                **values,
                "seed": request.seed,
                "guidance": GUIDANCE if request.guidance is None else request.guidance,
                "solver_steps": request.solver_steps or MOST_STEPS,
            },
            usage={"input_tokens": script.text_tokens, "prompt_positions": len(script.ids)},
        )

    def _cap(self, request: Request, script: Script) -> int:
        cap = request.max_frames or PATCHES_PER_TEXT_TOKEN * script.text_tokens + MORE_PATCHES
        cap, room = min(cap, self.spec.max_frames), self.spec.max_positions - len(script.ids)
        if cap > room:
            takes = f"the prompt takes {len(script.ids)} positions and leaves room for {max(room, 0)} patches"
            raise refuse("text", f"{takes}; {cap} are asked for")
        return cap

    # at the door

    def state(self, slots: int, max_frames: int | None = None) -> VoxState:
        return VoxState(self, slots, min(max_frames or self.spec.max_frames, self.spec.max_frames))

    def admit(self, state: VoxState, slot: int, prompt: Prompt) -> None:  # type: ignore[override]
        state.open(slot, prompt)
        values = prompt.slot
        state.before[slot] = values.get("before", 0)
        state.past[slot] = values.get("past", 0)
        for name in ("seed", "guidance", "solver_steps"):
            getattr(state, name)[slot] = values[name]

    # device

    def embed(self, state: VoxState, slots: Tensor) -> Tensor:  # type: ignore[override]
        """The last patch as one row, and a 1 for audio."""
        rows = self.net.rows(self._last(state, slots))  # [B, H]
        return torch.cat((rows, rows.new_ones(rows.shape[0], 1)), 1)

    def hidden(self, inputs: Tensor, batch: Batch) -> Tensor:
        """[T, H + 1], rows and whether each is audio -> [T, 2 H], the base model's hidden states, quantised where audio is, and the
        residual model's."""
        rows, is_audio = inputs[:, :-1], inputs[:, -1:] > 0
        base = self.net.base(rows, batch)
        base = torch.where(is_audio, self.net.fsq(base), base)  # [T, H]
        residual = self.net.residual(self.net.join(base, torch.where(is_audio, rows, 0)), batch)
        return torch.cat((base, residual), 1)

    def emit(self, state: VoxState, slots: Tensor, h: Tensor) -> None:  # type: ignore[override]
        """One patch of latents (160 ms) per slot. The patch at which the model stops is said. h [B, 2 H] at each last position."""
        base, residual = h.chunk(2, -1)
        steps = state.steps[slots]
        mu, noise = self.net.mu(base, residual), self._noise(state, slots)
        patch = self.net.solver(mu, self._last(state, slots), noise, state.guidance[slots], state.solver_steps[slots])
        stops = self.net.stops(base) & (steps > STOP_AFTER)
        state.append(slots, patch, torch.zeros_like(stops))
        state.done[slots] = state.done[slots] | stops

    def _last(self, state: VoxState, slots: Tensor) -> Tensor:
        """The patch before the next one [B, P, D]: on the tape, or of the reference, or zeros."""
        ready = state.ready[slots]
        return torch.where((ready > 0)[:, None, None], state.tape[slots, (ready - 1).clamp(min=0)], state.before[slots])

    def _noise(self, state: VoxState, slots: Tensor) -> Tensor:
        """[B, P, D]"""
        if state.noise is not None:
            return state.noise[state.steps[slots]].to(self.dtype)
        width = self.config.patch * self.config.vae.latent
        return normal(state.seed[slots], state.steps[slots], width).unflatten(1, self.spec.noise_shape).to(self.dtype)

    def render(self, state: VoxState, view: View) -> Tensor:  # type: ignore[override]
        at = view.start[:, None] + torch.arange(view.frames, device=view.start.device)  # [B, F]
        patches = state.tape[view.slots[:, None], at.clamp(max=state.tape.shape[1] - 1)]  # [B, F, P, D]
        latents = patches.flatten(1, 2).mT.to(state.past.dtype)  # [B, D, F * P]
        samples, past = self.vae.decoder(latents, state.past[view.slots], view.count, view.frames)
        state.past[view.slots] = past
        return samples.float()


def keys(script: Script) -> tuple[int, ...]:
    """What names each position: a text id, or, negative, a hash of the reference and the patch."""
    named, patch = [], 0
    for index in script.ids:
        if index == AUDIO:
            named.append(_patch_key(script.reference, patch))
            patch += 1
        else:
            named.append(index)
    return tuple(named)


def _patch_key(reference: Reference | None, patch: int) -> int:
    assert reference is not None, f"patch {patch} is of a reference, and there is none"
    name = blake2b(reference.name + struct.pack("q", patch), digest_size=8).digest()
    return int.from_bytes(name, "little") | -(1 << 63)
