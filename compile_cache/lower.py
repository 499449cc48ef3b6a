"""Lower a plain function to a fast one, following a strategy."""

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

from compile_cache import artifacts
from compile_cache.strategy import Eager, Lowering, Part, Parts

# Whether this context runs a function whose parts are compiled.
_of_parts = ContextVar("of_parts", default=False)


def lower(function: Callable[..., Any], how: Lowering) -> Callable[..., Any]:
    """Lower a function.

    Whole: one graph without breaks; an error says where a break would be.
    Eager: the function itself.
    Parts: the function itself, which must be a method, with one graph for each of the parts.
    """
    if isinstance(how, Eager):
        return function
    if isinstance(how, Parts):
        return with_parts(function, how.parts)
    return traced(function)


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function. Its first call with each kind of arguments compiles it into one graph."""
    # Inductor's own cache does not know the vector width that its C++ was generated for. Code for AVX2 that a
    # process with AVX-512 takes from it writes past the end of its buffers.
    torch.compiler.config.cache_key_tag = artifacts.target("cpu")
    # dynamic=False: only the sizes that `any_size` marks vary. Otherwise Dynamo would make a size dynamic
    # once it sees a second value, such as that of another window.
    return torch.compile(with_own_code(function), fullgraph=True, dynamic=False, options={"cpp.threads": 1})


def with_parts(
    function: Callable[..., Any],
    parts: Iterable[Part],
    compile: Callable[[Callable[..., Any], Part], Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """Return the function with its parts compiled. Other callers and threads still get the plain parts.

    compile: makes the fast method of a plain one, which is called with all arguments in order. By default the
    method is traced."""
    assert isinstance(function, MethodType), f"{function} is not a method, so it has no parts"
    known: list[tuple[object, str, Callable[..., Any]]] = []
    for part in parts:
        *owners, name = part.place.split(".")
        owner = reduce(getattr, owners, function.__self__)
        method = getattr(owner, name)
        compiled = traced(method) if compile is None else compile(method, part)
        known.append((owner, name, _any_size(method, compiled, part)))

    def lowered(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for owner, name, part in known:
                stack.enter_context(_in_place(owner, name, part))
            stack.callback(_of_parts.reset, _of_parts.set(True))
            return function(*args, **kwargs)

    return lowered


@contextmanager
def _in_place(owner: object, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Give an object this function as its method, in this context."""
    assert name not in vars(owner), f"{name} of a {type(owner).__name__} is already lowered"
    setattr(owner, name, function)
    try:
        yield
    finally:
        delattr(owner, name)


def _any_size(method: Callable[..., Any], compiled: Callable[..., Any], part: Part) -> Callable[..., Any]:
    """Return the compiled method, with a graph that holds for all sizes that the part names."""
    signature = inspect.signature(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not _of_parts.get():
            return method(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        for argument, names in part.any_size:
            first, *rest = argument.split(".")
            if rest and not hasattr(given[first], rest[0]):
                continue
            tensor = reduce(getattr, rest, given[first])
            for dim, name in enumerate(names):
                if name:
                    any_size((tensor,), dim, name)
        return compiled(*given.values())

    return call


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same method with its own code object.

    Dynamo keeps compiled graphs with the code object, eight at most. All models of a family in a process
    share the code of their class's `step`.
    """
    if not isinstance(function, MethodType):
        return function
    plain = function.__func__
    assert isinstance(plain, FunctionType), f"{plain} is not a Python function"
    own = FunctionType(
        plain.__code__.replace(), plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__
    )
    own.__kwdefaults__ = plain.__kwdefaults__
    return MethodType(own, function.__self__)


def any_size(tensors: Iterable[Tensor], dim: int, name: str) -> None:
    """Make the graph that is compiled with these tensors hold for every size of `dim`.

    Equal names mean equal sizes. On a CPU this includes size 1. On a GPU, size 1 gets its own graph, and the
    others share a graph that was laid out for the first size. Fully unknown sizes would prevent kernel fusion
    there (Higgs Audio V3: 65 generated kernels per step instead of 30). With two lanes, a step of one slot
    has two positions; that size is a constant of the graph for one slot, so the mark must not insist on it.
    """
    for tensor in tensors:
        if tensor.device.type == "cpu":
            torch._dynamo.decorators.mark_unbacked(tensor, dim, shape_id=name)
        elif tensor.shape[dim] > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)


def may_vary(tensor: Tensor) -> set[int]:
    """Return the dims of a GPU's tensor that `any_size` marked."""
    return getattr(tensor, "_dynamo_weak_dynamic_indices", set())
