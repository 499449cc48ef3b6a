"""Higgs Audio V3 as a family: embed, hidden, emit, render.

    slot ── embed ──> [B, D] ── hidden: 36 paged blocks ──> [B, D] ── emit ──> 8 codes, each to its own frame ── render ──> 24 kHz
             │ codes of the last step, summed                         │ the same table as a head, 8 draws

Source: sgl-project/sglang-omni 0.1.9, models/higgs_tts; transformers, models/qwen3.
"""

from __future__ import annotations

import torch
from einops import repeat
from torch import Tensor, nn

from zoo.check import check
from zoo.contract import Batch, Family, Prompt, Said, Spec, View, frame_cap
from zoo.higgs_v3.codec import Codec
from zoo.higgs_v3.config import Config
from zoo.higgs_v3.delay import DelayState
from zoo.higgs_v3.prompt import PromptWriter
from zoo.higgs_v3.strategy import STRATEGY
from zoo.nn.linear import Tables
from zoo.nn.narrow import dtype_of, tied_head
from zoo.nn.qwen3 import Stack
from zoo.nn.sampling import draw, gumbel
from zoo.request import Request

# The cap for a request that sets none: it stops speech that would never end.
FRAMES_PER_TEXT_TOKEN = 24
MIN_FRAMES = 384


class Backbone(nn.Module):
    """The LM: the text embedding, the code embeddings, and the blocks. A step's codes are read as the sum of
    their rows."""

    def __init__(self, config: Config):
        super().__init__()
        self.text = nn.Embedding(config.text_vocab, config.stack.hidden)
        self.codes = Tables(config.codebooks, config.vocab, config.stack.hidden)
        self.stack = Stack(config.stack)

    def rows(self, codes: Tensor) -> Tensor:
        """Embed codes [..., K] as the sum of their rows, [..., D]."""
        return self.codes(codes).sum(-2)


class HiggsState(DelayState):
    """The state of a slot, with its sampling values [S+1] added. They apply to all codebooks."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor

    def __init__(self, family: HiggsV3, slots: int, max_frames: int):
        super().__init__(family.spec, slots, max_frames, family.dtype, family.device)
        self.add("temperature")
        self.add("top_k", dtype=torch.int64)
        self.add("top_p", default=1)


class HiggsV3(Family[HiggsState]):
    encoder_packages = ("transformers.models.hubert.modeling_hubert", "vector_quantize_pytorch")

    def __init__(self, config: Config, spec: Spec, backbone: Backbone, codec: Codec, writer: PromptWriter):
        super().__init__()
        self.config, self.spec, self.strategy = config, spec, STRATEGY
        self.backbone, self.codec = backbone, codec
        self.writer = writer
        assert codec.decoder.context == spec.window.lookahead, (
            f"the codec looks {codec.decoder.context} frames ahead, not {spec.window.lookahead}"
        )
        self.dtype, self.device = dtype_of(backbone.codes), backbone.codes.weight.device
        # Tied: the row that embeds a code also scores it. The text head is never run.
        self.head = tied_head(backbone.codes)

    # on the host, outside the engine's loop

    @torch.inference_mode()
    def prompt(self, request: Request, said: Said | None = None) -> Prompt:
        values = check(request, self.spec)
        script = self.writer(request, values, said)
        ids = torch.tensor(script.ids, device=self.device)  # [T]
        inputs = self.backbone.text(ids.clamp(min=0))  # [T, D]
        if script.reference is not None:
            inputs[ids < 0] = self.backbone.rows(script.reference.rows)
        guard = max(MIN_FRAMES, FRAMES_PER_TEXT_TOKEN * script.text_tokens)
        delay = self.config.delay
        max_frames = frame_cap(
            self.spec, request, len(script.ids), guard, extra_steps=delay, num_text=script.text_tokens
        )
        return Prompt(
            inputs=inputs,
            prefix_keys=script.keys,
            max_frames=max_frames,
            max_steps=max_frames + delay,
            slot={
                "seed": request.seed,
                "temperature": values["temperature"],
                "top_k": values["top_k"],
                "top_p": values["top_p"],
            },
            usage={"input_tokens": script.text_tokens, "prompt_positions": len(script.ids)},
        )

    def later_prompt(self, request: Request, said: Said) -> Prompt:
        return self.prompt(request, said)

    # on the host, at admission

    def state(self, slots: int, max_frames: int | None = None) -> HiggsState:
        return HiggsState(self, slots, min(max_frames or self.spec.max_frames, self.spec.max_frames))

    # on the device

    def embed(self, state: HiggsState, slots: Tensor) -> Tensor:
        return self.backbone.rows(state.row[slots])

    def hidden(self, inputs: Tensor, batch: Batch) -> Tensor:
        # In bf16 the RoPE table is rounded too, as in training (sglang-omni 0.1.9,
        # models/higgs_tts/utils.py, truncate_rope_to_bf16).
        return self.backbone.stack(inputs, batch)

    def emit(self, state: HiggsState, slots: Tensor, h: Tensor) -> None:
        """Draw eight codes per slot independently and write each to its own frame (40 ms). h [B, D]."""
        c = self.config
        steps = state.steps[slots]
        logits = self.head(h).float().unflatten(-1, (c.codebooks, c.vocab))  # [B, K, V]
        # An end in the first step would leave no audio.
        logits[:, 0, c.end].masked_fill_(steps == 0, -torch.inf)
        noise = gumbel(state.seed[slots], steps, range(c.codebooks), c.vocab)  # [B, K, V]
        settings = (state.temperature, state.top_k, state.top_p)
        how = (repeat(value[slots], "b -> (b k)", k=c.codebooks) for value in settings)
        # [B, K]
        drawn = draw(logits.flatten(0, 1), *how, noise.flatten(0, 1)).unflatten(0, (-1, c.codebooks))
        state.step(slots, drawn, c.begin, c.end)

    def narrow_codec(self, dtype: torch.dtype) -> None:
        self.codec.decoder.to_rows(dtype)

    def render(self, state: HiggsState, view: View) -> tuple[Tensor, Tensor]:
        """Render a window. The codec also reads ten frames on each side of it from the tape, which ends after
        the last ready frame."""
        window = self.spec.window
        codes = state.window(view, window.left, window.lookahead)  # [B, F + 20, K]
        samples = self.codec.decoder(codes, view.start, state.ready[view.slots])
        return samples.float(), view.count * self.spec.frame_samples
