"""Read arrays of a file that joblib wrote, such as a clustering of scikit-learn. Such a file is a pickle, a program
that may call anything, with the arrays' bytes between its instructions. Here nothing that it names is called: each
object becomes an inert one that only keeps its values.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np

ARRAY = "joblib.numpy_pickle.NumpyArrayWrapper"  # whose bytes follow in the file
KINDS = "fiub"  # of dtypes, by their first letters
MAX_BYTES = 1 << 31  # of one array


class Inert:
    """An object of a pickle that is not built: the name of its class, its arguments, and its state."""

    kind = ""
    made_of: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any, **fields: Any) -> Inert:
        made = object.__new__(cls)
        made.made_of = args
        return made

    def __init__(self, *args: Any, **fields: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def value(self, name: str) -> Any:
        return self.state.get(name) if isinstance(self.state, dict) else None


_Unpickler: Any = pickle._Unpickler  # the one in Python, whose instructions can be changed


class _Reader(_Unpickler):
    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict(_Unpickler.dispatch)

    def __init__(self, file: BinaryIO):
        super().__init__(file)
        self.file = file

    def find_class(self, module: str, name: str) -> type[Inert]:
        return type("Inert", (Inert,), {"kind": f"{module}.{name}"})

    def load_build(self) -> None:
        super().load_build()
        top = self.stack[-1]
        if isinstance(top, Inert) and top.kind == ARRAY:
            self.stack[-1] = self.array(top)

    dispatch[pickle.BUILD[0]] = load_build

    def array(self, wrapper: Inert) -> np.ndarray:
        dtype, shape = _dtype(wrapper.value("dtype")), wrapper.value("shape")
        if wrapper.value("numpy_array_alignment_bytes") is not None:
            self.file.read(self.file.read(1)[0])
        num_bytes = math.prod(shape) * dtype.itemsize
        if not 0 <= num_bytes <= MAX_BYTES:
            raise ValueError(f"an array of {num_bytes} bytes")
        data = self.file.read(num_bytes)
        if len(data) < num_bytes:
            raise EOFError("an array is cut short")
        return np.frombuffer(bytearray(data), dtype).reshape(shape, order=wrapper.value("order"))


def _dtype(described: Any) -> np.dtype:
    """Return a plain dtype, of which the pickle has the name and the order of bytes."""
    name, order = described.made_of[0], described.state[1]
    if name[0] not in KINDS or order not in ("<", "|", "="):
        raise ValueError(f"an array of {name!r}")
    return np.dtype(name).newbyteorder("<")


def read_array(path: Path, name: str) -> np.ndarray:
    """Return an array that is an attribute of the file's object. Raises ValueError."""
    try:
        with path.open("rb") as file:
            found = _Reader(file).load()
            array = found.value(name)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except Exception as error:  # a pickle is a program, so a damaged one can raise anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{path} is not an uncompressed file of joblib ({reason})") from None
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path} holds no array {name!r}")
    return array
