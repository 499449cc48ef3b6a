"""Save a compiled function to a file, so that another process can load it without tracing it again.

This uses torch's `aot_compile` (experimental; used with 2.11 and 2.13), which keeps the output of Dynamo and
Inductor. Guards are left out, because their number grows with the model. The name of the file's entry
(artifacts.py) covers what they would check, and the graph holds for every size that varies (`any_size`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import _dynamo


class Counted:
    """The number of functions since the process began."""

    found = 0
    compiled = 0


def compiled(method: Callable[..., Any], examples: tuple[object, ...], file: Path) -> Callable[..., Any]:
    """Compile a method into one graph for such arguments and save it. Raises the compiler's errors."""
    assert isinstance(method, MethodType), f"{method} is not a method; its object is an argument of the graph"
    plain = method.__func__
    assert isinstance(plain, FunctionType), f"{plain} is not a Python function"
    options: dict[str, Any] = {"cpp.threads": 1, "guard_filter_fn": lambda guards: [False] * len(guards)}
    with _dynamo.config.patch(enable_aot_compile=True):  # torch 2.11 needs this already for torch.compile
        lowered: Any = torch.compile(plain, fullgraph=True, dynamic=False, options=options)
        made = lowered.aot_compile(((method.__self__, *examples), {}))
    made.save_compiled_function(str(file))
    Counted.compiled += 1
    return MethodType(made.fn, method.__self__)


def loaded(method: Callable[..., Any], file: Path) -> Callable[..., Any]:
    """Load a method that `compiled` saved for an equal object."""
    assert isinstance(method, MethodType), f"{method} is not a method; its object is an argument of the graph"
    with file.open("rb") as bytes:
        made: Any = torch.compiler.load_compiled_function(bytes)
    Counted.found += 1
    return MethodType(made.fn, method.__self__)
