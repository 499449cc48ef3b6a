"""Strict loading: a module built on `meta`, a table of names, the published files.

A table maps each published name to ours: `{"talker.model.norm.weight": "norm.weight"}`. `"qkv.weight[1]"` is the second part of a
`FusedLinear`. Every tensor of the module must be in the table and every tensor of the files too: nothing is guessed, nothing left over.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from pickle import UnpicklingError

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


def names(directory: Path) -> set[str]:
    """Of all tensors in the files. Raises ValueError."""
    return set(_files(directory))


def load(
    module: nn.Module,
    table: Table,
    directory: Path,
    device: torch.device,
    dtype: torch.dtype,
    skip: str | None = None,
    fp32: str | None = None,
    optional: frozenset[str] = frozenset(),
) -> None:
    """Fill a module that was built on `meta`, from model.safetensors, its shards, or pytorch_model.bin where there is neither. Names and
    shapes are checked before a byte is read.

    skip: a submodule whose tensors are checked but not read (it stays on `meta`). fp32: a submodule that is float32 whatever `dtype` is.
    optional: published names that the files may lack. Raises ValueError that names what is wrong.
    """
    found = _files(directory)
    shapes = published(module, table)
    expected = {name: shape for name, shape in shapes.items() if name not in optional or name in found}
    _check(expected, {name: shape for name, (shape, _) in found.items()}, directory)
    _fill(module, table, lambda name: found[name][1](), device, dtype, skip, fp32)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of one file: safetensors, or a PyTorch pickle of tensors, by themselves or as its `state_dict`. Raises ValueError."""
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    if path.suffix == ".safetensors":
        handle = _open(path)
        return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (no mapping)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{path} is not a whole PyTorch file ({reason}): it may have been cut short; copy it again") from None
    found = found.get("state_dict", found) if isinstance(found, dict) else None
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"{path} does not hold tensors by name")
    return found


def weight_normed(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Name -> shape, each convolution's `weight` replaced by the two that weight norm makes of it: `weight_g`, its size, and `weight_v`."""
    split: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if name.endswith(".weight") and len(shape) == 3:
            split |= {f"{name}_g": (shape[0], 1, 1), f"{name}_v": shape}
        else:
            split[name] = shape
    return split


def load_weight_normed(module: nn.Module, table: Table, tensors: Mapping[str, Tensor], path: Path, device: torch.device) -> None:
    """As `load`, in fp32, from tensors that were read from `path`, whose convolutions are weight-normed over all axes but the first.

    Both ways to write that down are read: weight_g and weight_v, and the parametrizations of newer releases of PyTorch.
    """
    newer = (("parametrizations.weight.original0", "weight_g"), ("parametrizations.weight.original1", "weight_v"))
    found = {}
    for name, value in tensors.items():
        for theirs, ours in newer:
            name = name.replace(theirs, ours)
        found[name] = value
    _check(weight_normed(published(module, table)), {name: tuple(value.shape) for name, value in found.items()}, path)

    def fold(name: str) -> Tensor:
        if name in found:
            return found[name]
        size, direction = found[f"{name}_g"].float(), found[f"{name}_v"].float()
        return direction * (size / direction.flatten(1).norm(dim=1)[:, None, None])

    _fill(module, table, fold, device, torch.float32)


def _fill(
    module: nn.Module,
    table: Table,
    get: Callable[[str], Tensor],
    device: torch.device,
    dtype: torch.dtype,
    skip: str | None = None,
    fp32: str | None = None,
) -> None:
    tensors = _tensors(module)
    wanted = {name for name in tensors if skip is None or not name.startswith(skip + ".")}
    for name in wanted:
        kept = torch.float32 if fp32 is not None and name.startswith(fp32 + ".") else dtype
        _place(module, name, torch.empty(tensors[name].shape, dtype=kept, device=device))
    tensors = _tensors(module)
    for theirs, ours in table.items():
        name, part = _split(ours)
        if name not in wanted:
            continue
        target = tensors[name]
        if part is not None:
            target = target.split(_parts(module, name))[part]
        target.copy_(get(theirs))


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


def _files(directory: Path) -> dict[str, tuple[tuple[int, ...], Callable[[], Tensor]]]:
    """Tensor name -> its shape, and what reads it."""
    index, pickle = directory / "model.safetensors.index.json", directory / "pytorch_model.bin"
    if pickle.exists() and not index.exists() and not (directory / "model.safetensors").exists():
        return {name: (tuple(tensor.shape), partial(Tensor.detach, tensor)) for name, tensor in read_tensors(pickle).items()}
    if index.exists():
        names = sorted(set(read_json(index)["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    found: dict[str, tuple[tuple[int, ...], Callable[[], Tensor]]] = {}
    for path in (directory / name for name in names):
        if not path.exists():
            raise ValueError(f"{path} does not exist")
        handle = _open(path)
        for name in handle.keys():  # noqa: SIM118 (no mapping)
            found[name] = (tuple(handle.get_slice(name).get_shape()), partial(handle.get_tensor, name))
    return found


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}): it may have been cut short; copy it again") from None


def _check(expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]], where: Path) -> None:
    problems = [f"missing {name} {list(expected[name])}" for name in expected if name not in found]
    problems += [f"unknown {name} {list(found[name])}" for name in found if name not in expected]
    problems += [
        f"{name} has shape {list(found[name])}, expected {list(expected[name])}"
        for name in expected
        if name in found and found[name] != expected[name]
    ]
    if problems:
        more = f" (and {len(problems) - 8} more)" if len(problems) > 8 else ""
        raise ValueError(f"{where} does not hold the tensors its config promises: {'; '.join(problems[:8])}{more}")
