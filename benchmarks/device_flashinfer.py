"""The parts `flashinfer=KIND` of device.py: FlashInfer's kernels next to ours, by family and number of streams.

Each finding has the largest gap to a plain form in torch, relative to values above 1, and the microseconds of both with
cold caches, recorded as the server records its launches:

    step        attention of a step, with rotation and writing (zoo/nn/attention.py); theirs is XQA. The gap is that of
                sequences of all lengths, with NaN behind them
    prompt      attention of prompts without either; theirs is the paged wrapper, whose plan the host makes before each
                launch: its time is given apart, because a recorded launch would wait for it
    norm, rope  as the compiler makes them alone; in a model it fuses them with their neighbours
    draw        with top-k and top-p; draws of both differ, because FlashInfer's depend on the row

Its kernels are compiled when they are first used, all at once here: 21 s of one core for XQA's, more for prompts.
Modules that lie in flashinfer/data/aot are loaded instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.device_kernels import DEVICE, KERNEL_GAPS, Alone, Put, Way, recorded
from zoo.kernels import gpu

STREAMS = (1, 16, 64, 128, 256)
ROWS = (16, 64, 256)  # of norm, rope and draw, which the compiler lays out for every number above 1
POSITIONS = 512  # of each sequence of a step
PROMPTS, PROMPT_TOKENS = (1, 4), 256
PAGE, THETA, EPS = 16, 1e6, 1e-6
DTYPE = torch.bfloat16


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    width: int  # of a hidden state
    logits: int  # of a draw; 0: the family draws none


class Measured(NamedTuple):
    """One row before its times: what is known already, and both ways."""

    found: dict[str, float]
    ours: Way
    theirs: Way


SHAPES = {
    "qwen3_tts": Shape(16, 8, 128, 2048, 3072),
    "voxcpm2": Shape(16, 2, 128, 2048, 0),
    "higgs_v3": Shape(32, 8, 128, 2560, 1026),
    "fish_s2": Shape(32, 8, 128, 2560, 4097),
    "cosyvoice2": Shape(14, 2, 64, 896, 6564),
    "zonos": Shape(16, 4, 128, 2048, 1026),
    "orpheus": Shape(24, 8, 128, 3072, 4097),
    "csm": Shape(32, 8, 64, 2048, 2051),
    "chatterbox": Shape(16, 16, 64, 1024, 8194),
    "glm4_voice": Shape(32, 2, 128, 4096, 168960),
}
KINDS = "norm", "rope", "draw", "prompt", "step"
FAMILIES = tuple(SHAPES)[:5]  # each further one may need a kernel more


def compared(kind: str, put: Put, alone: Alone, families: tuple[str, ...] = FAMILIES) -> None:
    """Report one of KINDS. Raises AssertionError for a gap that is too large."""
    from zoo.nn import attention, flashinfer_attention, sampling  # noqa: F401, the operators

    reason = flashinfer_attention.why_not(torch.empty(64, 8, 128, dtype=DTYPE, device=DEVICE), PAGE)
    if reason is not None:
        put("skipped", reason)
        return
    put("version", flashinfer_attention.version())
    began_s = time.monotonic()
    put("not built", build(kind, [SHAPES[family] for family in families]))
    put("building took, s", round(time.monotonic() - began_s, 1))
    wrong = [label for family in families for label in compare(kind, family, put, alone)]
    assert not wrong, f"FlashInfer failed or differs from the plain form: {', '.join(wrong)}"


def compare(kind: str, family: str, put: Put, alone: Alone) -> list[str]:
    """Report the rows of a family. Return the labels of those that failed, or whose gap is too large."""
    known, ways, wrong = {}, {}, []
    with torch.inference_mode():
        for label, measure in measurements(kind, family):
            try:
                row = measure()
                put(label, row.found)
                ways[label] = [recorded(row.ours), recorded(row.theirs)]
            except Exception as error:  # the other rows may work
                put(label, {"error": str(error)[-500:]})
                wrong.append(label)
                continue
            known[label] = row
            wrong += [label] * (not row.found.get("gap", 0.0) <= KERNEL_GAPS[DTYPE])
        with alone(put):
            for label, both in ways.items():
                put(label, known[label].found | times(both))
    return wrong


def measurements(kind: str, family: str) -> list[tuple[str, Callable[[], Measured]]]:
    """Return the rows of a family, by label."""
    shape = SHAPES[family]
    counts = {step: STREAMS, prompt: PROMPTS, norm: ROWS, rope: ROWS, draw: ROWS if shape.logits else ()}
    return [
        (f"{measure.__name__}, {family}, {count}", partial(measure, shape, count))
        for measure, numbers in counts.items()
        if measure.__name__ == kind
        for count in numbers
    ]


def build(kind: str, shapes: list[Shape]) -> dict[str, str]:
    """Build the kernels of a kind at once, with a compiler each -> why some cannot be built, by kernel."""
    from flashinfer import norm, rope
    from flashinfer import sampling as drawing

    kernels = gpu.of_gpu("flashinfer_kernels")
    place = torch.empty(0, device=DEVICE)
    wanted: dict[str, Way] = {}
    if kind == "step":
        for dim, group in sorted({(shape.dim, shape.heads // shape.kv_heads) for shape in shapes}):
            name = f"step of {group} queries a key, heads of {dim}"
            wanted[name] = partial(kernels.failure, place, DTYPE, PAGE, dim, group)
        wanted["gate"] = kernels.gate_failure
    if kind == "prompt":
        for shape in {shape.dim: shape for shape in shapes}.values():
            wanted[f"prompt, heads of {shape.dim}"] = partial(reason_of, partial(prompt_wrapper, shape, 1))
    others = {"norm": norm.get_norm_module, "rope": rope.get_rope_module, "draw": drawing.get_sampling_module}
    wanted |= {name: partial(reason_of, get) for name, get in others.items() if name == kind}
    with ThreadPoolExecutor(len(wanted)) as pool:
        reasons = dict(zip(wanted, pool.map(lambda one: one(), wanted.values()), strict=True))
    return {name: reason for name, reason in reasons.items() if reason is not None}


def reason_of(build: Way) -> str | None:
    """Build something. Return why that failed, or None."""
    try:
        build()
    except (RuntimeError, OSError, ValueError) as error:
        return str(error)[-500:]
    return None


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw on the device: 256 streams have half a gigabyte of keys."""
    drawn = torch.randn(
        shape, generator=torch.Generator(DEVICE).manual_seed(sum(shape)), device=DEVICE, dtype=dtype
    )
    assert isinstance(drawn, Tensor)
    return drawn


def times(ways: list[Way]) -> dict[str, float]:
    """Return the microseconds of ours and theirs."""
    from compile_cache import choices

    return {
        f"{name}_us": round(choices.time_us(way), 2)
        for name, way in zip(("ours", "theirs"), ways, strict=True)
    }


def compiled(function: Callable[..., Any], *inputs: Tensor) -> Way:
    """Return a call of a function that is compiled once for every number of rows of its inputs."""
    from compile_cache.lower import any_size

    any_size(inputs, 0, "rows")
    return partial(torch.compile(function), *inputs)


def apart(found: Tensor, expected: Tensor) -> float:
    """Return the largest gap; of values above 1, relative to them, since bf16 rounds them so."""
    gaps = (found.double() - expected.double()).abs() / expected.double().abs().clamp(min=1.0)
    return float(gaps.nan_to_num(nan=torch.inf).max())


def step(shape: Shape, streams: int) -> Measured:
    from zoo import kernels
    from zoo.nn.attention import Turn

    heads, kv_heads, dim = shape[:3]
    pages = POSITIONS // PAGE
    order = torch.randperm(streams * pages, generator=torch.Generator().manual_seed(0)).view(streams, pages)
    table = (order * 2 * PAGE).to(DEVICE)
    kv = random(streams * pages * 2 * PAGE, kv_heads, dim, dtype=DTYPE)
    qkv = random(streams, (heads + 2 * kv_heads) * dim, dtype=DTYPE)  # as one product gives them
    parts = [
        part.unflatten(1, (-1, dim)) for part in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], 1)
    ]
    angle = random(streams, dim // 2).repeat(1, 2)
    turn = Turn(angle.cos().to(DTYPE), angle.sin().to(DTYPE))
    starts = torch.arange(streams + 1, device=DEVICE)

    def ways(kv: Tensor, lens: Tensor) -> tuple[Way, Way]:
        last = lens - 1
        written = table.gather(1, (last // PAGE)[:, None])[:, 0] + last % PAGE
        where = written, table, lens, starts, PAGE, 0, dim**-0.5
        ours = partial(torch.ops.zoo.rotary_paged_attention.default, *parts, *turn, kv, *where)
        return ours, partial(ours, table.int(), lens.int(), "flashinfer")

    lens = POSITIONS - torch.arange(streams, device=DEVICE) * 37 % POSITIONS
    at = torch.arange(POSITIONS, device=DEVICE)
    rows = table[:, at // PAGE] + at % PAGE  # [streams, POSITIONS]: the row of each key
    beyond = rows[at >= lens[:, None]]
    torn = kv.index_fill(0, torch.cat((beyond, beyond + PAGE)), torch.nan)
    ours, theirs = ways(torn, lens)
    with kernels.plain():
        expected = ours()
    found = {"gap": apart(theirs(), expected), "gap_of_ours": apart(ours(), expected)}
    return Measured(found, *ways(kv, torch.full_like(lens, POSITIONS)))


def prompt(shape: Shape, prompts: int) -> Measured:
    """Prompts of PROMPT_TOKENS positions, of which none was in the pages before."""
    from zoo import kernels
    from zoo.nn.flashinfer_attention import pages

    heads, kv_heads, dim = shape[:3]
    num_pages = PROMPT_TOKENS // PAGE
    table = torch.arange(prompts * num_pages, device=DEVICE).view(prompts, -1) * 2 * PAGE
    kv = random(prompts * num_pages * 2 * PAGE, kv_heads, dim, dtype=DTYPE)
    q = random(prompts * PROMPT_TOKENS, heads, dim, dtype=DTYPE)
    lens = torch.full((prompts,), PROMPT_TOKENS, device=DEVICE)
    starts = torch.arange(prompts + 1, device=DEVICE) * PROMPT_TOKENS
    given = q, kv, table, lens, starts, PAGE
    plain = partial(torch.ops.zoo.paged_attention.default, *given, dim**-0.5)
    ours = partial(kernels.on_gpu, "triton_attention", "launch", *given, 0, dim**-0.5)
    if DEVICE == "cpu":
        ours = plain
    wrapper, plan = prompt_wrapper(shape, prompts)
    theirs = partial(wrapper.run, q, pages(kv, PAGE, 0))
    expected = plain()
    found = {"gap": apart(theirs(), expected), "gap_of_ours": apart(ours(), expected)}
    began_s = time.perf_counter()
    for _ in range(20):
        plan()
    found["plan_us"] = round(1e6 * (time.perf_counter() - began_s) / 20, 1)  # it waits for the device itself
    return Measured(found, ours, theirs)


def prompt_wrapper(shape: Shape, prompts: int) -> tuple[Any, Way]:
    """Return FlashInfer's wrapper for `prompt`, planned, and its plan."""
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

    num_pages = PROMPT_TOKENS // PAGE
    each = torch.arange(prompts + 1, dtype=torch.int32, device=DEVICE)
    first_rows = torch.arange(prompts * num_pages, dtype=torch.int32, device=DEVICE) * 2 * PAGE
    place = torch.zeros(128 << 20, dtype=torch.uint8, device=DEVICE)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(place, kv_layout="NHD")
    whole = torch.full((prompts,), PAGE, dtype=torch.int32, device=DEVICE)
    positions = each * PROMPT_TOKENS, each * num_pages, first_rows, whole
    sizes = shape.heads, shape.kv_heads, shape.dim, PAGE
    scale = shape.dim**-0.5
    plan = partial(wrapper.plan, *positions, *sizes, causal=True, sm_scale=scale, q_data_type=DTYPE)
    plan()
    return wrapper, plan


def norm(shape: Shape, rows: int) -> Measured:
    """FlashInfer rounds once, behind the weight; ours rounds before it too, as the references do."""
    from flashinfer.norm import rmsnorm

    from zoo.nn.norm import RMSNorm

    x = random(rows, shape.width, dtype=DTYPE)
    layer = RMSNorm(shape.width, EPS).to(DEVICE, DTYPE).requires_grad_(False)
    layer.weight.fill_(1.0)
    theirs = partial(rmsnorm, x, layer.weight, EPS)
    return Measured({"gap": apart(theirs(), layer(x))}, compiled(layer, x), theirs)


def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q and k [rows, heads, D] in float32."""
    from zoo.nn.rope import rotate

    q, k = (rotate(x.float(), cos[:, None], sin[:, None]).to(x.dtype) for x in (q, k))
    return q, k


def rope(shape: Shape, rows: int) -> Measured:
    from flashinfer.rope import apply_rope_with_cos_sin_cache

    from zoo.nn.rope import rope_table

    heads, kv_heads, dim = shape[:3]
    q, k = random(rows, heads, dim, dtype=DTYPE), random(rows, kv_heads, dim, dtype=DTYPE)
    positions = torch.arange(rows, device=DEVICE)
    cos, sin = rope_table(positions, dim, THETA, torch.float32)
    cache = torch.cat((cos[:, : dim // 2], sin[:, : dim // 2]), 1).contiguous()
    theirs = partial(apply_rope_with_cos_sin_cache, positions, q.flatten(1), k.flatten(1), dim, cache)
    pairs = zip(theirs(), turned(q, k, cos, sin), strict=True)
    found = {"gap": max(apart(ours.view_as(plain), plain) for ours, plain in pairs)}
    return Measured(found, compiled(turned, q, k, cos, sin), theirs)


def drawn(
    logits: Tensor, seed: Tensor, step: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor
) -> Tensor:
    """Draw a value of each row, as a model does."""
    from zoo.nn import sampling

    noise = sampling.uniform_noise(seed, step, range(1), logits.shape[1])[:, 0]
    value: Tensor = torch.ops.zoo.draw.default(
        logits, temperature, top_k, top_p, -torch.log(-torch.log(noise))
    )
    return value


def draw(shape: Shape, rows: int) -> Measured:
    from flashinfer.sampling import top_k_top_p_sampling_from_logits

    seed, step = torch.arange(2 * rows, device=DEVICE).view(2, -1)
    logits = 3 * random(rows, shape.logits)
    temperature, top_k, top_p = (torch.full((rows,), value, device=DEVICE) for value in (0.8, 50, 0.9))
    counter = torch.zeros(1, dtype=torch.int64, device=DEVICE)  # on the device, or it could not be recorded

    def theirs() -> Tensor:
        chosen: Tensor = top_k_top_p_sampling_from_logits(
            logits / temperature[:, None], top_k.int(), top_p, seed=counter, offset=counter
        )
        return chosen

    return Measured({}, compiled(drawn, logits, seed, step, temperature, top_k, top_p), theirs)
