"""Attention among the few tokens of a frame, on a GPU: everything between a block's two matrices in one
launch. A small stack that runs many times per frame (a code predictor or a solver) would spend most of its
time on launches. On a CPU, the families' own code does this, and the compiler fuses it with its neighbours.

q [B, L, H, dim], k and v [B, L, Hkv, dim] are the outputs of the matrix. Queries and keys are rotated in fp32
by the rows of cos and sin [K, dim] at their positions. Everything else is computed in fp32 too.
"""

import torch
from einops import rearrange
from torch import Tensor

from zoo import kernels
from zoo.kernels.operator import operator
from zoo.nn.norm import rms_norm
from zoo.nn.rope import rotate, rotate_pairs

MAX_TOKENS = 64  # per frame, including earlier ones; a kernel holds them in registers


def attend_within(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, scale: float, first: int = 0
) -> Tensor:
    """Attend from each token to all tokens -> like q. Rotated values are rounded to their dtype. q may have
    only the tokens from `first` on."""
    return torch.ops.zoo.frame_attention.default(q, k, v, cos, sin, scale, first)


def attend_and_grow(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    position: Tensor,
    cache: Tensor,
    *,
    norms: tuple[Tensor | None, Tensor | None, float] = (None, None, 0.0),
    is_paired: bool = False,
    is_rounded: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attend from token l, at position[0] + l, to itself and the tokens before it in the cache [B, 2, Hkv, K,
    dim] fp32 -> [B, L, H, dim], and the cache with the new keys and values. Later positions of the cache are
    undefined.

    norms: the weights [dim] of the `RMSNorm`s of queries and keys, which are applied first, and their eps.
    is_paired: value 2i rotates with 2i + 1, and the table has each angle twice; otherwise value i rotates
    with i + dim/2.
    is_rounded: rotated values are rounded to their dtype.
    """
    has_cpp = kernels.has_operators(q)
    attend = torch.ops.zoo.grow_frame_attention_cpp if has_cpp else torch.ops.zoo.grow_frame_attention
    return attend.default(q, k, v, cos, sin, scale, position, cache, *norms, is_paired, is_rounded)


@operator("frame_attention")
def frame_attention(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, scale: float, first: int
) -> Tensor:
    """`attend_within`"""
    assert cos.shape[0] == k.shape[1] <= MAX_TOKENS, f"a table of {cos.shape[0]} for {k.shape[1]} tokens"
    if kernels.use_gpu(q):
        return kernels.on_gpu("triton_frame_attention", "frame_attention", q, k, v, cos, sin, scale, first)
    cos, sin, own = cos[:, None].float(), sin[:, None].float(), slice(first, first + q.shape[1])
    queries, keys = rotate(q.float(), cos[own], sin[own]), rotate(k.float(), cos, sin)
    queries, keys = queries.to(q.dtype).float(), keys.to(k.dtype).float()
    return _mixed(queries, keys.transpose(1, 2), v.float().transpose(1, 2), None, scale).to(q.dtype)


def _empty_grown(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    position: Tensor,
    cache: Tensor,
    *how: object,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), torch.empty_like(cache)


kernels.cpp_operator(
    "grow_frame_attention_cpp",
    "(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, float scale, Tensor position, Tensor cache,"
    " Tensor? q_norm, Tensor? k_norm, float eps, bool is_paired, bool is_rounded) -> (Tensor, Tensor)",
    _empty_grown,
)


@operator("grow_frame_attention", gives=_empty_grown)
def grow_frame_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    position: Tensor,
    cache: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    is_paired: bool,
    is_rounded: bool,
) -> tuple[Tensor, Tensor]:
    """`attend_and_grow`"""
    assert cos.shape[0] == cache.shape[3] <= MAX_TOKENS, (
        f"a table of {cos.shape[0]} for {cache.shape[3]} positions"
    )
    if kernels.use_gpu(q):
        how = cos, sin, scale, position, cache, q_norm, k_norm, eps, is_paired, is_rounded
        return kernels.on_gpu("triton_frame_attention", "grow_frame_attention", q, k, v, *how)
    at = position + torch.arange(q.shape[1], device=q.device)  # [L]
    turned = []
    for x, weight in ((q, q_norm), (k, k_norm)):
        if weight is not None:
            x = rms_norm(x, weight, eps)
        y = (rotate_pairs if is_paired else rotate)(x.float(), cos[at, None].float(), sin[at, None].float())
        turned.append(y.to(x.dtype).float() if is_rounded else y)
    new = torch.stack((turned[1].transpose(1, 2), v.float().transpose(1, 2)), 1)  # [B, 2, Hkv, L, dim]
    cache = cache.index_copy(3, at, new)
    seen = torch.arange(cache.shape[3], device=q.device) <= at[:, None]  # [L, K]
    keys, values = cache.masked_fill(~seen.any(0)[:, None], 0).unbind(1)
    return _mixed(turned[0], keys, values, seen, scale).to(q.dtype), cache


def _mixed(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    """queries [B, L, H, dim], keys and values [B, Hkv, K, dim] -> [B, L, H, dim]"""
    queries = rearrange(queries, "b l (h g) d -> b h g l d", h=keys.shape[1])
    scores = queries @ keys.mT[:, :, None] * scale  # [B, Hkv, G, L, K]
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    mixed = scores.softmax(-1) @ values[:, :, None]
    return rearrange(mixed, "b h g l d -> b l (h g) d").contiguous()
