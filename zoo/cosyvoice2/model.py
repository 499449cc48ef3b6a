"""CosyVoice 2 as a family: embed, hidden, emit, render.

    slot ── embed ──> [B, D] ── hidden: 24 paged blocks ──> [B, D] ── emit ──> a code on the tape ── render ──> 24 kHz samples
             │ row of the last code                          │ head, repetition-aware       │ flow: 10 steps; its past is kept
                                                             │ sampling                     │ vocoder: past and phase are kept

Source: FunAudioLLM/CosyVoice, cosyvoice/llm/llm.py (Qwen2LM) and cosyvoice/cli/model.py (CosyVoice2Model).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.check import check, shares
from zoo.contract import NEVER, Batch, Family, Prompt, Spec, State, View, frame_cap
from zoo.cosyvoice2.clone import Cloner
from zoo.cosyvoice2.config import FILL, MAX_RAS_WINDOW, Config, LMConfig
from zoo.cosyvoice2.flow import PAST_TOKENS, Flow, FlowCache, PagedCache
from zoo.cosyvoice2.order import (
    CODE,
    CODE_GROUP,
    CONTROL,
    DRAWN,
    FIRST,
    NUM_TABLES,
    TEXT,
    TEXT_GROUP,
    UNKNOWN,
    Interleaved,
    full,
)
from zoo.cosyvoice2.prompt import (
    MAX_CODES_PER_TOKEN,
    MAX_TEXT_TOKENS,
    MIN_CODES_PER_TOKEN,
    PromptWriter,
    Script,
)
from zoo.cosyvoice2.sampling import repetition_aware
from zoo.cosyvoice2.strategy import SIZES, STRATEGY
from zoo.cosyvoice2.voices import MAX_REST, FlowPrompt, Voice, flow_prompt
from zoo.nn.block import PagedBlock
from zoo.nn.blocked_stack import run_blocks
from zoo.nn.eager import may_follow_values
from zoo.nn.narrow import dtype_of
from zoo.nn.norm import RMSNorm
from zoo.nn.rope import rope_table
from zoo.nn.rows import to_device
from zoo.nn.s3.carried import heard, source_noise
from zoo.nn.s3.hift import Vocoder
from zoo.nn.s3.sizes import GRID, LOOKAHEAD, MEL_SAMPLES, MELS, TOKEN_FRAMES
from zoo.nn.s3.stretch import Stretch
from zoo.nn.sampling import gumbel
from zoo.request import Request, RequestError, Share
from zoo.voices.references import References

# The most codes that a CPU renders at once in the flow, and in the vocoder, whose signals are longer. With
# more, the intermediate results would not fit its caches.
MAX_CODES_AT_ONCE, MAX_CODES_HEARD = 400, 200
NOISE_STEP = 1 << 31  # the vocoder draws noise at steps from here on, the language model below


class SpeechLM(nn.Module):
    """The networks in llm.pt. The text head is tied to the text table and never used."""

    def __init__(self, config: LMConfig):
        super().__init__()
        self.text = nn.Embedding(config.text_vocab, config.hidden)
        self.control = nn.Embedding(2, config.hidden)
        self.codes = nn.Embedding(config.num_outputs, config.hidden)
        self.layers = nn.ModuleList(PagedBlock(config, has_bias=True) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)
        self.head = nn.Linear(config.hidden, config.num_outputs)
        self.text_head: nn.Module | None = nn.Linear(config.hidden, config.text_vocab, bias=False)

    def given(self, key: Tensor) -> Tensor:
        """Return the rows [T, D] that keys [T] name (see order.py). Keys must be 0 or more."""
        index, table = key // NUM_TABLES, key % NUM_TABLES
        text = self.text(torch.where(table == TEXT, index, 0))
        control = self.control(torch.where(table == CONTROL, index, 0))
        code = self.codes(torch.where(table == CODE, index, 0))
        return torch.where(
            (table == TEXT)[:, None], text, torch.where((table == CODE)[:, None], code, control)
        )


class CosyVoice2State(State):
    """The fields of State, and for each slot:

    - sampling: its values [S+1]; the step before which the speech does not end [S+1];
      the last codes [S+1, MAX_RAS_WINDOW]
    - interleaved text: whether it is interleaved [S+1]; the keys after the prompt [S+1, K] (see order.py)
    - the flow's prompt: number of codes [S+1]; how many of them are in the cache [S+1];
      the others, and their mel [S+1, MAX_REST, ...]; the speaker [S+1, D]
    - the vocoder: state of its layers [S+1, V]; number of mel frames read [S+1];
      number of samples returned [S+1]; phase of the sines [S+1, H]
    - on the host, for each slot that waits for text: its order so far and the number of its keys
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    ras_win_size: Tensor
    ras_tau_r: Tensor
    min_steps: Tensor
    recent: Tensor
    is_interleaved: Tensor
    keys: Tensor
    num_prompt: Tensor
    num_cached: Tensor
    rest: Tensor
    rest_mel: Tensor
    speaker: Tensor
    vocoder: Tensor
    num_mel: Tensor
    num_heard: Tensor
    phase: Tensor

    def __init__(self, family: CosyVoice2, slots: int, max_frames: int):
        super().__init__(family.spec, slots, max_frames, family.dtype, family.device)
        config, mel_dtype = family.config, family.vocoder.mix.weight.dtype
        self.add("temperature")
        self.add("top_k", dtype=torch.int64)
        self.add("top_p", default=1)
        self.add("ras_win_size", dtype=torch.int64)
        self.add("ras_tau_r", default=1)
        self.add("min_steps", dtype=torch.int64)
        self.add("recent", MAX_RAS_WINDOW, dtype=torch.int64, default=-1)
        self.add("is_interleaved", dtype=torch.bool)
        num_keys = (1 + CODE_GROUP // TEXT_GROUP) * MAX_TEXT_TOKENS + family.spec.max_positions
        self.add("keys", num_keys, dtype=torch.int64, default=DRAWN)
        self.add("num_prompt", dtype=torch.int64)
        self.add("num_cached", dtype=torch.int64)
        self.add("rest", MAX_REST, dtype=torch.int64)
        self.add("rest_mel", TOKEN_FRAMES * MAX_REST, MELS)
        self.add("speaker", config.flow.speaker, default=1, dtype=mel_dtype)
        self.add("vocoder", family.vocoder.layout.size, dtype=mel_dtype)
        self.add("num_mel", dtype=torch.int64)
        self.add("num_heard", dtype=torch.int64)
        self.add("phase", config.vocoder.harmonics, dtype=torch.float64)
        self.flow = FlowCache(family.flow, slots + 1, family.past_tokens)
        self.texts: dict[int, tuple[Interleaved, int]] = {}

    def take_row(self, slot: int, source: State) -> None:
        super().take_row(slot, source)
        assert isinstance(source, CosyVoice2State), f"a row of {type(source).__name__}"
        self.flow.put(slot, source.flow)


class CosyVoice2(Family[CosyVoice2State]):
    """CosyVoice 2 as a family."""

    def __init__(
        self,
        config: Config,
        spec: Spec,
        lm: SpeechLM,
        flow: Flow,
        vocoder: Vocoder,
        writer: PromptWriter,
        voices: dict[str, Voice],
        cloner: Cloner,
    ):
        super().__init__()
        self.config, self.spec, self.strategy = config, spec, STRATEGY
        self.lm, self.flow, self.vocoder = lm, flow, vocoder
        self.writer, self.voices, self.cloner = writer, voices, cloner
        self.dtype, self.device = dtype_of(lm.head), lm.head.weight.device
        self.past_tokens = PAST_TOKENS
        self.flow_prompts: References[FlowPrompt] = References(max_bytes=4 << 30)

    # on the host, outside the engine's loop

    @torch.inference_mode()
    def prompt(self, request: Request) -> Prompt:
        values = check(request, self.spec)
        voice = self._voice(request)
        script = self.writer(request, voice.transcript)
        codes = voice.codes if script.has_codes else voice.codes[:0]
        flow = self.flow_prompts.get(voice.name, lambda: flow_prompt(self.flow, voice))
        slot = self._slot(request, values, flow)
        read = self._interleaved if script.is_interleaved else self._full
        prompt = read(request, script, tuple(codes.tolist()))
        prompt.slot |= slot
        prompt.grid_offset = -flow.num_codes % GRID
        prompt.past_frames = flow.num_codes
        prompt.past_keys = (flow.key,) * (flow.num_cached // GRID)
        return prompt

    def _full(self, request: Request, script: Script, codes: tuple[int, ...]) -> Prompt:
        keys, num_text = full((*script.before, *script.text), codes), len(script.text)
        cap = frame_cap(self.spec, request, len(keys), MAX_CODES_PER_TOKEN * num_text, num_text=num_text)
        return self._prompt(keys, cap, num_text, {"min_steps": MIN_CODES_PER_TOKEN * num_text})

    def _interleaved(self, request: Request, script: Script, codes: tuple[int, ...]) -> Prompt:
        """Return a prompt of all keys before the first sampled code.

        The slot reads the other keys step by step.
        """
        order, keys = Interleaved(codes).fed((*script.before, *script.text))
        check_length(order)
        keys = [FIRST, *keys] if request.is_open else [FIRST, *keys, *order.end()]
        num_given = keys.index(DRAWN) if DRAWN in keys else len(keys)
        rest, num_text = keys[num_given:], len(script.text)
        expected = self.spec.max_frames if request.is_open else MAX_CODES_PER_TOKEN * num_text
        each = 1 + Fraction(TEXT_GROUP, CODE_GROUP)
        cap = frame_cap(self.spec, request, order.max_given(0), expected, TEXT_GROUP, each)
        row = torch.tensor(rest, dtype=torch.int64)
        slot: dict[str, Any] = {"is_interleaved": True, "keys": row, "min_steps": len(rest)}
        prompt = self._prompt(keys[:num_given], cap, num_text, slot)
        prompt.max_steps = cap + order.max_given(cap) - num_given
        if request.is_open:
            prompt.num_fed_steps = 1 + len(rest)
            slot |= {"min_steps": NEVER, "text": (order, len(rest))}
        return prompt

    def _prompt(self, keys: list[int], cap: int, num_text: int, slot: dict[str, Any]) -> Prompt:
        return Prompt(
            inputs=self.lm.given(torch.tensor(keys, device=self.device)),
            prefix_keys=tuple(keys),
            max_frames=cap,
            slot=slot,
            usage={"input_tokens": num_text, "prompt_positions": len(keys)},
        )

    def _voice(self, request: Request) -> Voice:
        """Return the voice of the reference, with its transcript, or a named voice, or a mix of voices."""
        if mix := shares(request, self.spec):
            return self._mixed(mix)
        if request.references:
            [reference] = request.references
            transcript = tuple(self.writer.tokens("transcript", reference.transcript or ""))
            return replace(self.cloner(reference.clip), transcript=transcript)
        if not self.voices:
            raise RequestError(
                "references", f"a reference is needed: this checkpoint of {self.spec.name} has no voices"
            )
        return self.voices[request.voice.lower()] if request.voice else next(iter(self.voices.values()))

    def _mixed(self, mix: Sequence[Share]) -> Voice:
        """Return a voice without a prompt: the weighted sum of the speaker vectors."""
        found = [
            (
                share.weight,
                self.voices[share.name] if share.reference is None else self.cloner(share.reference.clip),
            )
            for share in mix
        ]
        name = blake2b(
            repr([(weight, voice.name) for weight, voice in found]).encode(), digest_size=16
        ).digest()
        speaker = torch.stack([weight * voice.speaker for weight, voice in found]).sum(0)
        first = found[0][1]
        return Voice(name, first.codes[:0], first.mel[:0], speaker)

    def _slot(self, request: Request, values: dict[str, Any], flow: FlowPrompt) -> dict[str, Any]:
        del values["text_mode"]
        return values | {
            "seed": request.seed,
            "num_prompt": flow.num_codes,
            "num_cached": flow.num_cached,
            "rest": flow.rest,
            "rest_mel": flow.rest_mel,
            "speaker": flow.speaker,
            "flow": flow.cache,
        }

    # at start-up and admission

    def state(self, slots: int, max_frames: int | None = None) -> CosyVoice2State:
        return CosyVoice2State(self, slots, min(max_frames or self.spec.max_frames, self.spec.max_frames))

    def admit(self, state: CosyVoice2State, slot: int, prompt: Prompt) -> None:
        rows = dict(prompt.slot)
        cache, text = rows.pop("flow"), rows.pop("text", None)
        state.open(slot, replace(prompt, slot=rows))
        state.texts.pop(slot, None)
        if text is not None:
            state.texts[slot] = text
            state.keys[slot, text[1] :] = UNKNOWN
        state.flow.clear(slot)
        if cache is not None and state.arena is None:
            state.flow.put(slot, cache)
        elif cache is not None:
            state.flow.put_ends(slot, cache)

    def fill_past(self, state: CosyVoice2State, prompt: Prompt, first: int, pages: Tensor) -> None:
        assert state.arena is not None, "the past has no pages"
        by_chunk = pages.view(len(prompt.past_keys) - first, -1)
        for i, own in enumerate(by_chunk, start=first):
            chunk = prompt.slot["flow"].chunk_of(0, i)
            room = len(own) * state.arena.shape[1]
            state.arena[own] = F.pad(chunk, (0, room - len(chunk))).view(len(own), -1)

    def tokenize(self, text: str) -> list[int]:
        return self.writer.tokenize(text)

    def feed(self, state: CosyVoice2State, slot: int, tokens: Sequence[int], is_last: bool) -> int:
        if wrong := [token for token in tokens if not 0 <= token < self.config.lm.text_vocab]:
            possible = f"ids from 0 to {self.config.lm.text_vocab - 1} are possible"
            raise RequestError("text", f"{wrong[0]} is not a text token; {possible}")
        order, start = state.texts[slot]
        order, more = order.fed(tokens)
        check_length(order)
        more += order.end() if is_last else []
        stop = start + len(more)
        state.keys[slot, start:stop] = to_device(torch.tensor(more, dtype=torch.int64), self.device)
        state.texts[slot] = order, stop
        if is_last:
            state.keys[slot, stop:] = DRAWN
            state.min_steps[slot] = stop
        return len(more)

    # on the device

    def embed(self, state: CosyVoice2State, slots: Tensor) -> Tensor:
        """Return the rows [B, D] of the last code, or of the given key that the order has in its place."""
        key = state.keys[slots, (state.steps[slots] - 1).clamp(min=0)]
        code = NUM_TABLES * state.last_frame(slots)[:, 0] + CODE
        return self.lm.given(torch.where(key < 0, code, key))

    def hidden(self, inputs: Tensor, batch: Batch) -> Tensor:
        config = self.config.lm
        rotary = rope_table(batch.positions, config.head_dim, config.rope_theta, inputs.dtype)
        return run_blocks(self.lm.layers, self.lm.norm, inputs, rotary, batch)

    def emit(self, state: CosyVoice2State, slots: Tensor, h: Tensor) -> None:
        """Append one code (40 ms) to each slot's tape, or end the speech if the sampled id is not a code.

        A slot whose next key is given appends nothing.
        """
        steps, recent = state.steps[slots], state.recent[slots]  # [B, MAX_RAS_WINDOW]
        logits = self._scores(state, slots, h)  # [B, V]
        noise = gumbel(state.seed[slots], state.ready[slots], range(2), logits.shape[1])  # [B, 2, V]
        size = state.ras_win_size[slots]
        is_recent = torch.arange(MAX_RAS_WINDOW, 0, -1, device=h.device) <= size[:, None]
        limit = size * state.ras_tau_r[slots]

        def is_repeated(code: Tensor) -> Tensor:
            return (size > 0) & ((is_recent & (recent == code[:, None])).sum(1) >= limit)

        temperature, top_k, top_p = state.temperature[slots], state.top_k[slots], state.top_p[slots]
        code = repetition_aware(logits, temperature, top_k, top_p, is_repeated, noise)
        num_codes, is_drawn = self.config.lm.num_codes, state.keys[slots, steps] == DRAWN
        is_fill = ~is_drawn & (steps > 0) & (state.keys[slots, (steps - 1).clamp(min=0)] == DRAWN)
        ended = is_drawn & (code >= num_codes)
        said = torch.cat((recent[:, 1:], torch.where(is_fill, FILL, code)[:, None]), 1)
        is_said = ~state.done[slots] & ((is_drawn & ~ended) | is_fill)
        state.recent[slots] = torch.where(is_said[:, None], said, recent)
        state.append(slots, code[:, None].clamp(max=num_codes - 1), ended, is_drawn)

    def _scores(self, state: CosyVoice2State, slots: Tensor, h: Tensor) -> Tensor:
        """Return logits [B, V] in fp32 of hidden states h [B, D].

        The end is masked before the minimum length. While interleaved text is incomplete, all ids that are
        not codes are masked.
        """
        logits = self.lm.head(h).float()
        index, end = torch.arange(logits.shape[1], device=h.device), self.config.lm.num_codes
        is_early = (state.steps[slots] < state.min_steps[slots])[:, None]
        is_out = (index == end) | ((index > end) & state.is_interleaved[slots, None])
        return logits.masked_fill(is_early & is_out, -torch.inf)

    def render(self, state: CosyVoice2State, view: View) -> tuple[Tensor, Tensor]:
        if not may_follow_values(view.slots):
            return self._samples(state, view, self._mel(state, view))
        made = []
        for part in parts(view, MAX_CODES_AT_ONCE):
            mel, first = self._mel(state, part), 0
            for few in parts(part, MAX_CODES_HEARD):
                stop = first + len(few.slots)
                made.append(self._samples(state, few, mel[first:stop]))
                first = stop
        samples, valid = zip(*made, strict=True)
        return torch.cat(samples), torch.cat(valid)

    def _mel(self, state: CosyVoice2State, view: View) -> Tensor:
        """Return mel frames [B, 2 * view.frames, MELS], of which 2 * view.count are valid.

        The first stretch begins with the codes of the prompt that are not in the cache.
        """
        slots, may_begin = view.slots, view.length <= SIZES[-1] or view.frames > SIZES[-1]
        is_first = view.start == 0
        num_rest = torch.where(is_first, state.num_prompt[slots] - state.num_cached[slots], 0)  # [B]
        tokens = view.frames + (MAX_REST if may_begin else 0)
        count = torch.where(view.count > 0, view.count + num_rest, 0)
        if may_follow_values(count):
            tokens = int(count.max())
            if tokens == 0:
                return state.rest_mel.new_zeros(len(slots), TOKEN_FRAMES * view.frames, MELS)
        stretch = Stretch(
            slots=slots,
            start=torch.where(is_first, state.num_cached[slots], state.num_prompt[slots] + view.start),
            count=count,
            num_kept=state.num_cached[slots],
            tokens=tokens,
            capacity=state.flow.capacity,
        )
        place = torch.arange(tokens + LOOKAHEAD, device=slots.device)
        at = view.start[:, None] + place - num_rest[:, None]
        spoken = state.tape[slots[:, None], at.clamp(min=0, max=state.tape.shape[1] - 1), 0]
        codes = torch.where(
            place < num_rest[:, None], state.rest[slots[:, None], place.clamp(max=MAX_REST - 1)], spoken
        )
        num_there = num_rest + state.ready[slots] - view.start
        place = torch.arange(TOKEN_FRAMES * tokens, device=slots.device)
        rest_mel = state.rest_mel[slots[:, None], place.clamp(max=TOKEN_FRAMES * MAX_REST - 1)]
        prompt = rest_mel * (place < TOKEN_FRAMES * num_rest[:, None])[..., None]
        start = None if state.noise is None else self._start(state, state.noise, stretch)
        cache: FlowCache | PagedCache = state.flow
        if state.arena is not None and view.pages is not None:
            cache = PagedCache(state.flow, state.arena, view.pages)
        mel = self.flow(codes, num_there, prompt, state.speaker[slots], stretch, cache, start)
        at = TOKEN_FRAMES * num_rest[:, None] + torch.arange(TOKEN_FRAMES * view.frames, device=slots.device)
        return mel.gather(1, at.clamp(max=mel.shape[1] - 1)[..., None].expand(-1, -1, MELS))

    def _samples(self, state: CosyVoice2State, view: View, mel: Tensor) -> tuple[Tensor, Tensor]:
        """Return samples of mel [B, 2 * view.frames, MELS] and the number of valid ones [B]."""
        slots, start = view.slots, state.num_mel[view.slots]
        stop = start + TOKEN_FRAMES * view.count
        noise = partial(self._noise, state, slots)
        samples = heard(self.vocoder, state, slots, mel, start, stop, view.is_last, noise)
        state.num_mel[slots] = stop
        return samples

    def _start(self, state: CosyVoice2State, noise: Tensor, stretch: Stretch) -> Tensor:
        """Return the flow's starting noise [B, 2T, MELS] from given noise.

        The given noise begins at the first frame of the speech, so the prompt's frames keep the fixed noise.
        """
        given = noise[..., :MELS].flatten(0, 1)  # [2F, MELS]
        frames = torch.arange(TOKEN_FRAMES * stretch.tokens, device=given.device)
        at = TOKEN_FRAMES * (stretch.start - state.num_prompt[stretch.slots])[:, None] + frames  # [B, 2T]
        spoken = given[at.clamp(min=0, max=len(given) - 1)]
        return torch.where((at >= 0)[..., None], spoken, self.flow.noise_of(stretch))

    def _noise(self, state: CosyVoice2State, slots: Tensor, frame: Tensor) -> Tensor:
        """Return the noise of the vocoder's source [B, W, MEL_SAMPLES, H] for frames of the speech [B, W].

        The noise of a frame does not depend on the window.
        """
        if state.noise is not None:
            given = state.noise[..., MELS:].flatten(0, 1)  # [2F, MEL_SAMPLES * H]
            shape = MEL_SAMPLES, self.config.vocoder.harmonics
            return given[frame.clamp(min=0, max=len(given) - 1)].unflatten(2, shape)
        return source_noise(self.config.vocoder, state.seed[slots], NOISE_STEP, frame)


def parts(view: View, codes: int) -> Iterator[View]:
    """Split a view by slots into views of at most `codes` codes each, or of one slot if a slot has more."""
    num = max(1, codes // view.frames)
    rows = (x.split(num) for x in (view.slots, view.start, view.count, view.is_last))
    for slots, start, count, is_last in zip(*rows, strict=True):
        yield replace(view, slots=slots, start=start, count=count, is_last=is_last)


def check_length(text: Interleaved) -> None:
    if text.num_text > MAX_TEXT_TOKENS:
        given = f"the transcript and the text have {text.num_text} tokens so far"
        raise RequestError("text", f"{given}; at most {MAX_TEXT_TOKENS} are possible")
