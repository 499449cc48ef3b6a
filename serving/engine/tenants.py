"""Which slots are free, and which request a late report belongs to."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


class Tenants:
    """Which slots are free. A render in flight still reads its slot on its own stream, and the next tenant
    would write there on another stream. So a slot that is given back stays `leaving` until its renders are
    done, and so do the pages of its past. `generation` grows when a slot changes hands, so that late reports
    find their own request."""

    def __init__(self, num_slots: int):
        self.free = list(range(num_slots - 1, -1, -1))
        self.leaving: dict[int, Callable[[], None]] = {}  # and what gives its past back
        self.generation = np.zeros(num_slots, np.int64)
        self.num_rendering = np.zeros(num_slots, np.int64)  # windows under way

    def renew(self, slot: int) -> None:
        """Begin the slot's next pass. Reports of earlier launches no longer find a tenant."""
        self.generation[slot] += 1

    def leave(self, slot: int, give_back: Callable[[], None]) -> None:
        self.renew(slot)
        self.leaving[slot] = give_back
        self.free_up()

    def free_up(self) -> None:
        free = [slot for slot in self.leaving if not self.num_rendering[slot]]
        self.free.extend(free)
        for slot in free:
            self.leaving.pop(slot)()

    def stayed(self, slots: np.ndarray, generation: np.ndarray) -> np.ndarray:
        """Return which slots still have the tenant of that generation. [B]"""
        return self.generation[slots] == generation
