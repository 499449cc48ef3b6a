"""A CPU that pretends to be an asynchronous GPU, so that branches for GPUs run on any machine, with real
numbers.

    with masquerade():             every tensor claims to be on "cuda"; tensors requested there are made on the CPU
        torch.cuda.CUDAGraph       a list of operators over the memory that they were recorded with. It does not keep that
                                   memory alive: reading freed memory is an error, where a GPU would read other data
        LateStream                 work runs when the host asks for its result, or a part of it at random times before
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from serving.engine.device import streams

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
    aten.equal.default,
}


class Mask(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.device.__get__:
            return CUDA
        if func == Tensor.is_cuda.__get__:
            return True
        if func == Tensor.is_cpu.__get__:
            return False
        if func == Tensor.pin_memory:
            return args[0].clone()
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        return func(*tree_map(unmasked, args), **tree_map(unmasked, kwargs))


def unmasked(value: Any) -> Any:
    is_cuda = isinstance(value, torch.device | str) and str(value).startswith("cuda")
    return CPU if is_cuda else value


class Freed(AssertionError):
    """A recorded launch reads or writes freed memory, which on a GPU may have been reused."""


class Outside:
    """A tensor that existed before recording. As on a GPU, the graph has its address and does not keep it
    alive."""

    def __init__(self, tensor: Tensor, func: Any):
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.layout = tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        self.what = f"{tuple(tensor.shape)} {tensor.dtype} of {func}"

    def tensor(self) -> Tensor:
        if self.storage.expired():
            raise Freed(f"a recorded launch reads {self.what}, memory that nobody holds any more")
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        dtype, offset, shape, stride = self.layout
        return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


class Graph:
    """Replaces torch.cuda.CUDAGraph: a list of operators, each with the memory that it was recorded with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, list[Any], TreeSpec, list[Tensor | None]]] = []

    def replay(self) -> None:
        with torch._C.DisableTorchFunction():
            for func, leaves, spec, kept in self.calls:
                there = [leaf.tensor() if type(leaf) is Outside else leaf for leaf in leaves]
                args, kwargs = tree_unflatten(there, spec)
                made = func(*args, **kwargs)
                values = [made] if isinstance(made, Tensor) else tree_leaves(made)
                for place, value in zip(kept, values, strict=True):
                    if place is not None:
                        place.copy_(value)


class Capture(TorchDispatchMode):
    """Replaces torch.cuda.graph. Operators of this project are recorded as a whole, like kernels."""

    def __init__(self, graph: Graph, pool: object = None, stream: object = None):
        super().__init__()
        self.graph, self.made = graph, dict[int, Tensor]()
        # Workspaces belong to streams and memory to pools, so graphs that share one of them must not run
        # concurrently.
        assert stream is not None, "the graph is recorded on torch's own stream, like others"
        assert STREAMS.setdefault(pool, stream) is stream and POOLS.setdefault(stream, pool) == pool

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert func not in WAITS, f"{func} waits for the device: it cannot be recorded"

        def seen(value: Any) -> Any:
            is_outside = isinstance(value, Tensor) and value.untyped_storage()._cdata not in self.made
            return Outside(value, func) if is_outside else value

        leaves, spec = tree_flatten((args, kwargs))
        kept = [seen(leaf) for leaf in leaves]
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **kwargs)
        outs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        # for `to`, `reshape` and similar operators, this is only known now
        fresh = [t.untyped_storage()._cdata not in given for t in outs]
        self.made |= {t.untyped_storage()._cdata: t for t, new in zip(outs, fresh, strict=True) if new}
        # A view needs no replay, because its address does not change.
        if func._schema.is_mutable or any(fresh):
            places = [t if new else None for t, new in zip(outs, fresh, strict=True)]
            self.graph.calls.append((func, kept, spec, places))
        return out


# stream -> pool and pool -> stream, within one `masquerade`
POOLS: dict[object, object] = {}
STREAMS: dict[object, object] = {}


class Event:
    def record(self, stream: object = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class CudaStream:
    def __init__(self, device: object = None, priority: int = 0): ...
    def wait_event(self, event: object) -> None: ...


class LateCopy:
    """Replaces AsyncCopy."""

    def __init__(self, stream: LateStream):
        self.stream = stream
        self.values: tuple[Tensor, ...] | None = None

    @property
    def is_there(self) -> bool:
        self.stream.advance()
        return self.values is not None

    def wait(self, max_s: float) -> None: ...

    def tensors(self) -> tuple[Tensor, ...]:
        while self.values is None:
            self.stream.do_next()
        return self.values

    def read(self) -> tuple[np.ndarray, ...]:
        return tuple(value.numpy() for value in self.tensors())


class LateStream(streams.Stream):
    chance = random.Random(0)
    current: LateStream | None = None  # the stream of the last `here`, for the recorder

    def __init__(self, device: torch.device, is_urgent: bool = False):
        super().__init__(device, is_urgent)
        self.queue: deque[tuple[Callable[[], Sequence[Tensor]], LateCopy]] = deque()

    def run(self, work: Callable[[], Sequence[Tensor]], observer: object = None) -> Any:
        copy = LateCopy(self)
        self.queue.append((work, copy))
        return copy

    def here(self) -> Any:
        """Run everything in the queue, so that later launches come after it."""
        self.finish()
        LateStream.current = self
        return nullcontext()

    def borrow(self, tensor: Tensor) -> None: ...

    def finish(self) -> None:
        while self.queue:
            self.do_next()

    def mark(self) -> Any:
        return self.queue[-1][1] if self.queue else None

    def wait_for(self, event: Any) -> None:
        """Let later work begin when another stream has done what it had to do at its mark."""
        if isinstance(event, LateCopy):
            self.run(lambda: event.tensors() and ())

    def advance(self) -> None:
        for _ in range(self.chance.choice((0, 0, 0, 0, 1, 3))):
            if self.queue:
                self.do_next()

    def do_next(self) -> None:
        work, copy = self.queue.popleft()
        with torch.inference_mode():
            copy.values = tuple(value.clone() for value in work())


@contextmanager
def masquerade() -> Iterator[None]:
    answers = {
        "is_available": lambda: True,
        "synchronize": lambda device=None: None,
        "graph_pool_handle": object,
        "current_stream": lambda device=None: LateStream.current,
        "mem_get_info": lambda device=None: (1 << 40, 1 << 40),
        "CUDAGraph": Graph,
        "graph": Capture,
        "Event": Event,
        "Stream": CudaStream,
        "stream": lambda stream: nullcontext(),
    }
    POOLS.clear()
    STREAMS.clear()
    with ExitStack() as stack:
        for name, value in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(streams, "Stream", LateStream))
        stack.enter_context(Mask())
        yield
