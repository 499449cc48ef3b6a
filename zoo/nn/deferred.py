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

Shape = tuple[int, ...]
_building = threading.Lock()  # accelerate changes nn.Module while it builds


class Deferred(nn.Module):
    """The tensors of a module of another package, under the names they have there; and, once it was used, the
    module itself."""

    def __init__(self, shapes: Mapping[str, Shape]):
        super().__init__()
        self._built: list[nn.Module] = []  # in a list: no submodule, because its tensors are already ours
        for name, shape in shapes.items():
            *path, leaf = name.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(leaf, nn.Parameter(torch.empty(shape)))

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy takes over: the tensors. It builds a module of its own around them."""
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
        module.load_state_dict(tensors, assign=True)
        return module.to(next(iter(tensors.values())).device).eval().requires_grad_(False)


def scratch(num_values: int, like: Tensor) -> Tensor:
    """Return what an encoder needs for temporary results, for a memory plan on `meta`, which imports
    nothing."""
    return torch.empty(num_values, dtype=torch.float32, device=like.device)
