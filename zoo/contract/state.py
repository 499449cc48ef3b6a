"""The tensors that a launch reads and writes: the rows of all slots, and the addresses of one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.contract.prompt import Prompt
from zoo.contract.spec import Spec
from zoo.nn.rows import beginning, copy_rows


@dataclass
class Batch:
    """The addresses that a launch reads and writes. Shapes are fixed; the tensors live on the device, and the
    host fills them.

    A step has one sequence for each lane of each slot, in blocks of B: all first lanes, then all second ones.
    A prefill has N sequences of any slots and lanes. A mixed launch has the sequences of a step and then those of
    a prefill; a slot's last positions of a prompt and its first step are one sequence. The sequences are packed:
    sequence n owns positions cu_seqlens[n]:cu_seqlens[n+1]. `page_table` counts rows of `kv`: layer 0's keys of a page begin at its row
    in the table, its values `page_tokens` rows later, and each further layer 2 * page_tokens rows later.
    """

    slots: Tensor  # [B], the slots of a step (unused in a prefill)
    positions: Tensor  # [T], each input's position in its sequence; in a step, T is L * B
    kv_write_index: Tensor  # [T], the row of kv that receives layer 0's key of each input
    page_table: Tensor  # [N, P], the row of kv where each page begins; in a step, N is L * B
    kv_lens: Tensor  # [N], positions in the KV cache, including those of this launch
    cu_seqlens: Tensor  # [N + 1]
    kv: Tensor  # [rows, H, D], the family's view of the byte arena
    page: Tensor  # [page_tokens], the positions within a page; its shape tells a graph the page size
    # [T] bool, whether each input is a row of audio. `Family.step` replaces it: true for all but a prompt's
    # last input, which may be text. In a mixed launch it belongs to `prompts`, as [P].
    is_audio: Tensor
    # For a mixed launch, and for a step whose second lanes open late: it has B first lanes and then the open
    # second ones. They are indices, since generated kernels cannot add the sizes of slots and open lanes.
    reads: Tensor | None = None  # [T], the row of `embed`'s output [L * B, D] that each input is
    outputs: Tensor | None = (
        None  # [L, B], the input of each slot's lanes; that of a closed lane is the first one's
    )
    # For a mixed launch
    prompts: Tensor | None = None  # [P, D], positions of prompts
    prompt_rows: Tensor | None = None  # [T], the row of `prompts` that each input is, or -1
    # page_table and kv_lens in int32, for a step that FlashInfer may compute; otherwise None.
    block_tables: Tensor | None = None  # [N, P]
    seq_lens: Tensor | None = None  # [N]
    attention: str = (
        "auto"  # "flashinfer" where it computes every step that has block_tables, "auto" the faster
    )

    @property
    def page_tokens(self) -> int:
        return self.page.shape[0]


@dataclass
class View:
    """The stretches of tape to render, one per slot: frames start .. start + count, padded to `frames`."""

    slots: Tensor  # [B]
    start: Tensor  # [B]
    count: Tensor  # [B], at most `frames`; 0 if only held samples are left
    is_last: Tensor  # [B] bool, whether the speech ends with this stretch
    frames: int  # the launch's shape, one of `Window.sizes`
    length: int = 0  # one of `Window.lengths`, at least start + count; 0 if the decoder reads no growing past
    # [B, P], pages of `State.arena` that hold each slot's past, chunk after chunk, and at last one for
    # padding; None if the state's own rows hold it
    pages: Tensor | None = None


SMALL_ROW = 64  # values; a longer row is filled on the device
NEVER = 1 << 40  # a step that no speech reaches
LANE_LEAD = 3  # steps from the one that opens a second lane to the first one that it takes


class State:
    """The tensors of all slots: one row per slot, and a spare last row that padding reads and writes.
    Families add tensors with `add`.

    tape [S+1, F, *frame]: the frames.
    ready [S+1], limit [S+1]: the number of frames on the tape, and the most that it may get.
    steps [S+1], done [S+1], seed [S+1]: the number of steps made, whether the slot has ended, and its seed.
    first [S+1, L, D], first_is_audio [S+1, L]: the last input of each lane's prompt, which the first step
    reads, and whether it is audio.
    written [S+1]: the text token of the last step, or -1.
    finite [S+1]: whether all values that were checked were finite (`check`).
    lane_at [S+1]: the step from which the second lane runs, NEVER if it stays closed; only with spec.opens_late.
    noise [F, *noise]: replaces the noise that each step draws, in every slot, unless it is None. See
    `zoo.generate`.
    arena [pages, values]: pages that hold the renderer's past; None if the state's own rows hold it.
    """

    seed: Tensor
    limit: Tensor
    lane_at: Tensor

    def __init__(self, spec: Spec, slots: int, max_frames: int, dtype: torch.dtype, device: torch.device):
        rows = slots + 1
        self.device = device
        self._defaults: dict[str, float] = {}
        self.tape = torch.zeros(rows, max_frames, *spec.frame_shape, dtype=spec.frame_dtype, device=device)
        self.ready = torch.zeros(rows, dtype=torch.int64, device=device)
        self.steps = torch.zeros(rows, dtype=torch.int64, device=device)
        self.done = torch.ones(rows, dtype=torch.bool, device=device)
        lanes = 1 if spec.opens_late else spec.lanes
        self.first = torch.zeros(rows, lanes, spec.width, dtype=dtype, device=device)
        self.first_is_audio = torch.zeros(rows, lanes, dtype=torch.bool, device=device)
        self.written = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self.finite = torch.ones(rows, dtype=torch.bool, device=device)
        self.noise: Tensor | None = None
        self.arena: Tensor | None = None
        self.add("limit", dtype=torch.int64)
        self.add("seed", dtype=torch.int64)
        if spec.opens_late:
            self.add("lane_at", dtype=torch.int64, default=NEVER)

    @property
    def spare(self) -> int:
        """The last row. As an attribute it would limit a graph to one number of slots."""
        return len(self.ready) - 1

    def add(self, name: str, *shape: int, dtype: torch.dtype = torch.float32, default: float = 0) -> None:
        """Add a tensor [S+1, *shape] under `name`. `open` sets a slot's row to the prompt's value or
        `default`."""
        setattr(self, name, torch.full((len(self.ready), *shape), default, dtype=dtype, device=self.device))
        self._defaults[name] = default

    def open(self, slot: int, prompt: Prompt) -> None:
        """Reset a slot's row for a new request. A value shorter than its row fills the beginning of the row.
        Values on the host go to the device in one copy, without synchronizing."""
        lanes, expected = prompt.lanes, self.first.shape[1]
        assert len(lanes) == expected, f"a prompt of {len(lanes)} lanes for a model of {expected}"
        unknown = prompt.slot.keys() - self._defaults.keys()
        assert not unknown, f"the prompt sets {sorted(unknown)}; the state has {sorted(self._defaults)}"
        self.tape[slot].zero_()
        self.first[slot] = torch.stack([lane.inputs[-1] for lane in lanes])
        self.first_is_audio[slot] = torch.stack([lane.audio_mask[-1] for lane in lanes])
        always = {"ready": 0, "steps": 0, "done": False, "written": -1, "finite": True}
        always["limit"] = prompt.max_frames
        values: dict[str, Any] = {**self._defaults, **always, **prompt.slot}
        rows = {name: getattr(self, name)[slot : slot + 1] for name in values}  # [1, *shape]
        known = {}  # the rows whose values are on the host
        for name, value in values.items():
            row, default = rows[name], self._defaults.get(name, 0)
            if isinstance(value, Tensor) and value.device.type != "cpu":
                row.fill_(default)
                (row if value.dim() == 0 else row[0, : len(value)]).copy_(value)
            elif not isinstance(value, Tensor) and row.numel() > SMALL_ROW:
                row.fill_(value)
            else:
                known[name] = beginning(row, torch.as_tensor(value), default)
        copy_rows([rows[name] for name in known], list(known.values()))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that have a row for each slot, by name."""
        return {
            name: value
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and name not in ("noise", "arena")
        }

    def take_row(self, slot: int, source: State) -> None:
        """Copy slot 0 of `source`, a state of the same family, to `slot`."""
        for name, value in source.tensors().items():
            getattr(self, name)[slot] = value[0]

    def last_frame(self, slots: Tensor) -> Tensor:
        """Return the latest frame of each tape [B, *frame]; undefined if a tape is empty."""
        return self.tape[slots, (self.ready[slots] - 1).clamp(min=0)]

    def window(self, view: View, left: int = 0, lookahead: int = 0) -> Tensor:
        """Return the tape around each stretch [B, left + F + lookahead, *frame]. Frames beyond an end of the
        tape repeat that end."""
        frames = torch.arange(-left, view.frames + lookahead, device=view.start.device)
        at = (view.start[:, None] + frames).clamp(min=0, max=self.tape.shape[1] - 1)  # [B, F]
        return self.tape[view.slots[:, None], at]

    def write(self, slots: Tensor, token: Tensor) -> None:
        """Set the text token of this step [B], -1 for none. Slots that are done are left unchanged, so call
        this before `append` ends one."""
        self.written[slots] = torch.where(self.done[slots], self.written[slots], token)

    def open_lane(self, slots: Tensor, opens: Tensor) -> None:
        """Let the second lanes of the slots that `opens` [B] names run from the third step behind this one on.
        The host reads of it while the steps between are on their way."""
        self.lane_at[slots] = torch.where(opens, self.steps[slots] + LANE_LEAD, self.lane_at[slots])

    def check(self, slots: Tensor, values: Tensor) -> None:
        """Record whether values [B, ...] of the slots are finite. A slot that had others stays marked."""
        self.finite[slots] = self.finite[slots] & values.flatten(1).isfinite().all(1)

    def append(self, slots: Tensor, frame: Tensor, ended: Tensor, is_spoken: Tensor | None = None) -> None:
        """Append a frame [B, *frame] to each tape, unless the model `ended` [B] there or `is_spoken` [B] is
        false. Slots that are done are left unchanged."""
        alive, ready = ~self.done[slots], self.ready[slots]
        spoken = alive & ~ended if is_spoken is None else alive & ~ended & is_spoken
        at = ready.clamp(max=self.tape.shape[1] - 1)
        fits = spoken.view(-1, *(1,) * (frame.dim() - 1))
        self.tape[slots, at] = torch.where(fits, frame, self.tape[slots, at])
        self.ready[slots] = ready + spoken
        self.steps[slots] = self.steps[slots] + alive
        self.done[slots] = ~alive | ended | (ready + spoken >= self.limit[slots])
