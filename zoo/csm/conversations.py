"""The conversations so far. The next prompt of one begins with its segments, and nothing is encoded again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor

MOST = 32  # conversations; at published size each holds up to 8 MB


@dataclass(frozen=True, eq=False)
class Context:
    """The beginning of a conversation's next prompt."""

    inputs: Tensor  # [T, D]
    keys: tuple[int, ...]


class Conversations:
    """The conversations that spoke last, by name. May be called from several threads."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, Context] = OrderedDict()
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: object) -> Conversations:
        """Return an empty store, for a copy of a family."""
        return Conversations()

    def get(self, name: str | None) -> Context | None:
        if name is None:
            return None
        with self._lock:
            return self._held.get(name)

    def put(self, name: str, context: Context) -> None:
        with self._lock:
            self._held[name] = context
            self._held.move_to_end(name)
            if len(self._held) > MOST:
                self._held.popitem(last=False)
