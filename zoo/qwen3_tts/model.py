"""Qwen3-TTS as a family: embed, hidden, emit, render.

    slot ── embed ──> [B, D] ── hidden: 28 paged blocks ──> [B, D] ── emit ──> 16 codes on the tape ── render ──> 24 kHz samples
             │ codes of the last frame, summed                         │ codec head: code 0, or the end
             │ + a text row (text_mode interleaved) or tts_pad         │ code predictor: codes 1..15

Source: QwenLM/Qwen3-TTS, qwen_tts/core/models/modeling_qwen3_tts.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.check import check, shares
from zoo.contract import Batch, Family, Prompt, Spec, State, View, frame_cap
from zoo.nn import mimi_encoder
from zoo.nn.blocked_stack import run_blocks
from zoo.nn.conv import slots_state
from zoo.nn.keys import prefix_key
from zoo.nn.narrow import dtype_of
from zoo.nn.norm import RMSNorm
from zoo.nn.qwen3 import Block
from zoo.nn.rope import rope_table
from zoo.nn.rows import to_device
from zoo.nn.sampling import GREEDY, draw, gumbel, keep_logits, penalise
from zoo.qwen3_tts.clone import EncodedReference
from zoo.qwen3_tts.codec import Codec
from zoo.qwen3_tts.config import CONTROL_IDS, Config, Defaults
from zoo.qwen3_tts.depth import CodePredictor
from zoo.qwen3_tts.prompt import FRAME, MAX_TEXT_TOKENS, NOTHING, SPEAKER, PromptWriter, Script
from zoo.qwen3_tts.speaker import PACKAGES, SpeakerEncoder
from zoo.qwen3_tts.strategy import STRATEGY
from zoo.request import Request, RequestError, Share

MIN_NEW_TOKENS = 2  # the end is banned until then; otherwise some requests come out empty (vllm-omni #4962)
# The cap for a request that sets none: it stops speech that would never end.
FRAMES_PER_TEXT_TOKEN = 12
MIN_FRAMES = 192


class TextProjection(nn.Module):
    """Embeds text tokens and projects them to the talker's width."""

    def __init__(self, config: Config):
        super().__init__()
        self.embedding = nn.Embedding(config.text_vocab, config.text_hidden)
        self.fc1 = nn.Linear(config.text_hidden, config.text_hidden)
        self.fc2 = nn.Linear(config.text_hidden, config.talker.hidden)

    def forward(self, ids: Tensor) -> Tensor:
        return self.fc2(F.silu(self.fc1(self.embedding(ids))))


class Talker(nn.Module):
    """The modules of model.safetensors: talker, code predictor and, in Base models, speaker encoder."""

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
        """Embed frames of codes [..., K] as one row each, [..., D]: the sum over the codebooks."""
        # [..., K, D]
        rows = torch.cat((self.codec_embedding(codes[..., :1]), self.depth.embeddings(codes[..., 1:])), -2)
        return rows.sum(-2)


class Qwen3State(State):
    """The state of a slot, with these tensors added:

    - the trailing text ids [S+1, M] and their count [S+1];
    - the sampling values [S+1, 2], for the first code and for the depth codes;
    - the codes seen so far [S+1, V], for the repetition penalty;
    - the codec decoder's state [S+1, values], and the number of reference frames in it [S+1]. These frames
      come before those of the tape.
    """

    text: Tensor
    text_count: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    penalty: Tensor
    seen_codes: Tensor
    codec_state: Tensor
    num_prompt_frames: Tensor

    def __init__(self, family: Qwen3TTS, slots: int, max_frames: int):
        super().__init__(family.spec, slots, max_frames, family.dtype, family.device)
        decoder = family.codec.decoder
        self.add("text", MAX_TEXT_TOKENS, dtype=torch.int64)
        self.add("text_count", dtype=torch.int64)
        self.add("temperature", 2)
        self.add("top_k", 2, dtype=torch.int64)
        self.add("top_p", 2, default=1)
        self.add("penalty", default=1)
        self.add("seen_codes", family.config.vocab, dtype=torch.bool)
        self.add("codec_state", decoder.state_size, dtype=decoder.dtype)
        self.add("num_prompt_frames", dtype=torch.int64)
        self.num_text = [0] * (slots + 1)  # text_count on the host, so that `feed` does not read the device


class Qwen3TTS(Family[Qwen3State]):
    def __init__(
        self,
        config: Config,
        defaults: Defaults,
        spec: Spec,
        talker: Talker,
        codec: Codec,
        writer: PromptWriter,
    ):
        super().__init__()
        self.config, self.defaults, self.spec, self.strategy = config, defaults, spec, STRATEGY
        self.talker, self.codec = talker, codec
        self.writer = writer
        self.encoder_packages = () if codec.encoder is None else mimi_encoder.PACKAGES + PACKAGES
        head = talker.codec_head.weight
        self.dtype, self.device = dtype_of(talker.codec_head), head.device
        never = torch.arange(config.vocab, device=head.device) >= config.vocab - CONTROL_IDS
        never[config.control.eos] = False
        self.never = nn.Buffer(never, persistent=False)  # [V]

    # on the host, outside the engine's loop

    @torch.inference_mode()
    def prompt(self, request: Request) -> Prompt:
        values = check(request, self.spec)
        mix = shares(request, self.spec)
        script = self.writer(request, values, is_mixed=bool(mix))
        text, codec = torch.tensor(script.pairs, device=self.device).unbind(1)  # [T] each
        rows = self.talker.codec_embedding(codec.clamp(min=0)).masked_fill((codec < 0)[:, None], 0)
        reference = self._mixed(mix) if mix else script.reference
        if reference is not None:
            rows[codec == SPEAKER] = reference.speaker.to(self.dtype)
            rows[codec <= FRAME] = self.talker.frames(reference.codes)
        guard = max(MIN_FRAMES, FRAMES_PER_TEXT_TOKEN * script.text_tokens)
        expected = self.spec.max_frames if request.is_open else guard
        return Prompt(
            inputs=self.talker.text(text) + rows,
            prefix_keys=tuple(key(text_id, codec_id, reference) for text_id, codec_id in script.pairs),
            max_frames=frame_cap(
                self.spec, request, len(script.pairs), expected, num_text=script.text_tokens
            ),
            slot=self._slot(request, values, script),
            usage={"input_tokens": script.text_tokens, "prompt_positions": len(script.pairs)},
            num_fed_steps=1 + len(script.trailing) if request.is_open else None,
        )

    def _mixed(self, mix: Sequence[Share]) -> EncodedReference:
        """Return the weighted sum of speaker vectors: the checkpoint's rows, and the encoded references."""
        vectors: list[Tensor] = []
        names: list[tuple[float, str | bytes]] = []
        for share in mix:
            if share.reference is None:
                row = torch.tensor(self.config.voices[share.name], device=self.device)
                vectors.append(share.weight * self.talker.codec_embedding(row).float())
                names.append((share.weight, share.name))
            else:
                assert self.writer.cloner is not None, "this model does not clone, but got a reference"
                encoded = self.writer.cloner(share.reference.clip, x_vector_only=True)
                vectors.append(share.weight * encoded.speaker)
                names.append((share.weight, encoded.name))
        name = blake2b(repr(names).encode(), digest_size=16).digest()
        none = torch.empty(0, self.config.codebooks, dtype=torch.int64, device=self.device)
        return EncodedReference(name, torch.stack(vectors).sum(0), none, None)

    def _slot(self, request: Request, values: dict[str, Any], script: Script) -> dict[str, Any]:
        """Return the slot's initial state. If the first codes are greedy, the depth codes are too, unless the
        request sets depth_temperature."""
        is_greedy = request.temperature is not None and request.temperature <= GREEDY
        if is_greedy and "depth_temperature" not in request.options:
            values = values | {"depth_temperature": 0.0}
        rows: dict[str, Any] = {
            "text": torch.tensor(script.trailing, dtype=torch.int64),
            "text_count": len(script.trailing),
            "seed": request.seed,
            "penalty": values["repetition_penalty"],
        }
        for name in ("temperature", "top_k", "top_p"):
            rows[name] = torch.tensor((values[name], values[f"depth_{name}"]))
        if script.reference is not None and script.reference.codec_state is not None:
            rows["num_prompt_frames"] = len(script.reference.codes)
            rows["codec_state"] = script.reference.codec_state
        return rows

    # on the host, at admission

    def state(self, slots: int, max_frames: int | None = None) -> Qwen3State:
        return Qwen3State(self, slots, min(max_frames or self.spec.max_frames, self.spec.max_frames))

    def admit(self, state: Qwen3State, slot: int, prompt: Prompt) -> None:
        super().admit(state, slot, prompt)
        state.num_text[slot] = prompt.slot["text_count"]

    def tokenize(self, text: str) -> list[int]:
        return self.writer.tokenize(text)

    def feed(self, state: Qwen3State, slot: int, tokens: Sequence[int], is_last: bool) -> int:
        """Append text tokens to the slot, and the end of the text if they are the last. Return how many more
        steps they allow: each frame reads one token."""
        if wrong := [token for token in tokens if not 0 <= token < self.config.text_vocab]:
            possible = f"use ids from 0 to {self.config.text_vocab - 1}"
            raise RequestError("text", f"{wrong[0]} is not a text token; {possible}")
        more = [*tokens, self.config.tts_eos] if is_last else list(tokens)
        start = state.num_text[slot]
        stop = start + len(more)
        if stop > MAX_TEXT_TOKENS:
            raise RequestError("text", f"the text has {stop} tokens so far; the limit is {MAX_TEXT_TOKENS}")
        state.text[slot, start:stop] = to_device(torch.tensor(more, dtype=torch.int64), self.device)
        state.text_count[slot] = state.num_text[slot] = stop
        return len(more)

    # on the device

    def embed(self, state: Qwen3State, slots: Tensor) -> Tensor:
        """Return [B, D]: the sum of the last frame's sixteen code rows and the row of the next text token."""
        codes = state.last_frame(slots)  # [B, K]
        frame = (state.steps[slots] - 1).clamp(min=0, max=MAX_TEXT_TOKENS - 1)
        # [B]
        token = torch.where(frame < state.text_count[slots], state.text[slots, frame], self.config.tts_pad)
        return self.talker.frames(codes) + self.talker.text(token)

    def hidden(self, inputs: Tensor, batch: Batch) -> Tensor:
        stack = self.config.talker
        rotary = rope_table(batch.positions, stack.head_dim, stack.rope_theta, inputs.dtype)
        return run_blocks(self.talker.layers, self.talker.norm, inputs, rotary, batch)

    def emit(self, state: Qwen3State, slots: Tensor, h: Tensor) -> None:
        """Append one frame of 16 codes (80 ms) per slot, or the end. h [B, D] is the talker's hidden state at
        each slot's last position."""
        alive = ~state.done[slots]
        steps = state.steps[slots]
        seed = state.seed[slots]
        seen = state.seen_codes[slots]
        # [B, 2] each
        temperature, top_k, top_p = state.temperature[slots], state.top_k[slots], state.top_p[slots]

        logits = self.scores(h, seen, state.penalty[slots], steps)
        noise = gumbel(seed, steps, range(1), self.config.vocab)[:, 0]  # [B, V]
        first = draw(logits, temperature[:, 0], top_k[:, 0], top_p[:, 0], noise)  # [B]
        ended = first == self.config.control.eos
        noise = gumbel(seed, steps, range(1, self.config.codebooks), self.config.depth_vocab)  # [B, K - 1, V]
        pick = partial(draw, temperature=temperature[:, 1], top_k=top_k[:, 1], top_p=top_p[:, 1])
        drawn: list[Tensor] = []
        first_row = self.talker.codec_embedding(first)
        frame = self.talker.depth(h, first, first_row, noise, keep_logits(pick, drawn))  # [B, K]
        state.check(slots, torch.cat(drawn, 1))

        state.seen_codes[slots] = seen | (
            alive[:, None] & (torch.arange(self.config.vocab, device=h.device) == first[:, None])
        )
        state.append(slots, frame, ended)

    def scores(self, h: Tensor, seen: Tensor, penalty: Tensor, steps: Tensor) -> Tensor:
        """Return the first code's logits [B, V] in fp32. All codes seen so far are penalized; control ids,
        and the end before MIN_NEW_TOKENS steps, are -inf."""
        logits = penalise(self.talker.codec_head(h).float(), seen, penalty)
        early = (steps < MIN_NEW_TOKENS)[:, None] & (
            torch.arange(self.config.vocab, device=h.device) == self.config.control.eos
        )
        return logits.masked_fill(early | self.never, -torch.inf)

    def narrow_codec(self, dtype: torch.dtype) -> None:
        self.codec.decoder.to_rows(dtype)

    def render(self, state: Qwen3State, view: View) -> tuple[Tensor, Tensor]:
        rows, slots, decoder = state.codec_state, view.slots, self.codec.decoder
        start = state.num_prompt_frames[slots] + view.start  # frames that the codec has decoded
        past = slots_state(decoder.layout, rows, slots, view.frames, view.count)
        samples = decoder(state.window(view), start, past)
        past.store(rows, slots)
        return samples.float(), view.count * self.spec.frame_samples


def key(text_id: int, codec_id: int, reference: EncodedReference | None) -> int:
    """Return the prefix-cache key of a position. Two ids give a number >= 0. If the position depends on the
    reference, the key is negative: a hash of the ids and the reference."""
    if codec_id >= NOTHING:
        return text_id << 32 | codec_id + 1
    assert reference is not None, f"codec id {codec_id} needs a reference, but the request has none"
    return prefix_key(reference.name, text_id, codec_id)
