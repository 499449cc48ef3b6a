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


def round_numbers(patch: pytest.MonkeyPatch) -> None:
    """Make the interpreter round float32 to the nearest bf16, as a GPU does, until the patch is undone. It would
    cut off bits."""
    convert = interpreter._convert_float

    def nearest(numbers: Any, kind: Any, to: Any, mode: Any) -> Any:
        if (kind, to) != (tl.float32, tl.bfloat16):
            return convert(numbers, kind, to, mode)
        bits = np.ascontiguousarray(numbers).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)

    patch.setattr(interpreter, "_convert_float", nearest)
