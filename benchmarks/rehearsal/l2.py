"""Estimate which bytes of a launch reach the card's memory; the others are still in its L2 cache.

This is a model, not a measurement. Its assumptions:

  - Whole tensors stay in half of the card's L2, least recently used first out. (An H100's L2 has two halves that may each hold a copy.)
  - A tensor larger than that does not stay.
  - Written data goes to memory once, when it is evicted, unless it was overwritten before.
  - The memory of a freed tensor goes to the next one of its size, as in torch's allocator.
  - Keys and values in pages never stay.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

PART = 0.5  # share of the card's L2 in which tensors stay
ASSUMED = (
    "bytes that half of the card's L2 (25 MB on an H100) does not hold, where whole tensors stay by last use; "
    "written bytes count when they are evicted."
)
Touched = Iterable[tuple[Tensor, int]]  # tensors, and the bytes of each


class L2:
    def __init__(self, size: int):
        self.size = int(size * PART)
        self.clear()

    def clear(self) -> None:
        """Forget everything, as if another program had run."""
        # of a storage: itself, its address, its bytes
        self.places: dict[int, tuple[StorageWeakRef, int, int]] = {}
        self.free: defaultdict[int, list[int]] = defaultdict(list)  # addresses by bytes
        self.held: OrderedDict[int, int] = OrderedDict()  # bytes at an address, latest use last
        self.changed: set[int] = set()  # addresses that memory does not have yet
        self.num_addresses = 0

    def launch(self, reads: Touched, writes: Touched) -> int:
        """Return the bytes that a launch reads from memory or writes to it."""
        self._forget_dead()
        moved = 0
        for tensor, num_bytes in reads:
            address = self._address(tensor)
            moved += 0 if self.held.get(address, 0) >= num_bytes else num_bytes
            moved += self._hold(address, num_bytes)
        for tensor, num_bytes in writes:
            address = self._address(tensor)
            self.changed.add(address)
            moved += self._hold(address, num_bytes)
        return moved

    def _hold(self, address: int, num_bytes: int) -> int:
        """Keep a tensor in the cache. Return the bytes that this evicts to memory."""
        self.held[address] = max(num_bytes, self.held.pop(address, 0))
        written, room = 0, sum(self.held.values())
        while room > self.size:
            oldest, size = self.held.popitem(last=False)
            room -= size
            if oldest in self.changed:
                self.changed.remove(oldest)
                written += size
        return written

    def _address(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        known = self.places.get(storage._cdata)
        if known is None:
            num_bytes = storage.nbytes()
            address = self.free[num_bytes].pop() if self.free[num_bytes] else self._new_address()
            known = self.places[storage._cdata] = StorageWeakRef(storage), address, num_bytes
        return known[1]

    def _new_address(self) -> int:
        self.num_addresses += 1
        return self.num_addresses

    def _forget_dead(self) -> None:
        for key in [key for key, (storage, *_) in self.places.items() if storage.expired()]:
            _, address, num_bytes = self.places.pop(key)
            self.free[num_bytes].append(address)
