"""The plain loop: one request, alone, eager, no server. The truth that everything faster is tested against."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, chain

import torch
from torch import Tensor

from zoo.contract import Batch, Family, Prompt, Request, Speech, View
from zoo.nn import kernels

PAGE_TOKENS = 16


@kernels.plain()
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
    for i, lane in enumerate(prompt.lanes):
        if whole.lengths[i]:
            family.hidden(lane.inputs[:-1], whole.prefill(i))
    written = bytearray()
    while not state.done[0]:
        family.step(state, whole.step())
        if (token := int(state.written[0])) >= 0:
            written += family.spell(token)
    frames, text = int(state.ready[0]), written.decode(errors="replace")
    if frames == 0:
        return Speech(state.tape[0, :0], torch.zeros(0), family.spec.sample_rate_hz, text)
    start, count = torch.zeros(1, dtype=torch.int64), torch.tensor([frames])
    view = View(torch.tensor([0], device=family.device), start.to(family.device), count.to(family.device), frames)
    samples = family.render(state, view)[0]
    return Speech(state.tape[0, :frames].cpu(), samples.cpu(), family.spec.sample_rate_hz, text)


class SoloBatches:
    """The launches of one request in slot 0, over pages of its own laid one after the other, lane after lane."""

    def __init__(self, family: Family, prompt: Prompt):
        kv, self.device = family.spec.kv, family.device
        self.lengths = [len(lane.inputs) - 1 for lane in prompt.lanes]  # positions in the cache
        lanes, pages = len(self.lengths), -(-max(prompt.most_positions(family.spec)) // PAGE_TOKENS)
        page_rows = 2 * kv.num_layers * PAGE_TOKENS
        self.kv = torch.zeros(lanes * pages * page_rows, kv.num_heads, kv.head_dim, dtype=family.dtype, device=self.device)
        self.rows = torch.arange(0, len(self.kv), page_rows, device=self.device).view(lanes, pages)  # [L, P]

    def prefill(self, lane: int = 0) -> Batch:
        """Of one lane's prompt but for its last input."""
        return self._batch(range(lane, lane + 1), [range(self.lengths[lane])])

    def step(self) -> Batch:
        self.lengths = [length + 1 for length in self.lengths]
        return self._batch(range(len(self.lengths)), [range(length - 1, length) for length in self.lengths])

    def _batch(self, lanes: range, stretches: list[range]) -> Batch:
        """One sequence a lane, with inputs at these positions."""

        def tensor(values: Iterable[int]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.int64, device=self.device)

        positions = tensor(chain(*stretches))  # [T]
        owner = tensor(chain(*([lane] * len(stretch) for lane, stretch in zip(lanes, stretches, strict=True))))  # [T]
        return Batch(
            slots=tensor([0]),
            positions=positions,
            writes=self.rows[owner, positions // PAGE_TOKENS] + positions % PAGE_TOKENS,
            rows=self.rows[lanes.start : lanes.stop],
            lengths=tensor(self.lengths[lane] for lane in lanes),
            starts=tensor(accumulate(map(len, stretches), initial=0)),
            kv=self.kv,
            page_tokens=PAGE_TOKENS,
        )
