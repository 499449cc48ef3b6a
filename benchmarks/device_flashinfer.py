"""The part `flashinfer` of device.py: FlashInfer's kernels next to ours, by family and number of streams.

Each finding has the largest gap to a plain form in torch, and the microseconds of both with cold caches, in one launch
as it would be recorded:

    step        attention of a step, with rotation and writing (zoo/nn/attention.py); theirs is XQA
    prompt      attention of prompts without either; theirs is the paged wrapper, whose plan the host makes before each
                launch: its time is given apart, because a recorded launch would wait for it
    norm, rope  as the compiler makes them alone; in a model it fuses them with their neighbours
    draw        with top-k and top-p; draws of both differ, because FlashInfer's depend on the row
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.device_kernels import DEVICE, KERNEL_GAPS, Alone, Put, random
from zoo.kernels import gpu

STREAMS = (1, 16, 64, 128, 256)
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


SHAPES = {
    "qwen3_tts": Shape(16, 8, 128, 2048, 3072),
    "voxcpm2": Shape(16, 2, 128, 2048, 0),
    "higgs_v3": Shape(32, 8, 128, 2560, 1026),
    "fish_s2": Shape(32, 8, 128, 2560, 4097),
    "zonos": Shape(16, 4, 128, 2048, 1026),
    "cosyvoice2": Shape(14, 2, 64, 896, 6564),
    "orpheus": Shape(24, 8, 128, 3072, 4097),
    "csm": Shape(32, 8, 64, 2048, 2051),
    "chatterbox": Shape(16, 16, 64, 1024, 8194),
    "glm4_voice": Shape(32, 2, 128, 4096, 168960),
}


def compared(put: Put, alone: Alone) -> None:
    """Raises AssertionError for a gap that is too large."""
    from zoo.nn import attention, flashinfer_attention, sampling  # noqa: F401, the operators

    reason = flashinfer_attention.why_not(random(64, 8, 128, dtype=DTYPE), PAGE)
    if reason is not None:
        put("skipped", reason)
        return
    put("version", flashinfer_attention.version())
    put("not built", build())
    wrong: list[str] = []
    for family, shape in SHAPES.items():
        for name, streams, measure in [
            *(("step", streams, step) for streams in STREAMS),
            *(("prompt", prompts, prompt) for prompts in PROMPTS),
            *(("norm", streams, norm) for streams in STREAMS),
            *(("rope", streams, rope) for streams in STREAMS),
            *(("draw", streams, draw) for streams in STREAMS if shape.logits),
        ]:
            with torch.inference_mode():
                found = measure(shape, streams, put, alone)
            label = f"{name}, {family}, {streams}"
            put(label, found)
            wrong.extend([label] * (not found.get("gap", 0.0) <= KERNEL_GAPS[DTYPE]))
    assert not wrong, f"FlashInfer differs from the plain form: {', '.join(wrong)}"


def build() -> dict[str, str]:
    """Build all kernels of steps at once, with a compiler each -> why some cannot be built, by family."""
    kernels = gpu.of_gpu("flashinfer_kernels")
    place = torch.empty(0, device=DEVICE)
    wanted = [(DTYPE, PAGE, shape.dim, shape.heads // shape.kv_heads) for shape in SHAPES.values()]
    with ThreadPoolExecutor(len(wanted)) as pool:
        reasons = pool.map(lambda shape: kernels.failure(place, *shape), wanted)
    return {family: reason for family, reason in zip(SHAPES, reasons, strict=True) if reason is not None}


def times(put: Put, alone: Alone, **ways: Any) -> dict[str, float]:
    """Return the microseconds of each way, alone on the device."""
    from compile_cache import choices

    for way in ways.values():
        way()  # builds and compiles while other parts run
    with alone(put):
        return {f"{name}_us": round(choices.time_us(way), 2) for name, way in ways.items()}


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).nan_to_num(nan=torch.inf).abs().max())


def step(shape: Shape, streams: int, put: Put, alone: Alone) -> dict[str, float]:
    from zoo import kernels

    heads, kv_heads, dim = shape[:3]
    pages = POSITIONS // PAGE
    order = torch.randperm(streams * pages, generator=torch.Generator().manual_seed(0)).view(streams, pages)
    table = (order * 2 * PAGE).to(DEVICE)
    kv = random(streams * pages * 2 * PAGE, kv_heads, dim, dtype=DTYPE)
    lens = torch.full((streams,), POSITIONS, device=DEVICE)
    parts = [random(streams, count, dim, dtype=DTYPE) for count in (heads, kv_heads, kv_heads)]
    angle = random(streams, dim // 2).repeat(1, 2)
    turn = angle.cos().to(DTYPE), angle.sin().to(DTYPE)
    written = table[:, -1] + PAGE - 1
    where = written, table, lens, torch.arange(streams + 1, device=DEVICE), PAGE, 0, dim**-0.5
    ours = partial(torch.ops.zoo.rotary_paged_attention.default, *parts, *turn, kv, *where)
    theirs = partial(ours, table.int(), lens.int(), "flashinfer")
    with kernels.plain():
        expected = ours()
    found = {"gap": apart(theirs(), expected), "gap_of_ours": apart(ours(), expected)}
    return found | times(put, alone, ours=ours, theirs=theirs)


def prompt(shape: Shape, prompts: int, put: Put, alone: Alone) -> dict[str, float]:
    """Prompts of PROMPT_TOKENS positions, of which none was in the pages before."""
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

    from zoo import kernels
    from zoo.nn.flashinfer_attention import pages

    heads, kv_heads, dim = shape[:3]
    num_pages = PROMPT_TOKENS // PAGE
    table = torch.arange(prompts * num_pages, device=DEVICE).view(prompts, -1) * 2 * PAGE
    kv = random(prompts * num_pages * 2 * PAGE, kv_heads, dim, dtype=DTYPE)
    q = random(prompts * PROMPT_TOKENS, heads, dim, dtype=DTYPE)
    lens = torch.full((prompts,), PROMPT_TOKENS, device=DEVICE)
    starts = torch.arange(prompts + 1, device=DEVICE) * PROMPT_TOKENS
    ours = partial(torch.ops.zoo.paged_attention.default, q, kv, table, lens, starts, PAGE, dim**-0.5)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(
        torch.zeros(128 << 20, dtype=torch.uint8, device=DEVICE), kv_layout="NHD"
    )

    def plan() -> None:
        wrapper.plan(
            starts.int(),
            torch.arange(prompts + 1, dtype=torch.int32, device=DEVICE) * num_pages,
            table.int().flatten(),
            torch.full((prompts,), PAGE, dtype=torch.int32, device=DEVICE),
            heads,
            kv_heads,
            dim,
            PAGE,
            causal=True,
            sm_scale=dim**-0.5,
            q_data_type=DTYPE,
        )

    plan()
    theirs = partial(wrapper.run, q, pages(kv, PAGE, 0))
    with kernels.plain():
        expected = ours()
    found = {"gap": apart(theirs(), expected), "gap_of_ours": apart(ours(), expected)}
    found |= times(put, alone, ours=ours, theirs=theirs)
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    for _ in range(20):
        plan()
    torch.cuda.synchronize()
    return found | {"plan_us": round(1e6 * (time.perf_counter() - began_s) / 20, 1)}


def norm(shape: Shape, rows: int, put: Put, alone: Alone) -> dict[str, float]:
    """FlashInfer rounds once, behind the weight; ours rounds before it too, as the references do."""
    from flashinfer.norm import rmsnorm

    from zoo.nn.norm import RMSNorm

    x = random(rows, shape.width, dtype=DTYPE)
    layer = RMSNorm(shape.width, EPS).to(DEVICE, DTYPE).requires_grad_(False)
    layer.weight.fill_(1.0)
    theirs = partial(rmsnorm, x, layer.weight, EPS)
    found = {"gap": apart(theirs(), layer(x))}
    return found | times(put, alone, ours=partial(torch.compile(layer), x), theirs=theirs)


def rope(shape: Shape, rows: int, put: Put, alone: Alone) -> dict[str, float]:
    from flashinfer.rope import apply_rope_with_cos_sin_cache

    from zoo.nn.rope import rope_table, rotate

    heads, kv_heads, dim = shape[:3]
    q, k = random(rows, heads, dim, dtype=DTYPE), random(rows, kv_heads, dim, dtype=DTYPE)
    positions = torch.arange(rows, device=DEVICE)
    cos, sin = rope_table(positions, dim, THETA, torch.float32)
    cache = torch.cat((cos[:, : dim // 2], sin[:, : dim // 2]), 1).contiguous()

    def turned(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (rotate(x.float(), cos[:, None], sin[:, None]).to(x.dtype) for x in (q, k))
        return q, k

    theirs = partial(apply_rope_with_cos_sin_cache, positions, q.flatten(1), k.flatten(1), dim, cache)
    pairs = zip(theirs(), turned(q, k), strict=True)
    found = {"gap": max(apart(ours.view_as(plain), plain) for ours, plain in pairs)}
    return found | times(put, alone, ours=partial(torch.compile(turned), q, k), theirs=theirs)


def draw(shape: Shape, rows: int, put: Put, alone: Alone) -> dict[str, float]:
    from flashinfer.sampling import top_k_top_p_sampling_from_logits

    from zoo.nn import sampling

    seed, step = torch.arange(2 * rows, device=DEVICE).view(2, -1)
    logits = 3 * random(rows, shape.logits)
    temperature, top_k, top_p = (torch.full((rows,), value, device=DEVICE) for value in (0.8, 50, 0.9))

    def ours() -> Tensor:
        noise = sampling.uniform_noise(seed, step, range(1), shape.logits)[:, 0]
        return torch.ops.zoo.draw.default(logits, temperature, top_k, top_p, -torch.log(-torch.log(noise)))

    def theirs() -> Tensor:
        drawn: Tensor = top_k_top_p_sampling_from_logits(logits / temperature[:, None], top_k.int(), top_p)
        return drawn

    return times(put, alone, ours=torch.compile(ours), theirs=theirs)
