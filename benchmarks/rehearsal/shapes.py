"""Load a family of any size without its weights: shapes, dtypes and devices, but no memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zoo
from zoo.checkpoint import loading, synthetic
from zoo.nn import frame_stack, whole_stack
from zoo.nn.block import PreNormBlock


def write(family: str, size: str, path: Path) -> Path:
    """Write the demo checkpoint of a size without values, a few megabytes on disk, unless it exists. Its shards are in
    bf16: a file in fp32 may be larger than the memory, and cannot be mapped then."""
    if not path.exists():
        with (
            mock.patch.object(synthetic, "write_tensors", write_holes),
            mock.patch.object(synthetic, "fill", _one_zero),
            mock.patch.object(Tensor, "to", _to),
        ):
            zoo.families()[family].write_demo(path, size, dtype=torch.bfloat16)
    return path


def write_holes(
    path: Path, shapes: Mapping[str, tuple[int, ...]], fill: Callable[..., Any], dtype: torch.dtype
) -> None:
    """Replace `synthetic.write_tensors`: write a file with holes instead of values."""
    header, end = {}, 0
    for name in sorted(shapes):
        start, end = end, end + math.prod(shapes[name]) * dtype.itemsize
        kind = synthetic.DTYPES[dtype]
        header[name] = {"dtype": kind, "shape": list(shapes[name]), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _one_zero(name: str, shape: tuple[int, ...], *args: Any, **kwargs: Any) -> np.ndarray:
    """Replace `synthetic.fill`: return one zero for all values, which pickles small."""
    return np.broadcast_to(np.zeros(1, np.float32), tuple(shape))


_plain_to = Tensor.to


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Replace Tensor.to: convert one value where it stands for all, so that 16 GB stay one number."""
    if tensor.numel() > 1 and not any(tensor.stride()):
        return _plain_to(tensor[(0,) * tensor.dim()], *args, **kwargs).expand(tensor.shape)
    return _plain_to(tensor, *args, **kwargs)


def _no_addresses(blocks: list[PreNormBlock]) -> Tensor:
    """Replace `whole_stack.addresses_of`, since these weights are nowhere."""
    shape = len(blocks), whole_stack.PARTS
    return torch.zeros(shape, dtype=torch.int64, device=blocks[0].norm.weight.device)


@contextmanager
def fake() -> Iterator[FakeTensorMode]:
    """Give tensors shapes and devices but no values, while the context is active."""
    from_numpy = torch.from_numpy
    with (
        FakeTensorMode(shape_env=_no_values(), allow_non_fake_inputs=True) as mode,
        mock.patch.object(
            torch, "from_numpy", lambda array: mode.from_tensor(from_numpy(array), static_shapes=True)
        ),
        mock.patch.object(Tensor, "numpy", _some_values),
        mock.patch.object(nn.Module, "_apply", _apply),
        mock.patch.object(frame_stack, "addresses_of", _no_addresses),
    ):
        yield mode


def _no_values() -> ShapeEnv:
    """Return a shape environment that raises an error when code asks for a value."""
    return ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)


def _some_values(tensor: Tensor) -> np.ndarray:
    """Return zeros of the same shape, whose values are never used."""
    return np.zeros(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Replace nn.Module._apply, which swaps the data of parameters. Fake parameters have none."""
    for owner in module.modules():
        for name, value in owner._parameters.items():
            if value is not None:
                owner._parameters[name] = nn.Parameter(function(value), requires_grad=False)
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = function(buffer)
    return module


class _FakeDevice(TorchDispatchMode):
    """A mode with a real host and a fake device."""

    def __init__(self, mode: FakeTensorMode):
        super().__init__()
        self.mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        is_fake = any(isinstance(leaf, FakeTensor) or _is_device(leaf) for leaf in leaves)
        with self.mode if is_fake else nullcontext():
            return func(*args, **(kwargs or {}))


def _is_device(leaf: Any) -> bool:
    return isinstance(leaf, torch.device) and leaf.type == "cuda"


def load(path: Path, mode: FakeTensorMode, dtype: str = "bfloat16") -> zoo.Family:
    """Return the family as zoo.load creates it on a GPU, with fake tensors. Runs within `fake` and `pretend`.

    Names, shapes and dtypes of the files are checked as usual. Weights are not read, but everything else in
    the files is."""
    with (
        unset_fake_temporarily(),
        _FakeDevice(mode),
        torch.inference_mode(False),  # in inference mode no parameter can be made from a fake tensor
        mock.patch.object(loading, "_fill", lambda *args: None),
    ):
        return zoo.load(path, device="cuda", dtype=dtype)
