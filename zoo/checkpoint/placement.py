"""Layers that lie on another device than the one they run on: on the host, or on another GPU.

    --device-map auto ─ names of layers -> devices ─ `placing`: weights are read to these devices ─ `dispatch`: accelerate's hooks
                                                                                                       copy a layer in, and drop the copy

Everything runs on the model's device, which also holds the KV cache, the states and the codec. So the results
are those of a model that lies there as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Place:
    """A layer and its device. kind: its class, because other modules of a family may have layers of equal
    names."""

    name: str  # in the family: "talker.layers.3"
    kind: type[nn.Module]
    device: torch.device

    def is_of(self, path: str, module: nn.Module) -> bool:
        """Return whether a module at `path` of a part of the family is this layer."""
        return f".{self.name}".endswith(f".{path}") and type(module) is self.kind


_places = ContextVar[tuple[Place, ...]]("places", default=())


@contextmanager
def placing(family: nn.Module, devices: Mapping[str, str]) -> Iterator[None]:
    """Read the layers of the family, which is on `meta`, to these devices. Raises ValueError for an unknown
    layer or device."""
    modules = dict(family.named_modules())
    for name, device in devices.items():
        if name not in modules:
            known = ", ".join(sorted(modules, key=len)[1:8])
            raise ValueError(
                f"the device map names {name!r}, and the model has no such layer; it has {known}, ..."
            )
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"the device map puts {name} on {device!r}: {reason}") from None
    places = tuple(Place(name, type(modules[name]), torch.device(where)) for name, where in devices.items())
    token = _places.set(places)
    try:
        yield
    finally:
        _places.reset(token)


def device_of(module: nn.Module, tensor: str, device: torch.device) -> torch.device:
    """Return where to put a tensor of a module that is read for `device`."""
    places, path = _places.get(), tensor
    while places and (path := path.rpartition(".")[0]):
        for place in places:
            if place.is_of(path, module.get_submodule(path)):
                return place.device
    return device


def dispatch(family: nn.Module, device: torch.device, names: Mapping[str, str]) -> None:
    """Make these layers run on `device`. The hooks keep their tensors; between runs, the layer's own are on
    `meta`."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for name in names:
        layer = family.get_submodule(name)
        kept = {key: tensor.data for key, tensor in (*layer.named_parameters(), *layer.named_buffers())}
        hook = AlignDevicesHook(
            execution_device=device,
            offload=True,
            offload_buffers=True,
            place_submodules=True,
            weights_map=kept,
        )
        add_hook_to_module(layer, hook)
