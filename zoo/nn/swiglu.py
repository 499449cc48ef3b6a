"""The gated half of an MLP: silu(x Wg^T) * (x Wu^T). On a GPU it is either one kernel that never stores gate
and up, or cuBLAS's product and a second launch. Which is faster depends on the device, so it is measured
there before the first request (`compile_cache.choices`). With FlashInfer installed, its second launch is a
third way. Inductor does none of this: its templates of a product can fuse what follows, but not two halves of
the result, and they would be enabled for all other products too.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

from compile_cache import choices
from zoo import kernels
from zoo.kernels.operator import operator
from zoo.nn.linear import FusedLinear, SwiGLU

DTYPES = (torch.bfloat16, torch.float16)
WAYS = ("fused", "apart")  # one launch, or two
FLASHINFER = "apart, by flashinfer"  # two, of which the second is FlashInfer's


class FusedSwiGLU(SwiGLU):
    """A `SwiGLU` for MLPs of many rows. On a GPU in half precision its gated half is an operator. Elsewhere
    the compiler makes faster code of the plain form. With weights in fp8 it does, too, because the same kernel
    rounds the result for the next product."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cuda" and x.dtype in DTYPES and isinstance(self.gate_up, FusedLinear):
            return self.down(torch.ops.zoo.swiglu_linear.default(x, self.gate_up.weight))
        return super().forward(x)


def _empty_gated(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2))


@operator("swiglu_linear", gives=_empty_gated)
def swiglu_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., D], weight [2 N, D] (gate, then up) -> silu(x Wg^T) * (x Wu^T) [..., N]."""
    if not (kernels.use_gpu(x) and x.dtype in DTYPES):
        return plain(x, weight)
    rows = x.numel() // x.shape[-1]
    sizes = f"{choices.at_most(rows)} x {weight.shape[0] // 2} x {weight.shape[1]}"
    key = f"swiglu_linear {str(x.dtype).removeprefix('torch.')} {sizes}"
    way = choices.fastest(key, {name: partial(computed, name, x, weight) for name in ways()})
    return plain(x, weight) if way is None else computed(way, x, weight)


def ways() -> tuple[str, ...]:
    """Return the ways that this machine has. FlashInfer's kernel is built when it is first measured."""
    if find_spec("flashinfer") is None:
        return WAYS
    if choices.is_measuring() and kernels.of_gpu("flashinfer_kernels").gate_failure() is not None:
        return WAYS
    return (*WAYS, FLASHINFER)


def plain(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = F.linear(x, weight).chunk(2, -1)
    return F.silu(gate) * up


def computed(way: str, x: Tensor, weight: Tensor) -> Tensor:
    """Compute the gated half in one of `ways`, on a GPU."""
    if way == "fused":
        return kernels.on_gpu("triton_swiglu", "swiglu_linear", x, weight)
    if way == FLASHINFER:
        return kernels.on_gpu("flashinfer_kernels", "gate", F.linear(x, weight))
    return kernels.on_gpu("triton_swiglu", "gate", F.linear(x, weight))
