"""VoxCPM2 as a family: embed, hidden, emit, render.

    slot ─ embed ─> [B, H]     ─ hidden: 28 + 8 paged blocks ─> [B, 2 H] ─ emit ─> a patch of 4 latents on the tape ─ render ─> 48 kHz
            │ LocEnc of the last patch    │ base, FSQ, fusion, residual      │ LocDiT: flow matching, 9 evaluations on 2B rows
                                          │ one page table for both          │ stop head

Source: OpenBMB/VoxCPM, model/voxcpm2.py, _inference.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.check import check
from zoo.contract import Batch, Family, Prompt, Said, Spec, State, View, frame_cap
from zoo.nn.conv import slots_state
from zoo.nn.keys import prefix_key
from zoo.nn.narrow import dtype_of
from zoo.nn.sampling import normal
from zoo.request import Request
from zoo.voxcpm2.block import LanguageModel
from zoo.voxcpm2.config import Config
from zoo.voxcpm2.latent import MAX_STEPS, PatchEncoder, PatchSolver
from zoo.voxcpm2.prompt import AUDIO, PromptWriter, Script
from zoo.voxcpm2.strategy import STRATEGY
from zoo.voxcpm2.vae import Vae

STOP_AFTER = 2  # the stop head is ignored up to this step (from 0), so speech has at least four patches
# the cap if the request sets none, for speech that never stops: 6 patches per text token, plus 10
PATCHES_PER_TEXT_TOKEN, MORE_PATCHES = 6, 10
MAX_PATCHES = 4096


class FSQ(nn.Module):
    """Finite scalar quantisation (arXiv 2309.15505): a bottleneck with values rounded to 2 scale + 1 levels.

    vector-quantize-pytorch's FSQ is not used: for bf16 input it rounds in fp32, and so to other levels than
    the reference.
    """

    def __init__(self, width: int, middle: int, scale: int):
        super().__init__()
        self.narrow = nn.Linear(width, middle)
        self.widen = nn.Linear(middle, width)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.widen(torch.round(self.narrow(x).tanh() * self.scale) / self.scale)


class Net(nn.Module):
    """The networks in model.safetensors."""

    def __init__(self, config: Config):
        super().__init__()
        width, local = config.lm.hidden, config.dit.hidden
        self.embedding = nn.Embedding(config.vocab, width)
        self.base = LanguageModel(config.lm, first_layer=0)
        self.fsq = FSQ(width, config.fsq_width, config.fsq_scale)
        self.fusion = None if config.is_first_generation else nn.Linear(2 * width, width)
        self.residual = LanguageModel(config.residual, first_layer=config.lm.layers)
        self.encoder = PatchEncoder(config)
        self.from_code = nn.Linear(config.encoder.hidden, width)
        self.lm_to_solver = nn.Linear(width, local)
        self.residual_to_solver = nn.Linear(width, local)
        self.solver = PatchSolver(config)
        self.stop_input = nn.Linear(width, width)
        self.stop = nn.Linear(width, 2, bias=False)

    def prepare(self) -> None:
        """Fill the tables that depend on the weights. Call once the weights are loaded."""
        weight = self.embedding.weight
        for stack in (self.base, self.residual, self.encoder.stack, self.solver.stack):
            stack.prepare(weight.device, dtype_of(self.embedding))
        self.solver.prepare(MAX_STEPS)

    def rows(self, patches: Tensor) -> Tensor:
        """Return the rows that the language model reads for patches [N, P, D], as [N, H]."""
        return self.from_code(self.encoder(patches))

    def join(self, base: Tensor, heard: Tensor) -> Tensor:
        """Return the residual model's input [T, H].

        base [T, H]: the base model's hidden states; heard [T, H]: the input rows at audio positions, zero
        elsewhere.
        """
        return base + heard if self.fusion is None else self.fusion(torch.cat((base, heard), 1))

    def mu(self, base: Tensor, residual: Tensor) -> Tensor:
        """Return the solver's condition from both models' hidden states [B, H]: [B, 2, h], or in the first
        generation their sum [B, 1, h]."""
        mu = torch.stack((self.lm_to_solver(base), self.residual_to_solver(residual)), 1)
        return mu.sum(1, keepdim=True) if self.fusion is None else mu

    def stops(self, h: Tensor) -> Tensor:
        """Return whether patches are the last [B], from the base model's hidden states [B, H]."""
        return self.stop(F.silu(self.stop_input(h))).argmax(-1) == 1


class VoxState(State):
    """The fields of State, and for each slot:

    - before [S+1, P, D]: the patch before the first one
    - cfg_scale [S+1] and solver_steps [S+1]: the request's options
    - codec_state [S+1, values]: the decoder's state
    """

    before: Tensor
    cfg_scale: Tensor
    solver_steps: Tensor
    codec_state: Tensor

    def __init__(self, family: VoxCPM2, slots: int, max_frames: int):
        super().__init__(family.spec, slots, max_frames, family.dtype, family.device)
        spec, decoder = family.spec, family.vae.decoder
        self.add("before", *spec.frame_shape, dtype=spec.frame_dtype)
        self.add("cfg_scale")
        self.add("solver_steps", dtype=torch.int64, default=MAX_STEPS)
        self.add("codec_state", decoder.state_size, dtype=decoder.dtype)


class VoxCPM2(Family[VoxState]):
    """VoxCPM2 and the first generation as a family."""

    def __init__(self, config: Config, spec: Spec, net: Net, vae: Vae, writer: PromptWriter):
        super().__init__()
        self.config, self.spec, self.strategy = config, spec, STRATEGY
        self.net, self.vae, self.writer = net, vae, writer
        self.dtype, self.device = dtype_of(net.embedding), net.embedding.weight.device

    # on the host, outside the engine's loop

    @torch.inference_mode()
    def prompt(self, request: Request, said: Said | None = None) -> Prompt:
        values = check(request, self.spec)
        script = self.writer(request, values, said)
        ids = torch.tensor(script.ids, device=self.device)  # [T]
        is_audio = ids == AUDIO
        rows = self.net.embedding(ids.clamp(min=0))  # [T, H]
        slot = {
            "seed": request.seed,
            "cfg_scale": values["cfg_scale"],
            "solver_steps": values["solver_steps"],
        }
        if script.references:
            rows[is_audio] = torch.cat([reference.rows for reference in script.references])
        if script.continues:
            last = script.references[-1]
            slot |= {"before": last.patches[-1], "codec_state": last.codec_state}
        guard = PATCHES_PER_TEXT_TOKEN * script.text_tokens + MORE_PATCHES
        return Prompt(
            inputs=rows,
            prefix_keys=keys(script),
            is_audio=is_audio,
            max_frames=frame_cap(self.spec, request, len(script.ids), guard, num_text=script.text_tokens),
            slot=slot,
            usage={"input_tokens": script.text_tokens, "prompt_positions": len(script.ids)},
        )

    def later_prompt(self, request: Request, said: Said) -> Prompt:
        return self.prompt(request, said)

    # at start-up

    def state(self, slots: int, max_frames: int | None = None) -> VoxState:
        return VoxState(self, slots, min(max_frames or self.spec.max_frames, self.spec.max_frames))

    # on the device

    def embed(self, state: VoxState, slots: Tensor) -> Tensor:
        """Return the last patch of each slot as one row [B, H]."""
        return self.net.rows(self._last(state, slots))  # [B, H]

    def hidden(self, inputs: Tensor, batch: Batch) -> Tensor:
        """Return the hidden states of the base model, quantised at audio positions, and of the residual
        model.

        inputs [T, H]; the result is [T, 2 H].
        """
        is_audio = batch.is_audio[:, None]
        base = self.net.base(inputs, batch)
        base = torch.where(is_audio, self.net.fsq(base), base)  # [T, H]
        residual = self.net.residual(self.net.join(base, torch.where(is_audio, inputs, 0)), batch)
        return torch.cat((base, residual), 1)

    def emit(self, state: VoxState, slots: Tensor, h: Tensor) -> None:
        """Append one patch of latents (160 ms) to each slot's tape, also at the step where the model stops.

        h [B, 2 H]: the hidden states at each last position.
        """
        base, residual = h.chunk(2, -1)
        steps = state.steps[slots]
        mu, noise = self.net.mu(base, residual), self._noise(state, slots)
        patch = self.net.solver(
            mu, self._last(state, slots), noise, state.cfg_scale[slots], state.solver_steps[slots]
        )
        stops = self.net.stops(base) & (steps > STOP_AFTER)
        state.append(slots, patch, torch.zeros_like(stops))
        state.done[slots] = state.done[slots] | stops

    def _last(self, state: VoxState, slots: Tensor) -> Tensor:
        """Return the previous patch [B, P, D]: from the tape, else the end of the reference, else zeros."""
        return torch.where(
            (state.ready[slots] > 0)[:, None, None], state.last_frame(slots), state.before[slots]
        )

    def _noise(self, state: VoxState, slots: Tensor) -> Tensor:
        """Return the noise of this step [B, P, D], from the seeds unless the state holds given noise."""
        if state.noise is not None:
            return state.noise[state.steps[slots]].to(self.dtype)
        width = self.config.patch * self.config.vae.latent
        return (
            normal(state.seed[slots], state.steps[slots], width)
            .unflatten(1, self.spec.noise_shape)
            .to(self.dtype)
        )

    def narrow_codec(self, dtype: torch.dtype) -> None:
        self.vae.decoder.to_rows(dtype)

    def render(self, state: VoxState, view: View) -> tuple[Tensor, Tensor]:
        rows, slots, decoder = state.codec_state, view.slots, self.vae.decoder
        past = slots_state(decoder.layout, rows, slots, view.frames, view.count)
        samples = decoder(state.window(view).flatten(1, 2).mT.to(rows.dtype), past)  # of [B, D, F * P]
        past.store(rows, slots)
        return samples.float(), view.count * self.spec.frame_samples


def keys(script: Script) -> tuple[int, ...]:
    """Return a key per position: its text id, or a negative hash of reference and patch number."""
    patches = [
        prefix_key(reference.name, i)
        for reference in script.references
        for i in range(len(reference.patches))
    ]
    of_next_patch = iter(patches)
    return tuple(next(of_next_patch) if index == AUDIO else index for index in script.ids)
