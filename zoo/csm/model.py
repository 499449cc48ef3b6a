"""CSM as a family: embed, hidden, emit, render.

    slot ── embed ──> [B, D] ── hidden: 16 paged blocks ──> [B, D] ── emit ──> 32 codes on the tape ── render ──> 24 kHz
             │ codes of the last frame, summed                         │ head: code 0
                                                                       │ depth decoder: codes 1..31; all zero: the end

Source: SesameAILabs/csm at 2d72082, models.py and generator.py; transformers 5.23, models/csm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zoo.check import check
from zoo.contract import Batch, Family, Prompt, Said, Spec, State, View, frame_cap
from zoo.csm.config import Config
from zoo.csm.conversations import Context, Conversations
from zoo.csm.depth import DepthDecoder
from zoo.csm.mimi import Decoder
from zoo.csm.prompt import PromptWriter, keys
from zoo.csm.strategy import STRATEGY
from zoo.nn import mimi_encoder
from zoo.nn.conv import slots_state
from zoo.nn.linear import Tables
from zoo.nn.llama import Stack
from zoo.nn.narrow import dtype_of
from zoo.nn.sampling import draw, gumbel, keep_logits
from zoo.request import Request
from zoo.text.pieces import most_s


class Lm(nn.Module):
    """The LM's tensors. `head` scores code 0, not text."""

    def __init__(self, config: Config):
        super().__init__()
        hidden = config.backbone.hidden
        self.text = nn.Embedding(config.text_vocab, hidden)
        self.audio = Tables(config.codebooks, config.vocab, hidden)
        self.backbone = Stack(config.backbone)
        self.head = nn.Linear(hidden, config.vocab, bias=False)
        self.depth = DepthDecoder(config)

    def prepare(self) -> None:
        """Compute what follows from the weights. Call once."""
        self.backbone.prepare()
        self.depth.prepare(self.audio)

    def frames(self, codes: Tensor) -> Tensor:
        """Embed codes [..., K] as the sum of their rows, [..., D]."""
        return self.audio(codes).sum(-2)


class CsmState(State):
    """Adds sampling values [S+1] for all codebooks, the stop rule [S+1], and the codec's state [S+1,
    values]."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    stops_early: Tensor
    codec_state: Tensor

    def __init__(self, family: Csm, slots: int, max_frames: int):
        super().__init__(family.spec, slots, max_frames, family.dtype, family.device)
        self.add("temperature")
        self.add("top_k", dtype=torch.int64)
        self.add("top_p", default=1)
        self.add("stops_early", dtype=torch.bool)
        self.add("codec_state", family.decoder.state_size, dtype=family.decoder.dtype)

    def take(self, slots: Tensor, frame: Tensor) -> None:
        """Append a frame [B, K], or end the speech: a frame of zeros is not spoken. With `stops_early`, a
        frame whose codes are zero except the last one is spoken and ends the speech too."""
        is_zero = frame == 0
        self.append(slots, frame, is_zero.all(1))
        self.done[slots] = self.done[slots] | (is_zero[:, :-1].all(1) & self.stops_early[slots])


class Csm(Family[CsmState]):
    encoder_packages = mimi_encoder.PACKAGES

    def __init__(self, config: Config, spec: Spec, lm: Lm, decoder: Decoder, writer: PromptWriter):
        super().__init__()
        self.config, self.spec, self.strategy = config, spec, STRATEGY
        self.lm, self.decoder = lm, decoder
        self.writer = writer
        self.conversations = Conversations()
        self.dtype, self.device = dtype_of(lm.head), lm.head.weight.device

    # on the host, outside the engine's loop

    @torch.inference_mode()
    def prompt(self, request: Request, said: Said | None = None) -> Prompt:
        values = check(request, self.spec)
        context = self.conversations.get(request.conversation)
        script = self.writer(request, values, said, has_context=context is not None)
        inputs = torch.cat([self._rows(part) for part in script.parts])  # [T, D]
        prefix_keys = script.keys
        if context is not None:
            inputs, prefix_keys = torch.cat((context.inputs, inputs)), context.keys + prefix_keys
        guard = max(1, round(most_s(request.text) * self.spec.frame_rate_hz))
        return Prompt(
            inputs=inputs,
            prefix_keys=prefix_keys,
            max_frames=frame_cap(self.spec, request, len(prefix_keys), guard, num_text=script.text_tokens),
            slot=self._slot(request, values),
            usage={"input_tokens": script.text_tokens, "prompt_positions": len(prefix_keys)},
            conversation=request.conversation,
        )

    def later_prompt(self, request: Request, said: Said) -> Prompt:
        return self.prompt(request, said)

    def _rows(self, part: Tensor) -> Tensor:
        """Return text ids [T] or codes [F, K] as the LM's inputs [T or F, D]."""
        part = part.to(self.device)
        return self.lm.text(part) if part.dim() == 1 else self.lm.frames(part)

    def _slot(self, request: Request, values: dict[str, Any]) -> dict[str, Any]:
        names = ("temperature", "top_k", "top_p", "stops_early")
        return {"seed": request.seed} | {name: values[name] for name in names}

    @torch.inference_mode()
    def end_turn(self, prompt: Prompt, frames: Tensor) -> tuple[int, ...]:
        """The next prompt of the conversation goes on behind the frames, and a frame of zeros."""
        closed = self.writer.closed(frames)
        frame_keys = tuple(keys(closed))
        if prompt.conversation is not None:
            inputs = torch.cat((prompt.inputs, self._rows(closed)))
            self.conversations.put(prompt.conversation, Context(inputs, prompt.prefix_keys + frame_keys))
        return frame_keys[:-1]

    # on the host, at admission

    def state(self, slots: int, max_frames: int | None = None) -> CsmState:
        return CsmState(self, slots, min(max_frames or self.spec.max_frames, self.spec.max_frames))

    # on the device

    def embed(self, state: CsmState, slots: Tensor) -> Tensor:
        return self.lm.frames(state.last_frame(slots))

    def hidden(self, inputs: Tensor, batch: Batch) -> Tensor:
        return self.lm.backbone(inputs, batch)

    def emit(self, state: CsmState, slots: Tensor, h: Tensor) -> None:
        """Draw one frame of 32 codes (80 ms) per slot. h [B, D], the hidden state at each last position."""
        c = self.config
        noise = gumbel(state.seed[slots], state.steps[slots], range(c.codebooks), c.vocab)  # [B, K, V]
        how = state.temperature[slots], state.top_k[slots], state.top_p[slots]

        def pick(logits: Tensor, k: int) -> Tensor:
            return draw(logits, *how, noise[:, k])

        first = pick(self.lm.head(h).float(), 0)
        drawn: list[Tensor] = []
        frame = self.lm.depth(h, first, keep_logits(pick, drawn))
        state.check(slots, torch.cat(drawn, 1))
        state.take(slots, frame)

    def render(self, state: CsmState, view: View) -> tuple[Tensor, Tensor]:
        rows, slots = state.codec_state, view.slots
        past = slots_state(self.decoder.layout, rows, slots, view.frames, view.count)
        samples = self.decoder(state.window(view), view.start, past)
        past.store(rows, slots)
        return samples.float(), view.count * self.spec.frame_samples
