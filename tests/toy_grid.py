"""A toy that uses every feature of the renderer, of fed text and of conversations, and has an option of its
own.

    text      "Good morning, everybod" "y" " " "w" ...     the first HEAD bytes are read before frame 0, then one with every frame
    tape      |  .  .  .  .  .  |  .  .  .  .  .  |        a window ends on a grid of GRID frames, counted from an offset of the prompt
    frame f   reads frames f - LEFT .. f + AHEAD, and the sum of all before it
    samples   ............ HOLD of each window wait for the next one

The option `echoes` speaks the text several times; each pass begins with the sum of the previous one's codes.
A conversation's next turn continues from the frames of the last one.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from toy import CODES, FRAME_SAMPLES, TURN, Toy, ToyState

from zoo.check import check
from zoo.contract import Prompt, Said, View, Window, frame_cap
from zoo.nn.keys import prefix_key
from zoo.request import Option, Request, RequestError

HEAD, MAX_TRAILING, SILENCE = 20, 64, 0
GRID, AHEAD, LEFT, HOLD = 5, 3, 2, 6
WINDOW = Window(
    sizes=(5, 10, 25), lookahead=AHEAD, left=LEFT, grid=GRID, hold_samples=HOLD, lengths=(16, 32, 64)
)
ECHOES = Option("echoes", int, "how often the text is spoken", 1, (1, 3))


class GridState(ToyState):
    """Adds the bytes that frames read [S+1, M] and their count, and the held samples [S+1, HOLD] and their
    count. The phase is not used."""

    text: Tensor
    text_count: Tensor
    held: Tensor
    held_count: Tensor


@dataclass
class Turns:
    """The beginning of a conversation's next prompt."""

    inputs: Tensor  # [T, D]
    prefix_keys: tuple[int, ...]


class GridToy(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.spec = replace(
            self.spec,
            variant="grid",
            window=WINDOW,
            options=(*self.spec.options, ECHOES),
            feeds=True,
            shares_turns=True,
            max_positions=512,
            piece_s=None,
        )
        self.conversations: dict[str, Turns] = {}

    def prompt(self, request: Request) -> Prompt:
        return next(self.prompts(request))

    def prompts(self, request: Request, said: Said | None = None) -> Generator[Prompt, Tensor, None]:
        values = check(request, self.spec)
        text, echoes = request.text.encode(), values.pop("echoes")
        if request.is_open and (len(text) < HEAD or echoes > 1):
            raise RequestError(
                "text", f"text that arrives while the toy speaks begins with {HEAD} bytes and has no echoes"
            )
        for i in range(echoes):
            frames = yield self._pass(request, values, text, is_final=i == echoes - 1)
            text = b"%d " % int(frames.sum()) + text

    def _pass(self, request: Request, values: dict[str, float], text: bytes, is_final: bool) -> Prompt:
        head, trailing = text[:HEAD], text[HEAD : HEAD + MAX_TRAILING]
        inputs, keys = self.bytes(torch.tensor(list(head))), tuple(head)
        before = self.conversations.get(request.conversation or "")
        if before is not None:
            inputs, keys = torch.cat((before.inputs, inputs)), before.prefix_keys + keys
        slot = {
            "seed": request.seed,
            "text": torch.tensor(list(trailing)),
            "text_count": len(trailing),
            **values,
        }
        return Prompt(
            inputs=inputs,
            prefix_keys=keys,
            max_frames=frame_cap(self.spec, request, len(keys), self.spec.max_frames),
            slot=slot,
            usage={"input_tokens": len(text)},
            grid_offset=len(text) % GRID,
            num_fed_steps=1 + len(trailing) if request.is_open else None,
            is_final=is_final,
            conversation=request.conversation,
        )

    def state(self, slots: int, max_frames: int | None = None) -> GridState:
        state = GridState(self.spec, slots, max_frames or self.spec.max_frames, self.dtype)
        state.add("text", MAX_TRAILING, dtype=torch.int64)
        state.add("text_count", dtype=torch.int64)
        state.add("held", HOLD, dtype=torch.int64)
        state.add("held_count", dtype=torch.int64)
        return state

    def feed(self, state: GridState, slot: int, tokens: Sequence[int], is_last: bool) -> int:
        start = int(state.text_count[slot])
        if start + len(tokens) > MAX_TRAILING:
            raise RequestError("text", f"{start + len(tokens)} bytes; at most {MAX_TRAILING} are possible")
        state.text[slot, start : start + len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        state.text_count[slot] = start + len(tokens)
        return len(tokens)

    def end_turn(self, prompt: Prompt, frames: Tensor) -> tuple[int, ...]:
        trailing = prompt.slot["text"].tolist()[: len(frames)]
        read = torch.tensor(trailing + [SILENCE] * (len(frames) - len(trailing)), dtype=torch.int64)
        keys = tuple(
            prefix_key(*frame, byte) for frame, byte in zip(frames.tolist(), read.tolist(), strict=True)
        )
        if prompt.conversation is not None:
            inputs = torch.cat((prompt.inputs, self._rows(frames, read)))
            self.conversations[prompt.conversation] = Turns(inputs, prompt.prefix_keys + keys)
        return keys

    def _rows(self, frames: Tensor, read: Tensor) -> Tensor:
        """Return the LM's inputs for frames [N, 2] and the bytes read with them [N] -> [N, D]."""
        return self.codes(frames + CODES * torch.arange(2)).sum(1) + self.bytes(read)

    def embed(self, state: GridState, slots: Tensor) -> Tensor:
        at = state.steps[slots] - 1
        byte = state.text[slots, at.clamp(min=0, max=MAX_TRAILING - 1)]
        return self._rows(state.last_frame(slots), torch.where(at < state.text_count[slots], byte, SILENCE))

    def render(self, state: GridState, view: View) -> tuple[Tensor, Tensor]:
        length = view.length
        frame = torch.arange(length + AHEAD)
        whole = state.tape[view.slots][:, : length + AHEAD]  # [B, F, 2]
        whole = torch.nn.functional.pad(whole, (0, 0, 0, length + AHEAD - whole.shape[1]))
        # [B, F]
        loud = (whole * CODES ** torch.arange(2)).sum(-1) * (frame < state.ready[view.slots][:, None])
        # [B, length, 6]
        around = torch.nn.functional.pad(loud, (LEFT, 0)).unfold(1, LEFT + 1 + AHEAD, 1)[:, :length]
        # [B, length]
        speed = (around * torch.arange(1, LEFT + 2 + AHEAD)).sum(-1) + loud[:, :length].cumsum(1)
        # [B, N], of the whole tape
        phase = speed[..., None].expand(-1, -1, FRAME_SAMPLES).flatten(1).cumsum(1) % TURN

        at = view.start[:, None] * FRAME_SAMPLES + torch.arange(view.frames * FRAME_SAMPLES)
        new = phase.gather(1, at.clamp(max=phase.shape[1] - 1))
        return self._hold(state, view, new)

    def _hold(self, state: GridState, view: View, new: Tensor) -> tuple[Tensor, Tensor]:
        """Return the held samples followed by the new ones [B, N], and hold the last ones again."""
        held = state.held_count[view.slots]
        at = torch.arange(HOLD + new.shape[1])
        source = torch.where(at < held[:, None], at, at - held[:, None] + HOLD)
        joined = torch.cat((state.held[view.slots], new), 1).gather(1, source.clamp(max=len(at) - 1))
        there = held + view.count * FRAME_SAMPLES
        kept = torch.where(view.is_last, 0, there.clamp(max=HOLD))
        valid = there - kept
        state.held[view.slots] = joined.gather(
            1, (valid[:, None] + torch.arange(HOLD)).clamp(max=len(at) - 1)
        )
        state.held_count[view.slots] = kept
        return (joined * (2 * math.pi / TURN)).sin(), valid


TOYS = {"toy_grid": GridToy}
