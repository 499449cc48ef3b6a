"""The plain loop: one request, alone, eager, no server. The truth that everything faster is tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.contract import Batch, Family, Prompt, Request, Speech, View

PAGE_TOKENS = 16


@torch.inference_mode()
def generate(family: Family, request: Request, max_frames: int | None = None, noise: Tensor | None = None) -> Speech:
    """Speak one request from its first frame to its last, then render the whole tape at once. Raises ValueError for a bad request.

    noise [F, *noise] is used in place of what the seed gives, so that another implementation can be compared; F frames are then the most.
    """
    shape = family.spec.noise_shape
    if noise is not None:
        if not shape:
            raise ValueError(f"{family.spec.family} takes no noise: its frames are not solved from any")
        if noise.shape[1:] != shape or len(noise) == 0:
            raise ValueError(f"noise has shape {list(noise.shape)}; [frames, {', '.join(map(str, shape))}] is needed")
        max_frames = min(len(noise), max_frames or len(noise))
    prompt = family.prompt(request)
    if max_frames is not None:
        prompt.max_frames = min(prompt.max_frames, max_frames)
    state = family.state(1, prompt.max_frames)
    state.noise = None if noise is None else noise.to(family.device)
    family.admit(state, 0, prompt)
    whole = SoloBatches(family, prompt)
    if whole.length:
        family.hidden(prompt.inputs[:-1], whole.prefill())
    while not state.done[0]:
        family.step(state, whole.step())
    frames = int(state.ready[0])
    if frames == 0:
        return Speech(state.tape[0, :0], torch.zeros(0), family.spec.sample_rate_hz)
    start, count = torch.zeros(1, dtype=torch.int64), torch.tensor([frames])
    view = View(torch.tensor([0], device=family.device), start.to(family.device), count.to(family.device), frames)
    samples = family.render(state, view)[0]
    return Speech(state.tape[0, :frames].cpu(), samples.cpu(), family.spec.sample_rate_hz)


class SoloBatches:
    """The launches of one request in slot 0, over pages of its own laid one after the other."""

    def __init__(self, family: Family, prompt: Prompt):
        kv, self.device = family.spec.kv, family.device
        self.length = len(prompt.inputs) - 1  # positions in the cache
        pages = -(-(self.length + 1 + prompt.max_frames + family.spec.delay) // PAGE_TOKENS)
        page_rows = 2 * kv.num_layers * PAGE_TOKENS
        self.kv = torch.zeros(pages * page_rows, kv.num_heads, kv.head_dim, dtype=family.dtype, device=self.device)
        self.rows = torch.arange(0, pages * page_rows, page_rows, device=self.device)  # [P]

    def prefill(self) -> Batch:
        return self._batch(torch.arange(self.length, device=self.device))

    def step(self) -> Batch:
        self.length += 1
        return self._batch(torch.arange(self.length - 1, self.length, device=self.device))

    def _batch(self, positions: Tensor) -> Batch:
        new = len(positions)

        def tensor(*values: int) -> Tensor:
            return torch.tensor(values, device=self.device)

        return Batch(
            slots=tensor(0),
            positions=positions,
            writes=self.rows[positions // PAGE_TOKENS] + positions % PAGE_TOKENS,
            rows=self.rows[None],
            lengths=tensor(self.length),
            starts=tensor(0, new),
            kv=self.kv,
            page_tokens=PAGE_TOKENS,
        )
