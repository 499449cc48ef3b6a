"""Write the two ONNX files of a demo checkpoint: initializers, and the nodes that read them, named as
PyTorch's exporter names them.

The files hold no graph that could run: the nodes are not connected, because the loader reads only their
names. Source: onnx/onnx.proto.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from zoo.nn.s3.files import NUMBERED

FLOAT = 1
Fill = Callable[[str, tuple[int, ...]], np.ndarray]


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def _bytes(number: int, content: bytes | str) -> bytes:
    content = content.encode() if isinstance(content, str) else content
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _tensor(name: str, values: np.ndarray) -> bytes:
    dims = b"".join(_varint(1 << 3) + _varint(size) for size in values.shape)
    raw = np.ascontiguousarray(values, np.float32).tobytes()
    return dims + _varint(2 << 3) + _varint(FLOAT) + _bytes(8, name) + _bytes(9, raw)


def _node(kind: str, name: str, inputs: list[str]) -> bytes:
    read = b"".join(_bytes(1, text) for text in inputs)
    return read + _bytes(2, f"{name}_output_0") + _bytes(3, name) + _bytes(4, kind)


def write(path: Path, shapes: Mapping[str, tuple[int, ...]], fill: Fill) -> None:
    """Write an ONNX file. shapes: of a torch state dict, whose names in NUMBERED are kept."""
    parts: list[bytes] = []
    for kind, module, names in _layers(shapes):
        is_numbered = names[0] in NUMBERED
        inputs = ["input", "one", "zero"] if len(names) == 2 and kind == "BatchNormalization" else ["input"]
        for name in names:
            values = fill(name, shapes[name])
            stored = name if is_numbered or kind != "MatMul" else f"onnx::MatMul_{name}"
            parts.append(_bytes(5, _tensor(stored, values.T if kind == "MatMul" else values)))
            inputs.append(stored)
        parts.append(_bytes(1, _node(kind, f"/{_path(module)}/{kind}", inputs)))
    opset = _bytes(8, _bytes(1, "") + _varint(2 << 3) + _varint(17))
    path.write_bytes(_varint(1 << 3) + _varint(8) + _bytes(7, b"".join(parts)) + opset)


def _layers(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield kind, module and tensors of each node.

    A linear layer over a sequence is two nodes, MatMul and Add.
    """
    modules = {name: NUMBERED.get(name, name).rpartition(".")[0] for name in shapes}
    for module in dict.fromkeys(modules.values()):
        names = [name for name in shapes if modules[name] == module]
        weight, *others = names
        if names[-1].endswith("running_var"):
            yield "BatchNormalization", module, names
        elif len(shapes[weight]) == 2:
            yield "MatMul", module, [weight]
            for bias in others:
                yield "Add", module, [bias]
        else:
            yield "Conv" if len(shapes[weight]) > 2 else "LayerNormalization", module, names


def _path(module: str) -> str:
    """Return the scope of a module in the exporter's node names.

    A list item carries the name of its list: "head.layer1.0.conv1" -> "head/layer1/layer1.0/conv1". It stands
    inside the scope of the list only if the list is called (a Sequential). The tokenizer's `blocks` is not
    called: "blocks.0.mlp.2" -> "blocks.0/mlp/mlp.2".
    """
    parts: list[str] = []
    for part in module.split("."):
        named = f"{parts[-1]}.{part}" if part.isdigit() else part
        if part.isdigit() and parts[-1] == "blocks":
            parts.pop()
        parts.append(named)
    return "/".join(parts)
