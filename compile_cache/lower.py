"""A plain function and a strategy -> the fast function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import reduce
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from compile_cache.strategy import Eager, Lowering, Part, Parts

_of_parts = ContextVar("of_parts", default=False)  # whether a function runs here whose parts are compiled


def lower(function: Callable[..., Any], how: Lowering) -> Callable[..., Any]:
    """Whole: one graph with no break (an error says where one would be); Eager: the function itself; Parts: the function
    itself, which must be a method, and one graph for each of the parts."""
    if isinstance(how, Eager):
        return function
    if isinstance(how, Parts):
        return with_parts(function, how.parts)
    return _compiled(function)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # dynamic=False: the sizes that vary are those `any_size` marks, and the third window is not mistaken for
    # a size of its own.
    return torch.compile(with_own_code(function), fullgraph=True, dynamic=False, options={"cpp.threads": 1})


def with_parts(function: Callable[..., Any], parts: Iterable[Part]) -> Callable[..., Any]:
    """The function, which calls the parts compiled. Only while it runs are they so, and for it alone: who else calls them, on
    another thread too, has them plain."""
    assert isinstance(function, MethodType), f"{function} is a part of nothing"
    known: list[tuple[object, str, Callable[..., Any]]] = []
    for part in parts:
        *owners, name = part.place.split(".")
        owner = reduce(getattr, owners, function.__self__)
        known.append((owner, name, _any_size(getattr(owner, name), part)))

    def lowered(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for owner, name, part in known:
                stack.enter_context(_in_place(owner, name, part))
            stack.callback(_of_parts.reset, _of_parts.set(True))
            return function(*args, **kwargs)

    return lowered


@contextmanager
def _in_place(owner: object, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Here an object has this function as its method."""
    assert name not in vars(owner), f"{name} of a {type(owner).__name__} is lowered already"
    setattr(owner, name, function)
    try:
        yield
    finally:
        delattr(owner, name)


def _any_size(method: Callable[..., Any], part: Part) -> Callable[..., Any]:
    """The compiled method, whose graph holds for all sizes that the part names."""
    compiled, signature = _compiled(method), inspect.signature(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not _of_parts.get():
            return method(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        for argument, names in part.any_size:
            first, *rest = argument.split(".")
            tensor = reduce(getattr, rest, given[first])
            for dim, name in enumerate(names):
                if name:
                    any_size((tensor,), dim, name)
        return compiled(*args, **kwargs)

    return call


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
