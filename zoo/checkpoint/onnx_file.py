"""Read the initializers of an ONNX file, which are its weights. The nodes that read them name them if the
exporter did not.

This is our own reader, because walking three nested messages does not justify installing `onnx` (with
protobuf and ml_dtypes). Source: protobuf.dev, "Encoding"; field numbers as in onnx/onnx.proto.
"""

import math
import mmap
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
FIXED_BYTES = {FIXED64: 8, FIXED32: 4}
GRAPH, NODE, INITIALIZER = 7, 1, 5  # fields of ModelProto and GraphProto
DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64",
    8: "string", 9: "bool", 10: "float16", 11: "float64", 16: "bfloat16",
}  # fmt: skip


# kind of node -> the names of its inputs in the module that it was exported from; "" is the data input.
ROLES = {
    "Conv": ("", "weight", "bias"),
    "LayerNormalization": ("", "weight", "bias"),
    "BatchNormalization": ("", "weight", "bias", "running_mean", "running_var"),
    "MatMul": ("weight", "weight"),
    "Add": ("bias", "bias"),
}


@dataclass
class Node:
    name: str = ""
    kind: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


@dataclass
class Initializer:
    data: memoryview  # little-endian values, or varints if `is_packed`
    name: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    is_packed: bool = False
    is_external: bool = False
    is_transposed: bool = False  # whether `read` returns the transpose; `shape` is then its shape

    def read(self) -> Tensor:
        """Return the values, if torch has their dtype. Raises ValueError if their number does not match the
        shape."""
        dtype = getattr(torch, self.dtype)
        # A copy, because the mapped file is read-only and its values may be unaligned.
        data = bytearray(array("q", _packed(self.data)).tobytes() if self.is_packed else self.data)
        if len(data) != math.prod(self.shape) * dtype.itemsize:
            what = f"{self.name} is {self.dtype} {list(self.shape)}"
            raise ValueError(f"{what}, but raw_data, float_data and int64_data hold {len(data)} bytes")
        if not data:
            return torch.empty(self.shape, dtype=dtype)
        if self.is_transposed:
            return torch.frombuffer(data, dtype=dtype).reshape(self.shape[::-1]).mT
        return torch.frombuffer(data, dtype=dtype).reshape(self.shape)


def initializers(path: Path) -> dict[str, Initializer]:
    """Return the initializers by name; their values are mapped from the file. Raises ValueError."""
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
            advice = "they must be in this file"
            raise ValueError(f"{path} keeps the values of {tensor.name} in another file; {advice}")
    return found


def parameters(path: Path, kept: frozenset[str] = frozenset()) -> dict[str, Initializer]:
    """Return the initializers that layers read, named as in a state dict. The matrix that node
    "/blocks.0/attn/query/MatMul" reads becomes "blocks.0.attn.query.weight", [out, in] as in torch. Constants
    of other nodes are left out.

    kept: initializers that keep their own name. Raises ValueError.
    """
    tensors, nodes = initializers(path), _nodes(path)
    same = {
        node.outputs[0]: node.inputs[0]
        for node in nodes
        if node.kind == "Identity" and node.inputs and node.outputs
    }
    found: dict[str, Initializer] = {}
    for node in nodes:
        for input_name, role in zip(node.inputs, ROLES.get(node.kind, ()), strict=False):
            source = same.get(input_name, input_name)
            if source not in tensors or not role or not tensors[source].shape:
                continue
            name = source if source in kept else f"{_scope(node.name)}.{role}"
            is_matrix = node.kind == "MatMul" and len(tensors[source].shape) == 2
            shape = tensors[source].shape[::-1] if is_matrix else tensors[source].shape
            found[name] = replace(tensors[source], shape=shape, is_transposed=is_matrix)
    return found


def _scope(name: str) -> str:
    """ "/head/layer1/layer1.0/conv1/Conv" -> "head.layer1.0.conv1". A part such as "layer1" is dropped if the
    next one repeats it."""
    parts = name.strip("/").split("/")[:-1]
    followed = zip(parts, [*parts[1:], ""], strict=True)
    return ".".join(part for part, following in followed if not following.startswith(f"{part}."))


def _nodes(path: Path) -> list[Node]:
    return [_node(message) for graph in _messages(_mapped(path), GRAPH) for message in _messages(graph, NODE)]


def _node(message: memoryview) -> Node:
    node = Node()
    for number, value in _fields(message):
        if not isinstance(value, memoryview) or number > 4:
            continue
        text = str(value, "utf-8")
        match number:
            case 1:
                node.inputs += (text,)
            case 2:
                node.outputs += (text,)
            case 3:
                node.name = text
            case 4:
                node.kind = text
    return node


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
    """Yield the values of a repeated field whose values are messages."""
    for found, value in _fields(message):
        if found == number and isinstance(value, memoryview):
            yield value


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield number and value of each field, in the file's order. Raises EOFError."""
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
            raise EOFError(f"a field has {size} bytes, but {len(message) - at} are left")
        yield tag >> 3, message[at : at + size]
        at += size


def _packed(data: memoryview) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield value


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Read a varint -> a signed 64-bit number and the offset behind it. Raises EOFError."""
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
