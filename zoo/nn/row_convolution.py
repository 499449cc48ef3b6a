"""A convolution over rows [B, N, C] in 16 bits, as the tensor cores of a GPU read them: our own kernel or cuDNN's.

cuDNN chooses its kernels by rules of thumb. One convolution of Higgs V3 over 8 rows of 75 frames took 42 ms on an
H200, because a kernel for grouped convolutions was chosen. So the ways are measured on the device before the first
request (`compile_cache.choices`).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from compile_cache import choices
from zoo import kernels
from zoo.kernels.operator import operator

DTYPES = (torch.bfloat16, torch.float16)
CUDNN = "cudnn"
TILES = {"triton": "usual", "triton, large tiles": "large"}  # ways of our own kernel -> the size of its tiles


def is_fit(x: Tensor) -> bool:
    """Return whether the operator convolves x. Elsewhere a compiler does as well with the plain code."""
    return x.device.type == "cuda" and x.dtype in DTYPES


def _empty_rows(x: Tensor, weight: Tensor, dilation: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] - (weight.shape[1] - 1) * dilation, weight.shape[0])


@operator("convolve_rows", gives=_empty_rows)
def convolve_rows(x: Tensor, weight: Tensor, dilation: int) -> Tensor:
    """x [B, N', C], weight [Cout, kernel, C], both contiguous -> [B, N' - (kernel - 1) dilation, Cout]."""
    if not (kernels.use_gpu(x) and x.dtype in DTYPES):
        return plain(x, weight, dilation)
    out_channels, kernel, channels = weight.shape
    rows = choices.at_most(x.shape[0] * (x.shape[1] - (kernel - 1) * dilation))
    sizes = f"{rows} x {channels} x {out_channels}, {kernel} taps {dilation} apart"
    key = f"convolve_rows {str(x.dtype).removeprefix('torch.')} {sizes}"
    known = {way: partial(computed, way, x, weight, dilation) for way in ways(x.device)}
    return computed(choices.fastest(key, known) or "triton", x, weight, dilation)


def ways(device: torch.device) -> tuple[str, ...]:
    """Return the ways that a GPU has."""
    if kernels.of_gpu("triton_conv").has_large_tiles(device):
        return (*TILES, CUDNN)
    return "triton", CUDNN


def plain(x: Tensor, weight: Tensor, dilation: int) -> Tensor:
    y = F.conv2d(x.mT[:, :, None], weight.mT[:, :, None], dilation=(1, dilation))
    return y[:, :, 0].mT.contiguous()  # copies nothing where the result is in rows already


def computed(way: str, x: Tensor, weight: Tensor, dilation: int) -> Tensor:
    """Convolve in one of `ways`, on a GPU."""
    if way == CUDNN:
        return plain(x, weight, dilation)
    return kernels.on_gpu("triton_conv", "convolve_rows", x, weight, dilation, TILES[way])
