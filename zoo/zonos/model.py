"""Zonos as a family: embed, hidden, emit, render.

    slot ── embed ──> [2 B, D] ── hidden: 26 paged blocks ──> [2 B, D] ── emit ──> 9 codes, each to its own frame ── render ──> 44.1 kHz
             │ the last column, 9 rows summed                  │ 9 heads, guidance, penalty, min-p, 9 draws      │ DAC, 11.6 ms a frame

Both lanes of a slot read the same columns; the first knows the conditions, the second only the phonemes.
Source: Zyphra/Zonos at bc40d98, model.py, sampling.py and backbone/_torch.py.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import repeat
from torch import Tensor, nn

from zoo.check import check
from zoo.checkpoint.stack import StackConfig
from zoo.contract import Batch, Family, Lane, Prompt, Said, Spec, View, frame_cap
from zoo.nn.attention import Paged, Turn, attend
from zoo.nn.guidance import merge
from zoo.nn.keys import prefix_key
from zoo.nn.linear import FusedLinear, Tables
from zoo.nn.narrow import dtype_of
from zoo.nn.rope import rope_table
from zoo.nn.sampling import gumbel
from zoo.nn.swiglu import FusedSwiGLU
from zoo.request import Request
from zoo.text.pieces import most_s
from zoo.zonos.codec import Codec
from zoo.zonos.conditioning import Prefix
from zoo.zonos.config import BOOKS, CODES, DELAY, END, MASK, Config
from zoo.zonos.delay import DelayState, columns, ramp
from zoo.zonos.prompt import PromptWriter, Script
from zoo.zonos.sampling import Settings, choose, penalise_recent
from zoo.zonos.strategy import CONTEXT, STRATEGY

IDS = CODES + 1  # that the heads know: codes and the end


class Block(nn.Module):
    """Grouped-query attention over pages, then a gated MLP. Both are pre-norm, with a bias in the norms, and
    residual."""

    def __init__(self, config: StackConfig):
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.norm = nn.LayerNorm(config.hidden, config.eps)
        self.qkv = FusedLinear(config.hidden, (queries, keys, keys))
        self.out = nn.Linear(queries, config.hidden, bias=False)
        self.mlp_norm = nn.LayerNorm(config.hidden, config.eps)
        self.mlp = FusedSwiGLU(config.hidden, config.inner)

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, paged: Paged) -> Tensor:
        """x [T, D] -> [T, D]; cos and sin [T, dim] float32."""
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv(self.norm(x)))
        x = x + self.out(attend(q, k, v, paged, self.head_dim**-0.5, Turn(cos, sin)).flatten(1))
        return x + self.mlp(self.mlp_norm(x))


class Backbone(nn.Module):
    """The LM: the tables of the codes, the blocks, the heads, and the prefix."""

    def __init__(self, config: Config):
        super().__init__()
        stack = config.stack
        self.codes = Tables(BOOKS, MASK + 1, stack.hidden)
        self.layers = nn.ModuleList(Block(stack) for _ in range(stack.layers))
        self.norm = nn.LayerNorm(stack.hidden, stack.eps)
        self.heads = FusedLinear(stack.hidden, (IDS,) * BOOKS)
        self.prefix = Prefix(config)

    def rows(self, column: Tensor) -> Tensor:
        """Embed columns of codes [..., K] as the sum of their rows, [..., D]."""
        return self.codes(column).sum(-2)


class ZonosState(DelayState):
    """Adds, for each slot: before [10, K], the last frames of the audio that the speech continues, at the end
    of the rows; num_before, how many they are; and the sampling values."""

    before: Tensor
    num_before: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    linear: Tensor
    conf: Tensor
    quad: Tensor
    penalty: Tensor
    cfg_scale: Tensor

    def __init__(self, family: Zonos, slots: int, max_frames: int):
        super().__init__(family.spec, slots, max_frames, family.dtype, family.device)
        self.add("before", CONTEXT, BOOKS, dtype=torch.int64)
        self.add("num_before", dtype=torch.int64)
        self.add("temperature")
        self.add("top_k", dtype=torch.int64)
        self.add("top_p", default=1)
        for name in ("min_p", "linear", "conf", "quad"):
            self.add(name)
        self.add("penalty", default=1)
        self.add("cfg_scale", default=1)


class Zonos(Family[ZonosState]):
    def __init__(self, config: Config, spec: Spec, backbone: Backbone, codec: Codec, writer: PromptWriter):
        super().__init__()
        self.config, self.spec, self.strategy = config, spec, STRATEGY
        self.backbone, self.codec, self.writer = backbone, codec, writer
        context = codec.decoder.context
        assert context == CONTEXT, f"the codec looks {context} frames to both sides, not {CONTEXT}"
        self.dtype, self.device = dtype_of(backbone.codes), backbone.codes.weight.device

    # on the host, outside the engine's loop

    @torch.inference_mode()
    def prompt(self, request: Request, said: Said | None = None) -> Prompt:
        values = check(request, self.spec)
        script = self.writer(request, values, said)
        audio = columns(script.codes)  # [P + 1, K]
        rows = self.backbone.rows(audio.to(self.device))
        keys = tuple(prefix_key(*column) for column in audio.tolist())
        first, second = (
            Lane(torch.cat((self._prefix(script, is_first), rows)), script.keys(is_first) + keys)
            for is_first in (True, False)
        )
        guard = max(1, round(most_s(request.text) * self.spec.frame_rate_hz))
        max_frames = frame_cap(
            self.spec, request, len(first.inputs), guard, extra_steps=DELAY, num_text=script.num_text
        )
        return Prompt(
            inputs=first.inputs,
            prefix_keys=first.prefix_keys,
            null=second,
            max_frames=max_frames,
            max_steps=max_frames + DELAY,
            slot=self._slot(request, values, script, audio),
            usage={"input_tokens": script.num_text, "prompt_positions": len(first.inputs)},
        )

    def later_prompt(self, request: Request, said: Said) -> Prompt:
        return self.prompt(request, said)

    def _prefix(self, script: Script, is_conditional: bool) -> Tensor:
        """Return the rows of a lane before the audio [T + 8, D]."""
        prefix = self.backbone.prefix
        known = script.conditions if is_conditional else dict.fromkeys(script.conditions)
        conditions = [prefix.row(name, values) for name, values in known.items()]
        return torch.cat((prefix.phonemes[list(script.ids)], torch.stack(conditions)))

    def _slot(
        self, request: Request, values: dict[str, Any], script: Script, audio: Tensor
    ) -> dict[str, Any]:
        slot = {name: values[name] for name in (*Settings._fields, "cfg_scale")}
        slot |= {"seed": request.seed, "penalty": values["recent_penalty"]}
        if len(script.codes) == 0:
            return slot
        last = script.codes[-CONTEXT:]
        before = torch.zeros(CONTEXT, BOOKS, dtype=torch.int64)
        before[CONTEXT - len(last) :] = last
        return slot | {
            "row": audio[-1],
            "ramp": ramp(script.codes),
            "before": before,
            "num_before": len(last),
        }

    # on the host, at admission

    def state(self, slots: int, max_frames: int | None = None) -> ZonosState:
        return ZonosState(self, slots, min(max_frames or self.spec.max_frames, self.spec.max_frames))

    # on the device

    def embed(self, state: ZonosState, slots: Tensor) -> Tensor:
        return self.backbone.rows(state.row[slots]).repeat(2, 1)

    def hidden(self, inputs: Tensor, batch: Batch) -> Tensor:
        stack = self.config.stack
        cos, sin = rope_table(batch.positions, stack.head_dim, stack.rope_theta, torch.float32)  # [T, dim]
        x = inputs
        for i, layer in enumerate(self.backbone.layers):
            x = layer(x, cos, sin, Paged(batch, i))
        return self.backbone.norm(x)

    def logits(self, h: Tensor) -> Tensor:
        """h [N, D] -> [N, K, V] float32"""
        return torch.stack([part.float() for part in self.backbone.heads(h)], 1)

    def guided(self, state: ZonosState, slots: Tensor, h: Tensor) -> Tensor:
        """h [2 B, D] -> [B, K, V] float32"""
        return merge(self.logits(h), state.cfg_scale[slots])

    def scores(self, state: ZonosState, slots: Tensor, h: Tensor) -> Tensor:
        """Return the logits [B, K, V] for h [2 B, D]: guidance, then only codebook 0 may end, then the
        penalty. The first step has neither of the last two."""
        logits = self.guided(state, slots, h)
        is_later = state.steps[slots] > 0
        book = torch.arange(BOOKS, device=slots.device)
        never = is_later[:, None] & (book > 0)  # [B, K]
        logits[..., END].masked_fill_(never, -torch.inf)
        penalty = torch.where(is_later, state.penalty[slots], 1.0)
        return penalise_recent(logits, (state.row[slots], state.previous[slots]), penalty)

    def emit(self, state: ZonosState, slots: Tensor, h: Tensor) -> None:
        """Draw nine codes per slot independently and write each to its own frame (11.6 ms). h [2 B, D]."""
        logits = self.scores(state, slots, h).flatten(0, 1)  # [B K, V]
        noise = gumbel(state.seed[slots], state.steps[slots], range(BOOKS), IDS).flatten(0, 1)
        settings = (
            state.temperature,
            state.top_k,
            state.top_p,
            state.min_p,
            state.linear,
            state.conf,
            state.quad,
        )
        how = Settings(*(repeat(value[slots], "b -> (b k)", k=BOOKS) for value in settings))
        state.step(slots, choose(logits, how, noise).unflatten(0, (-1, BOOKS)))

    def narrow_codec(self, dtype: torch.dtype) -> None:
        self.codec.decoder.to_rows(dtype)

    def render(self, state: ZonosState, view: View) -> tuple[Tensor, Tensor]:
        """Render a window. The codec also reads ten frames on each side of it: from the tape, which ends
        after the last ready frame, and from the audio that the speech continues."""
        codes = state.window(view, CONTEXT, CONTEXT)  # [B, F + 20, K]
        at = view.start[:, None] + torch.arange(-CONTEXT, view.frames + CONTEXT, device=codes.device)
        earlier = state.before[view.slots[:, None], (at + CONTEXT).clamp(0, CONTEXT - 1)]
        codes = torch.where((at < 0)[..., None], earlier, codes)
        num_before = state.num_before[view.slots]
        samples = self.codec.decoder(codes, view.start + num_before, state.ready[view.slots] + num_before)
        return samples.float(), view.count * self.spec.frame_samples
