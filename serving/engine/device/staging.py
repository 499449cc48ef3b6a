"""The inputs of launches: the host's numbers, padded to the launch's size, on their way to the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from serving.engine.device.page_table import INT, PageTable, for_flashinfer
from serving.engine.device.streams import LaunchInputs
from zoo.contract import Batch, Family

# Samples of a render on a CPU: in larger launches a decoder's layers do not find each other's outputs in the
# cache.
CACHED_SAMPLES = 150_000
# Rows of a reproducible render on a GPU: a lone row costs as much as so many, and many share launches.
REPRODUCIBLE_ROWS = 8
WARM_SLOTS = 2  # of a launch that stands for all sizes while graphs are built
# Of recorded launches; a shorter one is padded up to one.
PREFILL_TOKENS = (16, 64, 128, 256, 1024)
MIN_MIXED_TOKENS = 64  # positions of prompts in a mixed launch; fewer are padded up, as weights take the time

Arrive = Callable[[], dict[str, Tensor]]


def recorded_rows(family: Family, frames: int, slots: int) -> int:
    """Return how many windows of `frames` frames a GPU renders in one launch at most."""
    return max(1, min(slots, family.strategy.render_samples // (frames * family.spec.frame_samples)))


class Sizes:
    """The sizes of launches. is_recorded: on a GPU a launch has one of a few sizes; on a CPU one graph serves
    all. is_reproducible: all launches have one size. prefill_tokens: of one launch at most."""

    def __init__(
        self,
        family: Family,
        num_slots: int,
        is_recorded: bool,
        is_reproducible: bool,
        prefill_tokens: int,
    ):
        self.family = family
        self.num_slots = num_slots
        self.is_recorded = is_recorded
        self.is_reproducible = is_reproducible
        self.buckets = up_to(num_slots, family.strategy.batches)
        self.render_batches = family.strategy.render_batches
        self.prefill_tokens = [n for n in PREFILL_TOKENS if n < prefill_tokens] + [prefill_tokens]
        # Every second size of a step, and the largest: a start records each with each number of positions.
        self.mixed_buckets = self.buckets[::-2][::-1]
        self.mixed_tokens = [n for n in self.prefill_tokens if n >= MIN_MIXED_TOKENS] or [prefill_tokens]

    @property
    def has_mixed(self) -> bool:
        """Whether a step can read prompts in the same launch. Each size of a launch rounds in its own way, so
        reproducible steps do not."""
        return self.is_recorded and not self.is_reproducible

    def step_rows(self, count: int) -> int:
        if self.is_reproducible:
            return self.num_slots
        return next(n for n in self.buckets if n >= count) if self.is_recorded else count

    def mixed(self, count: int, num_tokens: int) -> tuple[int, int]:
        """Return the slots and the positions of prompts of the mixed launch for so many."""
        rows = next(n for n in self.mixed_buckets if n >= count)
        return rows, next(n for n in self.mixed_tokens if n >= num_tokens)

    def open_rows(self, rows: int) -> list[int]:
        """Return the possible numbers of open second lanes in a step of `rows` slots."""
        if self.is_reproducible:
            return [rows]
        return [0, *(n for n in self.buckets if n <= rows)] if self.is_recorded else list(range(rows + 1))

    def render_buckets(self, frames: int) -> list[int]:
        """Return the sizes of recorded renders of windows of `frames` frames."""
        most = recorded_rows(self.family, frames, self.num_slots)
        return [most] if self.is_reproducible else up_to(most, self.render_batches)

    def reproducible_rows(self, frames: int) -> int:
        """Return the one size of launches whose rows are reproducible. On a GPU, rows of launches of one size
        do not depend on each other; on a CPU they do, so each has its own launch."""
        if not self.is_recorded:
            return 1
        sizes = self.render_buckets(frames)
        return next((n for n in sizes if n >= REPRODUCIBLE_ROWS), sizes[-1])

    def rows_of_launch(self, frames: int) -> int:
        """Return how many windows of `frames` frames are rendered in one launch at most."""
        if self.is_recorded:
            return recorded_rows(self.family, frames, self.num_slots)
        if self.family.strategy.cuts_renders:
            return self.num_slots
        return max(1, min(self.num_slots, CACHED_SAMPLES // (frames * self.family.spec.frame_samples)))


class Staging:
    """Places that launches read. On a GPU they never move, so a recorded launch reads new numbers there; a
    launch whose size is not recorded does not use `inputs` and `is_audio`."""

    def __init__(
        self,
        family: Family,
        table: PageTable,
        sizes: Sizes,
        kv: Tensor,
        past: np.ndarray | None,
        attention: str,
    ):
        """past [S + 1, P]: the pages of each slot's past, as of `View.pages`; None without any. attention: as
        of `flashinfer_attention.kind`."""
        self.table = table
        self.attention = attention
        self.past = past
        self.sizes = sizes
        self.kv = kv
        device = family.device
        self.page = torch.arange(table.page_tokens, device=device)
        prefill_tokens = sizes.prefill_tokens[-1]
        room = prefill_tokens * sizes.is_recorded
        self.inputs = torch.zeros(room, family.spec.width, dtype=family.dtype, device=device)
        self.is_audio = torch.zeros(room, dtype=torch.bool, device=device)
        num_rows = table.num_sequences + WARM_SLOTS * len(table.lanes)
        self.no_audio = torch.zeros(num_rows, dtype=torch.bool, device=device)
        numbers = table.num_sequences * (4 + table.max_pages) + sizes.num_slots + 1
        numbers += 2 * table.num_sequences
        self.step_inputs = LaunchInputs(device, numbers + table.num_sequences * (1 + table.max_pages), 10)
        self.prefill_inputs = LaunchInputs(device, numbers + 2 * prefill_tokens, 6)
        # twice the sequences, and one; the inputs of a step and of prompts
        numbers = (2 * table.num_sequences + 1) * (2 + table.max_pages) + 1
        numbers += 4 * (table.num_sequences + prefill_tokens) + sizes.num_slots + table.num_sequences
        self.mixed_inputs = LaunchInputs(device, numbers, 9)
        width = 0 if past is None else past.shape[1]
        self.render_inputs = LaunchInputs(device, (4 + width) * sizes.num_slots, 5)

    @property
    def width(self) -> int | None:
        """The number of columns of a launch's page table. A recorded launch gets all."""
        return self.table.max_pages if self.sizes.is_recorded else None

    def step(self, slots: np.ndarray, opened: np.ndarray | None = None) -> Arrive:
        """slots [B], padded. opened [G], padded: where second lanes open late, the places in `slots` of those
        that are open, -1 for padding."""
        sequences, reads, outputs = self._stepping(slots, opened)
        more: dict[str, np.ndarray] = {"slots": slots}
        if opened is not None:
            more |= {"reads": reads, "outputs": outputs}
        positions = self.table.kv_lens[sequences] - 1
        starts = np.arange(len(sequences) + 1, dtype=INT)
        fields = self.table.fields(sequences, sequences, positions, starts, self.width)
        if self.attention != "triton":
            fields |= for_flashinfer(fields)
        return self.step_inputs.stage(more | fields)

    def _stepping(
        self, slots: np.ndarray, opened: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the sequences of a step [N], the row of `embed`'s output that each reads [N], and the place
        of each slot's lanes among them [L, B]."""
        if opened is None:
            sequences = self.table.sequences(slots)
            each = np.arange(len(sequences), dtype=INT)
            return sequences, each, each.reshape(-1, len(slots))
        each, is_open = np.arange(len(slots), dtype=INT), opened >= 0
        second = each.copy()
        second[opened[is_open]] = len(slots) + np.flatnonzero(is_open)
        reads = np.concatenate((each, len(slots) + opened.clip(min=0)))
        rows = np.where(is_open, slots[opened], self.sizes.num_slots)
        return np.concatenate((slots, self.table.num_rows + rows)), reads, np.stack((each, second))

    def mixed(
        self,
        slots: np.ndarray,
        opened: np.ndarray | None,
        filled: np.ndarray,
        counts: np.ndarray,
        num_tokens: int,
    ) -> Arrive:
        """A step of slots [B] that also fills prompts, which are in `inputs`: the last counts [C] positions
        of the sequences filled [C], in front of the step's own. slots, opened, num_tokens: padded."""
        sequences, reads, outputs = self._stepping(slots, opened)
        num_steps = len(sequences)
        at = np.full(len(self.table.rows), -1, INT)
        at[sequences] = np.arange(num_steps)
        at = at[filled]  # [C], the place of each among the step's sequences
        takes_none = at < 0
        at[takes_none] = num_steps + np.arange(takes_none.sum())
        sequences = np.concatenate((sequences, filled[takes_none]))
        lengths = np.ones(len(sequences), INT)
        lengths[num_steps:] = 0
        lengths[at] += counts
        starts = np.concatenate(([0], np.cumsum(lengths)))
        owner, row = np.repeat(sequences, lengths), np.arange(starts[-1], dtype=INT)
        positions = self.table.kv_lens[owner] - np.repeat(starts[1:], lengths) + row
        first = np.zeros(len(sequences), INT)
        first[at] = np.cumsum(counts) - counts
        prompt_rows = np.repeat(first - starts[:-1], lengths) + row
        steps = starts[1 : num_steps + 1] - 1
        prompt_rows[steps] = -1
        read = np.zeros(len(row), INT)
        read[steps] = reads
        fields = self.table.fields(sequences, owner, positions, starts, self.width)
        num_rows = num_steps + num_tokens
        fields |= {"reads": padded(read, num_rows, 0), "prompt_rows": padded(prompt_rows, num_rows, -1)}
        # One more than there can be. A compiler takes sizes that are equal in its example for one size.
        num_sequences = num_steps + min(num_tokens, self.table.num_sequences) + 1
        self._pad(fields, num_rows, num_sequences)
        return self.mixed_inputs.stage({"slots": slots, "outputs": steps[outputs]} | fields)

    def _pad(self, fields: dict[str, np.ndarray], num_tokens: int, num_sequences: int) -> None:
        """Add inputs that belong to no sequence and write to the scratch page, and empty sequences."""
        scratch, starts = self.table.scratch, fields["cu_seqlens"]
        fields["positions"] = padded(fields["positions"], num_tokens, 0)
        fields["kv_write_index"] = padded(fields["kv_write_index"], num_tokens, scratch)
        fields["page_table"] = padded(fields["page_table"], num_sequences, scratch)
        fields["kv_lens"] = padded(fields["kv_lens"], num_sequences, 0)
        fields["cu_seqlens"] = padded(starts, num_sequences + 1, starts[-1])

    def prefill(
        self, sequences: np.ndarray, owner: np.ndarray, positions: np.ndarray, starts: np.ndarray
    ) -> tuple[Arrive, int]:
        """Return the inputs, and how many tokens the launch has. A recorded launch has more than were given,
        which belong to no sequence and write to the scratch page.

        sequences [N]; owner [T], a sequence, and positions [T] say whose position each input is; starts [N +
        1].
        """
        fields = self.table.fields(sequences, owner, positions, starts, self.width)
        num_tokens = len(positions)
        if self.sizes.is_recorded:
            num_tokens = next(n for n in self.sizes.prefill_tokens if n >= num_tokens)
            self._pad(fields, num_tokens, self.table.num_sequences)
        return self.prefill_inputs.stage({"slots": np.zeros(1, INT)} | fields), num_tokens

    def render(
        self,
        slots: np.ndarray,
        start: np.ndarray,
        count: np.ndarray,
        is_last: np.ndarray,
        frames: int,
        size: int | None = None,
    ) -> Arrive:
        """All [B]; padded where launches are recorded. frames: of the window. size: of the launch; None: the
        smallest that is recorded."""
        fields = {"slots": slots, "start": start, "count": count, "is_last": is_last}
        if self.sizes.is_recorded:
            if size is None:
                size = next(n for n in self.sizes.render_buckets(frames) if n >= len(slots))
            spare = self.sizes.num_slots
            for name, value in fields.items():
                fields[name] = padded(value, size, spare if name == "slots" else 0)
        if self.past is not None:
            fields["pages"] = self.past[fields["slots"]]
        return self.render_inputs.stage(fields)

    def batch(self, fields: dict[str, Tensor], is_audio: Tensor | None = None) -> Batch:
        """is_audio [T], of a prefill. A step computes its own, and a mixed launch reads that of its
        prompts."""
        prompts = None
        if "prompt_rows" in fields:
            prompts, is_audio = self.inputs, self.is_audio
        elif is_audio is None:
            is_audio = self.no_audio[: len(fields["positions"])]
        return Batch(
            **fields, kv=self.kv, page=self.page, is_audio=is_audio, attention=self.attention, prompts=prompts
        )

    def gather(self, parts: Sequence[Tensor], place: Tensor, num_rows: int) -> Tensor:
        """Return the parts one behind the other; where launches are recorded, at the beginning of `place`."""
        if not self.sizes.is_recorded:
            return torch.cat(list(parts))
        num = sum(map(len, parts))
        torch.cat(list(parts), out=place[:num])
        return place[:num_rows]


def up_to(most: int, sizes: Sequence[int]) -> list[int]:
    return [n for n in sizes if n < most] + [most]


def padded(values: np.ndarray, length: int, filler: int) -> np.ndarray:
    """Return the values with rows of `filler` up to `length`."""
    whole = np.full((length, *values.shape[1:]), filler, values.dtype)
    whole[: len(values)] = values
    return whole
