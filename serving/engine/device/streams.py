"""A device's streams of work, and the copies that come back.

    lm        prompts into pages, steps; the report of a step
    renders   windows to samples, next to the steps
    prompts   requests to prompts, next to both

Work on one stream is done in the order it is given in. Work on two streams is ordered by the host, which
reads the first result before it launches the second, or by an event.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

POLL_S = 0.0005  # between looks at the device, which cannot wake a thread at a time
Observer = Callable[[str, int, float], None]  # "prefill", "step", "render" or "wait"; its rows; its seconds


class AsyncCopy:
    """Values on their way from the device. `read` returns them, and waits only if the device is not done."""

    def __init__(self, values: Sequence[Tensor], observer: Observer | None = None):
        self._event: torch.cuda.Event | None = None
        self._host, self._observer = tuple(values), observer
        if values and values[0].device.type == "cuda":
            self._host = tuple(
                torch.empty(value.shape, dtype=value.dtype, pin_memory=True) for value in values
            )
            for host, value in zip(self._host, values, strict=True):
                host.copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_there(self) -> bool:
        """Whether `read` would not wait."""
        return self._event is None or self._event.query()

    def wait(self, max_s: float) -> None:
        """Wait until the values are there, but not longer than `max_s`."""
        end_s = time.perf_counter() + max_s
        while not self.is_there and (left_s := end_s - time.perf_counter()) > 0:
            time.sleep(min(left_s, POLL_S))

    def read(self) -> tuple[np.ndarray, ...]:
        return tuple(value.numpy() for value in self.tensors())

    def tensors(self) -> tuple[Tensor, ...]:
        if self._event is not None:
            began_s = time.perf_counter()
            self._event.synchronize()
            if self._observer is not None:
                self._observer("wait", len(self._host[0]), time.perf_counter() - began_s)
        return self._host


class Stream:
    """On a CPU, work is done when `run` returns. is_urgent: its work goes before work that other streams
    have not begun. pool: the memory of all launches that are recorded on it, of any model, since they never
    run at the same time.
    """

    def __init__(self, device: torch.device, is_urgent: bool = False):
        is_gpu = device.type == "cuda"
        self.cuda = torch.cuda.Stream(device, priority=-1 if is_urgent else 0) if is_gpu else None
        self.pool = torch.cuda.graph_pool_handle() if is_gpu else None

    def here(self) -> AbstractContextManager[object]:
        """Return a context in which launches go to this stream."""
        return nullcontext() if self.cuda is None else torch.cuda.stream(self.cuda)

    def run(self, work: Callable[[], Sequence[Tensor]], observer: Observer | None = None) -> AsyncCopy:
        """Run `work`, which launches and returns the tensors that the host wants."""
        with self.here(), torch.inference_mode():
            return AsyncCopy(work(), observer)

    def mark(self) -> torch.cuda.Event | None:
        """Return an event behind all launches so far."""
        if self.cuda is None:
            return None
        event = torch.cuda.Event()
        event.record(self.cuda)
        return event

    def finish(self) -> None:
        """Wait, without using a processor, until all launches so far are done."""
        if self.cuda is not None:
            event = torch.cuda.Event(blocking=True)
            event.record(self.cuda)
            event.synchronize()

    def wait_for(self, event: torch.cuda.Event | None) -> None:
        """Order all later launches after the event. The host does not wait."""
        if self.cuda is not None and event is not None:
            self.cuda.wait_event(event)

    def borrow(self, tensor: Tensor) -> None:
        """Keep a tensor of another stream in memory until the launches here have read it."""
        if self.cuda is not None and tensor.is_cuda:
            tensor.record_stream(self.cuda)


class Streams:
    def __init__(self, device: torch.device):
        # A render has thousands of blocks that wait for a place: behind them, the many small launches of a
        # step would each wait too.
        self.lm, self.renders, self.prompts = Stream(device, is_urgent=True), Stream(device), Stream(device)


class LaunchInputs:
    """The numbers of a launch. On a GPU they arrive in one copy at a fixed place, so a recorded launch
    reads the new ones.

    capacity: values of the largest launch, on a GPU. num_fields: of a launch, at most.
    """

    def __init__(self, device: torch.device, capacity: int, num_fields: int):
        self.device = device
        room = (capacity + num_fields * (ALIGNED - 1)) if device.type == "cuda" else 0
        self.place = torch.zeros(room, dtype=torch.int64, device=device)
        self.parts: dict[tuple[tuple[int, ...], ...], dict[str, Tensor]] = {}  # by shapes, which are few

    def stage(self, fields: dict[str, np.ndarray]) -> Callable[[], dict[str, Tensor]]:
        """Taken from the host now -> the work that gives them on the device, of equal shapes at equal
        places."""
        if self.device.type == "cpu":
            arrays = {name: np.ascontiguousarray(value) for name, value in fields.items()}
            # made within the work: in inference mode a tensor is of another kind, which a graph is compiled
            # for
            return lambda: {name: torch.from_numpy(array) for name, array in arrays.items()}
        numbers = [as_int64(value) for value in fields.values()]
        sizes = [-(-len(value) // ALIGNED) * ALIGNED for value in numbers]
        total = sum(sizes)
        assert total <= len(self.place), f"a launch of {total} numbers, where {len(self.place)} fit"
        packed = torch.empty(total, dtype=torch.int64, pin_memory=True)
        for part, value in zip(packed.split(sizes), numbers, strict=True):
            part.numpy()[: len(value)] = value

        def arrive() -> dict[str, Tensor]:
            self.place[:total].copy_(packed, non_blocking=True)
            key = tuple(value.shape for value in fields.values())
            if key not in self.parts:
                self.parts[key] = parts(self.place, fields, sizes)
            return self.parts[key]

        return arrive


ALIGNED = 2  # int64 numbers: compiled code copies what does not begin at a multiple of 16 bytes


def as_int64(value: np.ndarray) -> np.ndarray:
    """Return the numbers of a field as int64, two of int32 in each."""
    flat = value.reshape(-1)
    return np.pad(flat, (0, flat.size % 2)).view(np.int64) if flat.dtype == np.int32 else flat


def parts(place: Tensor, fields: dict[str, np.ndarray], sizes: Sequence[int]) -> dict[str, Tensor]:
    """Pieces of int64 numbers in the shapes of `fields`, as int32 where a field has such, and as truth values
    where it has those: of each number the lowest byte.

    Each piece has a separate storage over the same memory, since a nested region cannot take two inputs of
    one storage.
    """
    found = {}
    for (name, value), part in zip(fields.items(), place[: sum(sizes)].split(sizes), strict=True):
        numbers = torch.from_dlpack(part)
        if value.dtype == np.int32:
            numbers = numbers.view(torch.int32)
        elif value.dtype == bool:
            numbers = numbers.view(torch.bool)[::8]
        found[name] = numbers[: value.size].view(value.shape)
    return found
