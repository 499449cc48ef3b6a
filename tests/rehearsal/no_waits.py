"""Find places where a GPU's host would wait.

Real tensors on the CPU pretend to be on a GPU. Code that asks for their values, or copies new values to the
device, is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from masquerade import Mask
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zoo import kernels

aten = torch.ops.aten
# The host asks for a value.
ASKS = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__,
    Tensor.nonzero, torch.nonzero, torch.masked_select, torch.unique, torch.equal, torch.argwhere,
}  # fmt: skip
# Values are created on the host and copied, which waits for all earlier work.
BRINGS = {torch.tensor, torch.as_tensor, torch.from_numpy, torch.asarray}
# The shapes of these results depend on values.
MEASURES = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.equal,
    aten.bincount,
}


class Waits(AssertionError):
    """On a GPU the host would wait here."""


@contextmanager
def no_waits() -> Iterator[None]:
    """Raise Waits for every operation in the context that would make a GPU's host wait.

    Our own operators run as on a GPU, but in torch."""
    with kernels.plain(), _Refusing(), _Pretending():
        yield


class _Pretending(Mask):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ASKS or func in BRINGS:
            raise Waits(f"{func.__name__} waits")
        if isinstance(func, torch._ops.OpOverload) and func.namespace == "zoo":
            with self:
                return OPDEFS[func._schema.name]._init_fn(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


class _Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet in MEASURES or (
            func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
        ):
            raise Waits(f"{func} waits")
        if packet in (aten.index, aten.index_put, aten.index_put_) and _has_mask(args[1]):
            raise Waits(f"{func} with a mask waits for the number of selected elements")
        return func(*args, **(kwargs or {}))


def _has_mask(indices: Any) -> bool:
    return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in tree_leaves(indices))
