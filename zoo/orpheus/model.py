"""Orpheus as a family: embed, hidden, emit, render.

    slot ── embed ──> [B, D] ── hidden: 28 paged blocks ──> [B, D] ── emit ──> 1 token ── seven make a frame ── render ──> 24 kHz
             │ the last token                                        │ head over the whole vocabulary     │ SNAC, 85.3 ms a frame

A step draws one token. A token at the place that is next in the frame fills that place, and the seventh
completes the frame. The model may slip: a token for the first place begins a new frame wherever it comes, and
any other token that is out of place drops the frame that was begun. Only whole frames reach the tape. Source:
canopyai/Orpheus-TTS at 835ac7c; transformers 5.23, models/llama and generation/logits_process.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zoo.check import check
from zoo.contract import Batch, Family, Prompt, Said, Spec, State, View, frame_cap
from zoo.nn.llama import Stack
from zoo.nn.narrow import dtype_of, tied_head
from zoo.nn.sampling import draw, gumbel, is_any, penalise
from zoo.orpheus.config import Config
from zoo.orpheus.prompt import PromptWriter
from zoo.orpheus.snac import Snac
from zoo.orpheus.strategy import STRATEGY
from zoo.orpheus.tokens import CODES, FIRST_CODE, PLACES, STOPS
from zoo.request import Request
from zoo.text.pieces import most_s


class Llama(nn.Module):
    """The LM's tensors. `head` exists only if the checkpoint holds one."""

    never: Tensor  # [8, V] bool, after prepare(): the ids that are not valid at each place

    def __init__(self, config: Config, has_head: bool):
        super().__init__()
        self.num_words = config.num_words
        self.embedding = nn.Embedding(config.vocabulary, config.stack.hidden)
        self.stack = Stack(config.stack)
        self.head = nn.Linear(config.stack.hidden, config.vocabulary, bias=False) if has_head else None

    @torch.no_grad()
    def prepare(self) -> None:
        """Call once, with the weights in place. A head that equals the embedding is kept once."""
        self.stack.prepare()
        table = self.embedding.weight
        if self.head is None or torch.equal(self.head.weight, table):
            self.head = tied_head(self.embedding)
        place = torch.arange(PLACES, device=table.device)[:, None]
        code = torch.arange(len(table), device=table.device) - self.num_words - FIRST_CODE
        valid = (code >= 0) & (code // CODES == place)  # [7, V]
        valid[:, [self.num_words + stop for stop in STOPS]] = place == 0  # a speech ends between two frames
        self.register_buffer("never", ~valid, persistent=False)


class OrpheusState(State):
    """Adds, for each slot: token, the last one drawn; place, how many codes of the next frame are there;
    codes [7], those codes; seen [V], the tokens of prompt and output; and the sampling values."""

    token: Tensor
    place: Tensor
    codes: Tensor
    seen: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    penalty: Tensor
    is_strict: Tensor
    last_step: Tensor

    def __init__(self, family: Orpheus, slots: int, max_frames: int):
        super().__init__(family.spec, slots, max_frames, family.dtype, family.device)
        self.num_words = family.config.num_words
        self.add("token", dtype=torch.int64)
        self.add("place", dtype=torch.int64)
        self.add("codes", PLACES, dtype=torch.int64)
        self.add("seen", family.config.vocabulary, dtype=torch.bool)
        self.add("temperature")
        self.add("top_k", dtype=torch.int64)
        self.add("top_p", default=1)
        self.add("penalty", default=1)
        self.add("is_strict", dtype=torch.bool)
        self.add("last_step", dtype=torch.int64)

    def take(self, slots: Tensor, token: Tensor) -> None:
        """One drawn token [B] of each slot, and the frame that it completes. A slot that is done stays as it
        is."""
        alive = ~self.done[slots]
        place = self.place[slots]
        codes = self.codes[slots]  # [B, 7]
        mark = token - self.num_words  # the special tokens and codes, counted as in tokens.py
        stopped = is_any(mark, STOPS)
        ends = stopped | (self.steps[slots] >= self.last_step[slots])
        index = mark - FIRST_CODE
        is_code = (index >= 0) & (index < CODES * PLACES)
        theirs = torch.where(is_code, index // CODES, -1)  # the place that the token is for
        filled = torch.where(
            theirs == place, place, torch.where(theirs == 0, 0, -1)
        )  # -1: it is out of place
        here = torch.arange(PLACES, device=token.device) == filled[:, None]  # [B, 7]
        codes = torch.where(here, (index % CODES)[:, None], codes)
        is_whole = filled == PLACES - 1
        next_place = torch.where(is_whole, 0, filled + 1)

        self.token[slots] = torch.where(alive, token, self.token[slots])
        self.place[slots] = torch.where(alive, next_place, place)
        self.codes[slots] = torch.where(alive[:, None], codes, self.codes[slots])
        self.seen[slots, token] = self.seen[slots, token] | alive
        self.append(slots, codes, stopped, is_whole)
        self.done[slots] = self.done[slots] | ends


class Orpheus(Family[OrpheusState]):
    def __init__(self, config: Config, spec: Spec, lm: Llama, codec: Snac, writer: PromptWriter):
        super().__init__()
        self.config = config
        self.spec = spec
        self.strategy = STRATEGY
        self.lm = lm
        self.codec = codec
        self.writer = writer
        context = codec.decoder.context
        assert context <= spec.window.lookahead, (
            f"the codec looks {context} frames ahead, not {spec.window.lookahead}"
        )
        self.dtype = dtype_of(lm.embedding)
        self.device = lm.embedding.weight.device

    # on the host, outside the engine's loop

    @torch.inference_mode()
    def prompt(self, request: Request, said: Said | None = None) -> Prompt:
        values = check(request, self.spec)
        script = self.writer(request, said)
        ids = torch.tensor(script.ids)
        guard = max(1, round(most_s(request.text) * self.spec.frame_rate_hz))
        max_frames = frame_cap(
            self.spec, request, len(ids), guard, steps_per_frame=PLACES, num_text=script.text_tokens
        )
        seen = torch.zeros(self.config.vocabulary, dtype=torch.bool)
        seen[ids] = True
        return Prompt(
            inputs=self.lm.embedding(ids.to(self.device)),
            prefix_keys=script.ids,
            max_frames=max_frames,
            max_steps=max_frames * PLACES,
            slot=self._slot(request, values, max_frames, seen),
            usage={"input_tokens": script.text_tokens, "prompt_positions": len(ids)},
        )

    def later_prompt(self, request: Request, said: Said) -> Prompt:
        return self.prompt(request, said)

    def _slot(
        self, request: Request, values: dict[str, Any], max_frames: int, seen: Tensor
    ) -> dict[str, Any]:
        sampling = {name: values[name] for name in ("temperature", "top_k", "top_p")}
        return sampling | {
            "seed": request.seed,
            "seen": seen,
            "penalty": values["repetition_penalty"],
            "is_strict": values["valid_only"],
            "last_step": max_frames * PLACES - 1,
        }

    # on the host, at admission

    def state(self, slots: int, max_frames: int | None = None) -> OrpheusState:
        return OrpheusState(self, slots, min(max_frames or self.spec.max_frames, self.spec.max_frames))

    # on the device

    def embed(self, state: OrpheusState, slots: Tensor) -> Tensor:
        return self.lm.embedding(state.token[slots])

    def hidden(self, inputs: Tensor, batch: Batch) -> Tensor:
        return self.lm.stack(inputs, batch)

    def scores(self, state: OrpheusState, slots: Tensor, h: Tensor) -> Tensor:
        """Return the logits [B, V] in fp32: repetition penalty over prompt and output, and with `valid_only`
        nothing that is out of place."""
        head = self.lm.head
        assert head is not None, "prepare() was not called"
        logits = penalise(head(h).float(), state.seen[slots], state.penalty[slots])
        never = self.lm.never[state.place[slots]] & state.is_strict[slots][:, None]  # [B, V]
        return logits.masked_fill(never, -torch.inf)

    def emit(self, state: OrpheusState, slots: Tensor, h: Tensor) -> None:
        """Draw one token per slot. h [B, D], the hidden state at each last position."""
        width = self.config.vocabulary
        noise = gumbel(state.seed[slots], state.steps[slots], range(1), width)[:, 0]  # [B, V]
        how = state.temperature[slots], state.top_k[slots], state.top_p[slots]
        state.take(slots, draw(self.scores(state, slots, h), *how, noise))

    def render(self, state: OrpheusState, view: View) -> tuple[Tensor, Tensor]:
        """SNAC reads three frames on both sides of the window from the tape, which ends with the last frame
        that is ready."""
        context = self.codec.decoder.context
        codes = state.window(view, context, context)  # [B, F + 6, 7]
        seed = state.seed[view.slots]
        samples = self.codec.decoder(codes, view.start, state.ready[view.slots], seed)
        return samples.float(), view.count * self.spec.frame_samples
