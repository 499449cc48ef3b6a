"""Gives a model's layers the forms that the CPU's kernels read (`zoo.nn.packed`, `zoo.nn.blocked_stack`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn

from compile_cache import choices
from zoo import kernels
from zoo.nn.block import PreNormBlock
from zoo.nn.blocked_stack import pack_stacks
from zoo.nn.deferred import Deferred
from zoo.nn.linear import FusedLinear, SwiGLU, Tables
from zoo.nn.narrow import NarrowEmbedding, NarrowLayer, NarrowTables, dtype_of, widened
from zoo.nn.packed import BlockedLinear, BlockedSwiGLU, PackedLinear, TiedRows, can_be_packed, has_16_bits
from zoo.nn.window_attention import GeluMLP, WindowLayer

LEAST_BYTES = 64 << 10  # smaller matrices take little of a step, unless their stack is one operator
KEPT = ("head", "flow")  # in the names of heads and renderers, which are never rounded
MEASURED_COLUMNS = 16384
MEASURED_ROWS = (1, 8)  # for which oneDNN's product and ours are compared, one after the other
FORMS: dict[str, Callable[[nn.Linear | FusedLinear], nn.Module]] = {
    "blocks": BlockedLinear,
    "onednn": PackedLinear,
}


def pack(model: nn.Module, least_bytes: int = LEAST_BYTES, is_int8: bool = False) -> None:
    """Replace the large `nn.Linear` and `FusedLinear` layers of a model by packed ones, in place, and free
    the plain weights. Weights that have only 16 bits stay in bf16 if that is faster, and embeddings stay in
    bf16, too. An embedding that is also a head reads the head's layout. In a module with `reads_many_rows`, all
    layers are replaced by oneDNN's. Encoders of other packages stay as they are. Does nothing if the model is
    not on a CPU, or if this build or machine lacks the kernels.

    is_int8: weights of 16 bits are rounded to 8 where `is_rounded`.
    """
    others = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, Deferred))
    ties = tied_tables(model)
    # paths, because a list of layers would keep all plain weights until the last one is packed
    paths = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    for path in paths:
        if path.startswith(others):
            continue
        parent, child = model.get_submodule(path.rpartition(".")[0]), model.get_submodule(path)
        if isinstance(child, nn.Embedding | Tables):
            model.set_submodule(path, narrowed(child, least_bytes))
        elif isinstance(child, nn.Linear | FusedLinear):
            reads_many_rows = getattr(parent, "reads_many_rows", False)
            has_8_bits = is_int8 and is_rounded(model, path, least_bytes)
            made = packed(child, least_bytes, reads_many_rows, has_8_bits, is_in_stack(model, path))
            model.set_submodule(path, made)
    for path in paths:
        child = model.get_submodule(path)
        if isinstance(child, SwiGLU):
            first, last = child.gate_up, child.down
            if isinstance(first, BlockedLinear) and isinstance(last, BlockedLinear) and last.bias is None:
                model.set_submodule(path, BlockedSwiGLU(first, last))
    for table, path in ties:
        head = model.get_submodule(path)
        if isinstance(head, BlockedLinear) and head.scales is None:
            plain = model.get_submodule(table)
            assert isinstance(plain, nn.Embedding | Tables), table
            model.set_submodule(table, TiedRows(plain, head))
    pack_stacks(model)


def num_in_int8(model: nn.Module) -> int:
    """Return how many products of a packed model read weights that were rounded to int8."""
    return sum(isinstance(layer, BlockedLinear) and layer.scales is not None for layer in model.modules())


def tied_tables(model: nn.Module) -> list[tuple[str, str]]:
    """Return the paths of embeddings and of the heads that score with the same table."""
    heads, tables = dict[tuple[int, torch.Size], str](), dict[str, tuple[int, torch.Size]]()
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            heads[layer.weight.data_ptr(), layer.weight.shape] = path
        elif isinstance(layer, nn.Embedding | Tables):
            tables[path] = layer.weight.data_ptr(), layer.weight.shape
    return [(path, heads[place]) for path, place in tables.items() if place in heads]


def is_rounded(model: nn.Module, path: str, least_bytes: int) -> bool:
    """Return whether `--weights` rounds an `nn.Linear` or `FusedLinear` whose weight has 16 bits: it is large,
    and neither a head, whose errors change most codes, nor in a renderer."""
    parent, layer = model.get_submodule(path.rpartition(".")[0]), model.get_submodule(path)
    assert isinstance(layer, nn.Linear | FusedLinear), path
    reads_many_rows = getattr(parent, "reads_many_rows", False)
    is_kept = reads_many_rows or any(part in path for part in KEPT)
    return is_large(layer, least_bytes) and not is_kept


def is_in_stack(model: nn.Module, path: str) -> bool:
    """Return whether a layer is in a block that runs in a stack, which is faster as one operator than any block
    with oneDNN's products."""
    above = path.rpartition(".")[0]
    parents = [model.get_submodule(name) for name in (above, above.rpartition(".")[0])]
    if isinstance(parents[0], SwiGLU | GeluMLP):
        parents = parents[1:]
    return isinstance(parents[0], PreNormBlock | WindowLayer) and parents[0].is_stacked


def packed(
    plain: nn.Linear | FusedLinear,
    least_bytes: int,
    reads_many_rows: bool,
    has_8_bits: bool,
    is_stacked: bool,
) -> nn.Module:
    """Return a layer in the form that computes it fastest, which may be itself."""
    has_onednn = can_be_packed(plain.weight, dtype_of(plain))
    has_kernels = kernels.has(plain.weight)
    if is_stacked and has_kernels and dtype_of(plain) == torch.float32:
        return BlockedLinear(plain, has_8_bits and has_16_bits(plain.weight))
    if reads_many_rows or not is_large(plain, least_bytes):
        return PackedLinear(plain) if reads_many_rows and has_onednn else widened(plain)
    is_narrow = has_kernels and has_16_bits(plain.weight)
    if is_narrow and (has_8_bits or not has_onednn):
        return BlockedLinear(plain, has_8_bits)
    if not has_onednn:
        return widened(plain)
    if not has_kernels:
        return PackedLinear(plain)
    return FORMS[fastest_form(plain)](plain)


def narrowed(plain: nn.Embedding | Tables, least_bytes: int) -> nn.Module:
    """Return an embedding with rows in bf16, or itself if its rows have more bits or are few."""
    if isinstance(plain, NarrowLayer) or not is_large(plain, least_bytes):
        return plain
    if not (kernels.has(plain.weight) and has_16_bits(plain.weight)):
        return plain
    return NarrowTables(plain) if isinstance(plain, Tables) else NarrowEmbedding(plain)


def is_large(layer: nn.Linear | FusedLinear | nn.Embedding | Tables, least_bytes: int) -> bool:
    return layer.weight.numel() * dtype_of(layer).itemsize >= least_bytes


def fastest_form(plain: nn.Linear | FusedLinear) -> str:
    """Return which of FORMS multiplies a few rows fastest. It is measured once for each shape on each kind of
    machine, before the first request (`compile_cache.choices`); all rows are then computed in that form. For
    a vocabulary only some columns are measured, because copies of all take much memory."""
    columns, width = plain.weight.shape
    dtype = dtype_of(plain)
    some = nn.Linear(width, columns, bias=False, device="meta")
    some.weight = nn.Parameter(plain.weight.detach()[:MEASURED_COLUMNS].to(dtype), False)
    makers = {name: cache(partial(form, some)) for name, form in FORMS.items()}
    few = [torch.ones(rows, width, dtype=dtype) for rows in MEASURED_ROWS]
    ways = {name: partial(multiply_few_rows, make, few) for name, make in makers.items()}
    bits = 16 if has_16_bits(some.weight) else 32
    where = "" if dtype == torch.float32 else ", rows in bfloat16"
    return choices.fastest(f"linear {width} x {columns}, {bits} bits{where}", ways) or "blocks"


@torch.inference_mode()
def multiply_few_rows(make: Callable[[], nn.Module], few: list[Tensor]) -> None:
    layer = make()
    for rows in few:
        layer(rows)
