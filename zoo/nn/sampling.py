"""Sampling by row. A request's draws depend only on its seed, step and stream (codebook), never on its slot
or the other rows."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zoo import kernels
from zoo.kernels.operator import operator

_LOW = 0xFFFFFFFF
GREEDY = 1e-5  # up to this temperature the likeliest token is taken; dividing by 1e-38 would overflow
MAX_GPU_WIDTH = 1 << 14  # the most logits per row that the GPU kernels can hold in registers


def _mix(x: Tensor) -> Tensor:
    """Apply a bijection of 32-bit values stored in int64 (constants are below 2^31, so no product overflows).
    Source: C. Wellons, hash-prospector."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _LOW
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _LOW
    return x ^ (x >> 15)


def _empty_keys(seed: Tensor, step: Tensor, first: int, streams: int) -> Tensor:
    return seed.new_empty(seed.shape[0], streams)


@operator("noise_keys", gives=_empty_keys)
def noise_keys(seed: Tensor, step: Tensor, first: int, streams: int) -> Tensor:
    """Return a 32-bit key per row and stream [B, streams]. The compiler must not trace it: each line of
    `_mix` uses x twice, so a fused chain of them doubles at every line and would take minutes to compile."""
    key = _mix((seed & _LOW) ^ 0x6A09E667)
    key = _mix(key ^ ((seed >> 32) & _LOW))
    key = _mix(key ^ (step & _LOW))  # [B]
    return _mix(key[:, None] ^ torch.arange(first, first + streams, device=seed.device))


def gumbel(seed: Tensor, step: Tensor, streams: range, width: int) -> Tensor:
    """seed, step [B] int64 -> standard Gumbel noise [B, streams, width] float32, independent of the row's
    index."""
    return -torch.log(-torch.log(uniform_noise(seed, step, streams, width)))


def normal(seed: Tensor, step: Tensor, width: int) -> Tensor:
    """seed, step [B] int64 -> standard normal noise [B, width] float32, independent of the row's index,
    within ±5.3."""
    if seed.device.type == "cpu":
        return torch.ops.zoo.normal.default(seed, step, width)
    return _normal(seed, step, width)


def _normal(seed: Tensor, step: Tensor, width: int) -> Tensor:
    return math.sqrt(2) * torch.erfinv(2 * uniform_noise(seed, step, range(1), width)[:, 0] - 1)


def _empty_normal(seed: Tensor, step: Tensor, width: int) -> Tensor:
    return seed.new_empty(seed.shape[0], width, dtype=torch.float32)


@operator("normal", gives=_empty_normal)
def normal_on_cpu(seed: Tensor, step: Tensor, width: int) -> Tensor:
    return (kernels.normal if kernels.has(seed) else _normal)(seed, step, width)


def uniform_noise(seed: Tensor, step: Tensor, streams: range, width: int) -> Tensor:
    """-> [B, streams, width] float32 between 0 and 1"""
    if seed.device.type in ("cpu", "cuda"):
        return torch.ops.zoo.uniform.default(seed, step, streams.start, len(streams), width)
    return _plain_uniform(seed, step, streams.start, len(streams), width)


def _plain_uniform(seed: Tensor, step: Tensor, first: int, streams: int, width: int) -> Tensor:
    keys = torch.ops.zoo.noise_keys.default(seed, step, first, streams)  # [B, streams]
    index = torch.arange(width, device=seed.device) * 0x9E3779B1 & _LOW
    bits = _mix(keys[:, :, None] ^ index)  # [B, streams, width]
    return ((bits >> 9).float() + 0.5) * 2.0**-23  # 23 bits: never 0, never 1 in fp32


def _empty_uniform(seed: Tensor, step: Tensor, first: int, streams: int, width: int) -> Tensor:
    return seed.new_empty(seed.shape[0], streams, width, dtype=torch.float32)


@operator("uniform", gives=_empty_uniform)
def uniform(seed: Tensor, step: Tensor, first: int, streams: int, width: int) -> Tensor:
    """Draw in one launch; in torch, the keys alone take fifty."""
    if kernels.use_gpu(seed):
        return kernels.on_gpu("triton_sampling", "uniform", seed, step, first, streams, width)
    if kernels.has(seed):
        return kernels.uniform(seed, step, first, streams, width)
    return _plain_uniform(seed, step, first, streams, width)


def keep_likely(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return logits [B, V] with -inf for all but each row's top_k (0: all), and of those, for all but the
    smallest set whose probabilities add up to top_p."""
    if logits.device.type in ("cpu", "cuda"):
        return torch.ops.zoo.keep_likely.default(logits, top_k, top_p)
    return _keep_likely(logits, top_k, top_p)


def _keep_likely(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    width = logits.shape[-1]
    ranked = logits.sort(-1, descending=True).values
    top_k = torch.where(top_k > 0, top_k, width).clamp(max=width)[:, None]
    by_rank = ranked.gather(-1, top_k - 1)  # [B, 1]
    mass = ranked.masked_fill(ranked < by_rank, -torch.inf).softmax(-1)
    before = mass.cumsum(-1) - mass  # the sum of all likelier entries
    # a top_p of 1 keeps all entries, although the sum in fp32 can reach 1 too early
    kept = ((before < top_p[:, None]) | (top_p[:, None] >= 1)).sum(-1, keepdim=True).clamp(min=1)
    by_mass = ranked.gather(-1, kept - 1)
    return logits.masked_fill(logits < torch.maximum(by_rank, by_mass), -torch.inf)


@operator("keep_likely")
def keep_likely_by_kernel(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    if kernels.use_gpu(logits) and logits.shape[1] <= MAX_GPU_WIDTH:
        return kernels.on_gpu("triton_sampling", "keep_likely", logits, top_k, top_p)
    return (kernels.keep_likely if kernels.know(logits) else _keep_likely)(logits, top_k, top_p)


@torch.compiler.nested_compile_region
def draw(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, noise: Tensor) -> Tensor:
    """Draw one token per row: logits and Gumbel noise [B, V] float32 -> [B]. A temperature up to GREEDY takes
    the largest logit.

    Order: temperature, top-k, top-p, draw. The argmax of logits plus noise is a draw from their softmax.
    """
    return draw_inline(logits, temperature, top_k, top_p, noise)


def draw_inline(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, noise: Tensor) -> Tensor:
    """Do the same as `draw`, but not as a separate region, for a step whose other draws have another number
    of rows."""
    if logits.device.type == "cuda":
        return torch.ops.zoo.draw.default(logits, temperature, top_k, top_p, noise)
    if kernels.has_operators(logits):
        return torch.ops.zoo.draw_cpp.default(logits, temperature, top_k, top_p, noise, GREEDY)
    return _draw(logits, temperature, top_k, top_p, noise)


def _draw(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, noise: Tensor) -> Tensor:
    hot = temperature > GREEDY
    scaled = logits / torch.where(hot, temperature, 1.0)[:, None]
    noisy = keep_likely(scaled, top_k, top_p) + noise
    return torch.where(hot[:, None], noisy, logits).argmax(-1)


def _empty_tokens(logits: Tensor, *others: Tensor | float) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


kernels.cpp_operator(
    "draw_cpp",
    "(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor noise, float greedy) -> Tensor",
    _empty_tokens,
)


@operator("draw", gives=_empty_tokens)
def draw_on_gpu(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, noise: Tensor) -> Tensor:
    """Draw in one launch and without sorting."""
    if kernels.use_gpu(logits):
        kernel = "draw" if logits.shape[1] <= MAX_GPU_WIDTH else "draw_wide"
        return kernels.on_gpu("triton_sampling", kernel, logits, temperature, top_k, top_p, noise)
    return _draw(logits, temperature, top_k, top_p, noise)


def drop_unlikely(noise: Tensor, logits: Tensor, temperature: Tensor, min_p: Tensor) -> Tensor:
    """Return the noise [B, V] for `draw` with -inf for tokens that are less likely than min_p [B] times the
    likeliest one. The quotient of two probabilities does not change when top-k and top-p drop others, so the
    order does not matter. Source: Nguyen et al. 2024 (arXiv 2407.01082)."""
    least = logits.amax(-1, keepdim=True) + (min_p.log() * temperature.clamp(min=GREEDY))[:, None]
    return noise.masked_fill(logits < least, -torch.inf)


def keep_logits(pick: Callable[..., Tensor], drawn: list[Tensor]) -> Callable[..., Tensor]:
    """Return `pick` (logits [B, V], ... -> codes [B]), which also appends each code's logit [B, 1] to
    `drawn`. If the logits are NaN, so is the code's."""

    def keep(logits: Tensor, *args: Any, **settings: Any) -> Tensor:
        code = pick(logits, *args, **settings)
        drawn.append(logits.gather(1, code[:, None]))
        return code

    return keep


def penalise(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Make tokens less likely that were produced before: seen [B, V] bool, penalty [B]. Source: the CTRL
    paper (arXiv 1909.05858), section 4.1."""
    penalty = penalty[:, None]
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def is_any(tokens: Tensor, ids: Sequence[int]) -> Tensor:
    """Return which tokens [B] are one of these ids. Ids are compared one by one: a tensor of them would be copied to the
    device in each step."""
    found = tokens == ids[0]
    for one in ids[1:]:
        found = found | (tokens == one)
    return found
