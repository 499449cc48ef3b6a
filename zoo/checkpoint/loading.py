"""Strict loading of published files into a module that was built on `meta`.

A table maps each published name to ours: `{"talker.model.norm.weight": "norm.weight"}`. `"qkv.weight[1]"` is
the second part of a `Parted` tensor. The table must contain every tensor of the module and every tensor of
the files: nothing is guessed, nothing is left over.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zoo.checkpoint.placement import device_of
from zoo.checkpoint.tensor_files import Header, TensorFile, contents, open_file
from zoo.nn.linear import Parted
from zoo.nn.narrow import Layer, NarrowLayer, narrow

Table = Mapping[str, str]
Change = Callable[[str, Tensor], Tensor]  # a published name and its tensor -> the tensor to load
Shape = tuple[int, ...]
FLOATS = ("float32", "bfloat16", "float16")
MAX_PROBLEMS = 8  # the most problems that one error lists
LEAST_NUMBERS = 128 << 10  # of a weight that may stay in bf16
PORTION_BYTES = 256 << 20  # that are mapped at once
_keeps_bf16 = ContextVar("keeps_bf16", default=False)
_PART = re.compile(r"(.+)\[(\d+)\]$")


class Expected(NamedTuple):
    shape: Shape
    dtypes: tuple[str, ...] = FLOATS


def published(module: nn.Module, table: Table) -> dict[str, Shape]:
    """Return the tensors that the files must have: published name -> shape. The module may be on `meta`."""
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

    Names, shapes and dtypes are checked before any value is read. Floats become `dtype`; integers keep their
    dtype. Raises ValueError that names the fault.

    source: a directory, an index of shards, or one file (see `tensor_files`).
    skip: a submodule whose tensors are checked but not read; it stays on `meta`.
    fp32: a submodule that is float32 whatever `dtype` is.
    optional: published names of skipped tensors that the files may lack.
    change: converts a tensor before it is rounded to `dtype`.
    """
    found = contents(source)
    expected = _expected(module, table)
    for name in optional - found.keys():
        del expected[name]
    check(expected, found, source)
    wanted = {theirs: ours for theirs, ours in table.items() if not _is_in(ours, skip)}
    _keep_bf16(module, wanted, found, dtype)
    _allocate(module, wanted, device, dtype, fp32)
    for path, inside in _portions(wanted, found):
        file = open_file(path)
        _fill(module, inside, file.read, path, change)
        # Unmap it before it or the next file is opened; the pages that were read leave memory with it.
        del file


def load_file(
    module: nn.Module,
    table: Table,
    file: TensorFile,
    device: torch.device,
    dtype: torch.dtype,
    skip: str | None = None,
) -> None:
    """Do the same as `load`, from an open file."""
    check(_expected(module, table), file.headers, file.path)
    wanted = {theirs: ours for theirs, ours in table.items() if not _is_in(ours, skip)}
    _keep_bf16(module, wanted, file.headers, dtype)
    _allocate(module, wanted, device, dtype)
    _fill(module, wanted, file.read, file.path)


def fill(
    module: nn.Module, table: Table, read: Callable[[str], Tensor], device: torch.device, path: Path
) -> None:
    """Fill a module that was built on `meta`, in fp32, with tensors that were checked before. path: for
    messages. Raises ValueError for a tensor that is not finite."""
    _allocate(module, table, device, torch.float32)
    _fill(module, table, read, path)


def weight_normed(
    shapes: Mapping[str, Shape], is_weight_normed: Callable[[str], bool] = lambda _: True
) -> dict[str, Shape]:
    """Return name -> shape with each convolution's `weight` replaced by the two tensors of weight norm:
    `weight_g` (its norm) and `weight_v` (its direction). is_weight_normed: tells from its name whether a
    convolution is weight-normed."""
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
    """Do the same as `load`, in fp32, from a file whose convolutions are weight-normed over all axes but the
    first. `is_weight_normed` tells which convolutions are.

    Reads both notations: weight_g and weight_v, and the parametrizations of newer releases of PyTorch.
    beside: names in the file that are not weights of the module; the caller reads them.
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
    """Return a weight-normed tensor's name in the older notation."""
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
    """Return whether a table names one of our tensors: as a whole, or every part of it."""
    owner = module.get_submodule(name.rpartition(".")[0])
    if name in named or not isinstance(owner, Parted):
        return name in named
    return all(f"{name}[{i}]" in named for i in range(len(owner.parts)))


def _view(module: nn.Module, tensors: Mapping[str, Tensor], ours: str) -> Tensor:
    """Return the tensor, or the part of a tensor, that `ours` names."""
    match = _PART.match(ours)
    if match is None:
        return tensors[ours]
    owner = module.get_submodule(match[1].rpartition(".")[0])
    assert isinstance(owner, Parted), f"{ours}: a {type(owner).__name__} has no parts"
    return tensors[match[1]].split(owner.parts)[int(match[2])]


def _is_in(name: str, submodule: str | None) -> bool:
    return submodule is not None and name.startswith(f"{submodule}.")


@contextmanager
def bf16_kept() -> Iterator[None]:
    """In this context, large layers that are loaded in float32 keep weights that are bf16 in the files as
    they are (see `nn.narrow`). A model needs half the memory then, and is slow until `nn.pack.pack`."""
    token = _keeps_bf16.set(True)
    try:
        yield
    finally:
        _keeps_bf16.reset(token)


def _keep_bf16(module: nn.Module, wanted: Table, found: Mapping[str, Header], dtype: torch.dtype) -> None:
    """Replace the layers that may keep bf16 in this context, if the model is loaded in fp32."""
    if dtype != torch.float32 or not _keeps_bf16.get():
        return
    dtypes: dict[str, set[str]] = {}
    for theirs, ours in wanted.items():
        dtypes.setdefault(_PART.sub(r"\1", ours), set()).add(found[theirs].dtype)
    for path, owner in tuple(module.named_modules()):
        for name, layer in owner.named_children():
            is_bf16 = dtypes.get(f"{path}.{name}.weight".lstrip(".")) == {"bfloat16"}
            if is_bf16 and isinstance(layer, Layer) and layer.weight.numel() >= LEAST_NUMBERS:
                setattr(owner, name, narrow(layer))


def _portions(wanted: Table, found: Mapping[str, Header]) -> Iterator[tuple[Path, Table]]:
    """Yield the tables of each file, cut after about PORTION_BYTES."""
    for path in dict.fromkeys(header.path for header in found.values()):
        portion: dict[str, str] = {}
        size = 0
        for theirs, ours in wanted.items():
            if found[theirs].path != path:
                continue
            portion[theirs] = ours
            size += found[theirs].num_bytes
            if size >= PORTION_BYTES:
                yield path, portion
                portion, size = {}, 0
        yield path, portion


def _allocate(
    module: nn.Module, wanted: Table, device: torch.device, dtype: torch.dtype, fp32: str | None = None
) -> None:
    """Replace tensors on `meta` by uninitialized memory."""
    names = {_PART.sub(r"\1", ours) for ours in wanted.values()}
    for name, tensor in _tensors(module).items():
        if name not in names:
            continue
        kept = tensor.dtype
        if tensor.is_floating_point() and not _is_bf16_kept(module, name):
            kept = torch.float32 if _is_in(name, fp32) else dtype
        where = device_of(module, name, device)
        _place(module, name, torch.empty(tensor.shape, dtype=kept, device=where))


def _is_bf16_kept(module: nn.Module, name: str) -> bool:
    """Return whether one of our tensors is the weight of a layer that keeps bf16."""
    path, _, leaf = name.rpartition(".")
    return leaf == "weight" and isinstance(module.get_submodule(path), NarrowLayer)


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
    """Fill the tensors that are not on `meta`. Raises ValueError for a tensor that is not finite."""
    tensors = _tensors(module)
    for theirs, ours in wanted.items():
        target = _view(module, tensors, ours)
        if target.is_meta:
            continue
        value = read(theirs) if change is None else change(theirs, read(theirs))
        is_exact = value.dtype == target.dtype or not _is_bf16_kept(module, _PART.sub(r"\1", ours))
        assert is_exact, f"{ours} is kept in {target.dtype}, but was changed to {value.dtype}"
        target.copy_(value)
        # check the written tensor, because it is on the device, where this is fast
        if not _is_finite(target):
            what = f"{theirs} holds NaN or infinity as {target.dtype}"
            raise ValueError(f"{path}: {what}; weights must be finite")


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite. The minimum and the maximum are NaN if any value is; finding them
    takes one pass and, unlike `isfinite`, no temporary tensors."""
    if tensor.numel() == 0:
        return True
    return bool(torch.stack(tensor.aminmax()).isfinite().all())


def check(expected: Mapping[str, Expected], found: Mapping[str, Header], where: Path) -> None:
    """Raise ValueError if `where` lacks a tensor, has an unknown one, or one of another shape or dtype."""
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
