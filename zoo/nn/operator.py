"""Operators of our own, `torch.ops.zoo.NAME`: a compiler calls them and does not look into them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef


def like_first(first: Tensor, *others: object) -> Tensor:
    """An empty tensor as the first argument is."""
    return torch.empty_like(first)


def operator(
    name: str, gives: Callable[..., Any] = like_first, writes: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Makes a function an operator, which changes none of its arguments but those that `writes` names.

    gives: its arguments -> an empty tensor of its result's shape and dtype, or several, which is all that a
    compiler asks.
    """

    def register(function: Callable[..., Any]) -> CustomOpDef:
        made = torch.library.custom_op(f"zoo::{name}", function, mutates_args=writes)
        made.register_fake(gives)
        return made

    return register
