"""Operators of our own, `torch.ops.zoo.NAME`: a compiler calls them and does not look into them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef


def written_in_regions(*names: str) -> tuple[str, ...]:
    """`writes` of an operator in blocks that are compiled once. From torch 2.13 on it has to be told; torch 2.11 refuses to
    compile the block if it is, and there it need not know, where nothing else in a launch reads what one block writes."""
    return names if torch.__version__ >= "2.13" else ()


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
