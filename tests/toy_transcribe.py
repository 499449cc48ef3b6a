"""A toy that speaks texts, and that also writes the words of a clip: one letter a step, without a frame."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from toy import WIDTH, Toy, ToyState

from zoo.check import check
from zoo.contract import Prompt, Spec
from zoo.request import Request

LETTERS = " etaoinshr"  # the first one is a space; a draw behind the last one ends the transcript
MAX_LETTERS = 20
CLIP_STEP = 160  # samples of a clip for each position of its prompt


class TranscriptState(ToyState):
    """Adds is_text, whether the slot writes; last_step, at which it ends; and letter, the last one written."""

    is_text: Tensor
    last_step: Tensor
    letter: Tensor

    def __init__(self, spec: Spec, slots: int, max_frames: int, dtype: torch.dtype):
        super().__init__(spec, slots, max_frames, dtype)
        self.add("is_text", dtype=torch.int64)
        self.add("last_step", dtype=torch.int64)
        self.add("letter", dtype=torch.int64)


class Transcribing(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.spec = replace(self.spec, variant="transcribing", outputs=("speech", "transcript"))
        self.letters = nn.Embedding(len(LETTERS), WIDTH)
        self.letter_head = nn.Linear(WIDTH, len(LETTERS) + 1, bias=False)
        random = torch.Generator().manual_seed(3)
        for module in (self.letters, self.letter_head):
            module.weight.data = torch.randn(module.weight.shape, generator=random)
        self.eval().requires_grad_(False)

    def prompt(self, request: Request) -> Prompt:
        if request.output != "transcript":
            return super().prompt(request)
        values = check(request, self.spec)
        clip = request.turns[0].clip
        assert clip is not None, "check lets no transcript without a clip through"
        keys = tuple(int(255 * abs(float(sample))) % 256 for sample in clip.samples[::CLIP_STEP])
        values |= {"seed": request.seed, "is_text": 1, "last_step": MAX_LETTERS - 1}
        usage = {"input_tokens": len(keys), "input_audio_tokens": len(keys)}
        inputs = self.bytes(torch.tensor(keys))
        return Prompt(inputs, keys, 1, values, usage=usage, max_steps=MAX_LETTERS, is_text=True)

    def state(self, slots: int, max_frames: int | None = None) -> TranscriptState:
        return TranscriptState(self.spec, slots, max_frames or self.spec.max_frames, self.dtype)

    def embed(self, state: TranscriptState, slots: Tensor) -> Tensor:
        is_text = state.is_text[slots, None] > 0
        return torch.where(is_text, self.letters(state.letter[slots]), super().embed(state, slots))

    def emit(self, state: TranscriptState, slots: Tensor, h: Tensor) -> None:
        is_text, is_open = state.is_text[slots] > 0, ~state.done[slots]
        drawn = self.letter_head(h).argmax(1)
        is_end = is_text & (drawn == len(LETTERS))
        letter = drawn.clamp(max=len(LETTERS) - 1)
        is_last = is_text & (state.steps[slots] >= state.last_step[slots])
        state.write(slots, torch.where(is_text & ~is_end, letter, -1))
        state.letter[slots] = torch.where(is_open, letter, state.letter[slots])
        ready, steps = state.ready[slots].clone(), state.steps[slots].clone()
        super().emit(state, slots, h)
        state.ready[slots] = torch.where(is_text, ready, state.ready[slots])
        state.steps[slots] = torch.where(is_text & is_open, steps + 1, state.steps[slots])
        state.done[slots] = torch.where(is_text, ~is_open | is_end | is_last, state.done[slots])

    def detokenize(self, token: int) -> bytes:
        return LETTERS[token].encode()


TOYS = {"toy_transcribing": Transcribing}
