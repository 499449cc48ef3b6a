"""Random tensors for demo checkpoints, and files of them. A tensor's values depend only on (salt, published
name, shape) and use integer arithmetic, so they are the same on every machine."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

# pattern of the published name, mean, standard deviation, and whether the deviation is divided by the root of
# the fan-in (all axes but the first); the first rule that matches counts. A family's values are chosen to catch
# errors: none is one, zero, or so small that a missing branch of the network would go unnoticed.
Rule = tuple[str, float, float, bool]
Fill = Callable[[str, tuple[int, ...]], np.ndarray]  # name and shape -> values
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
Config = TypeVar("Config")
_CHUNK = 1 << 16  # stays in the cache
_LANES = np.uint64(0x0000FFFF0000FFFF)


def fill(
    name: str, shape: Iterable[int], salt: str, rules: Sequence[Rule], fan_in: int | None = None
) -> np.ndarray:
    """Return random float32 values by the first rule that matches. Raises ValueError for a name without a
    rule.

    fan_in: how many products are summed into one output, if that is not all axes but the first. A value is
    the sum of four 16-bit words of a PCG64 stream: bell-shaped, bounded by 3.5 deviations, and exact up to
    the last two operations.
    """
    shape = tuple(shape)
    rule = next((rule for rule in rules if re.search(rule[0], name)), None)
    if rule is None:
        raise ValueError(f"no rule says how to fill {name!r}")
    _, middle, deviation, scaled = rule
    if scaled:
        deviation /= math.sqrt(fan_in or math.prod(shape[1:]))
    stream = np.random.PCG64(
        int.from_bytes(hashlib.sha256(f"{salt}:{name}".encode()).digest()[:16], "little")
    )
    step = np.float32(deviation * math.sqrt(3) / 65536)  # the sum's deviation is 65536 / sqrt(3)
    values = np.empty(math.prod(shape), np.float32)
    for start in range(0, values.size, _CHUNK):
        chunk = values[start : start + _CHUNK]
        words = stream.random_raw(chunk.size)
        pairs = (words & _LANES) + (words >> np.uint64(16) & _LANES)  # two sums of two in each word
        total = ((pairs >> np.uint64(32)) + (pairs & np.uint64(0xFFFFFFFF))).astype(np.float32)
        np.multiply(total - np.float32(131070), step, out=chunk)  # 131070 is the sum's mean
        chunk += np.float32(middle)
    return values.reshape(shape)


def begin(directory: str | Path, size: str, configs: Mapping[str, Config]) -> tuple[Path, Config]:
    """Return the path of a new checkpoint and a copy of the config for `size`, which may be changed. Raises
    ValueError for an unknown size and for a directory that is not empty."""
    directory = Path(directory)
    if size not in configs:
        raise ValueError(f"size {size!r} is not known; sizes: {', '.join(configs)}")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} exists and is not an empty directory; name a new one")
    return directory, copy.deepcopy(configs[size])


def check_dtype(dtype: torch.dtype) -> None:
    """Raise ValueError for a dtype that `write_tensors` cannot write."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype} cannot be written; possible: {', '.join(map(str, DTYPES))}")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tensors(path: Path, shapes: Mapping[str, tuple[int, ...]], fill: Fill, dtype: torch.dtype) -> None:
    """Write a safetensors file, making one tensor at a time: the header's length, a JSON header, then the
    tensors' bytes in the header's order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(shapes):
        start, end = end, end + math.prod(shapes[name]) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shapes[name]), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in sorted(shapes):
            values = torch.from_numpy(fill(name, shapes[name])).to(dtype)
            values.reshape(-1).view(torch.uint8).numpy().tofile(file)


def write_pickle(path: Path, shapes: Mapping[str, tuple[int, ...]], fill: Fill) -> None:
    """Write a PyTorch file of tensors in fp32."""
    torch.save({name: torch.from_numpy(fill(name, shape)) for name, shape in shapes.items()}, path)


def write_contents(directory: Path, contents: Mapping[str, Mapping[str, Any] | str]) -> None:
    """Write files by their names, which may have folders: texts as they are, and objects as JSON."""
    for name, content in contents.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        else:
            write_json(path, content)
