"""The part `kernels` of device.py: the GPU's kernels compared with the plain operators on the same device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from zoo.nn.attention import Turn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# query heads, key heads, head size of qwen3_tts, cosyvoice2, fish_s2 and higgs_v3, voxcpm2
SHAPES = ((16, 8, 128), (14, 2, 64), (32, 8, 128), (16, 2, 128))
# what families do to queries and keys before attention
TURNS = ("written", "rotated", "normed and rotated", "normed wide and rotated in pairs")
# columns of gate and of x: VoxCPM2's solver; the language models of qwen3_tts and voxcpm2, of fish_s2 and
# higgs_v3, of cosyvoice2; qwen3_tts's code predictor
GATED, GATED_ROWS = ((4096, 1024), (6144, 2048), (9728, 2560), (4864, 896), (3072, 1024)), (8, 64, 1408)
# rows, positions, channels, outputs, taps and dilation: residual units of Qwen3-TTS, VoxCPM2, Fish S2 and Higgs V3,
# an upsampling, and tiles that are not filled
CONVOLVED = (
    (12, 3000, 768, 768, 7, 1),
    (2, 48000, 96, 96, 7, 9),
    (8, 5000, 64, 64, 7, 3),
    (3, 9000, 32, 32, 7, 9),
    (12, 4000, 192, 288, 2, 1),
    (5, 101, 72, 40, 3, 3),
)
# inputs and outputs of the products of VoxCPM2's language model and solver, Higgs, Fish S2, Qwen3-TTS 1.7B and its
# code predictor, each as qkv, out, gate_up and down
FP8 = {
    "voxcpm2": ((2048, 2560), (2048, 2048), (2048, 12288), (6144, 2048)),
    "voxcpm2's solver": ((1024, 2560), (2048, 1024), (1024, 8192), (4096, 1024)),
    "higgs_v3 and fish_s2": ((2560, 6144), (4096, 2560), (2560, 19456), (9728, 2560)),
    "qwen3_tts": ((2048, 4096), (2048, 2048), (2048, 12288), (6144, 2048)),
    "qwen3_tts's code predictor": ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024)),
}
FP8_ROWS = (1, 64, 1408)  # the last: a solver of 64 streams
# allowed differences of a kernel from the plain operator, by dtype
KERNEL_GAPS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
FP8_GAP = 4e-2  # of a product: one step of bf16 is 1/32 at its largest values, 4 to 8
Put = Callable[[str, Any], None]
Way = Callable[[], Any]
Alone = Callable[[Put], AbstractContextManager[None]]  # keeps the device free of other parts


def kernels(put: Put, alone: Alone) -> None:
    """Report each kernel's largest gap to the plain operator. Raises AssertionError for a large one."""
    from benchmarks.device_stack import PUBLISHED, stacks
    from benchmarks.device_stretch import stretches
    from zoo.nn import attention, frame_attention, row_convolution, sampling, swiglu  # noqa: F401, the operators

    wrong: list[str] = []

    def compare(
        name: str, dtype: torch.dtype, operator: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> None:
        found = gap(operator, *arguments)
        put(name, found)
        wrong.extend([name] * (found > KERNEL_GAPS[dtype]))

    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            name = f"{shape[0]}/{shape[1]} x {shape[2]} {str(dtype).removeprefix('torch.')}"
            operator = torch.ops.zoo.rotary_paged_attention.default
            for is_step, turn in product((True, False), TURNS):
                launch = f"paged attention, {turn}, {'step' if is_step else 'prefill'}, {name}"
                compare(launch, dtype, operator, paged(*shape, dtype, is_step, turn))
            attend, grow = torch.ops.zoo.frame_attention.default, torch.ops.zoo.grow_frame_attention.default
            compare(f"within a frame, {name}", dtype, attend, in_frame(*shape, dtype))
            compare(f"within a growing frame, {name}", dtype, grow, growing(*shape, dtype))
    stretches(compare, put, alone)
    for width in (2048, 4097, 6564):
        put(f"draws of {width} that differ, of 256", draws_apart(width))
    seed = torch.arange(64, device=DEVICE) * 7919
    compare("noise", torch.float32, torch.ops.zoo.uniform.default, (seed, seed + 1, 3, 15, 2048))
    for shape in CONVOLVED:
        convolved(shape, compare)
    for rows, (inner, width) in product(GATED_ROWS, GATED):
        gated(f"gated product, {rows} x {inner} x {width}", rows, inner, width, compare, put, alone)
    wrong += stacks(put, alone, tuple(PUBLISHED), ("whole",), (1, 64))
    assert not wrong, f"kernels that differ from the plain operators: {', '.join(wrong)}"


def convolved(shape: tuple[int, ...], compare: Callable[..., None]) -> None:
    """Compare each way to convolve over rows with the plain operator."""
    from compile_cache import choices
    from zoo.nn.row_convolution import ways

    rows, length, channels, outputs, taps, dilation = shape
    for dtype in (torch.bfloat16, torch.float16):
        x = random(rows, length, channels, dtype=dtype)
        weight = random(outputs, taps, channels, dtype=dtype) * ((taps * channels) ** -0.5 / 4)
        for way in ways(x.device):
            kind = str(dtype).removeprefix("torch.")
            with choices.assumed(way):
                given = x, weight, dilation
                compare(
                    f"convolution of {shape} {kind}, {way}", dtype, torch.ops.zoo.convolve_rows.default, given
                )


def gated(
    name: str, rows: int, inner: int, width: int, compare: Callable[..., None], put: Put, alone: Alone
) -> None:
    """Compare a gated product in one launch, and by cuBLAS with a second launch, with the plain operator;
    time both."""
    from compile_cache import choices
    from zoo.nn.swiglu import computed, ways

    dtype = torch.bfloat16
    arguments = random(rows, width, dtype=dtype), random(2 * inner, width, dtype=dtype) * (width**-0.5 / 4)
    for way in ways():
        with choices.assumed(way):
            compare(f"{name}, {way}", dtype, torch.ops.zoo.swiglu_linear.default, arguments)
    if DEVICE == "cuda":
        with alone(put), torch.inference_mode():
            taken = {way: choices.time_us(partial(computed, way, *arguments)) for way in ways()}
        put(f"{name}, us", {way: round(us, 1) for way, us in taken.items()})


def fp8_products(put: Put, alone: Alone) -> None:
    """Compare products in fp8 with their plain form, at the published shapes, and time them beside bf16 products.
    Raises AssertionError for a large gap."""
    from zoo.nn import fp8

    why = fp8.why_not(torch.device(DEVICE), torch.bfloat16)
    if why is not None:
        return put("skipped", why)
    wrong: list[str] = []
    with torch.inference_mode():
        for whose, shapes in FP8.items():
            taken: dict[str, Callable[[], dict[str, float]]] = {}
            for width, columns in shapes:
                weight = random(columns, width, dtype=torch.bfloat16) * width**-0.5
                for rows in FP8_ROWS:
                    name = f"{whose}, {rows} x {width} x {columns}"
                    largest, times = fp8_product(random(rows, width, dtype=torch.bfloat16), weight)
                    put(name, largest)
                    taken[f"{name}, us"] = times
                    wrong.extend([name] * (not largest <= FP8_GAP))
            with alone(put):
                for name, times in taken.items():
                    put(name, times())
    assert not wrong, f"products in fp8 that differ from the plain form: {', '.join(wrong)}"


def fp8_product(x: Tensor, plain_weight: Tensor) -> tuple[float, Callable[[], dict[str, float]]]:
    """Return the largest gap of a product to its plain form, and a function that returns the us of it and of a bf16
    product."""
    from compile_cache import choices
    from zoo.nn import fp8

    weight, weight_scale = fp8.rounded(plain_weight)
    given = *fp8.rounded(x), weight, weight_scale.T.contiguous()
    ways = {"fp8": partial(fp8.scaled, *given), "bf16": partial(torch.nn.functional.linear, x, plain_weight)}
    largest = float((ways["fp8"]().double() - fp8.plain(*given).double()).abs().max())
    return largest, lambda: {way: round(choices.time_us(run), 1) for way, run in ways.items()}


def gap(operator: Callable[..., Any], *arguments: Any) -> float:
    from zoo import kernels

    with torch.inference_mode():
        found = operator(*arguments)
        with kernels.plain():
            expected = operator(*arguments)
    pairs = [(found, expected)] if isinstance(found, Tensor) else list(zip(found, expected, strict=True))
    return max(float((a.double() - b.double()).nan_to_num(nan=torch.inf).abs().max()) for a, b in pairs)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def recorded(way: Way) -> Way:
    """Return a replay of a way's launches, which takes no time of the host's; on a CPU, the way itself."""
    way()  # builds and compiles, while other parts run
    if DEVICE != "cuda":
        return way
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        way()
    return graph.replay


def paged(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, is_step: bool, turn: str
) -> tuple[Any, ...]:
    """Return the arguments of `rotary_paged_attention`: sequences of 1 to 3,000 positions in one layer of scattered
    pages, NaN behind each length, and new rows as one product gives them. turn: of TURNS."""
    lens = torch.tensor([1, 17, 500, 1500, 3000])
    new = torch.ones_like(lens) if is_step else torch.tensor([1, 17, 100, 33, 64])
    pages = -(-int(lens.max()) // 16)
    order = torch.randperm(len(lens) * pages, generator=torch.Generator().manual_seed(0)).view(len(lens), -1)
    kv = random(len(lens) * pages * 32, kv_heads, dim, dtype=dtype)
    at = torch.arange(pages * 16)
    rows = order[:, at // 16] * 32 + at % 16  # [5, positions]: the row of each key
    beyond = rows[at >= lens[:, None]].to(DEVICE)
    kv[torch.cat((beyond, beyond + 16))] = torch.nan
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), new.cumsum(0)))
    table, lens, starts = ((order * 32).to(DEVICE), lens.to(DEVICE), starts.to(DEVICE))
    rows = random(int(new.sum()), (heads + 2 * kv_heads) * dim, dtype=dtype)
    parts = rows.split([heads * dim, kv_heads * dim, kv_heads * dim], 1)
    token = torch.arange(len(rows), device=DEVICE)
    owner = torch.searchsorted(starts[1:], token, right=True)
    at = lens[owner] - starts[owner + 1] + token
    written = table[owner, at // 16] + at % 16
    where = kv, written, table, lens, starts, 16, 0, dim**-0.5
    return *(x.unflatten(1, (-1, dim)) for x in parts), *turned(turn, len(rows), dim, dtype), *where


def turned(turn: str, rows: int, dim: int, dtype: torch.dtype) -> Turn:
    """Return one of TURNS with random tables."""
    from zoo.nn.attention import Turn

    if turn == "written":
        return Turn()
    is_paired, angle = "pairs" in turn, random(rows, dim // 2)
    angle = angle.repeat_interleave(2, 1) if is_paired else angle.repeat(1, 2)
    table = angle.cos().to(dtype), angle.sin().to(dtype)
    if "normed" not in turn:
        return Turn(*table, is_paired=is_paired)
    return Turn(*table, *(random(2, dim, dtype=dtype) + 1), 1e-2, "wide" in turn, is_paired)


def in_frame(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[Any, ...]:
    rows = random(128, 11, (heads + 2 * kv_heads) * dim, dtype=dtype)
    q, k, v = rows.split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
    angle = random(11, dim)
    return *(x.unflatten(-1, (-1, dim)) for x in (q, k, v)), angle.cos(), angle.sin(), dim**-0.5, 0


def growing(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the last two positions of a cache, so that none of it is undefined."""
    rows = random(128, 2, (heads + 2 * kv_heads) * dim, dtype=dtype)
    parts = rows.split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
    angle, cache = random(11, dim), random(128, 2, kv_heads, 11, dim)
    norms = random(dim, dtype=dtype), random(dim, dtype=dtype)
    first = torch.full((1,), 9, dtype=torch.int64, device=DEVICE)
    q, k, v = (x.unflatten(-1, (-1, dim)) for x in parts)
    return q, k, v, angle.cos(), angle.sin(), dim**-0.5, first, cache, *norms, 1e-6, False, False


def draws_apart(width: int) -> int:
    """Return how many of 256 rows draw another value. A sum close to the edge may round differently."""
    from zoo import kernels
    from zoo.nn import sampling

    seed, step = torch.arange(512, device=DEVICE).view(2, -1)
    logits, noise = 3 * random(256, width), sampling.gumbel(seed, step, range(1), width)[:, 0]
    how = (torch.full((256,), value, device=DEVICE) for value in (0.8, 50, 0.9))
    arguments = logits, *how, noise
    drawn = torch.ops.zoo.draw.default(*arguments)
    with kernels.plain():
        return int((drawn != torch.ops.zoo.draw.default(*arguments)).sum())
