"""Strict loading: a module built on `meta`, a table of names, the published files.

A table maps each published name to ours: `{"talker.model.norm.weight": "norm.weight"}`. `"qkv.weight[1]"` is
the second part of a `Parted` tensor. Every tensor of the module must be in the table and every tensor of the
files too: nothing is guessed, nothing left over.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zoo.nn.linear import Parted
from zoo.nn.tensor_files import Header, TensorFile, contents, open_file

Table = Mapping[str, str]
Change = Callable[[str, Tensor], Tensor]  # a published name, and what the files hold under it
Shape = tuple[int, ...]
FLOATS = ("float32", "bfloat16", "float16")
MAX_PROBLEMS = 8  # that one error names
_PART = re.compile(r"(.+)\[(\d+)\]$")


class Expected(NamedTuple):
    shape: Shape
    dtypes: tuple[str, ...] = FLOATS


def published(module: nn.Module, table: Table) -> dict[str, Shape]:
    """The files' side of the table: published name -> shape. The module may be on `meta`."""
    return {name: expected.shape for name, expected in _expected(module, table).items()}


def load(
    module: nn.Module,
    table: Table,
    source: Path,
    device: torch.device,
    dtype: torch.dtype,
    skip: str | None = None,
    fp32: str | None = None,
    optional: frozenset[str] = frozenset(),
    change: Change | None = None,
) -> None:
    """Fill a module that was built on `meta`, one tensor at a time.

    Names, shapes and dtypes are checked before any value is read. Floats become `dtype`; integers stay what
    they are. Raises ValueError that names what is wrong.

    source: a directory, an index of shards, or one file (see `tensor_files`).
    skip: a submodule whose tensors are checked but not read; it stays on `meta`.
    fp32: a submodule that is float32 whatever `dtype` is.
    optional: published names, of what is skipped, that the files may lack.
    change: makes something else of a tensor, before it is rounded to `dtype`.
    """
    found = contents(source)
    expected = _expected(module, table)
    for name in optional - found.keys():
        del expected[name]
    check(expected, found, source)
    wanted = {theirs: ours for theirs, ours in table.items() if not _is_in(ours, skip)}
    _allocate(module, wanted, device, dtype, fp32)
    for path in dict.fromkeys(header.path for header in found.values()):
        inside = {theirs: ours for theirs, ours in wanted.items() if found[theirs].path == path}
        file = open_file(path)
        _fill(module, inside, file.read, path, change)
        del file  # before the next one is opened: what was read of it leaves memory with it


def load_file(
    module: nn.Module, table: Table, file: TensorFile, device: torch.device, dtype: torch.dtype
) -> None:
    """As `load`, from a file that is open already."""
    check(_expected(module, table), file.headers, file.path)
    _allocate(module, table, device, dtype)
    _fill(module, table, file.read, file.path)


def weight_normed(
    shapes: Mapping[str, Shape], is_weight_normed: Callable[[str], bool] = lambda _: True
) -> dict[str, Shape]:
    """Name -> shape, each convolution's `weight` replaced by the two that weight norm makes of it: `weight_g`
    (its size) and `weight_v`. is_weight_normed: of a convolution's name; others stay as they are."""
    split: dict[str, Shape] = {}
    for name, shape in shapes.items():
        if name.endswith(".weight") and len(shape) == 3 and is_weight_normed(name):
            split |= {f"{name}_g": (shape[0], 1, 1), f"{name}_v": shape}
        else:
            split[name] = shape
    return split


def load_weight_normed(
    module: nn.Module,
    table: Table,
    file: TensorFile,
    device: torch.device,
    beside: frozenset[str] = frozenset(),
    is_weight_normed: Callable[[str], bool] = lambda _: True,
) -> None:
    """As `load`, in fp32, from a file whose convolutions are weight-normed over all axes but the first, all
    of them or those that `is_weight_normed` says.

    Both ways to write that down are read: weight_g and weight_v, and the parametrizations of newer releases
    of PyTorch. beside: names in the file that are no weights of the module; the caller reads them.
    """
    names = {_older(name): name for name in file.headers if name not in beside}
    found = {older: file.headers[name] for older, name in names.items()}
    shapes = weight_normed(published(module, table), is_weight_normed)
    check({name: Expected(shape) for name, shape in shapes.items()}, found, file.path)

    def read(name: str) -> Tensor:
        if name in names:
            return file.read(names[name])
        size, direction = (file.read(names[f"{name}_{part}"]).float() for part in "gv")
        return direction * (size / direction.flatten(1).norm(dim=1)[:, None, None])

    _allocate(module, table, device, torch.float32)
    _fill(module, table, read, file.path)


def _older(name: str) -> str:
    """A weight-normed tensor's name from before it was called a parametrization."""
    for newer, older in (("original0", "weight_g"), ("original1", "weight_v")):
        name = name.replace(f"parametrizations.weight.{newer}", older)
    return name


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.data for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def _expected(module: nn.Module, table: Table) -> dict[str, Expected]:
    tensors = _tensors(module)
    missing = [name for name in tensors if not _is_covered(module, name, set(table.values()))]
    assert not missing, f"not in the table: {sorted(missing)}"
    expected = {}
    for theirs, ours in table.items():
        tensor = _view(module, tensors, ours)
        dtypes = FLOATS if tensor.is_floating_point() else (str(tensor.dtype).removeprefix("torch."),)
        expected[theirs] = Expected(tuple(tensor.shape), dtypes)
    return expected


def _is_covered(module: nn.Module, name: str, named: set[str]) -> bool:
    """Whether a table names one of our tensors: as a whole, or every part of it."""
    owner = module.get_submodule(name.rpartition(".")[0])
    if name in named or not isinstance(owner, Parted):
        return name in named
    return all(f"{name}[{i}]" in named for i in range(len(owner.parts)))


def _view(module: nn.Module, tensors: Mapping[str, Tensor], ours: str) -> Tensor:
    """The tensor, or the part of one, that an entry of a table means."""
    match = _PART.match(ours)
    if match is None:
        return tensors[ours]
    owner = module.get_submodule(match[1].rpartition(".")[0])
    assert isinstance(owner, Parted), f"{ours}: a {type(owner).__name__} has no parts"
    return tensors[match[1]].split(owner.parts)[int(match[2])]


def _is_in(name: str, submodule: str | None) -> bool:
    return submodule is not None and name.startswith(f"{submodule}.")


def _allocate(
    module: nn.Module, wanted: Table, device: torch.device, dtype: torch.dtype, fp32: str | None = None
) -> None:
    """Replace what is on `meta` by memory that is not yet filled."""
    names = {_PART.sub(r"\1", ours) for ours in wanted.values()}
    for name, tensor in _tensors(module).items():
        if name not in names:
            continue
        kept = tensor.dtype
        if tensor.is_floating_point():
            kept = torch.float32 if _is_in(name, fp32) else dtype
        _place(module, name, torch.empty(tensor.shape, dtype=kept, device=device))


def _place(module: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    else:
        owner._buffers[leaf] = value


def _fill(
    module: nn.Module, wanted: Table, read: Callable[[str], Tensor], path: Path, change: Change | None = None
) -> None:
    """Reads nothing for what is on `meta`. Raises ValueError for a tensor that is not finite."""
    tensors = _tensors(module)
    for theirs, ours in wanted.items():
        target = _view(module, tensors, ours)
        if target.is_meta:
            continue
        value = read(theirs)
        target.copy_(value if change is None else change(theirs, value))
        if not _is_finite(target):  # looked for in what was written, since that lies where the device is fast
            what = f"{theirs} holds NaN or infinity as {target.dtype}"
            raise ValueError(f"{path}: {what}; weights must be finite")


def _is_finite(tensor: Tensor) -> bool:
    """By the least and the greatest value, of which either is NaN where any value is: one pass, and unlike
    `isfinite` no tensors in between."""
    if tensor.numel() == 0:
        return True
    return bool(torch.stack(tensor.aminmax()).isfinite().all())


def check(expected: Mapping[str, Expected], found: Mapping[str, Header], where: Path) -> None:
    """Raises ValueError for a file (`where`) that lacks a tensor, has another, or one of another shape or
    dtype."""
    problems = [f"missing {name} {list(expected[name].shape)}" for name in expected if name not in found]
    problems += [f"unknown {name} {list(found[name].shape)}" for name in found if name not in expected]
    for name, (shape, dtypes) in expected.items():
        if name not in found:
            continue
        header = found[name]
        if header.shape != shape:
            problems.append(f"{name} has shape {list(header.shape)}, expected {list(shape)}")
        if header.dtype not in dtypes:
            problems.append(f"{name} is {header.dtype}, expected {' or '.join(dtypes)}")
    if problems:
        more = f" (and {len(problems) - MAX_PROBLEMS} more)" if len(problems) > MAX_PROBLEMS else ""
        named = "; ".join(problems[:MAX_PROBLEMS])
        raise ValueError(f"{where} does not hold the tensors its config promises: {named}{more}")
