"""Read the tensors of published files: safetensors, PyTorch pickles and ONNX; a single file, or shards with
an index.

Names, shapes and dtypes are read first. Values are read later, one tensor at a time, from a file that stays
mapped into memory as long as its `TensorFile` lives.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zoo.checkpoint import onnx_file
from zoo.checkpoint.json_files import read_json

INDEX = ".index.json"
MAIN_FILES = (  # of a directory; the first one that exists is read
    f"model.safetensors{INDEX}",
    "model.safetensors",
    f"pytorch_model.bin{INDEX}",
    "pytorch_model.bin",
)
# safetensors' names -> torch's; a dtype that is not listed keeps its name, such as F8_E4M3.
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
PICKLE_KEYS = ("state_dict", "module")  # under which training tools put the tensors
ZIP = b"PK\x03\x04"  # the first bytes of a pickle of PyTorch 1.6 or newer; older ones cannot be mapped


class Header(NamedTuple):
    """A tensor's description in a file, without its values."""

    shape: tuple[int, ...]
    dtype: str  # torch's name for it, if it has one
    path: Path

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype, torch.uint8).itemsize


class TensorFile(NamedTuple):
    path: Path
    headers: dict[str, Header]
    read: Callable[[str], Tensor]


def contents(source: Path) -> dict[str, Header]:
    """Return the headers of all tensors of a directory's main file, of an index's shards, or of one file.
    Raises ValueError."""
    if source.is_dir():
        source = _main_file(source)
    if not source.name.endswith(INDEX):
        return open_file(source).headers
    found: dict[str, Header] = {}
    for shard, names in _shards(source).items():
        headers = open_file(source.parent / shard).headers
        for name in headers:
            if name in found:
                first = found[name].path.name
                raise ValueError(f"{source}: {name} is in two shards, {first} and {shard}; it must be in one")
        for name in names:
            if name not in headers:
                raise ValueError(f"{source} puts {name} into {shard}, which lacks it")
        found |= headers
    return found


def open_file(path: Path) -> TensorFile:
    """Map one file and read its headers. Raises ValueError."""
    if path.suffix not in _OPENERS:
        raise ValueError(f"{path} has no known format; known: {', '.join(_OPENERS)}")
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    return _OPENERS[path.suffix](path)


def read_pickle(path: Path) -> Any:
    """Read tensors, numbers and strings in dicts and lists, on the CPU, mapped if possible.

    Raises ValueError for a pickle with other objects and does not load them, because unpickling an object
    runs its code.
    """
    try:
        with path.open("rb") as file:
            is_zip = file.read(len(ZIP)) == ZIP
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # a pickle is a program, so a damaged one can raise anything
        beside = re.search(r"GLOBAL (\S+)|TorchScript archives", str(error))
        if beside:
            what = beside[1] or beside[0]
            raise ValueError(f"{path} holds more than tensors ({what}); only tensors are read") from None
        reason = re.split(r"\. |\n", str(error))[0] or type(error).__name__
        advice = "it may have been cut short; copy it again"
        raise ValueError(f"{path} is not a whole PyTorch file ({reason}): {advice}") from None


def _open_safetensors(path: Path) -> TensorFile:
    try:
        file = safe_open(path, framework="pt")
    except SafetensorError as error:
        advice = "it may have been cut short; copy it again"
        raise ValueError(f"{path} is not a whole safetensors file ({error}): {advice}") from None
    headers = {}
    for name in file.keys():  # noqa: SIM118 (no mapping)
        entry = file.get_slice(name)
        dtype = entry.get_dtype()
        headers[name] = Header(tuple(entry.get_shape()), DTYPES.get(dtype, dtype), path)
    return TensorFile(path, headers, file.get_tensor)


def _open_pickle(path: Path) -> TensorFile:
    """Open a pickle of tensors by name, at its root or under one of PICKLE_KEYS."""
    return of_tensors(path, read_pickle(path))


def of_tensors(path: Path, tensors: Any) -> TensorFile:
    """Return the tensors by name that a pickle holds at its root or under one of PICKLE_KEYS. Raises ValueError."""
    if isinstance(tensors, dict):
        tensors = next((tensors[key] for key in PICKLE_KEYS if key in tensors), tensors)
    if not isinstance(tensors, dict):
        raise ValueError(f"{path} does not hold tensors by name, but a {type(tensors).__name__}")
    headers = {}
    for name, value in tensors.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ValueError(f"{path} does not hold tensors by name: {name!r} is a {type(value).__name__}")
        headers[name] = Header(tuple(value.shape), str(value.dtype).removeprefix("torch."), path)
    return TensorFile(path, headers, lambda name: tensors[name].detach())


def _open_onnx(path: Path) -> TensorFile:
    return _of_initializers(path, onnx_file.initializers(path))


def open_onnx_parameters(path: Path, kept: frozenset[str] = frozenset()) -> TensorFile:
    """Open an ONNX file whose weights are named after the nodes that read them (see `onnx_file.parameters`).
    Raises ValueError."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    return _of_initializers(path, onnx_file.parameters(path, kept))


def _of_initializers(path: Path, tensors: dict[str, onnx_file.Initializer]) -> TensorFile:
    headers = {name: Header(tensor.shape, tensor.dtype, path) for name, tensor in tensors.items()}

    def read(name: str) -> Tensor:
        try:
            return tensors[name].read()
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path}: {error}") from None

    return TensorFile(path, headers, read)


_OPENERS: dict[str, Callable[[Path], TensorFile]] = {
    ".safetensors": _open_safetensors,
    ".pt": _open_pickle,
    ".pth": _open_pickle,
    ".bin": _open_pickle,
    ".ckpt": _open_pickle,
    ".onnx": _open_onnx,
}


def _main_file(directory: Path) -> Path:
    for name in MAIN_FILES:
        if (directory / name).exists():
            return directory / name
    expected = directory / "model.safetensors"
    raise ValueError(f"{expected} does not exist, nor does any of: {', '.join(MAIN_FILES)}")


def _shards(index: Path) -> dict[str, list[str]]:
    """Return file name -> the tensors that the index assigns to the file. Raises ValueError."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} has no weight_map; it needs an object of tensor names and file names")
    shards: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise ValueError(f"{index} puts {name} into {shard!r}; it needs a file name")
        # Check the name, not the resolved path: a cache links to files elsewhere.
        if Path(shard).is_absolute() or ".." in Path(shard).parts:
            raise ValueError(f"{index} puts {name} into {shard}, which is outside its directory")
        shards.setdefault(shard, []).append(name)
    return shards
