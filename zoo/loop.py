"""The plain loop: one request, alone, eager, without a server. Everything faster is tested against it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from zoo import kernels
from zoo.contract import NEVER, Batch, Family, Lane, Prompt, Speech, View, following
from zoo.contract.family import SpokenPiece
from zoo.request import Request, RequestError
from zoo.text.stops import Writing

PAGE_TOKENS = 16


@kernels.plain()
@torch.inference_mode()
def generate(
    family: Family[Any], request: Request, max_frames: int | None = None, noise: Tensor | None = None
) -> Speech:
    """Speak one request from its first frame to its last, then render each pass's whole tape at once. Raises
    RequestError.

    noise [F, *noise] replaces the noise that follows from the seed, for comparison with another
    implementation. The speech is then at most F frames long.
    """
    if request.is_open:
        raise RequestError(
            "is_open",
            "text that arrives while the model speaks needs an engine: zoo.generate takes all of it at once",
        )
    noise = None if noise is None else _fitting(noise, family)
    if noise is not None:
        max_frames = min(len(noise), max_frames or len(noise))
    passes, spoken, samples = family.passes(request), list[Speech](), list[Tensor]()
    pieces: list[SpokenPiece] = []
    prompt: Prompt | None = next(passes)
    while prompt is not None:
        if max_frames is not None:
            prompt.max_frames = min(prompt.max_frames, max_frames)
        spoken.append(speak_pass(family, prompt, noise, request.stop))
        start = sum(map(len, samples)) + prompt.silence_before
        samples += (torch.zeros(prompt.silence_before), spoken[-1].samples, torch.zeros(prompt.silence_after))
        if prompt.text and len(spoken[-1].samples):
            pieces.append(SpokenPiece(prompt.text, start, start + len(spoken[-1].samples)))
        if family.spec.shares_turns:
            family.end_turn(prompt, spoken[-1].frames)
        prompt = None if prompt.is_final else following(passes, spoken[-1].frames)
    return Speech(
        frames=torch.cat([speech.frames for speech in spoken]),
        samples=torch.cat(samples),
        sample_rate_hz=family.spec.sample_rate_hz,
        text="".join(speech.text for speech in spoken),
        pieces=tuple(pieces),
        tokens=tuple(chain(*(speech.tokens for speech in spoken))),
    )


def _fitting(noise: Tensor, family: Family[Any]) -> Tensor:
    """Return the noise on the family's device. Raises ValueError if its shape is wrong."""
    shape = family.spec.noise_shape
    if not shape:
        raise ValueError(f"{family.spec.family} takes no noise: its frames are not solved from any")
    if noise.shape[1:] != shape or len(noise) == 0:
        raise ValueError(
            f"noise has shape {list(noise.shape)}; [frames, {', '.join(map(str, shape))}] is needed"
        )
    return noise.to(family.device)


def speak_pass(family: Family[Any], prompt: Prompt, noise: Tensor | None, stop: Sequence[str] = ()) -> Speech:
    """Speak one pass of `generate`."""
    prompt.check_room(family.spec)
    state = family.state(1, prompt.max_frames)
    state.noise = noise
    family.admit(state, 0, prompt)
    batches = SoloBatches(family, prompt)
    for i, lane in enumerate(prompt.lanes):
        if batches.lengths[i]:
            family.hidden(lane.inputs[:-1], batches.prefill(i))
    writing, text, steps = Writing(stop), "", list[int]()
    while not (state.done[0] or writing.is_stopped):
        frames = int(state.ready[0])
        family.step(state, batches.step())
        if family.spec.opens_late and not batches.is_open and int(state.lane_at[0]) < NEVER:
            lane = family.second_lane(batches.length_at(int(state.lane_at[0])))
            family.hidden(lane.inputs, batches.open(lane))
        token = int(state.written[0])
        if token >= 0:
            text += writing.more(family.detokenize(token))
        if token >= 0 or int(state.ready[0]) > frames:
            steps.append(token)
    text += writing.more(b"", is_end=True)
    frames = int(state.ready[0])
    tape = state.tape[0, :frames].cpu()
    tokens = family.answer_tokens(tape, steps) if family.spec.keeps_answers else ()
    if frames == 0:
        return Speech(tape, torch.zeros(0), family.spec.sample_rate_hz, text, tokens=tokens)
    start, count = torch.tensor([[0], [frames]], device=family.device)
    slots, is_last = torch.tensor([0], device=family.device), torch.tensor([True], device=family.device)
    length = family.spec.window.length_bucket(frames)
    samples, valid = family.render(state, View(slots, start, count, is_last, frames, length))
    return Speech(tape, samples[0, : int(valid[0])].cpu(), family.spec.sample_rate_hz, text, tokens=tokens)


class SoloBatches:
    """The launches of one request in slot 0. Its pages lie one after the other, lane after lane."""

    def __init__(self, family: Family[Any], prompt: Prompt):
        kv, self.device = family.spec.kv, family.device
        self.prompt_lanes = prompt.lanes
        self.lengths = [len(lane.inputs) - 1 for lane in prompt.lanes]  # positions in the cache
        self.opens_late, self.begin = family.spec.opens_late, self.lengths[0]
        lanes, pages = family.spec.lanes, -(-max(prompt.max_positions) // PAGE_TOKENS)
        page_rows = 2 * kv.num_layers * PAGE_TOKENS
        self.kv = torch.zeros(
            lanes * pages * page_rows, kv.num_heads, kv.head_dim, dtype=family.dtype, device=self.device
        )
        self.page = torch.arange(PAGE_TOKENS, device=self.device)
        # [L, P]
        self.page_table = torch.arange(0, len(self.kv), page_rows, device=self.device).view(lanes, pages)
        self.late: int | None = None  # positions of a second lane that is filled, and is not run yet

    @property
    def is_open(self) -> bool:
        return self.late is not None or len(self.lengths) > 1

    def length_at(self, step: int) -> int:
        """Return how many inputs the first lane has read before a step."""
        return self.begin + step

    def open(self, lane: Lane) -> Batch:
        """Return the launch that fills a second lane. It runs once the first one is as long."""
        self.late = len(lane.inputs)
        return self._batch(range(1, 2), [range(self.late)], [self.late])

    def prefill(self, lane: int = 0) -> Batch:
        """Return the launch that reads one lane's prompt, except its last input."""
        length = self.lengths[lane]
        batch = self._batch(range(lane, lane + 1), [range(length)], [length])
        is_audio = self.prompt_lanes[lane].is_audio
        if is_audio is not None:
            batch.is_audio = is_audio[:-1]
        return batch

    def step(self) -> Batch:
        if self.late == self.lengths[0]:
            self.lengths.append(self.late)
        self.lengths = [length + 1 for length in self.lengths]
        lanes = range(len(self.lengths))
        batch = self._batch(lanes, [range(length - 1, length) for length in self.lengths], self.lengths)
        if self.opens_late:
            batch.reads = torch.tensor(lanes, device=self.device)
            batch.outputs = torch.tensor([[0], [lanes[-1]]], device=self.device)
        return batch

    def _batch(self, lanes: range, stretches: list[range], lengths: Sequence[int]) -> Batch:
        """Return a launch with one sequence per lane and inputs at the positions `stretches`."""

        def tensor(values: Iterable[int]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.int64, device=self.device)

        positions = tensor(chain(*stretches))  # [T]
        # [T], the lane of each position
        owner = tensor(
            chain(*([lane] * len(stretch) for lane, stretch in zip(lanes, stretches, strict=True)))
        )
        return Batch(
            slots=tensor([0]),
            positions=positions,
            kv_write_index=self.page_table[owner, positions // PAGE_TOKENS] + positions % PAGE_TOKENS,
            page_table=self.page_table[lanes.start : lanes.stop],
            kv_lens=tensor(lengths),
            cu_seqlens=tensor(accumulate(map(len, stretches), initial=0)),
            kv=self.kv,
            page=self.page,
            is_audio=torch.zeros(len(positions), dtype=torch.bool, device=self.device),
        )
