"""Record what a run on a pretended GPU would launch, and what would make the host wait."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.rehearsal.l2 import L2

aten = torch.ops.aten
Touched = Sequence[tuple[Tensor, int]]  # tensors, and the bytes of each
# The results of these depend on values, so the host waits for the device.
WAITS = {
    aten._local_scalar_dense, aten.nonzero, aten.nonzero_static, aten.masked_select, aten.is_nonzero, aten.item, aten.equal,
    aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.bincount, aten.repeat_interleave,
}  # fmt: skip
COPIES = {aten._to_copy, aten.copy_, aten.copy, aten._copy_from}
# Operators that launch nothing, in addition to views.
FREE = {
    "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach", "alias", "set_", "lift_fresh", "_unsafe_view",
    "resize_", "_pin_memory", "is_pinned",
}  # fmt: skip
READS_WHAT_IT_GIVES = {"index", "index_select", "embedding", "gather"}
WRITES_WHAT_IT_IS_GIVEN = {
    "index_put",
    "index_put_",
    "index_copy",
    "index_copy_",
    "scatter",
    "scatter_",
    "index_fill_",
}

# In-place operators whose first argument is written and not read.
OVERWRITES = {"copy_", "fill_", "zero_"}


class Launch(NamedTuple):
    """One kernel.

    kind: "triton" and "extern" (generated for the compiled graph, and called by it), "recorded" (launched by
    Python once, while recording), "eager" (launched by Python each time), or "phase" (a further phase of a
    kernel). within: our operator that it is
    a part of. memory_bytes: its bytes that are not in the card's cache (`l2`)."""

    name: str
    kind: str
    within: str
    bytes: int
    flops: int
    arithmetic: str
    memory_bytes: int = 0


@dataclass
class Log:
    """The events since `clear`.

    waits: values that the host waits for. copies: blocking copies between host and device."""

    launches: Counter[Launch] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    kind: str = "eager"
    within: str = ""
    kv: Tensor | None = None  # the arena; a launch reads the pages of its sequences in one layer
    live_kv_bytes: int = 0
    cache: L2 = field(default_factory=lambda: L2(0))

    def clear(self) -> None:
        self.cache.clear()
        for counter in (self.launches, self.waits, self.copies):
            counter.clear()

    def counted(self) -> list[Counter[Any]]:
        """Return copies of the counters."""
        return [Counter(counter) for counter in (self.launches, self.waits, self.copies)]

    def repeat(self, counted: list[Counter[Any]]) -> None:
        """Count the given events again."""
        for counter, more in zip((self.launches, self.waits, self.copies), counted, strict=True):
            counter.update(more)

    def add(
        self, name: str, reads: Touched, writes: Touched = (), flops: int = 0, arithmetic: str = "fp32"
    ) -> None:
        """Count one launch with the bytes that it touches of each tensor."""
        pages = sum(n for tensor, n in (*reads, *writes) if self._is_arena(tensor))
        others = [
            [(tensor, n) for tensor, n in some if not self._is_arena(tensor)] for some in (reads, writes)
        ]
        num_bytes = sum(n for _, n in (*reads, *writes))
        moved = pages + self.cache.launch(*others)
        self.launches[Launch(name, self.kind, self.within, num_bytes, flops, arithmetic, moved)] += 1

    def touched(self, tensor: Tensor) -> tuple[Tensor, int]:
        """Return a tensor with the bytes of it that one of our kernels needs."""
        return tensor, self.live_kv_bytes if self._is_arena(tensor) else tensor_bytes(tensor)

    def _is_arena(self, tensor: Tensor) -> bool:
        return self.kv is not None and _storage(tensor) == _storage(self.kv)

    @contextmanager
    def of(self, kind: str) -> Iterator[None]:
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes that can be touched; an expanded tensor is read once."""
    sizes = (n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(map(int, sizes)) * tensor.element_size()


def tensors_of(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def arithmetic(tensors: Iterable[Tensor], is_convolution: bool = False) -> str:
    """Return the precision in which products of these operands are computed."""
    tensors = list(tensors)
    if any(tensor.dtype == torch.float8_e4m3fn for tensor in tensors):
        return "fp8"
    if all(tensor.dtype != torch.float32 for tensor in tensors):
        return "bf16"
    is_tf32 = torch.backends.cudnn.allow_tf32 if is_convolution else torch.backends.cuda.matmul.allow_tf32
    return "tf32" if is_tf32 else "fp32"


def touches(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[Touched, Touched]:
    """Return what an operator reads and writes at least. A tensor passed as `out` is not read."""
    made, name = tensors_of(out), func.overloadpacket.__name__
    given = tensors_of(args, {key: value for key, value in kwargs.items() if key != "out"})
    writes = [(tensor, tensor_bytes(tensor)) for tensor in made]
    if name in WRITES_WHAT_IT_IS_GIVEN:
        reads = [(tensor, tensor_bytes(tensor)) for tensor in given[1:]]
        writes = [(given[0], sum(n for _, n in reads))]
    elif name in READS_WHAT_IT_GIVES:
        rest = [(tensor, tensor_bytes(tensor)) for tensor in given[1:]]
        reads = [*rest, (given[0], sum(n for _, n in writes))]
    else:
        given = given[1:] if name in OVERWRITES else given
        reads = [(tensor, tensor_bytes(tensor)) for tensor in given]
    return reads, writes


def flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    count = flop_registry.get(func.overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))


def is_view(func: Any) -> bool:
    return func.is_view or any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)


class Recorder(TorchDispatchMode):
    """A mode that logs operators on the device as launches.

    Our own operators are opened: they launch what their Python code launches."""

    def __init__(self, log: Log):
        super().__init__()
        self.log = log
        self.pinned = dict[int, Tensor]()  # keeps them alive, so that no other tensor gets their storage

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, because Dynamo does not compile frames under other modes."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "zoo":
            return self._opened(func, args, kwargs)
        if func.namespace == "prim":  # asks for a property and launches nothing
            return func(*args, **kwargs)
        with self:  # in inference mode composite operators arrive undecomposed
            out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        packet, given = func.overloadpacket, tensors_of(args, kwargs)
        if packet in WAITS and any(tensor.is_cuda for tensor in given):
            self.log.waits[self._named(func)] += 1
        out = func(*args, **kwargs)
        made = tensors_of(out)
        if kwargs.get("pin_memory") or packet is aten._pin_memory:
            self.pinned |= {_storage(tensor): tensor for tensor in made}
        devices = {tensor.device.type for tensor in (*given, *made)}
        if "cuda" not in devices or packet.__name__ in FREE or is_view(func):
            return out
        if packet in COPIES and "cpu" in devices:
            self._check_copy(given, made, bool(kwargs.get("non_blocking") or args[2:3] == (True,)))
        is_convolution = "convolution" in packet.__name__
        work = flops(func, args, kwargs, out), arithmetic(given, is_convolution)
        self.log.add(str(func), *touches(func, args, kwargs, out), *work)
        return out

    def _named(self, func: Any) -> str:
        return f"{func} in zoo.{self.log.within}" if self.log.within else str(func)

    def _opened(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one of our operators under this mode. One that needs values counts as one launch."""
        before, self.log.within = self.log.within, func.overloadpacket.__name__
        try:
            with self:
                return OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
        except DataDependentOutputException:
            out = func(*args, **kwargs)
            given = map(self.log.touched, tensors_of(args, kwargs))
            self.log.add(str(func), list(given), list(map(self.log.touched, tensors_of(out))))
            return out
        finally:
            self.log.within = before

    def _check_copy(self, given: list[Tensor], made: list[Tensor], is_async: bool) -> None:
        host = next(tensor for tensor in (*given, *made) if tensor.device.type == "cpu")
        is_pinned = _storage(host) in self.pinned
        if is_pinned and is_async:
            return
        way = "to the host" if made[0].device.type == "cpu" else "to the device"
        why = "blocking" if is_pinned else "unpinned"
        self.log.copies[
            f"{why} copy {way} of {str(host.dtype).removeprefix('torch.')}{list(host.shape)}"
        ] += 1
