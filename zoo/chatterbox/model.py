"""Chatterbox as a family: embed, hidden, emit, render.

    slot ── embed ──> [L B, D] ── hidden: 30 paged blocks ──> [L B, D] ── emit ──> a code on the tape ── render ──> 24 kHz
             │ row of the last code,                           │ head, guidance,      │ flow and vocoder over
             │ the same for both lanes                         │ sampling             │ the whole speech

The flow is not causal, so a speech is rendered when it ends. Long texts are spoken in short pieces. In chunks
(`render_in_chunks`), the flow runs over all codes so far for each chunk, and the vocoder carries its past.
Source: chatterbox-tts 0.1.7, models/t3/t3.py, models/s3gen/s3gen.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.chatterbox.clone import MAX_PROMPT, Cloner, Voice
from zoo.chatterbox.config import END, Config
from zoo.chatterbox.flow import Flow
from zoo.chatterbox.prompt import PromptWriter
from zoo.chatterbox.sampling import draw_after_penalty, draw_before_penalty
from zoo.chatterbox.strategy import AHEAD, MAX_FRAMES, STRATEGY, chunks
from zoo.chatterbox.t3 import T3
from zoo.chatterbox.watermark import marked
from zoo.check import check
from zoo.contract import Batch, Family, Lane, Prompt, Spec, State, View, frame_cap
from zoo.nn.eager import may_follow_values
from zoo.nn.guidance import merge
from zoo.nn.keys import prefix_key
from zoo.nn.narrow import dtype_of
from zoo.nn.s3.carried import heard, source_noise
from zoo.nn.s3.held_pitch import Vocoder
from zoo.nn.s3.hift import Place
from zoo.nn.s3.sizes import FRAME_SAMPLES, MEL_SAMPLES, MELS, NUM_CODES, TOKEN_FRAMES
from zoo.nn.sampling import gumbel, normal, uniform_noise
from zoo.request import Request, RequestError
from zoo.text.pieces import most_s
from zoo.voices.references import References

BEGIN_KEY, NULL_KEY = prefix_key("chatterbox begin"), prefix_key("chatterbox null")
SILENCE, NUM_SILENT = 4299, 3  # the codes that end every speech of Turbo
FADE = MEL_SAMPLES  # samples of silence, and then of the fade, at the beginning of a speech
# Steps of the noise: the language model draws below them.
SPEECH_STEP, PROMPT_STEP, SOURCE_STEP, PHASE_STEP = 1 << 30, 1 << 31, 1 << 32, 1 << 33


class VoiceRows:
    """A voice as the language model reads it, without the emotion: rows [P, D]."""

    def __init__(self, rows: Tensor):
        self.rows = rows

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes


class ChatterboxState(State):
    """Adds sampling values [S+1], the last id drawn [S+1] and all ids drawn [S+1, V], whether a watermark is
    wanted [S+1], and the voice as the flow reads it: number of codes [S+1], codes [S+1, MAX_PROMPT], mel
    [S+1, 2 MAX_PROMPT, MELS], timbre [S+1, D]. For chunks also what the vocoder carries (`Carried`)."""

    temperature: Tensor
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    penalty: Tensor
    guidance: Tensor
    last: Tensor
    seen: Tensor
    is_marked: Tensor
    num_prompt: Tensor
    prompt: Tensor
    prompt_mel: Tensor
    timbre: Tensor
    vocoder: Tensor
    phase: Tensor
    num_heard: Tensor

    def __init__(self, family: Chatterbox, slots: int, max_frames: int):
        super().__init__(family.spec, slots, max_frames, family.dtype, family.device)
        mel_dtype = family.vocoder.mix.weight.dtype
        self.add("temperature")
        self.add("min_p")
        self.add("top_k", dtype=torch.int64)
        self.add("top_p", default=1)
        self.add("penalty", default=1)
        self.add("guidance", default=1)
        self.add("last", dtype=torch.int64)
        self.add("seen", family.config.t3.num_outputs, dtype=torch.bool)
        self.add("is_marked", dtype=torch.bool)
        self.add("num_prompt", dtype=torch.int64)
        self.add("prompt", MAX_PROMPT, dtype=torch.int64)
        self.add("prompt_mel", TOKEN_FRAMES * MAX_PROMPT, MELS, dtype=mel_dtype)
        self.add("timbre", family.config.flow.speaker, default=1, dtype=mel_dtype)
        if family.is_chunked:
            self.add("vocoder", family.vocoder.layout.size, dtype=mel_dtype)
            self.add("phase", family.config.vocoder.harmonics, dtype=torch.float64)
            self.add("num_heard", dtype=torch.int64)


class Chatterbox(Family[ChatterboxState]):
    """Chatterbox as a family."""

    def __init__(
        self,
        config: Config,
        spec: Spec,
        t3: T3,
        flow: Flow,
        vocoder: Vocoder,
        writer: PromptWriter,
        voice: Voice | None,
        cloner: Cloner,
    ):
        super().__init__()
        self.config, self.spec, self.strategy = config, spec, STRATEGY
        self.t3, self.flow, self.vocoder = t3, flow, vocoder
        self.writer, self.voice, self.cloner = writer, voice, cloner
        self.dtype, self.device = dtype_of(t3.head), t3.head.weight.device
        self.voice_rows: References[VoiceRows] = References()

    def render_in_chunks(self) -> None:
        self.is_chunked = True
        options = tuple(option for option in self.spec.options if option.name != "watermark")
        self.spec = replace(
            self.spec, window=chunks(self.spec.max_frames, self.vocoder.plan.lag), options=options
        )

    # on the host, outside the engine's loop

    @torch.inference_mode()
    def prompt(self, request: Request) -> Prompt:
        values = check(request, self.spec)
        if values.get("watermark") and self.device.type != "cpu":
            raise RequestError(
                "watermark", "the watermark is computed on a CPU only: serve with --device cpu"
            )
        ids = self.writer(request)
        voice = self._voice(request)
        text, null_text = self.t3.text_rows(torch.tensor(ids, device=self.device))
        before, keys = self._voice_inputs(voice, values)
        begin = self.t3.begin_rows()
        inputs = torch.cat((before, text, begin))
        ends = (BEGIN_KEY,) * len(begin)
        null = None
        if self.spec.lanes == 2:
            null_keys = (*keys, *[NULL_KEY] * len(null_text), *ends)
            null = Lane(torch.cat((before, null_text, begin)), null_keys)
        guard = max(1, round(most_s(request.text) * self.spec.frame_rate_hz))
        return Prompt(
            inputs=inputs,
            prefix_keys=(*keys, *ids, *ends),
            null=null,
            max_frames=frame_cap(self.spec, request, len(inputs), min(guard, MAX_FRAMES)),
            slot=self._slot(request, values, voice),
            usage={"input_tokens": len(ids), "prompt_positions": len(inputs)},
        )

    def _voice(self, request: Request) -> Voice:
        if request.references:
            return self.cloner(request.references[0].clip)
        assert self.voice is not None, "without a voice, check lets no request without a reference through"
        return self.voice

    def _voice_inputs(self, voice: Voice, values: dict[str, Any]) -> tuple[Tensor, tuple[int, ...]]:
        """Return the rows [P, D] before the text, and their keys. The rows of the voice are made once."""

        def make() -> VoiceRows:
            return VoiceRows(self.t3.voice_rows(voice.speaker, voice.codes))

        rows = self.voice_rows.get(voice.name, make).rows
        keys = tuple(prefix_key(voice.name, i) for i in range(len(rows)))
        if self.config.is_turbo:
            return rows, keys
        exaggeration = values["exaggeration"]
        return torch.cat((rows, self.t3.emotion_row(exaggeration))), (
            *keys,
            prefix_key("emotion", exaggeration),
        )

    def _slot(self, request: Request, values: dict[str, Any], voice: Voice) -> dict[str, Any]:
        slot = {name: values[name] for name in ("temperature", "top_p", "min_p", "top_k") if name in values}
        return slot | {
            "seed": request.seed,
            "penalty": values["repetition_penalty"],
            "guidance": 1 + values.get("cfg_weight", 0.0),
            "is_marked": values.get("watermark", False),
            "num_prompt": len(voice.flow_codes),
            "prompt": voice.flow_codes,
            "prompt_mel": voice.mel,
            "timbre": voice.timbre,
        }

    # at start-up and admission

    def state(self, slots: int, max_frames: int | None = None) -> ChatterboxState:
        return ChatterboxState(self, slots, min(max_frames or self.spec.max_frames, self.spec.max_frames))

    # on the device

    def embed(self, state: ChatterboxState, slots: Tensor) -> Tensor:
        """Return the rows [L * B, D] of the last id that was drawn, the same for both lanes."""
        return self.t3.code_rows(state.last[slots], state.steps[slots]).repeat(self.spec.lanes, 1)

    def hidden(self, inputs: Tensor, batch: Batch) -> Tensor:
        return self.t3.stack(inputs, batch)

    def emit(self, state: ChatterboxState, slots: Tensor, h: Tensor) -> None:
        """Append one code (40 ms) to each slot's tape, or end the speech. An id that is neither a code nor
        the end is read by the next step, but not spoken."""
        steps, alive = state.steps[slots], ~state.done[slots]
        token = self._drawn(state, slots, h)  # [B]
        ended = token == END
        if self.config.is_turbo:
            ended = ended & (steps > 0)  # the reference looks for the end from the second id on
        is_token = torch.arange(state.seen.shape[1], device=h.device) == token[:, None]
        state.seen[slots] = state.seen[slots] | (alive[:, None] & is_token)
        state.last[slots] = torch.where(alive, token, state.last[slots])
        state.append(slots, token[:, None].clamp(max=NUM_CODES - 1), ended, token < NUM_CODES)
        state.done[slots] = state.done[slots] | (state.steps[slots] >= state.limit[slots])

    def _drawn(self, state: ChatterboxState, slots: Tensor, h: Tensor) -> Tensor:
        """Return ids [B] for hidden states h [L * B, D]."""
        logits = self.t3.head(h).float()
        noise = gumbel(state.seed[slots], state.steps[slots], range(1), logits.shape[1])[:, 0]
        penalty, temperature, top_p = state.penalty[slots], state.temperature[slots], state.top_p[slots]
        is_begin = torch.arange(logits.shape[1], device=h.device) == NUM_CODES  # it counts as drawn
        if self.config.is_turbo:
            is_begin = is_begin & (state.steps[slots] == 0)[:, None]  # before the first id only
            seen = state.seen[slots] | is_begin
            return draw_before_penalty(logits, seen, penalty, temperature, state.top_k[slots], top_p, noise)
        logits = merge(logits, state.guidance[slots])
        seen = state.seen[slots] | is_begin
        return draw_after_penalty(logits, seen, penalty, temperature, state.min_p[slots], top_p, noise)

    def render(self, state: ChatterboxState, view: View) -> tuple[Tensor, Tensor]:
        """Render whole speeches, or chunks. On a CPU each has its own length, so nothing is padded."""
        speak, most = (
            (self._chunk, self._most_of_chunk) if self.is_chunked else (self._speech, self._most_samples)
        )
        if not may_follow_values(view.slots):
            return speak(state, view, view.length)
        samples = torch.zeros(len(view.slots), most(view.frames))
        valid = torch.zeros_like(view.count)
        for i, count in enumerate(view.count.tolist()):
            if count or (self.is_chunked and view.is_last[i]):
                rows = (x[i : i + 1] for x in (view.slots, view.start, view.count, view.is_last))
                slots, start, counts, is_last = rows
                one = replace(view, slots=slots, start=start, count=counts, is_last=is_last)
                made, num = speak(state, one, int(start) + count)
                valid[i] = num[0]
                speech = made[0, : num[0]]
                samples[i, : num[0]] = marked(speech) if state.is_marked[slots[0]] else speech
        return samples, valid

    def _most_samples(self, frames: int) -> int:
        return (frames + self._num_silent) * FRAME_SAMPLES

    def _most_of_chunk(self, frames: int) -> int:
        return self._most_samples(frames) + self.vocoder.plan.lag

    @property
    def _num_silent(self) -> int:
        return NUM_SILENT if self.config.is_turbo else 0

    def _speech(self, state: ChatterboxState, view: View, frames: int) -> tuple[Tensor, Tensor]:
        """Return samples [B, N] of speeches of at most `frames` codes, and the number of valid ones [B]."""
        count = torch.where(view.count > 0, view.count + self._num_silent, 0)
        most = frames + self._num_silent
        mel = self._mel(state, view.slots, view.count, count, most)
        mel = self._part(state, view.slots, mel, torch.zeros_like(count), most)
        samples = self._samples(state, view.slots, mel, TOKEN_FRAMES * count)
        samples = F.pad(samples, (0, self._most_samples(view.frames) - samples.shape[1]))
        return samples, self._without_noise(view, FRAME_SAMPLES * count)

    def _chunk(self, state: ChatterboxState, view: View, length: int) -> tuple[Tensor, Tensor]:
        """Return samples [B, N] of chunks that end at code `length` at most, and the number of valid ones
        [B]. The flow reads AHEAD codes behind a chunk, or as many as the speech still has."""
        slots, stop = view.slots, view.start + view.count
        end = torch.where(view.is_last, stop + self._num_silent, stop)  # [B]
        spoken = torch.where(view.is_last, stop, torch.minimum(stop + AHEAD, state.ready[slots]))
        mel = self._mel(state, slots, spoken, torch.maximum(spoken, end), length + AHEAD)
        mel = self._part(state, slots, mel, view.start, view.frames + self._num_silent)
        begins = (view.start == 0)[:, None]
        state.phase[slots] = torch.where(begins, self._phase(state, slots), state.phase[slots])
        before, noise = state.num_heard[slots], partial(self._source_noise, state, slots)
        start, stop = TOKEN_FRAMES * view.start, TOKEN_FRAMES * end
        samples, valid = heard(self.vocoder, state, slots, mel, start, stop, view.is_last, noise)
        gain = self._fade(samples)  # [2 FADE]
        at = before[:, None] + torch.arange(samples.shape[1], device=slots.device)
        samples = samples * torch.where(at < len(gain), gain[at.clamp(max=len(gain) - 1)], 1)
        return samples, self._without_noise(view, valid)

    def _without_noise(self, view: View, valid: Tensor) -> Tensor:
        """Return the number of samples [B] to give out of `valid` [B]. Those of the last code of Multilingual are
        noise, because the model draws it with weak attention. A speech of one code stays.

        Source: resemble-ai/chatterbox at 5de7a54, mtl_tts.py."""
        if self.config.kind != "multilingual":
            return valid
        has_several = view.start + view.count > 1
        return torch.where(view.is_last & has_several, valid - FRAME_SAMPLES, valid)

    def _mel(self, state: ChatterboxState, slots: Tensor, spoken: Tensor, num: Tensor, most: int) -> Tensor:
        """Return the mel [B, F, MELS] of the voice's codes and of `num` [B] codes behind them, at most `most`.

        The first `spoken` [B] of these are on the tape, and silence follows.
        """
        num_prompt, most_prompt = state.num_prompt[slots], MAX_PROMPT
        if may_follow_values(num_prompt):
            most_prompt = int(num_prompt.max())
        tokens = most_prompt + most
        codes = self._codes(state, slots, spoken, torch.arange(tokens, device=slots.device))
        prompt = F.pad(state.prompt_mel[slots, : TOKEN_FRAMES * most_prompt], (0, 0, 0, TOKEN_FRAMES * most))
        noise = self._flow_noise(state, slots, torch.arange(TOKEN_FRAMES * tokens, device=slots.device))
        noise = noise.to(state.prompt_mel.dtype)
        return self.flow(codes, num_prompt + num, prompt, state.timbre[slots], noise)

    def _part(self, state: ChatterboxState, slots: Tensor, mel: Tensor, start: Tensor, codes: int) -> Tensor:
        """Return the mel [B, 2 codes, MELS] of a speech from code `start` [B] on."""
        first = TOKEN_FRAMES * (state.num_prompt[slots] + start)
        at = first[:, None] + torch.arange(TOKEN_FRAMES * codes, device=slots.device)
        part = mel.gather(1, at.clamp(max=mel.shape[1] - 1)[..., None].expand(-1, -1, MELS))
        return part.to(state.prompt_mel.dtype)

    def _codes(self, state: ChatterboxState, slots: Tensor, spoken: Tensor, place: Tensor) -> Tensor:
        """Return the codes [B, T] at places [T]: those of the voice, the first `spoken` [B] of the speech, and
        silence."""
        rows = slots[:, None]
        at = place - state.num_prompt[rows]  # [B, T], in the speech
        code = state.tape[rows, at.clamp(min=0, max=state.tape.shape[1] - 1), 0]
        code = torch.where(at < spoken[:, None], code, SILENCE)
        return torch.where(at < 0, state.prompt[rows, place.clamp(max=MAX_PROMPT - 1)], code)

    def _flow_noise(self, state: ChatterboxState, slots: Tensor, place: Tensor) -> Tensor:
        """Return where the flow starts from [B, F, MELS] at mel frames [F]. A frame's noise depends only on
        its place in the voice or in the speech."""
        at = place - TOKEN_FRAMES * state.num_prompt[slots, None]  # [B, F]
        if state.noise is not None:
            given = state.noise[..., :MELS].flatten(0, 1)  # [2F, MELS]
            return given[at.clamp(min=0, max=len(given) - 1)] * (at >= 0)[..., None]
        step = torch.where(at >= 0, SPEECH_STEP + at, PROMPT_STEP + place)
        return normal(state.seed[slots, None].expand_as(step).flatten(), step.flatten(), MELS).view(
            *step.shape, MELS
        )

    def _samples(self, state: ChatterboxState, slots: Tensor, mel: Tensor, limit: Tensor) -> Tensor:
        """Return samples [B, F * MEL_SAMPLES] of mel [B, F, MELS], of which the first `limit` [B] are
        speech."""
        plan, num = self.vocoder.plan, mel.shape[1]
        frames = num + plan.flush
        first, rows = torch.zeros_like(limit), mel.new_zeros(len(mel), self.vocoder.layout.size)
        at = Place(first, limit, frames).at(1, plan.f0_lag + 1, frames + 1)
        noise, phase = self._source_noise(state, slots, at), self._phase(state, slots)
        mel = F.pad(mel, (0, 0, 0, plan.flush))
        samples, *_ = self.vocoder(mel, first, limit, limit, rows, phase, noise)
        samples = samples[:, plan.lag :][:, : num * MEL_SAMPLES]
        faded = samples[:, : 2 * FADE] * self._fade(samples)
        return torch.cat((faded, samples[:, 2 * FADE :]), 1).float()

    def _fade(self, like: Tensor) -> Tensor:
        """Return the gain of a speech's first samples [2 FADE]: zero, then half a cosine up to one."""
        angle = torch.linspace(math.pi, 0, FADE, device=like.device, dtype=like.dtype)
        return torch.cat((torch.zeros_like(angle), (angle.cos() + 1) / 2))

    def _source_noise(self, state: ChatterboxState, slots: Tensor, frame: Tensor) -> Tensor:
        """Return the noise of the vocoder's source [B, W, MEL_SAMPLES, H] for mel frames of the speech [B,
        W]."""
        if state.noise is not None:
            given = state.noise[..., MELS:].flatten(0, 1)  # [2F, MEL_SAMPLES * H]
            shape = MEL_SAMPLES, self.config.vocoder.harmonics
            return given[frame.clamp(min=0, max=len(given) - 1)].unflatten(2, shape)
        return source_noise(self.config.vocoder, state.seed[slots], SOURCE_STEP, frame)

    def _phase(self, state: ChatterboxState, slots: Tensor) -> Tensor:
        """Return where the phases of the harmonics begin [B, H], in turns; the first one's is 0."""
        harmonics = self.config.vocoder.harmonics
        phase = torch.zeros(len(slots), harmonics, dtype=torch.float64, device=slots.device)
        if state.noise is None:
            seed = state.seed[slots]
            phase[:, 1:] = uniform_noise(seed, torch.full_like(seed, PHASE_STEP), range(1), harmonics)[
                :, 0, 1:
            ]
        return phase
