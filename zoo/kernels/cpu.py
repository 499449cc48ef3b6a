"""The CPU kernels, kernels*.cpp. They are built and cached like the code that inductor generates.

Torch's general operators spend most of a small step on overhead: they gather pages before attention reads
them, sort a vocabulary for its fifty likeliest entries, and pass five times over a codec's activations. These
kernels avoid that (benchmarks/LOG.md). Until `build`, the operators in zoo/nn run as written in torch. The
kernels are tested against that version.
"""

from __future__ import annotations

import os
import platform
from contextlib import nullcontext
from ctypes import CDLL, c_bool, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.kernels.operator import is_plain

# compiled as one file, in this order
FILES = (
    "kernels.cpp",
    "kernels_render.cpp",
    "kernels_snake.cpp",
    "kernels_frame.cpp",
    "kernels_products.cpp",
    "kernels_stack.cpp",
    "kernels_operators.cpp",
)
SOURCES = tuple(Path(__file__).with_name(name) for name in FILES)
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
# what compilers call the instruction sets that ATEN_CPU_CAPABILITY can limit torch to
LEVELS = {"default": "x86-64", "avx2": "x86-64-v3", "avx512": "x86-64-v4"}

_library: CDLL | None = None
_key = ""  # of the library


def key() -> str:
    """Return a hash of the sources and of `level`, which names the library that `build` builds."""
    return blake2b(f"{level()}\n{source()}".encode(), digest_size=8).hexdigest()


def source() -> str:
    return "\n".join(path.read_text() for path in SOURCES)


def level() -> str | None:
    """Return the instruction set that the kernels are limited to, because ATEN_CPU_CAPABILITY limits torch to
    it, or None for all that this machine has."""
    return LEVELS.get(os.environ.get("ATEN_CPU_CAPABILITY", "")) if platform.machine() == "x86_64" else None


def build() -> None:
    """Build the kernels; from then on the CPU operators of this process use them. Takes seconds the first
    time. Raises ValueError without a C++ compiler."""
    global _library, _key
    assert _key in ("", key()), "the kernels are already built for another instruction set"
    # imported here because it takes two seconds, which only a server needs to spend
    from torch._inductor import config
    from torch._inductor.codecache import CppCodeCache
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        with nullcontext() if level() is None else config.patch({"cpp.march": level()}):
            library = CppCodeCache.load(source())
    except InvalidCxxCompiler:
        raise ValueError(
            "compiling for a CPU needs a C++ compiler, and none was found: install g++, or serve with --no-compile"
        ) from None
    for name in NAMES.values():
        getattr(library, f"attend_stretch_{name}").argtypes = (
            [c_void_p] * 8 + [c_int64] * 8 + [c_float, c_int]
        )
        getattr(library, f"norm_mish_{name}").argtypes = [c_void_p] * 5 + [c_int64] * 2 + [c_float, c_int]
    for name in ("snake", "snake_of_rows"):
        getattr(library, name).argtypes = [c_void_p] * 4 + [c_int64] * 3 + [c_int]
    library.convolve_snake_of_rows.argtypes = [c_void_p] * 15 + [c_int64] * 13 + [c_bool] * 3 + [c_int]
    library.group_norm_mish_of_rows.argtypes = [c_void_p] * 5 + [c_int64] * 4 + [c_float, c_int]
    library.depthwise_unit_of_rows.argtypes = [c_void_p] * 13 + [c_int64] * 7 + [c_int]
    library.uniform.argtypes = [c_void_p] * 3 + [c_int64] * 4 + [c_int]
    library.normal.argtypes = [c_void_p] * 3 + [c_int64] * 2 + [c_int]
    for name in ("keep_likely", "keep_likely_before_temperature", "keep_nucleus"):
        getattr(library, name).argtypes = [c_void_p] * 4 + [c_int64] * 2 + [c_int]
    _library, _key = library, key()


def has(tensor: Tensor) -> bool:
    """Return whether to use CPU kernels for data on the tensor's device. False under torch.compile, which
    cannot trace them; compiled code reaches them through operators only."""
    if torch.compiler.is_compiling():
        return False
    return _library is not None and not is_plain() and tensor.device.type == "cpu"


def has_operators(tensor: Tensor) -> bool:
    """Return whether the operators of kernels_operators.cpp exist for data on the tensor's device. Unlike
    `has`, this also holds under torch.compile."""
    is_wanted = torch.compiler.is_compiling() or not is_plain()
    return _library is not None and is_wanted and tensor.device.type == "cpu"


def know(*tensors: Tensor) -> bool:
    """Return whether to use CPU kernels for the tensors, whose dtypes must be supported."""
    return all(has(tensor) and tensor.dtype in NAMES for tensor in tensors)


def attend_stretch(
    q: Tensor, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor, index: Tensor, mask: Tensor, heads: int
) -> Tensor:
    """Attention of `nn.s3.estimator` -> [B * L, Q, H * D]. Queries q [B * L, Q, H * D] see the first
    positions of cache [S, P, L, 2 * H * D] and the new keys and values k, v (shaped like q) where mask [B, Q,
    held + Q] is true. The new ones are then written to the cache at slots [B] and index [B, Q]."""
    assert _library is not None and cache.is_contiguous() and mask.dtype == torch.bool
    slots, index, mask = (tensor.contiguous() for tensor in (slots, index, mask))
    stride = q.stride(1)  # q, k and v may be slices of one product
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
    """Same arguments as `keep_likely`; `fish_s2.sampling.keep_likely`."""
    return _keep("keep_likely_before_temperature", logits, top_k, top_p)


def keep_nucleus(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Same arguments as `keep_likely`; `cosyvoice2.sampling.nucleus`."""
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


EIGHT = 8  # vectors of columns in a block of weights, as in kernels_products.cpp


def in_blocks(weight: Tensor) -> Tensor:
    """Return a matrix [N, K], float32, bf16 or int8, as `blocked_linear` reads it: [blocks, K, words] float32
    or int32. Columns are padded with zeros to whole blocks."""
    kinds = {torch.float32: torch.float32, torch.bfloat16: torch.int16, torch.int8: torch.int8}
    assert _library is not None and weight.dtype in kinds, f"{weight.dtype}"
    columns, per_word = _library.block_columns(), 4 // weight.itemsize
    bits = weight.view(kinds[weight.dtype])
    bits = F.pad(bits, (0, 0, 0, -len(bits) % columns))
    # a word holds one weight of each of the next `per_word` vectors of columns
    bits = bits.view(-1, EIGHT // per_word, per_word, columns // EIGHT, weight.shape[1])
    words = bits.permute(0, 4, 1, 3, 2).contiguous().view(torch.float32 if per_word == 1 else torch.int32)
    return words.flatten(2)


def scales_in_blocks(scales: Tensor) -> Tensor:
    """Return scales [N, groups] float32 as `blocked_linear` reads them, [blocks, groups, columns]."""
    assert _library is not None and scales.dtype == torch.float32, f"{scales.dtype}"
    columns = _library.block_columns()
    return F.pad(scales, (0, 0, 0, -len(scales) % columns)).unflatten(0, (-1, columns)).mT.contiguous()


def norm_mish(x: Tensor, weight: Tensor, bias: Tensor, shift: Tensor | None, eps: float) -> Tensor:
    """Return mish(layer norm x) + shift for x [..., C]; weight, bias and shift have C values and x's dtype;
    `nn.s3.estimator`."""
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


def group_norm_mish(x: Tensor, norm: nn.GroupNorm, shift: Tensor | None) -> Tensor:
    """Return mish(norm(x)) + shift for x [B, C, N] float32, in the layout of `convolve_snake`; shift [C]."""
    assert _library is not None and x.dtype == norm.weight.dtype == norm.bias.dtype == torch.float32
    assert norm.num_channels == x.shape[1] and (shift is None or shift.shape == (x.shape[1],))
    rows = x.mT.contiguous()
    shift = None if shift is None else shift.contiguous()
    out = torch.empty_like(rows)
    tensors = rows, norm.weight, norm.bias, shift, out
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    _library.group_norm_mish_of_rows(
        *pointers, *rows.shape, norm.num_groups, norm.eps, torch.get_num_threads()
    )
    return out.mT


def snake(x: Tensor, frequency: Tensor, gain: Tensor) -> Tensor:
    """x [B, C, N], frequency and gain of C values each, all float32 -> [B, C, N]; `snake.snake`."""
    assert _library is not None and x.dtype == frequency.dtype == gain.dtype == torch.float32
    is_rows = x.shape[1] > 1 and x.stride(1) == 1  # channels are contiguous; the result keeps that layout
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


COLUMNS = 64  # as in kernels_snake.cpp
MOST_BYTES_OF_NINE = 8 << 20  # of a weight


def nine_filters(weight: Tensor) -> Tensor:
    """Return a convolution's weight [D, C, taps] as `convolve_snake` reads it by nine short filters: `panels`
    of their taps.

    The taps are divided into even ones, odd ones, and the sums of both; each of the three is divided the same
    way again.
    """

    def thirds(taps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        even, odd = taps[..., 0::2], taps[..., 1::2]
        return even, odd, even + F.pad(odd, (0, even.shape[-1] - odd.shape[-1]))

    return panels(torch.cat([ninth for third in thirds(weight) for ninth in thirds(third)], -1))


def panels(weight: Tensor) -> Tensor:
    """Return a convolution's weight [D, C, taps] in the order in which `convolve_snake` reads it, [panels,
    taps, C, columns]. Outputs are padded with zeros to a multiple of COLUMNS."""
    assert _library is not None or weight.is_meta
    columns = COLUMNS if _library is None else _library.panel_columns()
    padded = F.pad(weight.permute(2, 1, 0), (0, -len(weight) % COLUMNS))  # [taps, C, D]
    return padded.unflatten(2, (-1, columns)).permute(2, 0, 1, 3).contiguous()


def convolution_filters(weight: Tensor) -> Tensor:
    """Return a convolution's weight [D, C, taps] in the form that `convolve_snake` computes fastest.

    Nine short filters have 4.25 taps an output instead of 7, but two and a half times as many weights. They
    make long signals faster, but no convolution of two taps, and not those of large weights.
    """
    has_nine = weight.shape[2] > 2 and weight.nbytes <= MOST_BYTES_OF_NINE
    return nine_filters(weight) if has_nine else panels(weight)


def has_nine(filters: Tensor, taps: int) -> bool:
    """Return whether the filters of a convolution with `taps` taps are nine short ones."""
    return filters.shape[1] != taps


ELU: Final = "elu"
# what a convolution's input goes through: a snake, by frequency and gain of each channel; ELU; or nothing
Wave = tuple[Tensor, Tensor] | Literal["elu"] | None
Pointers = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Pointwise:
    """An activation, then a convolution that is 1 wide: `panels` of its weight [E, D, 1], and its bias [E]."""

    panels: Tensor
    bias: Tensor
    wave: Wave


@dataclass(frozen=True)
class Past:
    """The pasts of all slots, which precede the activated inputs of streams. A kernel reads those of `slots`
    and replaces them with the ends of the activated inputs."""

    rows: Tensor  # [S, P, C]; the positions of a slot are contiguous
    slots: Tensor  # [B]
    valid: Tensor  # [B]: how many positions of an input are not padding


def convolve_snake(
    x: Tensor,
    wave: Wave,
    filters: Tensor,
    bias: Tensor,
    taps: int,
    dilation: int,
    mask: Tensor | None = None,
    residual: Tensor | None = None,
    past: Tensor | Past | None = None,
    then: Pointwise | None = None,
    padding: int = 0,
) -> Tensor:
    """Convolve the activated x [B, C, N] -> [B, D, M], or [B, E, M] with `then`. Everything is float32;
    channels are contiguous in x and in the result.

    wave: the activation. filters: `nine_filters` or `panels` of the weight. bias [D].
    mask [B, P + N] bool: where the activated x is replaced by zero. residual: added last, in the result's
    shape. past, or [B, C, P]: stands before the activated x. then: applied to the convolution's output. padding:
    positions of zeros before and behind the activated x, instead of a past.
    """
    assert _library is not None and x.dtype == filters.dtype == bias.dtype == torch.float32
    (batch, channels, num), out_channels = x.shape, len(bias)
    assert past is None or not padding
    before, old, old_step = _past(past, batch, channels)
    before = before or padding
    length = before + num + padding - (taps - 1) * dilation
    assert filters.is_contiguous() and filters.shape[2] == channels and length > 0
    frequency, gain = _snake(wave, channels)
    x, x_step = _rows(x)
    more, more_step = (None, 0) if residual is None else _rows(residual)
    width = out_channels if then is None else len(then.bias)
    assert more is None or more.shape == (batch, length, width)
    assert mask is None or (
        mask.shape == (batch, before + num) and mask.stride(1) == 1 and mask.dtype == torch.bool
    )
    assert then is None or then.panels.shape[2] == out_channels
    out = x.new_empty(batch, length, width)
    pointwise = (None,) * 4 if then is None else (then.panels, then.bias, *_snake(then.wave, out_channels))
    tensors = *old, x, filters, bias, frequency, gain, mask, *pointwise, more, out
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    steps = old_step, x_step, 0 if mask is None else mask.stride(0), more_step
    sizes = batch, before, num, length, channels, out_channels, width, taps, dilation
    kinds = wave == ELU, then is not None and then.wave == ELU, has_nine(filters, taps)
    _library.convolve_snake_of_rows(*pointers, *sizes, *steps, *kinds, torch.get_num_threads())
    return out.mT


def depthwise_unit(
    x: Tensor,
    wave: tuple[Tensor, Tensor],
    taps: Tensor,
    bias: Tensor,
    dilation: int,
    past: Tensor | Past | None,
    then: Pointwise,
) -> Tensor:
    """Return x + then(depthwise convolution of snake(x)), x [B, C, N], in the layout of `convolve_snake`.

    taps [kernel, C]; past, of P = (kernel - 1) * dilation positions, or [B, C, P]: stands before snake(x). Without
    it, the result lacks P / 2 positions at each end of x.
    """
    assert _library is not None and x.dtype == taps.dtype == bias.dtype == torch.float32
    (batch, channels, num), reach = x.shape, (len(taps) - 1) * dilation
    assert taps.is_contiguous() and taps.shape[1] == channels == len(then.bias) == then.panels.shape[2]
    x, x_step = _rows(x)
    before, old, old_step = _past(past, batch, channels)
    assert past is None or before == reach
    length = num if past is not None else num - reach
    assert length > 0 and then.wave not in (None, ELU), f"{num} positions, {reach} read, before {then.wave}"
    out = x.new_empty(batch, length, channels)
    snakes = _snake(wave, channels), _snake(then.wave, channels)
    tensors = *old, x, taps, bias, *snakes[0], then.panels, then.bias, *snakes[1], out
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    sizes = batch, num, channels, len(taps), dilation, old_step, x_step
    _library.depthwise_unit_of_rows(*pointers, *sizes, torch.get_num_threads())
    return out.mT


def _snake(wave: Wave, channels: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return frequency and gain of a snake, or None for both if `wave` is not one."""
    if wave is None or wave == ELU:
        return None, None
    frequency, gain = wave
    assert (
        frequency.numel() == gain.numel() == channels and frequency.is_contiguous() and gain.is_contiguous()
    )
    return frequency, gain


def _past(past: Tensor | Past | None, batch: int, channels: int) -> tuple[int, Pointers, int]:
    """Return how many positions a past has, what the kernels read (the rows, the slots, and how much of an input is
    valid), and the stride between streams or slots."""
    if past is None:
        return 0, (None, None, None), 0
    if isinstance(past, Past):
        rows, slots, valid = past.rows, past.slots.contiguous(), past.valid.contiguous()
        assert rows.stride()[1:] == (channels, 1) and len(slots) == len(valid) == batch
        assert slots.dtype == valid.dtype == torch.int64
        found: Pointers = rows, slots, valid
    else:
        rows, _ = _rows(past)
        found = rows, None, None
        assert len(rows) == batch
    assert rows.dtype == torch.float32 and rows.shape[2] == channels
    return rows.shape[1], found, rows.stride(0)


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """x [B, C, N] -> [B, N, C] in which each stream's rows are contiguous, and the stride between streams."""
    rows = x.mT
    if rows.stride(2) != 1 or rows.stride(1) != rows.shape[2]:
        rows = rows.contiguous()
    return rows, rows.stride(0)
