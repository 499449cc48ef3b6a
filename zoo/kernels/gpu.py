"""Access to the GPU kernels, triton_attention.py and the others, each tested against the plain operator."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from zoo.kernels.operator import is_plain


def use_gpu(tensor: Tensor) -> bool:
    """Return whether to use GPU kernels for a tensor."""
    return tensor.device.type == "cuda" and not is_plain()


def of_gpu(name: str) -> ModuleType:
    """Import a module of GPU kernels. Raises ValueError without Triton, which CPU builds of torch lack."""
    try:
        return importlib.import_module(f"zoo.kernels.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("flashinfer"):
            raise
        raise ValueError(
            f"a GPU needs Triton, which torch {torch.__version__} does not include: pip install triton"
        ) from None


def on_gpu(module: str, function: str, *arguments: Any) -> Any:
    """Call a function of GPU kernels on the device of its first argument. Triton launches on the current
    device, which may be another one."""
    with torch.cuda.device_of(arguments[0]):
        return getattr(of_gpu(module), function)(*arguments)
