"""What of a launch's bytes reaches a card's memory: the others are still in its second-level cache from the launch
before. A model of whole tensors, never a measurement.

The assumptions: tensors stay by when they were last touched, whole ones, in half of the card's L2 (an H100's has two
halves, each of which may hold a copy); a tensor larger than that does not stay; what is written goes to memory when it
leaves, once, unless it was overwritten before; memory of a tensor that is gone is given to the next of its size, as
torch's allocator gives it; keys and values in pages never stay.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

PART = 0.5  # of the card's L2 in which tensors stay
ASSUMED = (
    "what is not in half of the card's L2 (25 MB of an H100's), where whole tensors stay by when they were last touched; "
    "what is written counts when it leaves."
)
Touched = Iterable[tuple[Tensor, int]]  # tensors, and how many bytes of each


class L2:
    def __init__(self, size: int):
        self.size = int(size * PART)
        self.clear()

    def clear(self) -> None:
        """As if something else had run."""
        self.places: dict[
            int, tuple[StorageWeakRef, int, int]
        ] = {}  # of a storage: itself, its address, its bytes
        self.free: defaultdict[int, list[int]] = defaultdict(list)  # addresses by bytes
        self.held: OrderedDict[int, int] = OrderedDict()  # bytes at an address, the latest last
        self.changed: set[int] = set()  # addresses whose memory is behind
        self.num_addresses = 0

    def launch(self, reads: Touched, writes: Touched) -> int:
        """-> bytes that go to memory or come from it."""
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
        """-> bytes that are written to memory for it."""
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
