"""A step's attention by FlashInfer, where that is faster than `zoo.kernels.triton_attention`.

Its XQA kernel reads page numbers and lengths on the device, so that a recorded launch can hold it. Its other
kernels need a plan that the host makes from the lengths before each launch, so prompts stay with Triton.

    rows of kv       r        n keys of layer 0        a page of the arena begins at row r
                     r + n    n values of layer 0
                     r + 2n   n keys of layer 1
    k_cache[i]       rows i .. i + n of kv             read at i = r + 2 n * layer
    v_cache[i]       rows i + n .. i + 2n of kv        read at the same i

FlashInfer's pages may have any stride. With a stride of one row its pages overlap, and the number of a page
is its first row, as in our page table. So its `block_tables` are our page table in int32, and no number is
computed for it. K and V are [pages, n, H, D] (its layout NHD) with strides (H D, H D, D, 1).

One thing differs: FlashInfer splits a sequence by how many sequences a launch has, so the last bits of a
result depend on the batch. `--deterministic` therefore leaves it out.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from compile_cache import choices
from zoo import kernels
from zoo.kernels.operator import operator

KINDS = ("auto", "triton", "flashinfer")  # of a GPU's steps; auto: the faster one of each shape
ARCHITECTURES = (9, 10, 12)  # the major compute capabilities that have XQA kernels
PAGE_TOKENS = (16, 32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16)
MEASURED_POSITIONS = (
    512  # of each sequence when both are timed: a voice's recording and half a minute of speech
)
INSTALL = "pip install -e '.[flashinfer]'"

log = logging.getLogger(__name__)


def kind(asked: str, kv: Tensor, page_tokens: int, is_deterministic: bool) -> str:
    """Return one of KINDS for a model's steps: "triton" where FlashInfer cannot compute them. kv [rows, H,
    D]: the model's view of the arena. Raises ValueError where FlashInfer was asked for and cannot."""
    if asked not in KINDS:
        raise ValueError(f"attention {asked!r} is not possible; possible: {', '.join(KINDS)}")
    if asked != "auto" and kv.device.type != "cuda":
        raise ValueError(f"attention {asked} is for GPUs, and the model is on {kv.device.type}: use auto")
    if asked == "triton":
        return asked
    reason = why_not(kv, page_tokens)
    if reason is None and is_deterministic:
        reason = "its last bits depend on the number of streams, which --deterministic excludes"
    if reason is None:
        return asked
    if asked == "flashinfer":
        raise ValueError(f"attention flashinfer is not possible: {reason}")
    return "triton"


def why_not(kv: Tensor, page_tokens: int) -> str | None:
    """Return why FlashInfer cannot read a cache [rows, H, D], or None if it can."""
    if kv.device.type != "cuda":
        return f"it is for GPUs, and the model is on {kv.device.type}"
    if find_spec("flashinfer") is None:
        return f"the package is not installed: {INSTALL}"
    major, minor = torch.cuda.get_device_capability(kv.device)
    if major not in ARCHITECTURES:
        needed = ", ".join(f"{known}.x" for known in ARCHITECTURES)
        return f"its kernels are for compute capability {needed}, and this GPU has {major}.{minor}"
    if kv.dtype not in DTYPES:
        return f"it computes in bfloat16 and float16, and the model in {str(kv.dtype).removeprefix('torch.')}"
    if page_tokens not in PAGE_TOKENS:
        needed = ", ".join(map(str, PAGE_TOKENS))
        return (
            f"it reads pages of {needed} positions, and the model's have {page_tokens}; serve the model alone"
        )
    rows, heads, dim = kv.shape
    if dim % 16 or not 16 <= dim <= 256:
        return f"it reads heads of 16 to 256 values in steps of 16, and the model's have {dim}"
    if rows * heads >= 1 << 32:
        return f"it counts 32 bits of keys, and the KV memory holds {rows * heads}; use a smaller --kv-memory"
    return None


def version() -> str | None:
    return importlib.metadata.version("flashinfer-python") if find_spec("flashinfer") else None


def pages(kv: Tensor, page_tokens: int, layer: int) -> tuple[Tensor, Tensor]:
    """Return K and V of a layer as FlashInfer reads them [pages, n, H, D], where page i begins at row i of
    layer 0."""
    rows, heads, dim = kv.shape
    offset = 2 * layer * page_tokens
    shape = rows - offset - 2 * page_tokens + 1, page_tokens, heads, dim
    strides = heads * dim, heads * dim, dim, 1
    first = kv.storage_offset() + offset * heads * dim
    k, v = (kv.as_strided(shape, strides, first + n * page_tokens * heads * dim) for n in range(2))
    return k, v


@operator("flashinfer_decode")
def flashinfer_decode(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    page_tokens: int,
    layer: int,
    scale: float,
) -> Tensor:
    """Attend with q [B, H, D] over the pages of block_tables [B, P] int32 -> [B, H, D]. Sequence b has
    seq_lens[b] positions (int32, at least 1); q[b] is its last one. block_tables are those of layer 0."""
    assert kv.is_contiguous() and block_tables.is_contiguous(), f"{kv.stride()}, {block_tables.stride()}"
    assert block_tables.dtype == seq_lens.dtype == torch.int32, f"{block_tables.dtype}, {seq_lens.dtype}"
    given = *pages(kv, page_tokens, layer), block_tables, seq_lens, scale
    if kernels.use_gpu(q):
        return kernels.on_gpu("flashinfer_kernels", "decode", q, *given)
    return plain_decode(q, *given)


def plain_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    """Read the same tensors as FlashInfer, in torch: q [B, H, D], K and V [pages, n, H, D] -> [B, H, D]."""
    k, v = (rearrange(cache[block_tables], "b p n h d -> b h (p n) d") for cache in (k_cache, v_cache))
    seen = torch.arange(k.shape[2], device=q.device) < seq_lens[:, None]  # [B, P n]
    k, v = (x.masked_fill(~seen[:, None, :, None], 0) for x in (k, v))  # unwritten values may be NaN
    grouped = rearrange(q, "b (h g) d -> b h g d", h=k.shape[1])
    mixed = F.scaled_dot_product_attention(grouped, k, v, attn_mask=seen[:, None, None], scale=scale)
    return rearrange(mixed, "b h g d -> b (h g) d").contiguous()


Attend = Callable[[Tensor, Tensor], Tensor]  # page table and lengths, int64 of ours or int32 of theirs


def takes_over(attention: str, q: Tensor, kv: Tensor, page_tokens: int, ours: Attend, theirs: Attend) -> bool:
    """Return whether FlashInfer computes a step of q [B, H, D]. attention: "flashinfer", or "auto": if it was
    faster in the warm-up. Raises ValueError if its kernel was asked for and cannot be built."""
    if not kernels.use_gpu(q):
        return False
    (rows, heads, dim), kv_heads = q.shape, kv.shape[1]
    shape = q.dtype, page_tokens, dim, heads // kv_heads
    if attention == "flashinfer":
        return True
    key = (
        f"paged_attention {str(q.dtype).removeprefix('torch.')} {choices.at_most(rows)} x {heads}/{kv_heads} "
        f"x {dim}, pages of {page_tokens}"
    )
    if choices.is_measuring() and choices.known(key) is None:
        if (failure := kernels.on_gpu("flashinfer_kernels", "failure", q, *shape)) is not None:
            log.info("FlashInfer is not used: %s", failure)
            return False
        table, lens = measured_pages(rows, kv, page_tokens)
        ways = {
            "triton": partial(ours, table, lens),
            "flashinfer": partial(theirs, table.int(), lens.int()),
        }
        choices.fastest(key, ways)
    return choices.known(key) == "flashinfer"


def measured_pages(rows: int, kv: Tensor, page_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the page table [B, P] and lengths [B] of a step whose sequences have MEASURED_POSITIONS
    positions or as many as the cache has, in pages that they share as little as possible. In a warm-up all
    sequences have one position."""
    num_places = max(1, kv.shape[0] // (2 * page_tokens) - 1)
    columns = min(MEASURED_POSITIONS // page_tokens, num_places)
    page = torch.arange(rows * columns, device=kv.device) % num_places
    table = (page * 2 * page_tokens).view(rows, columns)
    return table, torch.full((rows,), columns * page_tokens, device=kv.device)
