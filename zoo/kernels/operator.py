"""Custom operators `torch.ops.zoo.NAME`. A compiler calls them without tracing them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef

_plain = ContextVar("plain", default=False)


def written_in_regions(*names: str) -> tuple[str, ...]:
    """Return `writes` for an operator in blocks that are compiled once as regions. Torch 2.13 and newer need
    it. Torch 2.11 refuses to compile a block with it, and works without it as long as nothing else in a
    launch reads what the block writes."""
    return names if torch.__version__ >= "2.13" else ()


def like_first(first: Tensor, *others: object) -> Tensor:
    """Return an empty tensor like the first argument."""
    return torch.empty_like(first)


def operator(
    name: str,
    gives: Callable[..., Any] = like_first,
    writes: Sequence[str] = (),
    tags: Sequence[torch.Tag] = (),
) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Return a decorator that makes a function an operator. It mutates only the arguments that `writes`
    names.

    gives: the function's arguments -> an empty tensor of the result's shape and dtype, or several, for the
    compiler. tags: what the compiler may assume.
    """

    def register(function: Callable[..., Any]) -> CustomOpDef:
        made = torch.library.custom_op(f"zoo::{name}", function, mutates_args=writes, tags=tags)
        made.register_fake(gives)
        return made

    return register


def cpp_operator(name: str, schema: str, gives: Callable[..., Any] = like_first) -> None:
    """Declare an operator that kernels_operators.cpp computes, on a CPU and after `kernels.build`.

    schema: arguments and results, as torch writes them. gives: as in `operator`.
    """
    torch.library.define(f"zoo::{name}", schema)
    torch.library.register_fake(f"zoo::{name}", gives)


@contextmanager
def plain() -> Iterator[None]:
    """Run operators as written in torch, within this context and on this thread. All kernels are tested
    against that."""
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


def is_plain() -> bool:
    """Return whether this thread is in `plain`."""
    return _plain.get()
