"""Correct bf16 products in Triton's interpreter, which keeps bf16 as bits and would multiply the bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter


def multiply_numbers(patch: pytest.MonkeyPatch) -> None:
    """Make the interpreter convert bf16 to float32 before it multiplies, until the patch is undone."""
    multiply = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype == tl.bfloat16:
            a, b = wide(a), wide(b)
        return multiply(self, a, b, *rest)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def wide(handle: Any) -> Any:
    return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
