"""A CPU's own kernels: kernels.cpp and kernels_render.cpp, built as inductor builds what it generates, and kept
in the same place. And where those of a GPU are found: triton_attention.py and triton_sampling.py.

Torch's general operators spend most of a small step on the way to the work: gathering pages before attention
reads them, sorting a vocabulary for its fifty likeliest, passing five times over a codec's activations. These
do the work alone (benchmarks/LOG.md). Until `build`, and on devices without kernels, the operators in attention.py,
sampling.py and snake.py run as they are written in torch, which is what the kernels are tested against.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import CDLL, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

SOURCES = tuple(
    Path(__file__).with_name(name) for name in ("kernels.cpp", "kernels_render.cpp")
)  # one after the other
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

_library: CDLL | None = None
_plain = ContextVar("plain", default=False)


def key() -> str:
    """Names what `build` builds."""
    return blake2b(source().encode(), digest_size=8).hexdigest()


def source() -> str:
    return "\n".join(path.read_text() for path in SOURCES)


def build() -> None:
    """From now on this process's CPU operators use the kernels. Takes seconds the first time. Raises
    ValueError without a C++ compiler."""
    global _library
    from torch._inductor.codecache import CppCodeCache  # takes two seconds, which only a server has to spend
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        library = CppCodeCache.load(source())
    except InvalidCxxCompiler:
        raise ValueError(
            "compiling for a CPU needs a C++ compiler, and there is none: install g++, or serve with --no-compile"
        ) from None
    for name in NAMES.values():
        getattr(library, f"attend_{name}").argtypes = [c_void_p] * 5 + [c_int64] * 6 + [c_float, c_int]
        getattr(library, f"attend_stretch_{name}").argtypes = (
            [c_void_p] * 8 + [c_int64] * 8 + [c_float, c_int]
        )
        getattr(library, f"norm_mish_{name}").argtypes = [c_void_p] * 5 + [c_int64] * 2 + [c_float, c_int]
    for name in ("snake", "snake_of_rows"):
        getattr(library, name).argtypes = [c_void_p] * 4 + [c_int64] * 3 + [c_int]
    library.convolve_snake_of_rows.argtypes = [c_void_p] * 13 + [c_int64] * 11 + [c_int]
    library.depthwise_unit_of_rows.argtypes = [c_void_p] * 11 + [c_int64] * 7 + [c_int]
    library.uniform.argtypes = [c_void_p] * 3 + [c_int64] * 4 + [c_int]
    library.normal.argtypes = [c_void_p] * 3 + [c_int64] * 2 + [c_int]
    for name in ("keep_likely", "keep_likely_before_temperature", "keep_nucleus"):
        getattr(library, name).argtypes = [c_void_p] * 4 + [c_int64] * 2 + [c_int]
    _library = library


@contextmanager
def plain() -> Iterator[None]:
    """Here, and on this thread, operators run as they are written in torch: the truth that all else is
    compared with."""
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


def use_gpu(tensor: Tensor) -> bool:
    """Whether a GPU's kernels are to be used for such a tensor."""
    return tensor.device.type == "cuda" and not _plain.get()


def of_gpu(name: str) -> ModuleType:
    """The module of a GPU's kernels; a CPU's torch comes without Triton. Raises ValueError without it."""
    try:
        return importlib.import_module(f"zoo.nn.{name}")
    except ModuleNotFoundError:
        raise ValueError(
            f"a GPU needs Triton, which torch {torch.__version__} came without: pip install triton"
        ) from None


def on_gpu(module: str, function: str, *arguments: Any) -> Any:
    """What a function of GPU kernels gives, launched where its first argument is: Triton launches on the
    current device, which may be another."""
    with torch.cuda.device_of(arguments[0]):
        return getattr(of_gpu(module), function)(*arguments)


def has(tensor: Tensor) -> bool:
    """Whether a CPU's kernels are to be used for what lies where the tensor does. A compiler cannot look into them: what it
    traces has them in operators alone."""
    if torch.compiler.is_compiling():
        return False
    return _library is not None and not _plain.get() and tensor.device.type == "cpu"


def know(*tensors: Tensor) -> bool:
    """Whether a CPU's kernels are to be used, and made for such tensors."""
    return all(has(tensor) and tensor.dtype in NAMES for tensor in tensors)


def attend(q: Tensor, kv: Tensor, rows: Tensor, lengths: Tensor, page_tokens: int, scale: float) -> Tensor:
    """One query for each sequence: q [B, H, D], kv [rows, Hkv, D], rows [B, P], lengths [B] -> [B, H, D];
    `attention.paged_attention`."""
    assert _library is not None and kv.is_contiguous() and q.dtype == kv.dtype, (
        f"{q.dtype} over {kv.dtype}, {kv.stride()}"
    )
    q, rows, lengths = q.contiguous(), rows.contiguous(), lengths.contiguous()
    out, (batch, heads, width), kv_heads = torch.empty_like(q), q.shape, kv.shape[1]
    pointers = (tensor.data_ptr() for tensor in (q, kv, rows, lengths, out))
    sizes = batch, kv_heads, heads // kv_heads, width, rows.shape[1], page_tokens
    getattr(_library, f"attend_{NAMES[q.dtype]}")(*pointers, *sizes, scale, torch.get_num_threads())
    return out


def attend_stretch(
    q: Tensor, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor, index: Tensor, mask: Tensor, heads: int
) -> Tensor:
    """q, k, v [B * L, Q, H * D] over the first positions of cache [S, P, L, 2 * H * D] and themselves, of which mask
    [B, Q, held + Q] says who sees whom; slots [B], index [B, Q] where the new ones are then put -> [B * L, Q, H * D];
    `cosyvoice2.estimator`."""
    assert _library is not None and cache.is_contiguous() and mask.dtype == torch.bool
    slots, index, mask = (tensor.contiguous() for tensor in (slots, index, mask))
    stride = q.stride(1)  # of parts of one product, which lie side by side
    if not all(x.stride() == (x.shape[1] * stride, stride, 1) for x in (q, k, v)):
        q, k, v = (x.contiguous() for x in (q, k, v))
        stride = q.shape[2]
    out, (batch, num, keys), dim = q.new_empty(q.shape), mask.shape, q.shape[2] // heads
    lanes, positions = cache.shape[2], cache.shape[1]
    assert (
        q.shape == k.shape == v.shape == (batch * lanes, num, heads * dim)
        and cache.shape[3] == 2 * q.shape[2]
    )
    pointers = (tensor.data_ptr() for tensor in (q, k, v, cache, slots, index, mask, out))
    sizes = batch, lanes, num, keys - num, positions, heads, dim, stride
    function = getattr(_library, f"attend_stretch_{NAMES[q.dtype]}")
    function(*pointers, *sizes, dim**-0.5, torch.get_num_threads())
    return out


def keep_likely(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """logits [B, V] float32, top_k [B] int64, top_p [B] float32 -> [B, V]; `sampling.keep_likely`."""
    return _keep("keep_likely", logits, top_k, top_p)


def keep_likely_before_temperature(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """As `keep_likely`; `fish_s2.sampling.keep_likely`."""
    return _keep("keep_likely_before_temperature", logits, top_k, top_p)


def keep_nucleus(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """As `keep_likely`; `cosyvoice2.sampling.nucleus`."""
    return _keep("keep_nucleus", logits, top_k, top_p)


def _keep(name: str, logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    assert (
        _library is not None and logits.dtype == top_p.dtype == torch.float32 and top_k.dtype == torch.int64
    )
    logits, top_k, top_p = logits.contiguous(), top_k.contiguous(), top_p.contiguous()
    out = torch.empty_like(logits)
    pointers = (tensor.data_ptr() for tensor in (logits, top_k, top_p, out))
    getattr(_library, name)(*pointers, *logits.shape, torch.get_num_threads())
    return out


def uniform(seed: Tensor, step: Tensor, first: int, streams: int, width: int) -> Tensor:
    """seed, step [B] int64 -> [B, streams, width] float32; `sampling.uniform`."""
    assert _library is not None and seed.dtype == step.dtype == torch.int64
    seed, step = seed.contiguous(), step.contiguous()
    out = torch.empty(len(seed), streams, width)
    pointers = (tensor.data_ptr() for tensor in (seed, step, out))
    _library.uniform(*pointers, len(seed), first, streams, width, torch.get_num_threads())
    return out


def normal(seed: Tensor, step: Tensor, width: int) -> Tensor:
    """seed, step [B] int64 -> [B, width] float32; `sampling.normal`."""
    assert _library is not None and seed.dtype == step.dtype == torch.int64
    seed, step = seed.contiguous(), step.contiguous()
    out = torch.empty(len(seed), width)
    pointers = (tensor.data_ptr() for tensor in (seed, step, out))
    _library.normal(*pointers, len(seed), width, torch.get_num_threads())
    return out


def norm_mish(x: Tensor, weight: Tensor, bias: Tensor, shift: Tensor | None, eps: float) -> Tensor:
    """x [..., C]; weight, bias and shift of C values, all of one dtype -> mish(layer norm x) + shift;
    `cosyvoice2.estimator`."""
    assert _library is not None and x.dtype == weight.dtype == bias.dtype
    assert shift is None or (
        shift.dtype == x.dtype and shift.numel() == x.shape[-1] and shift.is_contiguous()
    )
    x = x.contiguous()
    out = torch.empty_like(x)
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in (x, weight, bias, shift, out))
    sizes = x.numel() // x.shape[-1], x.shape[-1]
    getattr(_library, f"norm_mish_{NAMES[x.dtype]}")(*pointers, *sizes, eps, torch.get_num_threads())
    return out


def snake(x: Tensor, frequency: Tensor, gain: Tensor) -> Tensor:
    """x [B, C, N], frequency and gain of C values each, all float32 -> [B, C, N]; `snake.snake`."""
    assert _library is not None and x.dtype == frequency.dtype == gain.dtype == torch.float32
    is_rows = x.shape[1] > 1 and x.stride(1) == 1  # channels side by side, and so they stay
    x = x.mT.contiguous().mT if is_rows else x.contiguous()
    frequency, gain = frequency.contiguous(), gain.contiguous()
    assert frequency.numel() == gain.numel() == x.shape[1], (
        f"{frequency.numel()} frequencies for {x.shape[1]} channels"
    )
    out = torch.empty_like(x)
    pointers = (tensor.data_ptr() for tensor in (x, frequency, gain, out))
    function = _library.snake_of_rows if is_rows else _library.snake
    function(*pointers, *x.shape, torch.get_num_threads())
    return out


COLUMNS = 64  # of a block of weights, as in kernels_render.cpp


def nine_filters(weight: Tensor) -> Tensor:
    """A convolution's weight [D, C, taps] as `convolve_snake` reads it: of its even taps, its odd ones and their sums the same
    three, with zeros up to a multiple of COLUMNS outputs [blocks, taps of all nine, C, COLUMNS]."""

    def thirds(taps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        even, odd = taps[0::2], taps[1::2]
        return even, odd, even + F.pad(odd, (0, 0, 0, 0, 0, len(even) - len(odd)))

    taps = F.pad(weight.permute(2, 1, 0), (0, -len(weight) % COLUMNS))  # [taps, C, D]
    nine = torch.cat([ninth for third in thirds(taps) for ninth in thirds(third)])
    return nine.unflatten(2, (-1, COLUMNS)).permute(2, 0, 1, 3).contiguous()


def columns(weight: Tensor) -> Tensor:
    """A product's weight [D, C] as `convolve_snake` reads it, with zeros up to a multiple of COLUMNS outputs [blocks, C, COLUMNS]."""
    return (
        F.pad(weight.T, (0, -len(weight) % COLUMNS)).unflatten(1, (-1, COLUMNS)).permute(1, 0, 2).contiguous()
    )


@dataclass(frozen=True)
class Pointwise:
    """A snake and a product, position by position: `columns` of the weight [D, D], and D values each."""

    columns: Tensor
    bias: Tensor
    frequency: Tensor
    gain: Tensor


def convolve_snake(
    x: Tensor,
    wave: tuple[Tensor, Tensor],
    filters: Tensor,
    bias: Tensor,
    taps: int,
    dilation: int,
    mask: Tensor | None = None,
    residual: Tensor | None = None,
    past: Tensor | None = None,
    then: Pointwise | None = None,
) -> Tensor:
    """A convolution of a snake of x [B, C, N], whose channels lie side by side, and so they do in what comes out [B, D, M];
    all float32. wave: frequency and gain of the snake, C values each; filters: `nine_filters` of the weight; bias [D];
    past [B, C, P]: what is before the snake of x; mask [B, P + N] bool, where the snake is zero instead; then: a snake and a product of
    what comes out; residual [B, D, M], what is added last."""
    assert _library is not None and x.dtype == filters.dtype == bias.dtype == torch.float32
    (batch, channels, num), out_channels = x.shape, len(bias)
    before = 0 if past is None else past.shape[2]
    length = before + num - (taps - 1) * dilation
    assert filters.is_contiguous() and filters.shape[2] == channels == wave[0].numel() and length > 0
    x, x_step = _rows(x)
    more, more_step = (None, 0) if residual is None else _rows(residual)
    old, old_step = (None, 0) if past is None else _rows(past)
    assert old is None or (old.dtype == torch.float32 and old.shape[::2] == (batch, channels))
    assert more is None or more.shape == (batch, length, out_channels)
    assert mask is None or (
        mask.shape == (batch, before + num) and mask.stride(1) == 1 and mask.dtype == torch.bool
    )
    assert then is None or then.columns.shape[1] == out_channels == then.frequency.numel()
    out = x.new_empty(batch, length, out_channels)
    pointwise = (None,) * 4 if then is None else (then.columns, then.bias, then.frequency, then.gain)
    tensors = old, x, filters, bias, *wave, mask, *pointwise, more, out
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    steps = old_step, x_step, 0 if mask is None else mask.stride(0), more_step
    sizes = batch, before, length, channels, out_channels, taps, dilation
    _library.convolve_snake_of_rows(*pointers, *sizes, *steps, torch.get_num_threads())
    return out.mT


def depthwise_unit(
    x: Tensor,
    wave: tuple[Tensor, Tensor],
    taps: Tensor,
    bias: Tensor,
    dilation: int,
    past: Tensor,
    then: Pointwise,
) -> Tensor:
    """x and a convolution of its snake in which channels are apart, behind which a snake and a product are: x [B, C, N], as
    `convolve_snake` takes and gives it; taps [kernel, C]; past [B, C, (kernel - 1) * dilation], what is before the snake of
    x."""
    assert _library is not None and x.dtype == past.dtype == taps.dtype == bias.dtype == torch.float32
    batch, channels, num = x.shape
    assert taps.is_contiguous() and taps.shape[1] == channels == wave[0].numel() == then.columns.shape[1]
    assert past.shape == (batch, channels, (len(taps) - 1) * dilation)
    x, x_step = _rows(x)
    old, old_step = _rows(past)
    out = x.new_empty(batch, num, channels)
    tensors = old, x, taps, bias, *wave, then.columns, then.bias, then.frequency, then.gain, out
    sizes = batch, num, channels, len(taps), dilation, old_step, x_step
    _library.depthwise_unit_of_rows(
        *(tensor.data_ptr() for tensor in tensors), *sizes, torch.get_num_threads()
    )
    return out.mT


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """x [B, C, N] -> [B, N, C] with each stream's rows one behind the other, and how far apart the streams lie."""
    rows = x.mT
    if rows.stride(2) != 1 or rows.stride(1) != rows.shape[2]:
        rows = rows.contiguous()
    return rows, rows.stride(0)
