"""Step-Audio 2 as a family: embed, hidden, emit, render.

    slot ── embed ──> [B, D] ── hidden: 28 paged blocks ──> [B, D] ── emit ──> 1 token ─┬─ a code: onto the tape ── render ──> 24 kHz
             │ the last token                                                           └─ text: written

Text and codes share one vocabulary. The model itself alternates: a token of text (or of padding), then 4
codes of 40 ms. A token that is neither text nor a code is written, too, as an id after the vocabulary's rows:
it has no bytes.

The flow renders cells of 25 codes behind the voice's prompt, each when 3 more codes are there. The last cell of an answer
takes up to 27 codes. So the samples do not depend on how the tape is cut into windows.

Source: stepfun-ai/Step-Audio2 at 7c58630, stepaudio2.py, token2wav.py and examples-vllm-stream.py. The reference's
vocoder renders each chunk with 8 frames before it, and fades between chunks; here it carries its past.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.check import check
from zoo.contract import Batch, Family, Prompt, Spec, State, View, frame_cap
from zoo.nn.eager import may_follow_values
from zoo.nn.narrow import dtype_of
from zoo.nn.s3.carried import heard, source_noise
from zoo.nn.s3.cells import rendered
from zoo.nn.s3.hift import Vocoder
from zoo.nn.s3.sizes import GRID, LOOKAHEAD, MEL_SAMPLES, MELS, TOKEN_FRAMES
from zoo.nn.sampling import draw, gumbel, penalise
from zoo.request import AudioClip, Request, RequestError
from zoo.step_audio2 import thought
from zoo.step_audio2.config import Config
from zoo.step_audio2.flow import Flow
from zoo.step_audio2.listener import PACKAGES
from zoo.step_audio2.lm import Published
from zoo.step_audio2.past import MAX_PROMPT, Cell, Past
from zoo.step_audio2.prompt import PromptWriter, Script
from zoo.step_audio2.strategy import STRATEGY
from zoo.step_audio2.voices import Cloner, FlowPrompt, flow_prompt
from zoo.voices.references import References

MOST_CODES = GRID + LOOKAHEAD - 1  # of the last cell
CELL_MEL = TOKEN_FRAMES * MOST_CODES
EXTRA_STEPS = 32  # that a bound on frames leaves for text behind the speech
NOISE_STEP = 1 << 30  # apart from the steps of the LM
MAX_PROMPT_BYTES = 4 << 30  # of the pasts behind voices


class VoiceState(State):
    """Adds, for each slot:

    - token, the last one drawn; last_step, at which the answer ends; seen [S+1, V], the tokens of prompt and answer; and
      the sampling values
    - is_silent: codes are not spoken, because the answer is text
    - thought: how many bytes of `</think>` were written; all of them if the request has no thought. closing: how many
      of the tokens after a thought are still to come
    - speaker and num_prompt, of the voice; num_rendered, codes; the flow's past
    - the vocoder's past: its rows, the phases, and the number of samples that were given out
    """

    token: Tensor
    last_step: Tensor
    seen: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    repetition_penalty: Tensor
    is_silent: Tensor
    thought: Tensor
    closing: Tensor
    speaker: Tensor
    num_prompt: Tensor
    num_rendered: Tensor
    vocoder: Tensor
    phase: Tensor
    num_heard: Tensor

    def __init__(self, family: StepAudio2, slots: int, max_frames: int):
        super().__init__(family.spec, slots, max_frames, family.dtype, family.device)
        dtype = dtype_of(family.flow.output)
        for name in ("token", "last_step", "top_k", "closing", "num_prompt", "num_rendered", "num_heard"):
            self.add(name, dtype=torch.int64)
        self.add("seen", family.config.lm.vocab, dtype=torch.bool)
        self.add("temperature")
        self.add("top_p", default=1)
        self.add("repetition_penalty", default=1)
        self.add("is_silent", dtype=torch.bool)
        self.add("thought", dtype=torch.int64, default=len(thought.END))
        self.add("speaker", family.config.flow.speaker, default=1, dtype=dtype)
        self.add("vocoder", family.vocoder.layout.size, dtype=dtype)
        self.add("phase", family.config.vocoder.harmonics, dtype=torch.float64)
        self.past: Past = family.flow.past(slots + 1, MAX_PROMPT)

    def take_row(self, slot: int, source: State) -> None:
        super().take_row(slot, source)
        assert isinstance(source, VoiceState), f"a row of {type(source).__name__}"
        self.past.take(slot, source.past)


class StepAudio2(Family[VoiceState]):
    encoder_packages = PACKAGES

    def __init__(
        self,
        config: Config,
        spec: Spec,
        published: Published,
        flow: Flow,
        vocoder: Vocoder,
        writer: PromptWriter,
        cloner: Cloner,
        voices: dict[str, AudioClip],
    ):
        super().__init__()
        self.config, self.spec, self.strategy = config, spec, STRATEGY
        self.lm, self.listener = published.lm, published.listener
        self.flow, self.vocoder, self.writer, self.cloner, self.voices = flow, vocoder, writer, cloner, voices
        vocabulary = writer.vocabulary
        self.first_code, self.first_hidden, self.end = (
            vocabulary.first_code,
            vocabulary.first_hidden,
            vocabulary.end,
        )
        self.num_tokens = vocabulary.num_tokens
        self.dtype, self.device = dtype_of(self.lm.head), self.lm.head.weight.device
        spelled = thought.table(config.lm.vocab, vocabulary.bytes_of)
        self.register_buffer("spelled", spelled.to(self.device), persistent=False)  # [V, len + 1]
        closing = torch.tensor(thought.closing(vocabulary), device=self.device)
        self.register_buffer("closing", closing, persistent=False)
        self.flow_prompts: References[FlowPrompt] = References(max_bytes=MAX_PROMPT_BYTES)

    spelled: Tensor
    closing: Tensor

    # on the host, outside the engine's loop

    @torch.inference_mode()
    def prompt(self, request: Request) -> Prompt:
        values = check(request, self.spec)
        is_spoken = request.output == "speech"
        voice = self._voice(request) if is_spoken else None
        script = self.writer(request, values)
        if request.output == "transcript" and request.temperature is None:
            values["temperature"] = 0.0
        most, thinks = values.pop("max_tokens"), values.pop("thinks")
        del values["template"]
        room = self.spec.max_positions - len(script.ids)
        max_frames, max_steps = 1, min(most, room)
        if is_spoken:
            max_frames = frame_cap(self.spec, request, len(script.ids), most)
            if request.max_frames is not None or not thinks:  # a bound on frames bounds the thought, too
                max_steps = min(max_steps, 2 * max_frames + EXTRA_STEPS)
        if max_steps < 1:
            raise RequestError(
                "text", f"the conversation leaves no room; the model has {self.spec.max_positions} positions"
            )
        slot = values | {"seed": request.seed, "last_step": max_steps - 1, "is_silent": not is_spoken}
        if thinks:
            slot["thought"] = 0
        if voice is not None:
            slot |= {"speaker": voice.speaker, "num_prompt": voice.num_tokens, "past": voice.past}
        return self._prompt(script, max_frames, max_steps, slot, not is_spoken)

    def _prompt(
        self, script: Script, max_frames: int, max_steps: int, slot: dict[str, Any], is_text: bool
    ) -> Prompt:
        ids = torch.tensor(script.ids, device=self.device)
        inputs = self.lm.embedding(ids)
        for first, rows in script.heard:
            inputs[first : first + len(rows)] = rows.to(inputs.dtype)
        seen = torch.zeros(self.config.lm.vocab, dtype=torch.bool, device=self.device)
        seen[ids] = True
        return Prompt(
            inputs=inputs,
            prefix_keys=script.keys,
            max_frames=max_frames,
            max_steps=max_steps,
            slot=slot | {"seen": seen},
            is_text=is_text,
            usage={
                "input_tokens": len(script.ids),
                "input_audio_tokens": script.num_heard,
                "prompt_positions": len(script.ids),
            },
        )

    def _voice(self, request: Request) -> FlowPrompt:
        """Return the flow's past behind the voice of a request. Raises RequestError."""
        if request.references:
            clip = request.references[0].clip
        else:
            clip = self.voices[(request.voice or next(iter(self.voices))).lower()]
        name_of_clip, voice = self.cloner(clip)
        return self.flow_prompts.get(name_of_clip, lambda: flow_prompt(self.flow, voice))

    def detokenize(self, token: int) -> bytes:
        return self.writer.vocabulary.bytes_of(token) if token < self.config.lm.vocab else b""

    def answer_tokens(self, frames: Tensor, steps: Sequence[int]) -> tuple[int, ...]:
        codes, rows = iter(frames[:, 0].tolist()), self.config.lm.vocab
        return tuple(self.first_code + next(codes) if token < 0 else token % rows for token in steps)

    # on the host, at admission

    def state(self, slots: int, max_frames: int | None = None) -> VoiceState:
        return VoiceState(self, slots, min(max_frames or self.spec.max_frames, self.spec.max_frames))

    def admit(self, state: VoiceState, slot: int, prompt: Prompt) -> None:
        rows = dict(prompt.slot)
        past, num_tokens = rows.pop("past", None), rows.get("num_prompt", 0)
        state.open(slot, replace(prompt, slot=rows))
        state.past.clear(slot)
        if past is not None:
            state.past.put(slot, past, num_tokens)

    # on the device

    def embed(self, state: VoiceState, slots: Tensor) -> Tensor:
        return self.lm.embedding(state.token[slots])

    def hidden(self, inputs: Tensor, batch: Batch) -> Tensor:
        return self.lm.stack(inputs, batch)

    def emit(self, state: VoiceState, slots: Tensor, h: Tensor) -> None:
        """Draw one token per slot. h [B, D], the hidden state at each last position."""
        is_open = ~state.done[slots]
        drawn = self._drawn(state, slots, h)
        token, is_thought = self._behind_thought(state, slots, drawn, is_open)
        code, rows = token - self.first_code, self.config.lm.vocab
        is_code = (code >= 0) & (code < self.config.flow.num_codes) & ~state.is_silent[slots]
        ended = token == self.end
        is_shown = (token < self.first_hidden) & ~is_thought
        is_last = state.steps[slots] >= state.last_step[slots]
        state.write(slots, torch.where(is_code | ended, -1, torch.where(is_shown, token, token + rows)))
        state.token[slots] = torch.where(is_open, token, state.token[slots])
        state.seen[slots, token] = state.seen[slots, token] | is_open
        state.append(slots, code.clamp(0, self.config.flow.num_codes - 1)[:, None], ended, is_code)
        state.done[slots] = state.done[slots] | is_last

    def _drawn(self, state: VoiceState, slots: Tensor, h: Tensor) -> Tensor:
        """Return a token per slot [B]. The rows behind the last audio token have none, and are never drawn."""
        logits = self.lm.head(h).float()
        logits = penalise(logits, state.seen[slots], state.repetition_penalty[slots])
        is_token = torch.arange(logits.shape[1], device=h.device) < self.num_tokens
        logits = logits.masked_fill(~is_token, -torch.inf)
        noise = gumbel(state.seed[slots], state.steps[slots], range(1), logits.shape[1])[:, 0]  # [B, V]
        return draw(logits, state.temperature[slots], state.top_k[slots], state.top_p[slots], noise)

    def _behind_thought(
        self, state: VoiceState, slots: Tensor, drawn: Tensor, is_open: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the token of each slot [B], and whether it belongs to a thought or to what follows it. The tokens that
        follow a thought are not drawn."""
        whole, num = len(thought.END), len(self.closing)
        before, left = state.thought[slots], state.closing[slots]
        after = self.spelled[drawn, before].long()
        is_over = (before < whole) & (after == whole) & ~state.is_silent[slots]
        left = torch.where(is_over, num, left)
        token = torch.where(left > 0, self.closing[(num - left).clamp(min=0, max=num - 1)], drawn)
        state.thought[slots] = torch.where(is_open, torch.where(left > 0, whole, after), before)
        state.closing[slots] = torch.where(is_open, (left - 1).clamp(min=0), state.closing[slots])
        return token, (before < whole) | (left > 0)

    def narrow_codec(self, dtype: torch.dtype) -> None:
        self.flow.estimator.to(dtype)

    def render(self, state: VoiceState, view: View) -> tuple[Tensor, Tensor]:
        cells = -(-view.frames // GRID)
        most = cells * CELL_MEL * MEL_SAMPLES + self.vocoder.plan.lag
        return rendered(view, cells, GRID, most, partial(self._cell, state))

    def _cell(self, state: VoiceState, view: View) -> tuple[Tensor, Tensor]:
        """Return samples [B, N] of at most one cell per slot, and how many of them are valid [B]."""
        slots, start, first = view.slots, view.start, state.num_rendered[view.slots]
        num_left = state.ready[slots] - start
        count = torch.where(num_left <= MOST_CODES, num_left, GRID)
        # the last cell may have taken the codes of the next one
        count = torch.where((view.count > 0) & (start >= first), count, 0)
        mel = self._mel(state, slots, start, count, num_left)
        stop = torch.where(count > 0, start + count, first)
        state.num_rendered[slots] = stop
        noise = partial(source_noise, self.config.vocoder, state.seed[slots], NOISE_STEP)
        frames = TOKEN_FRAMES * first, TOKEN_FRAMES * stop
        return heard(self.vocoder, state, slots, mel, *frames, view.is_last, noise)

    def _mel(
        self, state: VoiceState, slots: Tensor, start: Tensor, count: Tensor, num_left: Tensor
    ) -> Tensor:
        """Return the mel [B, CELL_MEL, MELS] of codes start .. start + count."""
        tokens = MOST_CODES
        if may_follow_values(count):
            tokens = int(count.max())
            if tokens == 0:
                return state.vocoder.new_zeros(len(slots), CELL_MEL, MELS)
        cell = Cell(slots, start, count, state.num_prompt[slots], tokens, MAX_PROMPT)
        at = start[:, None] + torch.arange(tokens + LOOKAHEAD, device=slots.device)
        codes = state.tape[slots[:, None], at.clamp(max=state.tape.shape[1] - 1), 0]
        silent = state.vocoder.new_zeros(len(slots), TOKEN_FRAMES * tokens, MELS)
        mel = self.flow(codes, num_left, silent, state.speaker[slots], cell, state.past)
        return F.pad(mel, (0, 0, 0, CELL_MEL - mel.shape[1]))
