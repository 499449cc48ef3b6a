"""The initializers of an ONNX file, which are its weights. The graph is passed over.

A reader of our own, since a walk through three nested messages is all that is needed of what `onnx` installs
(with protobuf and ml_dtypes). Source: protobuf.dev, "Encoding"; numbers as in onnx/onnx.proto.
"""

import math
import mmap
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
FIXED_BYTES = {FIXED64: 8, FIXED32: 4}
GRAPH, INITIALIZER = 7, 5  # fields of ModelProto and GraphProto
DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64",
    8: "string", 9: "bool", 10: "float16", 11: "float64", 16: "bfloat16",
}  # fmt: skip


@dataclass
class Initializer:
    data: memoryview  # little-endian values, or varints where `is_packed`
    name: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    is_packed: bool = False
    is_external: bool = False

    def read(self) -> Tensor:
        """Of a dtype that torch has. Raises ValueError where the values are not as many as the shape says."""
        dtype = getattr(torch, self.dtype)
        # A copy: what lies in the file is not aligned, and not to be written to.
        data = bytearray(array("q", _packed(self.data)).tobytes() if self.is_packed else self.data)
        if len(data) != math.prod(self.shape) * dtype.itemsize:
            what = f"{self.name} is {self.dtype} {list(self.shape)}"
            raise ValueError(f"{what}, but raw_data, float_data and int64_data hold {len(data)} bytes")
        if not data:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).reshape(self.shape)


def initializers(path: Path) -> dict[str, Initializer]:
    """By name, their values mapped. Raises ValueError."""
    found: dict[str, Initializer] = {}
    try:
        model = _mapped(path)
        for graph in _messages(model, GRAPH):
            for message in _messages(graph, INITIALIZER):
                tensor = _initializer(message)
                found[tensor.name] = tensor
    except (EOFError, UnicodeDecodeError, OSError) as error:
        advice = "it may have been cut short; copy it again"
        raise ValueError(f"{path} is not a whole ONNX file ({error}): {advice}") from None
    for tensor in found.values():
        if tensor.is_external:
            advice = "they must be in this one"
            raise ValueError(f"{path} keeps the values of {tensor.name} in another file; {advice}")
    return found


def _mapped(path: Path) -> memoryview:
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            raise EOFError("it is empty")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _initializer(message: memoryview) -> Initializer:
    tensor = Initializer(data=message[:0])
    for number, value in _fields(message):
        match number, value:
            case (1, int()):  # dims
                tensor.shape += (value,)
            case (1, memoryview()):
                tensor.shape += tuple(_packed(value))
            case (2, int()):  # data_type
                tensor.dtype = DTYPES.get(value, f"type {value}")
            case (8, memoryview()):  # name
                tensor.name = str(value, "utf-8")
            case (4 | 9, memoryview()):  # float_data, raw_data
                tensor.data = value
            case (7, memoryview()):  # int64_data
                tensor.data = value
                tensor.is_packed = True
            case (14, int()):  # data_location: 0 here, 1 in another file
                tensor.is_external = value != 0
    return tensor


def _messages(message: memoryview, number: int) -> Iterator[memoryview]:
    """The values of one repeated field, each a message of its own."""
    for found, value in _fields(message):
        if found == number and isinstance(value, memoryview):
            yield value


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Number and value of each field, in the file's order. Raises EOFError."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == VARINT:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        if kind == BYTES:
            size, at = _varint(message, at)
        elif kind in FIXED_BYTES:
            size = FIXED_BYTES[kind]
        else:
            raise EOFError(f"a field has wire type {kind}")
        if not 0 <= size <= len(message) - at:
            raise EOFError(f"a field has {size} bytes, where {len(message) - at} are left")
        yield tag >> 3, message[at : at + size]
        at += size


def _packed(data: memoryview) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield value


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """-> a signed number of 64 bits, and where the next one begins. Raises EOFError."""
    number = 0
    for shift in range(0, 70, 7):  # seven bits a byte, the lowest first
        if at == len(data):
            raise EOFError("a number has no end")
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    number &= (1 << 64) - 1
    return number - (number >> 63 << 64), at
