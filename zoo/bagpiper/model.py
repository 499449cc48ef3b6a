"""Bagpiper as a family: embed, hidden, emit, render.

    slot ── embed ──> [2 B, D] ── hidden: 36 paged blocks ──> [2 B, D] ── emit ──> a word, or 8 codes ── render ──> 16 kHz
             │ the last row, 8 ids of one table summed          │ two heads; guidance               │ X-Codec, 20 ms a frame

The reference adds a vector per stream to the hidden state, and scores all ids of all modalities with one head for
each stream. Here the words are one head, and each stream scores only its own codes, in one product for all
streams; the vector's share of each score is a constant.

The second lane of guidance knows nothing of the text: it has read only pads, as many as the first lane has read
rows. Source: espnet 202611, espnet2/speechlm/model/speechlm/lm/parallel.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from einops import repeat
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.bagpiper.codec import Decoder
from zoo.bagpiper.config import DELAY, PAD, STREAMS, Config
from zoo.bagpiper.listener import Listener
from zoo.bagpiper.phases import IN_AUDIO, PhaseState
from zoo.bagpiper.prompt import EXPECTED_TOKENS, PromptWriter, Script
from zoo.bagpiper.strategy import STRATEGY
from zoo.check import check
from zoo.contract import LANE_LEAD, Batch, Family, Lane, Prompt, Spec, View, frame_cap
from zoo.nn.guidance import merge
from zoo.nn.keys import prefix_key
from zoo.nn.linear import FusedLinear
from zoo.nn.narrow import dtype_of
from zoo.nn.qwen3 import Stack
from zoo.nn.sampling import draw, draw_inline, gumbel
from zoo.request import Request


class Backbone(nn.Module):
    """The LM: the table of all ids, the blocks, and the head in parts. One part scores words and the two ends. Each
    stream has a part for its pad and its codes; that of the first stream scores the two ends, too."""

    offset: Tensor  # [all rows of heads] float32, after prepare(): the share of the streams' vectors

    def __init__(self, config: Config):
        super().__init__()
        hidden, size = config.body.hidden, config.codec.num_codes + 1
        self.ids = nn.Embedding(config.num_ids, hidden)
        self.stack = Stack(config.body)
        self.words = nn.Linear(hidden, config.num_words + 2, bias=False)
        self.heads = FusedLinear(hidden, (size + 2, *(size,) * (STREAMS - 1)))
        self.streams = nn.Embedding(STREAMS, hidden)

    @torch.no_grad()
    def prepare(self) -> None:
        """Compute what follows from the weights. Call once, with the weights in place. The first stream's vector
        does not count, whatever is stored."""
        heads = self.heads.weight.split(self.heads.parts)
        vectors = self.streams.weight.float()
        first = torch.zeros(self.heads.parts[0], device=vectors.device)
        others = [head.float() @ vector for head, vector in zip(heads[1:], vectors[1:], strict=True)]
        self.register_buffer("offset", torch.cat((first, *others)), persistent=False)

    def rows(self, ids: Tensor) -> Tensor:
        """Embed rows of ids [..., 8] as the sum of their vectors, [..., D]. Pads count in the first stream only."""
        is_read = (ids != PAD) | (torch.arange(STREAMS, device=ids.device) == 0)
        return self.ids(ids).mul(is_read[..., None]).sum(-2)

    def scores(self, h: Tensor, weight: Tensor) -> Tensor:
        """h [2 B, D], weight [B] of guidance -> the scores of each stream [B, 8, V] float32, -inf behind the ids
        that it may draw."""
        scores = merge(torch.cat(self.heads(h), -1).float(), weight) + self.offset
        parts = scores.split(self.heads.parts, -1)
        width = max(self.heads.parts)
        return torch.stack([F.pad(part, (0, width - part.shape[1]), value=-torch.inf) for part in parts], 1)


class BagpiperState(PhaseState):
    """Adds the sampling values of both phases."""

    text_temperature: Tensor
    text_top_k: Tensor
    audio_temperature: Tensor
    audio_top_k: Tensor
    top_p: Tensor

    def __init__(self, family: Bagpiper, slots: int, max_frames: int):
        super().__init__(family.config, family.spec, slots, max_frames, family.dtype, family.device)
        for phase in ("text", "audio"):
            self.add(f"{phase}_temperature")
            self.add(f"{phase}_top_k", dtype=torch.int64)
        self.add("top_p", default=1)


class Bagpiper(Family[BagpiperState]):
    def __init__(
        self,
        config: Config,
        spec: Spec,
        backbone: Backbone,
        codec: Decoder,
        listener: Listener | None,
        writer: PromptWriter,
    ):
        super().__init__()
        self.config, self.spec, self.strategy = config, spec, STRATEGY
        self.backbone, self.codec, self.listener, self.writer = backbone, codec, listener, writer
        if listener is not None:
            self.encoder_packages = listener.packages
        assert codec.context == spec.window.lookahead, (
            f"the codec looks {codec.context} frames ahead, not {spec.window.lookahead}"
        )
        self.dtype, self.device = dtype_of(backbone.ids), backbone.ids.weight.device

    # on the host, outside the engine's loop

    @torch.inference_mode()
    def prompt(self, request: Request) -> Prompt:
        values = check(request, self.spec)
        script = self.writer(request)
        length, is_text = len(script.rows), request.output == "text"
        most_words = values["max_tokens"]
        if is_text:
            frame_cap(self.spec, replace(request, max_frames=1), length, 1)  # room for a word
            most_words = min(most_words, self.spec.max_positions - length)
            max_frames, max_steps = 1, most_words
        else:
            extra = most_words + LANE_LEAD - 1 + DELAY
            max_frames = frame_cap(self.spec, request, length, self.spec.max_frames, extra_steps=extra)
            max_steps = extra + max_frames
        return Prompt(
            inputs=self._inputs(script),
            prefix_keys=script.keys,
            max_frames=max_frames,
            max_steps=max_steps,
            lead_steps=0 if is_text else min(most_words, EXPECTED_TOKENS) + LANE_LEAD - 1 + DELAY,
            opens_lane=values["guidance"] > 1 and not is_text,
            is_text=is_text,
            slot=self._sampling(values)
            | {"seed": request.seed, "most_words": most_words, "is_text": is_text},
            usage={
                "input_tokens": script.num_words + script.num_heard,
                "input_audio_tokens": script.num_heard,
                "prompt_positions": length,
            },
        )

    def _inputs(self, script: Script) -> Tensor:
        """Return the rows [T, D] that the LM reads: ids, and what was heard in their place."""
        inputs = self.backbone.rows(script.rows.to(self.device))
        for at, heard in script.heard:
            inputs[at : at + len(heard)] = heard.to(inputs)
        return inputs

    def _sampling(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the sampling values of the slot: `temperature` and `top_k` are those of both phases."""
        found = {"top_p": values["top_p"], "guidance": values["guidance"]}
        for name, phase in (("text", self.config.sampling.text), ("audio", self.config.sampling.audio)):
            given, top_k = values["temperature"], values["top_k"]
            found[f"{name}_temperature"] = values[f"{name}_temperature"] if given is None else given
            found[f"{name}_top_k"] = phase.top_k if top_k is None else top_k
        return found

    def second_lane(self, length: int) -> Lane:
        """Return as many pads, which the first stream reads as a vector like any other."""
        return Lane(
            self.backbone.ids.weight[PAD].to(self.dtype).expand(length, -1), (prefix_key(PAD),) * length
        )

    def detokenize(self, token: int) -> bytes:
        return self.writer.tokenize.bytes_of(token)

    # on the host, at admission

    def state(self, slots: int, max_frames: int | None = None) -> BagpiperState:
        return BagpiperState(self, slots, min(max_frames or self.spec.max_frames, self.spec.max_frames))

    # on the device

    def embed(self, state: BagpiperState, slots: Tensor) -> Tensor:
        return self.backbone.rows(state.row[slots]).repeat(2, 1)  # the second lane runs in audio only

    def hidden(self, inputs: Tensor, batch: Batch) -> Tensor:
        return self.backbone.stack(inputs, batch)

    def emit(self, state: BagpiperState, slots: Tensor, h: Tensor) -> None:
        """Draw a word and eight codes per slot, and take what its phase asks for. h [2 B, D]."""
        state.step(slots, self._word(state, slots, h), self._codes(state, slots, h))

    def _word(self, state: BagpiperState, slots: Tensor, h: Tensor) -> Tensor:
        """Return the index of a word, or of an end behind the words [B]."""
        first, _ = h.unflatten(0, (2, -1)).unbind(0)
        logits = self.backbone.words(first).float()
        is_early = state.count[slots] < self.config.sampling.text.min_steps
        logits[:, self.config.num_words :].masked_fill_(is_early[:, None], -torch.inf)
        how = state.text_temperature[slots], state.text_top_k[slots], state.top_p[slots]
        noise = gumbel(state.seed[slots], state.steps[slots], range(STREAMS, STREAMS + 1), logits.shape[1])
        return draw_inline(logits, *how, noise[:, 0])

    def _codes(self, state: BagpiperState, slots: Tensor, h: Tensor) -> Tensor:
        """Return the index of an id of each stream [B, 8]."""
        weight = torch.where(state.phase[slots] == IN_AUDIO, state.guidance[slots], 1.0)
        logits = self.scores(state, slots, h, weight)
        values = state.audio_temperature, state.audio_top_k, state.top_p
        how = (repeat(value[slots], "b -> (b s)", s=STREAMS) for value in values)
        noise = gumbel(state.seed[slots], state.steps[slots], range(STREAMS), logits.shape[2])
        return draw(logits.flatten(0, 1), *how, noise.flatten(0, 1)).unflatten(0, (-1, STREAMS))

    def scores(self, state: BagpiperState, slots: Tensor, h: Tensor, weight: Tensor) -> Tensor:
        """Return the scores [B, 8, V] of the codes, without the ends in the first rows."""
        logits = self.backbone.scores(h, weight)
        is_early = state.count[slots] < self.config.sampling.audio.min_steps
        logits[:, 0, self.backbone.heads.parts[1] :].masked_fill_(is_early[:, None], -torch.inf)
        return logits

    def render(self, state: BagpiperState, view: View) -> tuple[Tensor, Tensor]:
        """Render a window. The codec also reads ten frames on each side of it from the tape, which ends with the
        last frame that is ready."""
        context = self.codec.context
        codes = state.window(view, context, context)  # [B, F + 20, 8]
        samples = self.codec(codes, view.start, state.ready[view.slots])
        return samples.float(), view.count * self.spec.frame_samples
