"""GLM-4-Voice as a family: embed, hidden, emit, render.

    slot ── embed ──> [B, D] ── hidden: 40 paged blocks ──> [B, D] ── emit ──> 1 token ─┬─ a code: onto the tape ── render ──> 22.05 kHz
             │ the last token                                                           └─ text: written

Text and codes share one vocabulary, and the model itself alternates: 13 text tokens, then 26 codes; after the
text only codes. Each code is 80 ms.

A cell of 50 codes is rendered with the 64 to 127 codes before it, their mel as the prompt, and up to 5 codes after it. The
first cell has 25 codes for early audio. So the samples do not depend on how the tape is cut into windows, and a cell costs
the same anywhere in a long answer.

    codes    | 64 .. 127 codes: the prompt | cell of 50 | 5 |            the prompt begins at a multiple of 64 codes,
    mel      | as it was rendered          | 344 or 345 | dropped        where a mel frame begins, too

Source: THUDM/GLM-4-Voice at eb00ce9, model_server.py, flow_inference.py and web_demo.py. The reference renders from the
beginning of the answer again for every chunk, and fades between chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zoo.check import check
from zoo.contract import Batch, Family, Prompt, Spec, State, View, frame_cap
from zoo.glm4_voice.config import FRAME_SAMPLES, MEL_SAMPLES, PER_TOKENS, Config, mel_frames
from zoo.glm4_voice.flow import Flow
from zoo.glm4_voice.listener import Listener
from zoo.glm4_voice.lm import Lm
from zoo.glm4_voice.prompt import PromptWriter
from zoo.glm4_voice.strategy import CELL, LOOKAHEAD, STRATEGY
from zoo.nn.eager import may_follow_values
from zoo.nn.narrow import dtype_of
from zoo.nn.s3.carried import heard, source_noise
from zoo.nn.s3.cells import rendered
from zoo.nn.s3.held_pitch import Vocoder
from zoo.nn.s3.sizes import GRID, MELS
from zoo.nn.sampling import draw, gumbel, is_any, uniform_noise
from zoo.request import Request

LEAST_PAST = 64  # codes of the prompt of a cell, once there are so many
MOST_CODES = LEAST_PAST + PER_TOKENS - 1 + CELL + LOOKAHEAD
MOST_MEL = mel_frames(MOST_CODES)
ALIGNED = 32  # a graph holds for all numbers of mel frames that are a multiple of this, since attention is aligned then
KEPT_MEL = 1024  # frames of the ring in which the latest mel is kept: more than a prompt's
GROUP = 13  # text tokens before the first code
NOISE_STEP, PHASE_STEP = 1 << 30, (1 << 31) - 1  # apart from the steps of the LM


class VoiceState(State):
    """Adds, for each slot: token, the last one drawn; last_step, at which the answer ends; the sampling values; mel, a ring
    of the latest frames; and the vocoder's past: its rows, the phases, and the samples that were given out."""

    token: Tensor
    last_step: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    mel: Tensor
    vocoder: Tensor
    phase: Tensor
    num_heard: Tensor

    def __init__(self, family: Glm4Voice, slots: int, max_frames: int):
        super().__init__(family.spec, slots, max_frames, family.dtype, family.device)
        dtype = dtype_of(family.flow.output)
        self.add("token", dtype=torch.int64)
        self.add("last_step", dtype=torch.int64)
        self.add("temperature")
        self.add("top_k", dtype=torch.int64)
        self.add("top_p", default=1)
        self.add("mel", KEPT_MEL, MELS, dtype=dtype)
        self.add("vocoder", family.vocoder.layout.size, dtype=dtype)
        self.add("phase", family.config.vocoder.harmonics, dtype=torch.float64)
        self.add("num_heard", dtype=torch.int64)


class Glm4Voice(Family[VoiceState]):
    def __init__(
        self,
        config: Config,
        spec: Spec,
        lm: Lm,
        flow: Flow,
        vocoder: Vocoder,
        listener: Listener,
        writer: PromptWriter,
    ):
        super().__init__()
        self.config, self.spec, self.strategy = config, spec, STRATEGY
        self.lm, self.flow, self.vocoder, self.listener = lm, flow, vocoder, listener
        self.writer = writer
        vocabulary = writer.vocabulary
        self.first_code = vocabulary.first_code
        self.stops = config.lm.stops
        self.dtype, self.device = dtype_of(lm.head), lm.head.weight.device

    # on the host, outside the engine's loop

    @torch.inference_mode()
    def prompt(self, request: Request) -> Prompt:
        values = check(request, self.spec)
        script = self.writer(request)
        most = values.pop("max_tokens")
        max_frames = frame_cap(self.spec, request, len(script.ids), most)
        room = self.spec.max_positions - len(script.ids)
        max_steps = min(most, room, 2 * max_frames + GROUP)
        ids = torch.tensor(script.ids, device=self.device)
        return Prompt(
            inputs=self.lm.embedding(ids),
            prefix_keys=script.ids,
            max_frames=max_frames,
            max_steps=max_steps,
            grid_offset=self.spec.window.grid_offset,
            slot=self._slot(request, values, max_steps),
            usage={
                "input_tokens": len(script.ids),
                "input_audio_tokens": script.num_codes,
                "prompt_positions": len(script.ids),
            },
        )

    def _slot(self, request: Request, values: dict[str, Any], max_steps: int) -> dict[str, Any]:
        seed = torch.tensor([request.seed])
        phase = uniform_noise(seed, torch.tensor([PHASE_STEP]), range(1), self.config.vocoder.harmonics)[0, 0]
        phase[0] = 0
        return values | {"seed": request.seed, "last_step": max_steps - 1, "phase": phase.double()}

    def detokenize(self, token: int) -> bytes:
        return self.writer.vocabulary.bytes_of(token)

    def answer_tokens(self, frames: Tensor, steps: Sequence[int]) -> tuple[int, ...]:
        codes = iter(frames[:, 0].tolist())
        return tuple(self.first_code + next(codes) if token < 0 else token for token in steps)

    # on the host, at admission

    def state(self, slots: int, max_frames: int | None = None) -> VoiceState:
        return VoiceState(self, slots, min(max_frames or self.spec.max_frames, self.spec.max_frames))

    # on the device

    def embed(self, state: VoiceState, slots: Tensor) -> Tensor:
        return self.lm.embedding(state.token[slots])

    def hidden(self, inputs: Tensor, batch: Batch) -> Tensor:
        return self.lm.stack(inputs, batch)

    def emit(self, state: VoiceState, slots: Tensor, h: Tensor) -> None:
        """Draw one token per slot. h [B, D], the hidden state at each last position."""
        logits = self._logits(h)
        noise = gumbel(state.seed[slots], state.steps[slots], range(1), logits.shape[1])[:, 0]  # [B, V]
        token = draw(logits, state.temperature[slots], state.top_k[slots], state.top_p[slots], noise)
        code = token - self.first_code
        is_code = (code >= 0) & (code < self.config.flow.codes)
        ended = is_any(token, self.stops)
        is_last = state.steps[slots] >= state.last_step[slots]
        state.write(slots, torch.where(is_code | ended, -1, token))
        state.token[slots] = torch.where(state.done[slots], state.token[slots], token)
        state.append(slots, code.clamp(0, self.config.flow.codes - 1)[:, None], ended, is_code)
        state.done[slots] = state.done[slots] | is_last

    def _logits(self, h: Tensor) -> Tensor:
        """Return the logits [B, V] in fp32. The rows behind the codes have no token."""
        logits = self.lm.head(h).float()
        is_token = torch.arange(logits.shape[1], device=h.device) < self.first_code + self.config.flow.codes
        return logits.masked_fill(~is_token, -torch.inf)

    def narrow_codec(self, dtype: torch.dtype) -> None:
        self.flow.estimator.narrow(dtype)

    def render(self, state: VoiceState, view: View) -> tuple[Tensor, Tensor]:
        # A stretch of at most CELL codes is one cell, unless it begins with the first cell and goes on behind it.
        is_cell = view.frames <= CELL and view.length != CELL
        cells = 1 if is_cell else 1 - (-view.frames // CELL)
        most = MEL_SAMPLES * (mel_frames(view.frames) + cells) + self.vocoder.plan.lag
        return rendered(view, cells, CELL, most, partial(self._cell, state))

    def _cell(self, state: VoiceState, view: View) -> tuple[Tensor, Tensor]:
        """Return samples [B, N] of at most one cell per slot, and how many of them are valid [B]."""
        slots, start, stop = view.slots, view.start, view.start + view.count
        first = ((start - LEAST_PAST).clamp(min=0) // PER_TOKENS) * PER_TOKENS
        end = torch.minimum(stop + LOOKAHEAD, state.ready[slots])
        most = min(view.length + LOOKAHEAD, MOST_CODES)
        mel = self._mel(state, slots, first, start, torch.maximum(end, first + 1), most)
        mel_start, mel_stop = _mel_frames(start), _mel_frames(stop)
        size = GRID if view.length <= CELL else CELL
        at = torch.arange(mel_frames(size) + 1, device=slots.device)
        mel = mel.gather(1, _index(mel_start - _mel_frames(first), at, mel.shape[1]))
        is_new = (mel_start[:, None] + at < mel_stop[:, None])[..., None]
        place = (mel_start[:, None] + at) % KEPT_MEL
        state.mel[slots[:, None], place] = torch.where(is_new, mel, state.mel[slots[:, None], place])
        noise = partial(source_noise, self.config.vocoder, state.seed[slots], NOISE_STEP)
        return heard(self.vocoder, state, slots, mel, mel_start, mel_stop, view.is_last, noise)

    def _mel(
        self, state: VoiceState, slots: Tensor, first: Tensor, start: Tensor, end: Tensor, most: int
    ) -> Tensor:
        """Return the mel [B, T, MELS] of codes first .. end, of which there are `most` at most, given that of codes
        first .. start."""
        count, num, frames = end - first, most, -(-mel_frames(most) // ALIGNED) * ALIGNED
        if may_follow_values(count):
            num = int(count.max())
            frames = mel_frames(num)
        at = first[:, None] + torch.arange(num, device=slots.device)
        codes = state.tape[slots[:, None], at.clamp(max=state.tape.shape[1] - 1), 0]
        at = _mel_frames(first)[:, None] + torch.arange(frames, device=slots.device)
        prompt = state.mel[slots[:, None], at % KEPT_MEL]
        return self.flow(codes, count, prompt, _mel_frames(start) - _mel_frames(first))


def _mel_frames(tokens: Tensor) -> Tensor:
    return torch.div(441 * tokens, PER_TOKENS, rounding_mode="floor")


def _index(first: Tensor, at: Tensor, num: int) -> Tensor:
    """Return the index [B, F, MELS] for `gather` of frames first + at, of at most num."""
    return (first[:, None] + at).clamp(max=num - 1)[..., None].expand(-1, -1, MELS)


assert MEL_SAMPLES * mel_frames(PER_TOKENS) == FRAME_SAMPLES * PER_TOKENS
