"""FlashInfer's kernels for `zoo.nn.flashinfer_attention` and `zoo.nn.swiglu`. Imported only when a GPU uses them: the
package is an extra, and imports for seconds.

It compiles a kernel for each shape when it is first used, with nvcc, which takes 21 s of one core, and keeps it in
~/.cache/flashinfer. Source: FlashInfer 0.6.4, decode.py, xqa.py, activation.py.

XQA reads our overlapping pages as they are. data/csrc/xqa/xqa_wrapper.cu takes the strides of a page, a token and a head
from the tensors. mhaUtils.cuh (HeadPtr) adds page number * stride, in 32 bits of heads, which `why_not` bounds. Keys
and values behind the length of a sequence are read as 0. It reads the page table and the lengths without a check of
their type: int32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from flashinfer.activation import get_act_and_mul_module, silu_and_mul
from flashinfer.decode import trtllm_batch_decode_with_kv_cache
from flashinfer.xqa import get_xqa_module
from torch import Tensor

# Its first 8 MiB are counters, which must be 0 at first and which each launch leaves at 0. The rest holds the
# splits of one launch: at most one a processor, each of 32 rows of 256 values.
WORKSPACE_BYTES = 32 << 20


@cache
def _workspace(device: torch.device) -> Tensor:
    """Return the workspace of all launches of a device, which run one after the other: only steps use it."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def failure(q: Tensor, dtype: torch.dtype, page_tokens: int, head_dim: int, group: int) -> str | None:
    """Build or load the kernel of a shape. Return why that failed, or None."""
    return _failure(dtype, page_tokens, head_dim, group)


@cache
def _failure(dtype: torch.dtype, page_tokens: int, head_dim: int, group: int) -> str | None:
    reason = _built(partial(get_xqa_module, dtype, dtype, page_tokens, head_dim, group, False, dtype, 1))
    if reason is None:
        return None
    return f"its kernel for {group} queries a key and heads of {head_dim} cannot be built: {reason}"


@cache
def gate_failure() -> str | None:
    """Build or load the kernel of `gate`. Return why that failed, or None."""
    return _built(partial(get_act_and_mul_module, "silu"))


def _built(build: Callable[[], object]) -> str | None:
    try:
        build()
    except (RuntimeError, OSError, ValueError) as error:
        return next(iter(str(error).splitlines()), type(error).__name__)
    return None


def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    """Do the same as `zoo.nn.flashinfer_attention.plain_decode`. Raises ValueError if there is no kernel."""
    page_tokens, kv_heads, dim = k_cache.shape[1:]
    reason = _failure(q.dtype, page_tokens, dim, q.shape[1] // kv_heads)
    if reason is not None:
        raise ValueError(f"attention flashinfer is not possible: {reason}")
    out: Tensor = trtllm_batch_decode_with_kv_cache(
        query=q.contiguous(),
        kv_cache=(k_cache, v_cache),
        workspace_buffer=_workspace(q.device),
        block_tables=block_tables,
        seq_lens=seq_lens,
        max_seq_len=block_tables.shape[1] * page_tokens,
        bmm1_scale=scale,
        kv_layout="NHD",
        backend="xqa",
    )
    return out


def gate(gate_up: Tensor) -> Tensor:
    """gate_up [..., 2 N], gate first -> silu(gate) * up [..., N]."""
    out: Tensor = silu_and_mul(gate_up.contiguous())
    return out
