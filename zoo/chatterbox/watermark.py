"""The original's inaudible watermark, by Resemble AI's own package. The option exists if the package is
installed."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

from zoo.nn.s3.sizes import RATE_HZ

PACKAGE, MODULE = "resemble-perth", "perth"
HINT = f"the watermark needs the package {PACKAGE}: pip install {PACKAGE}"


def is_installed() -> bool:
    return importlib.util.find_spec(MODULE) is not None


@cache
def _watermarker() -> Any:
    import perth

    return perth.PerthImplicitWatermarker()


def marked(samples: Tensor) -> Tensor:
    """Return samples [N] on the CPU with the watermark in them."""
    made = _watermarker().apply_watermark(samples.numpy(), sample_rate=RATE_HZ)
    return torch.as_tensor(made, dtype=samples.dtype)
