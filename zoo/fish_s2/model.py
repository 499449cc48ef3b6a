"""Fish Audio S2 as a family: embed, hidden, emit, render.

    slot ── embed ──> [B, D] ── hidden ──> [B, D] ── emit ──> 10 codes on the tape ── render ──> samples
             │ the last frame's    36 paged           │ head of 4,097 rows:            44.1 kHz
             │ codes and token,    blocks             │ code 0, or the end
             │ as one row                             │ fast AR: codes 1..9

Source: facts of fish-speech 0.1.0, models/text2semantic/llama.py; see README.md.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from math import ceil, sqrt
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from zoo.check import check
from zoo.contract import Batch, Family, Prompt, Said, Spec, State, View, frame_cap
from zoo.fish_s2.block import SlowBlock, rope_table, turns
from zoo.fish_s2.codec import Codec
from zoo.fish_s2.config import Config
from zoo.fish_s2.depth import FastAR
from zoo.fish_s2.prompt import PromptWriter, Writer, column_keys, passes
from zoo.fish_s2.sampling import RAS_WINDOW, draw, draw_semantic, remember
from zoo.fish_s2.strategy import STRATEGY
from zoo.nn.blocked_stack import run_blocks
from zoo.nn.conv import slots_state
from zoo.nn.keys import prefix_key
from zoo.nn.narrow import dtype_of
from zoo.nn.norm import RMSNorm
from zoo.nn.sampling import gumbel, keep_logits
from zoo.request import Request
from zoo.text.pieces import most_s

AnyWriter = TypeVar("AnyWriter", bound=Writer)
# The cap of the original's server, for a request that sets none. A short text gets less, because the model
# may never emit the end.
DEFAULT_FRAMES = 1024


class DualAR(nn.Module):
    """The modules of the shards: the slow AR and the fast AR."""

    # set by prepare()
    rope: Tensor  # [positions, 2, dim / 2] bf16
    first: Tensor  # [K], each codebook's first row in the embedding

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.slow.hidden)
        self.codes = nn.Embedding(config.codebooks * config.codebook_size, config.slow.hidden)
        self.layers = nn.ModuleList(SlowBlock(config.slow) for _ in range(config.slow.layers))
        self.norm = RMSNorm(config.slow.hidden, config.slow.eps)
        if config.is_s1:
            self.output = nn.Linear(config.slow.hidden, config.vocab, bias=False)
        self.fast = FastAR(config)

    @torch.no_grad()
    def prepare(self) -> None:
        """Gather both heads' rows that may be drawn, because all other logits would be -inf, and compute the
        RoPE tables. Call this once after loading the weights."""
        c = self.config
        slow = c.slow
        fast = c.fast
        rows = self.embedding.weight
        if c.is_s1:
            rows = self.output.weight
            del self.output
            self.fast.head.weight = nn.Parameter(self.fast.head.weight[: c.num_residual_codes].clone())
        semantic = rows[c.semantic_start : c.semantic_start + c.codebook_size]
        drawn = torch.cat((semantic, rows[c.end : c.end + 1])).to(dtype_of(self.embedding))
        self.head = nn.Linear(slow.hidden, c.codebook_size + 1, bias=False, device="meta")
        del self.head.weight  # rows that another parameter has are a buffer
        self.head.register_buffer("weight", drawn, persistent=False)
        buffers = {
            "first": torch.arange(c.codebooks, device=rows.device) * c.codebook_size,
            "rope": rope_table(c.max_positions, slow.head_dim, slow.rope_theta, rows.device),
            "fast.rope": rope_table(c.codebooks, fast.head_dim, fast.rope_theta, rows.device),
        }
        for name, value in buffers.items():
            owner, _, leaf = name.rpartition(".")
            self.get_submodule(owner).register_buffer(leaf, value, persistent=False)

    def read(self, columns: Tensor) -> Tensor:
        """Embed columns [..., 1 + K], each a token and a frame's codes, as [..., D]. The codes of a text
        column are ignored."""
        token, codes = columns[..., 0], columns[..., 1:]
        text, start = self.embedding(token), self.config.semantic_start
        frame = (text + self.codes(codes + self.first).sum(-2)) / sqrt(1 + self.config.codebooks)
        is_frame = (token >= start) & (token < start + self.config.codebook_size)
        return torch.where(is_frame[..., None], frame, text)


class FishState(State):
    """The state of a slot, with these tensors added: the sampling values [S+1], the latest semantic codes
    [S+1, RAS_WINDOW] (-1 for none), and the codec decoder's state [S+1, values]."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    recent: Tensor
    codec_state: Tensor

    def __init__(self, family: FishFamily[Any], slots: int, max_frames: int):
        super().__init__(family.spec, slots, max_frames, family.dtype, family.device)
        decoder = family.codec.decoder
        self.add("temperature")
        self.add("top_k", dtype=torch.int64)
        self.add("top_p", default=1)
        self.add("recent", RAS_WINDOW, dtype=torch.int64, default=-1)
        self.add("codec_state", decoder.state_size, dtype=decoder.dtype)


class FishFamily(Family[FishState], Generic[AnyWriter]):
    """The parts of the family that S2 and S1 share."""

    sampled: tuple[str, ...] = ("temperature", "top_k", "top_p")  # options that the state stores

    def __init__(self, config: Config, spec: Spec, lm: DualAR, codec: Codec, writer: AnyWriter):
        super().__init__()
        self.config, self.spec, self.strategy = config, spec, STRATEGY
        self.lm, self.codec, self.writer = lm, codec, writer
        self.dtype, self.device = dtype_of(lm.head), lm.head.weight.device

    # on the host, outside the engine's loop

    @torch.inference_mode()
    def _pass(self, request: Request, values: dict[str, Any], text: str, read: Tensor, seed: int) -> Prompt:
        """Return the prompt of one pass. text: the text that it speaks. read [T, 1 + K]: the columns that the
        LM reads."""
        sampling = {name: values[name] for name in self.sampled}
        expected = min(DEFAULT_FRAMES, ceil(most_s(text) * self.spec.frame_rate_hz))
        num_text = len(self.writer.tokenize(text))
        return Prompt(
            inputs=self.lm.read(read.to(self.device)),
            prefix_keys=column_keys(read, self.config),
            max_frames=frame_cap(self.spec, request, len(read), expected, num_text=num_text),
            slot={"seed": seed, **sampling},
            usage={"input_tokens": num_text, "prompt_positions": len(read)},
        )

    # on the host, at admission

    def state(self, slots: int, max_frames: int | None = None) -> FishState:
        return FishState(self, slots, min(max_frames or self.spec.max_frames, self.spec.max_frames))

    # on the device

    def embed(self, state: FishState, slots: Tensor) -> Tensor:
        codes = state.last_frame(slots)  # [B, K]
        return self.lm.read(torch.cat((codes[:, :1] + self.config.semantic_start, codes), 1))

    def stack(self, inputs: Tensor, batch: Batch, norm: RMSNorm | None) -> Tensor:
        rotary = turns(self.lm.rope[batch.positions])
        return run_blocks(self.lm.layers, norm, inputs, rotary, batch)

    def scores(self, h: Tensor, steps: Tensor) -> Tensor:
        """Return logits [B, V + 1] in fp32 for code 0 and, last, the end. The end is banned in the first
        step, where the original would ignore it."""
        logits = self.lm.head(h).float()
        is_end = torch.arange(logits.shape[1], device=h.device) == self.config.codebook_size
        return logits.masked_fill((steps == 0)[:, None] & is_end, -torch.inf)

    def narrow_codec(self, dtype: torch.dtype) -> None:
        self.codec.decoder.to_rows(dtype)

    def render(self, state: FishState, view: View) -> tuple[Tensor, Tensor]:
        rows, slots, decoder = state.codec_state, view.slots, self.codec.decoder
        past = slots_state(decoder.layout, rows, slots, view.frames, view.count)
        samples = decoder(state.window(view), view.start, past)
        past.store(rows, slots)
        return samples.float(), view.count * self.spec.frame_samples


class FishS2(FishFamily[PromptWriter]):
    def prompt(self, request: Request) -> Prompt:
        return next(self.prompts(request))

    def prompts(self, request: Request, said: Said | None = None) -> Generator[Prompt, Tensor, None]:
        """Yield one prompt per pass. Each reads `said` and the messages of earlier passes, as far back as the
        positions allow. A piece follows only the first piece, like a second turn in the original. The pieces
        in between are left out, so that all pieces cost the same."""
        values = check(request, self.spec)
        texts = passes(request.text, int(values["chunk_length"]))
        system = self.writer.system(request.references)
        messages: list[Tensor] = []
        if said is not None:
            messages = [self.writer.user(said.text), self.writer.said(said.frames)]
        left = request.max_frames
        for i, text in enumerate(texts):
            asked = replace(request, max_frames=left)
            messages.append(self.writer.user(text))
            messages = self._latest(asked, len(system), messages)
            read = torch.cat((system, *messages))
            seed = prefix_key(request.seed, i) if i else request.seed
            prompt = self._pass(asked, values, text, read, seed)
            prompt.is_final = i == len(texts) - 1
            frames = yield prompt
            if left is not None:
                left -= len(frames)
                if left == 0:
                    return
            messages.append(self.writer.said(frames))

    def _latest(self, request: Request, num_before: int, messages: list[Tensor]) -> list[Tensor]:
        """Return the latest messages, starting with a user's. They leave enough positions for the frames that
        follow."""
        wanted = min(request.max_frames or DEFAULT_FRAMES, self.spec.max_frames)
        while len(messages) > 1 and num_before + sum(map(len, messages)) + wanted > self.spec.max_positions:
            messages = messages[2:]
        return messages

    def hidden(self, inputs: Tensor, batch: Batch) -> Tensor:
        return self.stack(inputs, batch, self.lm.norm)

    def emit(self, state: FishState, slots: Tensor, h: Tensor) -> None:
        """Append one frame of codes (46.4 ms) per slot, or the end. h [B, D] is the slow AR's hidden state at
        each slot's last position."""
        alive = ~state.done[slots]
        steps = state.steps[slots]
        seed = state.seed[slots]
        recent = state.recent[slots]
        sampling = state.temperature[slots], state.top_k[slots], state.top_p[slots]  # [B] each
        size, codebooks = self.config.codebook_size, self.config.codebooks

        logits = self.scores(h, steps)
        draws = [gumbel(seed, steps, range(i, i + 1), size + 1) for i in (0, codebooks)]  # [B, 1, V + 1] each
        token = draw_semantic(logits, recent, *sampling, torch.cat(draws, 1))
        noise = gumbel(seed, steps, range(1, codebooks), size)  # [B, K - 1, V]

        def pick(logits: Tensor, k: int) -> Tensor:
            return draw(logits, *sampling, noise[:, k - 1])

        drawn: list[Tensor] = []
        frame = self.lm.fast(h, token.clamp(max=size - 1), keep_logits(pick, drawn))  # [B, K]
        state.check(slots, torch.cat(drawn, 1))
        # As in the original, the first frame's code does not enter the window.
        state.recent[slots] = remember(recent, token, alive & (steps > 0))
        state.append(slots, frame, token == size)
