"""Which pages each sequence has, and how many positions: numbers of the host, so launches never wait for the
device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zoo.contract import NEVER

INT = np.int64


class PageTable:
    """Each lane of a slot is one sequence with its own pages; all lanes take every step together. The
    first lanes of all slots and of the spare one come first, then the second lanes. page_rows: rows of the
    arena that a page takes; scratch: the row of the family's scratch page, which stands where a sequence has
    no page."""

    def __init__(
        self,
        num_slots: int,
        lanes: int,
        page_tokens: int,
        page_rows: int,
        max_positions: int,
        scratch: int,
    ):
        self.num_rows = num_slots + 1  # the spare slot is the last
        self.lanes = np.arange(lanes, dtype=INT)[:, None]
        self.page_tokens = page_tokens
        self.page_rows = page_rows
        self.max_pages = -(-max_positions // page_tokens)
        self.scratch = scratch
        self.rows = np.full((lanes * self.num_rows, self.max_pages), scratch, INT)
        self.kv_lens = np.zeros(lanes * self.num_rows, INT)
        self.spares = self.sequences(np.array([num_slots], INT))
        self.opens_at = np.full(
            self.num_rows, NEVER, INT
        )  # positions of the first lane at which the second joins

    @property
    def num_sequences(self) -> int:
        """Sequences of all slots but the spare one."""
        return len(self.lanes) * (self.num_rows - 1)

    def sequences(self, slots: np.ndarray) -> np.ndarray:
        """Return all lanes of slots [B] as sequences [L * B], in blocks of B."""
        return (slots + self.lanes * self.num_rows).ravel()

    def sequence(self, slot: int, lane: int) -> int:
        return slot + lane * self.num_rows

    def opened(self, slots: np.ndarray) -> np.ndarray:
        """Return the places in slots [B] of those whose second lanes take the next step, too. [G]"""
        found = np.flatnonzero(self.kv_lens[slots] >= self.opens_at[slots])
        first, second = (self.kv_lens[slots[found] + lane * self.num_rows] for lane in (0, 1))
        assert (first == second).all(), f"second lanes of {second} positions join first ones of {first}"
        return found

    def running(self, slots: np.ndarray, opened: np.ndarray) -> np.ndarray:
        """Return the first lanes of slots [B], then the open second ones, as sequences [B + G]."""
        return np.concatenate((slots, self.num_rows + slots[opened]))

    def set_pages(self, sequence: int, pages: Sequence[int]) -> None:
        self.rows[sequence] = self.scratch
        self.rows[sequence, : len(pages)] = np.asarray(pages, INT) * self.page_rows

    def fields(
        self,
        sequences: np.ndarray,
        owner: np.ndarray,
        positions: np.ndarray,
        starts: np.ndarray,
        width: int | None,
    ) -> dict[str, np.ndarray]:
        """Return the fields of a Batch over these sequences.

        owner [T]: the sequence of each input. width: columns of the page table. Without a width, the number
        of needed columns is rounded up to a power of two, so that launches share shapes."""
        if width is None:
            num_pages = int(-(-self.kv_lens[sequences].max() // self.page_tokens))
            width = min(1 << (num_pages - 1).bit_length(), self.max_pages)
        page = self.rows[owner, positions // self.page_tokens]
        return {
            "positions": positions,
            "kv_write_index": page + positions % self.page_tokens,
            "page_table": self.rows[sequences, :width],
            "kv_lens": self.kv_lens[sequences],
            "cu_seqlens": starts,
        }


def for_flashinfer(fields: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the page table and lengths of a step under FlashInfer's names, in int32."""
    return {
        "block_tables": fields["page_table"].astype(np.int32),
        "seq_lens": fields["kv_lens"].astype(np.int32),
    }
