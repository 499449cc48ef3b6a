"""A plain function and a strategy -> the fast function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from compile_cache.strategy import Eager, Lowering


def lower(function: Callable[..., Any], how: Lowering) -> Callable[..., Any]:
    """Whole: one graph with no break (an error says where one would be); Eager: the function itself."""
    if isinstance(how, Eager):
        return function
    # dynamic=False: the sizes that vary are those `any_size` marks, and the third window is not mistaken for
    # a size of its own.
    return torch.compile(with_own_code(function), fullgraph=True, dynamic=False, options={"cpp.threads": 1})


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same method with a code object of its own. Dynamo keeps what it compiled with the code object,
    eight graphs at most, and every model that a process ever loads has its `step` from the same class."""
    if not isinstance(function, MethodType):
        return function
    plain = function.__func__
    assert isinstance(plain, FunctionType), f"{plain} has no code of its own"
    own = FunctionType(
        plain.__code__.replace(), plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__
    )
    own.__kwdefaults__ = plain.__kwdefaults__
    return MethodType(own, function.__self__)


def any_size(tensors: Iterable[Tensor], dim: int, name: str) -> None:
    """The graph compiled with these tensors holds for every size of `dim`; equal names mean equal sizes.

    On a CPU for 1 too. On a GPU 1 gets a graph of its own, and the others share one that was laid out for the size
    at hand: sizes of which nothing is known keep kernels from being fused (Higgs Audio V3: 65 generated kernels a
    step, and 30 so).
    """
    for tensor in tensors:
        if tensor.device.type == "cpu":
            torch._dynamo.decorators.mark_unbacked(tensor, dim, shape_id=name)
        elif tensor.shape[dim] > 1:
            torch._dynamo.mark_dynamic(tensor, dim)
