"""A compiled function in a file: another process loads it and need not trace it again.

torch's own `aot_compile` (experimental; seen with 2.11 and 2.13) keeps what Dynamo and Inductor made of a function.
It is called without guards, whose number grows with the model: what a guard would ask is in the name of the entry
that the file lies in (artifacts.py), and sizes that vary are unknown to the graph (`any_size`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import _dynamo


class Counted:
    """Functions, since the process began."""

    found = 0
    compiled = 0


def compiled(method: Callable[..., Any], examples: tuple[object, ...], file: Path) -> Callable[..., Any]:
    """A method as one graph for such arguments, kept in a new file. Raises what the compiler raises."""
    assert isinstance(method, MethodType), f"{method} is no method, whose object is an argument of the graph"
    plain = method.__func__
    assert isinstance(plain, FunctionType), f"{plain} has no code of its own"
    options: dict[str, Any] = {"cpp.threads": 1, "guard_filter_fn": lambda guards: [False] * len(guards)}
    with _dynamo.config.patch(enable_aot_compile=True):  # torch 2.11 wants it said, here already
        lowered: Any = torch.compile(plain, fullgraph=True, dynamic=False, options=options)
        made = lowered.aot_compile(((method.__self__, *examples), {}))
    made.save_compiled_function(str(file))
    Counted.compiled += 1
    return MethodType(made.fn, method.__self__)


def loaded(method: Callable[..., Any], file: Path) -> Callable[..., Any]:
    """What `compiled` made of the same method of an equal object."""
    assert isinstance(method, MethodType), f"{method} is no method, whose object is an argument of the graph"
    with file.open("rb") as bytes:
        made: Any = torch.compiler.load_compiled_function(bytes)
    Counted.found += 1
    return MethodType(made.fn, method.__self__)
