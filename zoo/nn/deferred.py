"""Encoders that other packages provide. They run once per recording.

A model's tensors are checked and read when it is loaded. The package is imported, and its module built around
these tensors, when the first recording comes: importing transformers takes 1.9 s of one core and 105 MiB, and
vector-quantize-pytorch 0.9 s and 78 MiB. An import also keeps the other threads of the process from
running, so a server that is warmed up imports the packages of its models (`Family.encoder_packages`) before.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zoo.nn.narrow import NarrowLayer

Shape = tuple[int, ...]
_building = threading.Lock()  # accelerate changes nn.Module while it builds


class Deferred(nn.Module):
    """The tensors of a module of another package, under the names they have there; and, once it was used, the
    module itself."""

    def __init__(self, shapes: Mapping[str, Shape]):
        super().__init__()
        self._built: list[nn.Module] = []  # in a list: no submodule, because its tensors are already ours
        for name, shape in shapes.items():
            path, _, leaf = name.rpartition(".")
            owner = self._owner(path)
            if leaf == "weight" and len(shape) == 2:  # a layer or an embedding, which may keep bf16
                self.set_submodule(path, nn.Linear(*shape[::-1], bias=f"{path}.bias" in shapes))
            elif leaf not in owner._parameters:
                owner.register_parameter(leaf, nn.Parameter(torch.empty(shape)))

    def _owner(self, path: str) -> nn.Module:
        """Return the submodule at a path, which is made if it is missing."""
        owner: nn.Module = self
        for part in filter(None, path.split(".")):
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        return owner

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy: the tensors. The copy builds its own module around them."""
        return self.__dict__ | {"_built": []}

    def build(self) -> nn.Module:
        """Import the package and return a module whose `state_dict` has our names."""
        raise NotImplementedError

    @property
    def module(self) -> nn.Module:
        """The package's module around our tensors."""
        with _building:
            if not self._built:
                self._built.append(self._build())
        return self._built[0]

    def _build(self) -> nn.Module:
        from accelerate import init_empty_weights

        # Buffers are built with their values: some are constants that no checkpoint has.
        with init_empty_weights(include_buffers=False):
            module = self.build()
        tensors = self.state_dict()
        where = next(iter(tensors.values())).device
        narrow = ((path, ours) for path, ours in self.named_modules() if isinstance(ours, NarrowLayer))
        for path, ours in narrow:
            if isinstance(module.get_submodule(path), nn.Linear):
                module.set_submodule(path, ours)
            else:  # an embedding
                tensors[f"{path}.weight"] = ours.weight.to(ours.dtype)
        module.load_state_dict(tensors, assign=True)
        return module.to(where).eval().requires_grad_(False)


def scratch(num_values: int, like: Tensor) -> Tensor:
    """Return a tensor as large as an encoder's temporary results, for a memory plan on `meta`, which imports
    no package."""
    return torch.empty(num_values, dtype=torch.float32, device=like.device)
