"""Matrices in float8_e4m3fn for GPUs that multiply it: half the bytes of bf16, and up to twice its arithmetic.

Each row of a weight has a scale, and so has each row of the activations. The largest value of a row becomes 448.
Activations are rounded in the compiled graph, by the kernel of the norm or the gate before. Codes change;
`benchmarks/rounded_weights.py` measures how many, with the plain form of the product, which any machine computes.

Not every product gains. On an H200, those with long sums and few outputs are slower in fp8 unless they have
hundreds of rows (benchmarks/LOG.md). So each shape is measured while a model is loaded.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compile_cache import choices
from zoo import kernels
from zoo.kernels.operator import operator
from zoo.nn.linear import FusedLinear
from zoo.nn.pack import is_rounded

KIND = torch.float8_e4m3fn
MOST = 448.0  # the largest number of KIND
LEAST_SCALE = torch.finfo(torch.float32).tiny  # of a row of zeros
STEP = 16  # a product needs multiples of it as inputs and outputs; any number of rows is possible
CAPABILITY = (8, 9)  # the first with fp8 products
LEAST_BYTES = 512 << 10  # of a matrix that is rounded
SLOTS = 64  # for which products in fp8 and in bf16 are compared


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a model on a device cannot have fp8 weights, or None."""
    needs = "weights fp8 need a GPU of compute capability 8.9 or newer"
    if device.type != "cuda":
        return f"{needs}, and the model is on {device.type}"
    if torch.version.hip is not None:
        return f"{needs} from NVIDIA, and this torch is built for ROCm"
    found = torch.cuda.get_device_capability(device)
    if found < CAPABILITY:
        return f"{needs}, and this one has {found[0]}.{found[1]}"
    if dtype != torch.bfloat16:
        return f"weights fp8 need dtype bfloat16, and it is {str(dtype).removeprefix('torch.')}"
    return None


def round_weights(model: nn.Module, least_bytes: int = LEAST_BYTES) -> None:
    """Replace the large bf16 matrices of a model by `FP8Linear`, in place, and free the plain weights.
    Embeddings, heads, and modules in float32 stay as they are, as with int8. So do matrices that are faster in
    bf16, and those that read an attention's result: no kernel could round it in passing."""
    # paths, because a list of layers would keep all plain weights until the last one is rounded
    for path in [path for path, _ in model.named_modules(remove_duplicate=False) if path]:
        layer = model.get_submodule(path)
        if (
            isinstance(layer, nn.Linear | FusedLinear)
            and layer.weight.dtype == torch.bfloat16
            and is_rounded(model, path, least_bytes)
            and path.rpartition(".")[2] != "out"
            and not any(size % STEP for size in layer.weight.shape)
        ):
            made = FP8Linear(layer)
            if is_faster(made, layer, SLOTS * rows_per_slot(model, path)):
                model.set_submodule(path, made)


def rows_per_slot(model: nn.Module, path: str) -> int:
    """Return how many rows a layer multiplies in a step of one slot: `rows_per_slot` of a module that it is
    in, or 1."""
    parts = path.split(".")
    around = [model.get_submodule(".".join(parts[:i])) for i in range(len(parts))]
    return max(getattr(module, "rows_per_slot", 1) for module in around)


def is_faster(made: FP8Linear, plain: nn.Linear | FusedLinear, rows: int) -> bool:
    """Return whether this device multiplies `rows` rows faster in fp8. Each shape is measured once
    (`compile_cache.choices`). Without a measurement, fp8 is assumed to be faster."""
    columns, width = plain.weight.shape

    @cache
    def x() -> Tensor:
        return torch.randn(rows, width, dtype=torch.bfloat16, device=plain.weight.device)

    @cache
    def given() -> tuple[Tensor, Tensor]:
        return rounded(x())

    ways = {
        "fp8": lambda: scaled(*given(), made.weight, made.scale),
        "bf16": lambda: F.linear(x(), plain.weight),
    }
    return choices.fastest(f"fp8_linear {rows} x {width} x {columns}", ways) != "bf16"


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [..., in] in KIND and a scale for each row [..., 1] float32. A row with inf or NaN becomes
    NaN."""
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / MOST).clamp(min=LEAST_SCALE)
    return (wide / scale).clamp(-MOST, MOST).to(KIND), scale


class FP8Linear(nn.Module):
    """An `nn.Linear` or `FusedLinear` in fp8: x [..., in] bf16 -> [..., out] bf16, or one result per part of a
    `FusedLinear`."""

    weight: Tensor  # [out, in] KIND
    scale: Tensor  # [1, out] float32
    bias: Tensor | None  # [out] bf16

    def __init__(self, plain: nn.Linear | FusedLinear):
        super().__init__()
        self.parts = plain.parts if isinstance(plain, FusedLinear) else None
        weight, scale = rounded(plain.weight.detach())
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("scale", scale.T.contiguous(), persistent=False)
        self.register_buffer("bias", None if plain.bias is None else plain.bias.detach(), persistent=False)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        rows, scale = rounded(x.reshape(-1, x.shape[-1]))
        y = torch.ops.zoo.fp8_linear.default(rows, scale, self.weight, self.scale)
        y = y.view(*x.shape[:-1], y.shape[-1])
        if self.bias is not None:
            y = y + self.bias
        return y if self.parts is None else y.split(self.parts, -1)


def _empty_products(x: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.bfloat16)


@operator("fp8_linear", gives=_empty_products)
def fp8_linear(x: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Multiply x [rows, in] by a weight [out, in], both KIND, with the scales [rows, 1] and [1, out] float32
    -> [rows, out] bf16."""
    if kernels.use_gpu(x):
        return scaled(x, scale, weight, weight_scale)
    return plain(x, scale, weight, weight_scale)


def plain(x: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    return ((x.float() * scale) @ (weight.float() * weight_scale.T).T).bfloat16()


def scaled(x: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Multiply by cuBLAS, or by torch's own kernel before CUDA 12.9 and on other GPUs than Hopper. Sums have 32
    bits."""
    return torch._scaled_mm(
        x.contiguous(), weight.T, scale_a=scale, scale_b=weight_scale, out_dtype=torch.bfloat16
    )
