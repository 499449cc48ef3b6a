"""Qwen3-TTS as a family: embed, hidden, emit, render.

    slot ── embed ──> [B, D] ── hidden: 28 paged blocks ──> [B, D] ── emit ──> 16 codes on the tape ── render ──> 24 kHz samples
             │ codes of the last frame, summed                         │ codec head: code 0, or the end
             │ + a text row (streaming layout) or tts_pad              │ code predictor: codes 1..15

Source: QwenLM/Qwen3-TTS, qwen_tts/core/models/modeling_qwen3_tts.py.
"""

from __future__ import annotations

import struct
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.contract import Batch, Family, Prompt, Request, Spec, State, View
from zoo.nn.attention import Paged, attend
from zoo.nn.norm import RMSNorm
from zoo.nn.rope import rope_table, rotate
from zoo.nn.sampling import draw, gumbel, penalise
from zoo.qwen3_tts.block import Qwen3Block
from zoo.qwen3_tts.clone import Reference
from zoo.qwen3_tts.codec import Codec
from zoo.qwen3_tts.config import Config, Defaults
from zoo.qwen3_tts.depth import CodePredictor
from zoo.qwen3_tts.prompt import FRAME, MAX_TEXT_TOKENS, NOTHING, SPEAKER, PromptWriter
from zoo.qwen3_tts.speaker import SpeakerEncoder
from zoo.qwen3_tts.strategy import STRATEGY

MIN_NEW_TOKENS = 2  # the end is banned before: without it some requests come out empty (vllm-omni #4962)
CONTROL_IDS = 1024  # the last ids of the codec vocabulary are no codes and are never sampled, the end excepted
FRAMES_PER_TEXT_TOKEN, LEAST_FRAMES = 12, 192  # the guard against a voice that never ends, where the request sets no cap


class Block(Qwen3Block):
    """A block over pages."""

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, paged: Paged) -> Tensor:
        """x [T, D], cos and sin [T, 1, dim]"""
        q, k, v = self.read(x)
        return self.write(x, attend(rotate(q, cos, sin), rotate(k, cos, sin), v, paged, self.head_dim**-0.5).flatten(1))


class TextProjection(nn.Module):
    """A text token's row, brought to the talker's width."""

    def __init__(self, config: Config):
        super().__init__()
        self.embedding = nn.Embedding(config.text_vocab, config.text_hidden)
        self.fc1 = nn.Linear(config.text_hidden, config.text_hidden)
        self.fc2 = nn.Linear(config.text_hidden, config.talker.hidden)

    def forward(self, ids: Tensor) -> Tensor:
        return self.fc2(F.silu(self.fc1(self.embedding(ids))))


class Talker(nn.Module):
    """All of the root file's tensors."""

    def __init__(self, config: Config):
        super().__init__()
        self.text = TextProjection(config)
        self.codec_embedding = nn.Embedding(config.vocab, config.talker.hidden)
        self.layers = nn.ModuleList(Block(config.talker) for _ in range(config.talker.layers))
        self.norm = RMSNorm(config.talker.hidden, config.talker.eps)
        self.codec_head = nn.Linear(config.talker.hidden, config.vocab, bias=False)
        self.depth = CodePredictor(config)
        self.speaker = SpeakerEncoder(config.speaker) if config.speaker else None

    def frames(self, codes: Tensor) -> Tensor:
        """codes [..., K] -> a frame's codes as one row each [..., D]."""
        rows = torch.cat((self.codec_embedding(codes[..., :1]), self.depth.embeddings(codes[..., 1:])), -2)  # [..., K, D]
        return rows.sum(-2)


class Qwen3State(State):
    """Adds: trailing text ids [S+1, M] and their count; sampling values [S+1, 2] (first code, depth codes); codes already said
    [S+1, V] for the repetition penalty; the codec decoder's past [S+1, values], and the reference's frames in it [S+1], which come before
    the tape's."""

    def __init__(self, family: Qwen3TTS, slots: int, max_frames: int):
        spec, config, decoder, dtype, device = family.spec, family.config, family.codec.decoder, family.dtype, family.device
        super().__init__(spec, slots, max_frames, dtype, device)
        rows = slots + 1
        self.text = torch.zeros(rows, MAX_TEXT_TOKENS, dtype=torch.int64, device=device)
        self.text_count = torch.zeros(rows, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(rows, 2, device=device)
        self.top_k = torch.zeros(rows, 2, dtype=torch.int64, device=device)
        self.top_p = torch.ones(rows, 2, device=device)
        self.penalty = torch.ones(rows, device=device)
        self.said = torch.zeros(rows, config.vocab, dtype=torch.bool, device=device)
        self.past = torch.zeros(rows, decoder.past_values, dtype=decoder.dtype, device=device)
        self.primed = torch.zeros(rows, dtype=torch.int64, device=device)


class Qwen3TTS(Family):
    def __init__(self, config: Config, defaults: Defaults, spec: Spec, talker: Talker, codec: Codec, writer: PromptWriter):
        super().__init__()
        self.config, self.defaults, self.spec, self.strategy = config, defaults, spec, STRATEGY
        self.talker, self.codec = talker, codec
        self.writer = writer
        head = talker.codec_head.weight
        self.dtype, self.device = head.dtype, head.device
        never = torch.arange(config.vocab, device=head.device) >= config.vocab - CONTROL_IDS
        never[config.control.eos] = False
        self.never = nn.Buffer(never, persistent=False)  # [V]

    # host, off the loop

    @torch.inference_mode()
    def prompt(self, request: Request) -> Prompt:
        script = self.writer(request)
        text, codec = torch.tensor(script.pairs, device=self.device).unbind(1)  # [T] each
        rows = self.talker.codec_embedding(codec.clamp(min=0)).masked_fill((codec < 0)[:, None], 0)
        reference = script.reference
        if reference is not None:
            rows[codec == SPEAKER] = reference.speaker.to(self.dtype)
            rows[codec <= FRAME] = self.talker.frames(reference.codes)
        cap = self.spec.max_frames
        if request.max_frames is not None:
            cap = min(cap, request.max_frames)
        else:
            cap = min(cap, max(LEAST_FRAMES, FRAMES_PER_TEXT_TOKEN * script.text_tokens))
        if len(script.pairs) + cap > self.spec.max_positions:
            room = self.spec.max_positions - len(script.pairs)
            raise ValueError(f"the prompt takes {len(script.pairs)} positions and leaves room for {room} frames; {cap} are asked for")
        d = self.defaults
        temperature = _either(request.temperature, d.temperature)
        depth = 0.0 if request.temperature == 0 else d.depth_temperature
        return Prompt(
            inputs=self.talker.text(text) + rows,
            keys=tuple(key(text_id, codec_id, reference) for text_id, codec_id in script.pairs),
            max_frames=cap,
            slot={
                "text": torch.tensor(script.trailing, dtype=torch.int64),
                "seed": request.seed,
                "temperature": (temperature, _either(request.depth_temperature, depth)),
                "top_k": (_either(request.top_k, d.top_k), _either(request.depth_top_k, d.depth_top_k)),
                "top_p": (_either(request.top_p, d.top_p), _either(request.depth_top_p, d.depth_top_p)),
                "penalty": _either(request.repetition_penalty, d.repetition_penalty),
                "primed": 0 if reference is None else len(reference.codes),
                "past": None if reference is None else reference.past,
            },
            usage={"input_tokens": script.text_tokens, "prompt_positions": len(script.pairs)},
        )

    # at the door

    def state(self, slots: int, max_frames: int | None = None) -> Qwen3State:
        return Qwen3State(self, slots, min(max_frames or self.spec.max_frames, self.spec.max_frames))

    def admit(self, state: Qwen3State, slot: int, prompt: Prompt) -> None:  # type: ignore[override]
        state.open(slot, prompt)
        values = prompt.slot
        trailing = values["text"]
        state.text[slot, : len(trailing)] = trailing.to(self.device)
        state.text_count[slot] = len(trailing)
        state.seed[slot] = values["seed"]
        state.temperature[slot] = torch.tensor(values["temperature"])
        state.top_k[slot] = torch.tensor(values["top_k"])
        state.top_p[slot] = torch.tensor(values["top_p"])
        state.penalty[slot] = values["penalty"]
        state.said[slot] = False
        state.primed[slot] = values["primed"]
        state.past[slot] = 0 if values["past"] is None else values["past"]

    # device

    def embed(self, state: Qwen3State, slots: Tensor) -> Tensor:  # type: ignore[override]
        """The last frame's sixteen codes as one row, plus the text token that follows that frame."""
        codes = state.tape[slots, (state.ready[slots] - 1).clamp(min=0)]  # [B, K]
        frame = (state.steps[slots] - 1).clamp(min=0, max=MAX_TEXT_TOKENS - 1)
        token = torch.where(frame < state.text_count[slots], state.text[slots, frame], self.config.tts_pad)  # [B]
        return self.talker.frames(codes) + self.talker.text(token)

    def hidden(self, inputs: Tensor, batch: Batch) -> Tensor:
        stack = self.config.talker
        cos, sin = rope_table(batch.positions, stack.head_dim, stack.rope_theta, inputs.dtype)
        cos, sin = cos[:, None], sin[:, None]  # [T, 1, dim]
        x = inputs
        for i, layer in enumerate(self.talker.layers):
            x = layer(x, cos, sin, Paged(batch, i))
        return self.talker.norm(x)

    def emit(self, state: Qwen3State, slots: Tensor, h: Tensor) -> None:  # type: ignore[override]
        """One frame of 16 codes (80 ms) per slot, or the end. h [B, D], the talker's hidden state at each last position."""
        alive, steps, seed, said = ~state.done[slots], state.steps[slots], state.seed[slots], state.said[slots]
        temperature, top_k, top_p = state.temperature[slots], state.top_k[slots], state.top_p[slots]  # [B, 2] each

        logits = self.scores(h, said, state.penalty[slots], steps)
        noise = gumbel(seed, steps, range(1), self.config.vocab)[:, 0]  # [B, V]
        first = draw(logits, temperature[:, 0], top_k[:, 0], top_p[:, 0], noise)  # [B]
        ended = first == self.config.control.eos
        noise = gumbel(seed, steps, range(1, self.config.codebooks), self.config.depth_vocab)  # [B, K - 1, V]
        pick = partial(draw, temperature=temperature[:, 1], top_k=top_k[:, 1], top_p=top_p[:, 1])
        frame = self.talker.depth(h, first, self.talker.codec_embedding(first), noise, pick)  # [B, K]

        state.said[slots] = said | (alive[:, None] & (torch.arange(self.config.vocab, device=h.device) == first[:, None]))
        state.append(slots, frame, ended)

    def scores(self, h: Tensor, said: Tensor, penalty: Tensor, steps: Tensor) -> Tensor:
        """First code's logits [B, V] in fp32: repetition penalty over every code said so far, no end before its time, codes alone."""
        logits = penalise(self.talker.codec_head(h).float(), said, penalty)
        early = (steps < MIN_NEW_TOKENS)[:, None] & (torch.arange(self.config.vocab, device=h.device) == self.config.control.eos)
        return logits.masked_fill(early | self.never, -torch.inf)

    def render(self, state: Qwen3State, view: View) -> Tensor:  # type: ignore[override]
        at = view.start[:, None] + torch.arange(view.frames, device=view.start.device)  # [B, F]
        codes = state.tape[view.slots[:, None], at.clamp(max=state.tape.shape[1] - 1)]  # [B, F, K]
        start = state.primed[view.slots] + view.start  # frames that the codec has heard
        samples, past = self.codec.decoder(codes, state.past[view.slots], start, view.count)
        state.past[view.slots] = past
        return samples.float()


def key(text_id: int, codec_id: int, reference: Reference | None) -> int:
    """What names a position: its ids, which make a number that is not negative; or, negative, a hash of them and of the reference."""
    if codec_id >= NOTHING:
        return text_id << 32 | codec_id + 1
    assert reference is not None, f"codec id {codec_id} is of a reference, and there is none"
    name = blake2b(reference.name + struct.pack("qq", text_id, codec_id), digest_size=8).digest()
    return int.from_bytes(name, "little") | -(1 << 63)


def _either(value: Any, default: Any) -> Any:
    return default if value is None else value
