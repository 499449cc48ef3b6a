"""The parts of a transformer block before and after its attention, for blocks of few channels: LayerNorm and a
product, then projection, LayerNorm and MLP.

On a GPU in half precision each is one launch, or the second one three. Which is faster depends on the device
and the number of rows, so it is measured there before the first request (`compile_cache.choices`). In fp32,
and for other widths, torch's operators run.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compile_cache import choices
from zoo import kernels
from zoo.kernels.operator import operator
from zoo.nn.linear import FusedLinear

DTYPES = (torch.bfloat16, torch.float16)
WIDTHS = (16, 32, 64, 128, 256, 512)  # of a row that a program normalizes as a whole
MOST_IN_ONE = 256  # channels; the sums of more do not fit into registers
WAYS = ("in three", "in one")  # launches after attention; the first one is taken where none was measured


def fits(x: Tensor, *layers: nn.Linear | FusedLinear) -> bool:
    """Return whether these operators take a block whose input is x [..., C]: on a GPU, with weights in the same
    half precision, with rows and products that fill tiles."""
    if x.device.type != "cuda" or x.dtype not in DTYPES or x.shape[-1] not in WIDTHS:
        return False
    return all(one.weight.dtype == x.dtype and one.weight.shape[1] % 16 == 0 for one in layers)


def _empty_product(x: Tensor, weight: Tensor, bias: Tensor, eps: float, factor: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], len(factor)))


@operator("norm_linear", gives=_empty_product)
def norm_linear(x: Tensor, weight: Tensor, bias: Tensor, eps: float, factor: Tensor) -> Tensor:
    """Return norm(x) factor^T [..., N] of x [..., C]. weight, bias, eps: the norm's; factor [N, C]."""
    if kernels.use_gpu(x):
        return kernels.on_gpu("triton_transformer", "norm_linear", x, weight, bias, eps, factor, None)
    return F.linear(F.layer_norm(x, x.shape[-1:], weight, bias, eps), factor)


def _empty_rows(y: Tensor, weight: Tensor, bias: Tensor, x: Tensor, *others: object) -> Tensor:
    return x.new_empty(x.shape)


@operator("after_attention", gives=_empty_rows)
def after_attention(
    y: Tensor,
    weight: Tensor,
    bias: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    wide_weight: Tensor,
    wide_bias: Tensor,
    narrow_weight: Tensor,
    narrow_bias: Tensor,
) -> Tensor:
    """Return z + MLP(norm(z)) [..., C], where z = x + y weight^T + bias. y [..., H * D]: of attention; x [..., C]:
    the block's input. The MLP has GELU."""
    given = (
        y,
        weight,
        bias,
        x,
        norm_weight,
        norm_bias,
        eps,
        wide_weight,
        wide_bias,
        narrow_weight,
        narrow_bias,
    )
    if not kernels.use_gpu(x):
        return plain(*given)
    rows = x.numel() // x.shape[-1]
    sizes = f"{choices.at_most(rows)} x {y.shape[-1]} x {x.shape[-1]} x {len(wide_weight)}"
    key = f"after_attention {str(x.dtype).removeprefix('torch.')} {sizes}"
    possible = WAYS if x.shape[-1] <= MOST_IN_ONE else WAYS[:1]
    way = choices.fastest(key, {name: partial(computed, name, *given) for name in possible})
    return computed(way if way is not None and way in possible else WAYS[0], *given)


def plain(
    y: Tensor,
    weight: Tensor,
    bias: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    wide_weight: Tensor,
    wide_bias: Tensor,
    narrow_weight: Tensor,
    narrow_bias: Tensor,
) -> Tensor:
    x = x + F.linear(y, weight, bias)
    wide = F.gelu(
        F.linear(F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, eps), wide_weight, wide_bias)
    )
    return x + F.linear(wide, narrow_weight, narrow_bias)


def computed(way: str, *given: Tensor | float) -> Tensor:
    """Compute `after_attention` in one of WAYS, on a GPU."""
    return kernels.on_gpu("triton_transformer", f"mlp_{way.replace(' ', '_')}", *given)


def project(x: Tensor, norm: nn.LayerNorm, qkv: FusedLinear) -> tuple[Tensor, ...]:
    """Return queries, keys and values [..., H * D] of a block's input [..., C], in one launch."""
    y = torch.ops.zoo.norm_linear.default(x, norm.weight, norm.bias, norm.eps, qkv.weight)
    return y.split(qkv.parts, -1)


def finish(
    y: Tensor, x: Tensor, out: nn.Linear, norm: nn.LayerNorm, widen: nn.Linear, narrow: nn.Linear
) -> Tensor:
    """Return a block's output from its input x [..., C] and from what attention gave, y [..., H * D]."""
    parts = out.weight, out.bias, x, norm.weight, norm.bias, norm.eps
    after = widen.weight, widen.bias, narrow.weight, narrow.bias
    return torch.ops.zoo.after_attention.default(y, *parts, *after)
