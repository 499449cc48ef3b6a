"""Strict loading: a module built on `meta`, a table of names, the published files.

A table maps each published name to ours: `{"talker.model.norm.weight": "norm.weight"}`. `"qkv.weight[1]"` is the second part of a
`FusedLinear`. Every tensor of the module must be in the table and every tensor of the files too: nothing is guessed, nothing left over.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

Table = Mapping[str, str]
_PART = re.compile(r"(.+)\[(\d+)\]$")


def read_json(path: Path) -> dict:
    """Raises ValueError with the path if the file is absent or is not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value


def published(module: nn.Module, table: Table) -> dict[str, tuple[int, ...]]:
    """The files' side of the table: published name -> shape. The module may be on `meta`."""
    tensors = _tensors(module)
    shapes, covered = {}, set()
    for theirs, ours in table.items():
        name, part = _split(ours)
        shape = tuple(tensors[name].shape)
        if part is not None:
            shape = (_parts(module, name)[part], *shape[1:])
        shapes[theirs] = shape
        covered.add(name)
    assert covered == set(tensors), f"not in the table: {sorted(set(tensors) - covered)}"
    return shapes


def load(module: nn.Module, table: Table, directory: Path, device: torch.device, dtype: torch.dtype, skip: str | None = None) -> None:
    """Fill a module that was built on `meta`. Names and shapes are checked before a byte is read.

    skip: a submodule whose tensors are checked but not read (it stays on `meta`). Raises ValueError that names what is wrong.
    """
    files = _files(directory)
    shapes = published(module, table)
    _check(shapes, {name: tuple(handle.get_slice(name).get_shape()) for name, handle in files.items()}, directory)
    tensors = _tensors(module)
    wanted = {name for name in tensors if skip is None or not name.startswith(skip + ".")}
    for name in wanted:
        _place(module, name, torch.empty(tensors[name].shape, dtype=dtype, device=device))
    tensors = _tensors(module)
    for theirs, ours in table.items():
        name, part = _split(ours)
        if name not in wanted:
            continue
        target = tensors[name]
        if part is not None:
            target = target.split(_parts(module, name))[part]
        target.copy_(files[theirs].get_tensor(theirs))


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.data for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def _split(ours: str) -> tuple[str, int | None]:
    match = _PART.match(ours)
    return (match[1], int(match[2])) if match else (ours, None)


def _parts(module: nn.Module, name: str) -> tuple[int, ...]:
    return module.get_submodule(name.rpartition(".")[0]).parts  # type: ignore[return-value]


def _place(module: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    else:
        owner._buffers[leaf] = value


def _files(directory: Path) -> dict:
    """Tensor name -> open file, from model.safetensors or its shards."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(read_json(index)["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    handles = {}
    for path in (directory / name for name in names):
        if not path.exists():
            raise ValueError(f"{path} does not exist")
        try:
            handle = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{path} is not a whole safetensors file ({error}): it may have been cut short; copy it again") from None
        handles.update(dict.fromkeys(handle.keys(), handle))
    return handles


def _check(expected: dict[str, tuple], found: dict[str, tuple], directory: Path) -> None:
    problems = [f"missing {name} {list(expected[name])}" for name in expected if name not in found]
    problems += [f"unknown {name} {list(found[name])}" for name in found if name not in expected]
    problems += [
        f"{name} has shape {list(found[name])}, expected {list(expected[name])}"
        for name in expected
        if name in found and found[name] != expected[name]
    ]
    if problems:
        more = f" (and {len(problems) - 8} more)" if len(problems) > 8 else ""
        raise ValueError(f"{directory} does not hold the tensors its config promises: {'; '.join(problems[:8])}{more}")
