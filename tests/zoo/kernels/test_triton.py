"""The GPU kernels without a GPU: run in Triton's interpreter, and built for two cards by the assembler that
comes with Triton.

    pip install --no-deps triton==3.7.1          the version of torch 2.13's CUDA build: the extra `rehearse`
    pytest -s tests/zoo/kernels/test_triton.py        -s prints registers
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402

from benchmarks.device_kernels import TURNS, turned  # noqa: E402
from zoo.kernels import (  # noqa: E402
    triton_attention,
    triton_conv,
    triton_frame_attention,
    triton_sampling,
    triton_stretch,
    triton_swiglu,
    triton_whole_stack,
)
from zoo.nn import sampling  # noqa: E402

pytestmark = pytest.mark.rehearse
CARDS = {"H100": 90, "RTX 4090": 89}
# query heads, key heads, size of a head
PUBLISHED = {
    "qwen3_tts": (16, 8, 128),
    "cosyvoice2": (14, 2, 64),
    "fish_s2": (32, 8, 128),
    "higgs_v3": (32, 8, 128),
    "voxcpm2": (16, 2, 128),
}
# what happens to queries and keys in a step, by shape
TURNED = {
    PUBLISHED["qwen3_tts"]: ("normed and rotated",),
    PUBLISHED["cosyvoice2"]: ("rotated",),
    PUBLISHED["higgs_v3"]: ("normed and rotated", "normed wide and rotated in pairs"),
    PUBLISHED["voxcpm2"]: ("written", "rotated"),
}
WIDTHS = [1026, 2048, 3072, 4097, 6564, sampling.MAX_GPU_WIDTH]  # of rows of logits
SHAPES = {*PUBLISHED.values(), (4, 4, 256), (8, 1, 192), (6, 3, 80)}
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64"}


@pytest.mark.parametrize(
    "what", ["attention", "conv", "frame_attention", "sampling", "stretch", "swiglu", "whole_stack"]
)
def test_the_interpreter_agrees(what):
    cases = Path(__file__).with_name(f"interpreted_{what}.py")
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(cases)]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout, done.stdout[-500:]


def compiled(kernel, values: dict[str, object], cc: int):
    """Compile a kernel. values: for each argument a dtype (it is a pointer to it), the name of a type, or the
    number that it is compiled for; also options."""
    options = {name: values.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in values}
    kinds = {name: POINTERS.get(value, value) for name, value in values.items()}
    signature = {name: kind if isinstance(kind, str) else "constexpr" for name, kind in kinds.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={name: kind for name, kind in kinds.items() if not isinstance(kind, str)},
        attrs=aligned,
    )
    return triton.compile(source, target=GPUTarget("cuda", cc, 32), options=options)


def build(kernel, values: dict[str, object], cc: int, tmp_path: Path) -> tuple[int, int, int]:
    """Build a kernel -> registers per thread, bytes of stack per thread, and bytes of shared memory."""
    made = compiled(kernel, values, cc)
    file = tmp_path / "kernel.cubin"
    file.write_bytes(made.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    said = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", said).groups())
    return registers, stack, made.metadata.shared


@pytest.mark.compile
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", sorted(SHAPES), ids=str)
def test_attention_builds_without_spills(shape, dtype, card, tmp_path):
    heads, kv_heads, dim = shape
    q, kv = (torch.empty(1, n, dim, dtype=dtype, device="meta") for n in (heads, kv_heads))
    splits = triton_attention.NUM_SPLITS
    forms = [(True, splits, ""), (True, 1, ""), (False, 1, "")]
    if dtype in triton_attention.TURNED_WHERE_READ:
        forms += [(True, n, turn) for n in (splits, 1) for turn in TURNED.get(shape, ())]
    for is_step, splits, turn in forms:
        counts = dict.fromkeys((*triton_attention.LENGTHS, "q_stride", "k_stride", "v_stride"), "i32")
        values = dict.fromkeys(("q", "k", "v", "cos", "sin", "q_norm", "k_norm", "kv"), dtype)
        values |= dict.fromkeys(("kv_write_index", "page_table", "kv_lens", "cu_seqlens"), torch.int64)
        values |= {"out": dtype, "log_sums": torch.int64}
        if splits > 1:
            values |= {"out": torch.float32, "log_sums": torch.float32}
        values |= counts | {"scale": "fp32", "eps": "fp32"}
        values |= triton_attention.constants(
            q, kv, 16, is_step, splits, turned(turn, 1, dim, dtype) if turn else None
        )
        registers, stack, shared = build(triton_attention._attend, values, CARDS[card], tmp_path)
        kind = f"{'step' if is_step else 'prompt'}, {splits} splits {turn}"
        print(
            f"{card} {heads}/{kv_heads} x {dim} {dtype} {kind}: {registers} registers, {stack} B stack, {shared} B shared"
        )
        assert stack == 0, f"{kind}: {stack} bytes per thread do not fit into registers"
        assert shared <= 99 << 10, f"{kind}: {shared} bytes of shared memory are more than an RTX 4090 has"
    joined = {"parts": torch.float32, "log_sums": torch.float32, "out": dtype, "DIM": dim}
    joined |= {"PADDED_DIM": max(16, triton.next_power_of_2(dim)), "SPLITS": triton_attention.NUM_SPLITS}
    registers, stack, _ = build(triton_attention._join, joined | {"num_warps": 1}, CARDS[card], tmp_path)
    assert stack == 0, f"joining: {stack} bytes per thread do not fit into registers"


@pytest.mark.compile
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("turn", TURNS)
def test_writing_builds_without_spills(turn, dtype, card, tmp_path):
    heads, kv_heads, dim = PUBLISHED["voxcpm2"]
    values = dict.fromkeys(("q", "k", "v", "cos", "sin", "q_norm", "k_norm", "kv", "out"), dtype)
    values |= dict.fromkeys(("layer", "q_stride", "k_stride", "v_stride"), "i32")
    values |= {
        "kv_write_index": torch.int64,
        "eps": "fp32",
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
    }
    values |= {"PADDED_GROUP": heads // kv_heads, "DIM": dim, "PADDED_DIM": dim, "PAGE_TOKENS": 16}
    values |= triton_attention.forms(turned(turn, 1, dim, dtype))
    _, stack, _ = build(triton_attention._write, values, CARDS[card], tmp_path)
    assert stack == 0, f"{stack} bytes per thread do not fit into registers"


FRAMES = {  # heads as above, tokens per pass, positions of the cache
    "qwen3_tts, first": (PUBLISHED["qwen3_tts"], 2, 16),
    "qwen3_tts": (PUBLISHED["qwen3_tts"], 1, 16),
    "fish_s2": (PUBLISHED["fish_s2"], 1, 10),
    "voxcpm2": (PUBLISHED["voxcpm2"], 11, 0),
    "voxcpm2, last": (PUBLISHED["voxcpm2"], 11, 0),
    "voxcpm2, encoder's last": (PUBLISHED["voxcpm2"], 5, 0),
}
KEPT = {
    "voxcpm2, last": range(7, 11),
    "voxcpm2, encoder's last": range(1),
}  # tokens with queries, if not all of them


@pytest.mark.compile
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("frame", FRAMES)
def test_attention_within_a_frame_builds_without_spills(frame, dtype, card, tmp_path):
    shape, tokens, cached = FRAMES[frame]
    values = dict.fromkeys(("q", "k", "v"), dtype) | dict.fromkeys(("cos", "sin"), torch.float32)
    kernel = triton_frame_attention._attend_frame
    sizes = triton_frame_attention.constants(*shape, tokens, dtype, KEPT.get(frame))
    if cached:
        kernel = triton_frame_attention._attend_and_grow
        sizes = triton_frame_attention.growing_constants(*shape, tokens, cached)
        sizes |= {"IS_NORMED": cached == 16, "IS_PAIRED": cached == 10, "IS_ROUNDED": cached != 16}
        values |= {"position": torch.int64, "cache": torch.float32, "q_norm": dtype, "k_norm": dtype}
    values |= {"out": dtype} | ({"grown": torch.float32} if cached else {})
    values |= {"token_stride": "i32", "scale": "fp32"} | ({"eps": "fp32"} if cached else {})
    registers, stack, shared = build(kernel, values | sizes, CARDS[card], tmp_path)
    print(f"{card} {frame} {dtype}: {registers} registers, {stack} B stack, {shared} B shared")
    assert stack == 0, f"{stack} bytes per thread do not fit into registers"
    assert shared <= 99 << 10, f"{shared} bytes of shared memory are more than an RTX 4090 has"


# hidden size, inner size, heads as above, positions, and the treatment of heads
STACKS = {
    "qwen3_tts": (1024, 3072, (16, 8, 128), 16, (True, False, False)),
    "fish_s2": (2560, 9728, (32, 8, 128), 10, (False, True, True)),
    "csm": (1024, 8192, (8, 2, 128), 32, (False, False, False)),
}


@pytest.mark.compile
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize(("streams", "tokens"), [(1, 2), (64, 1)])
@pytest.mark.parametrize("name", STACKS)
def test_a_whole_code_predictor_builds_without_spills(name, streams, tokens, card, tmp_path):
    """Each multiprocessor of the card must have room for a program, so that all run at once."""
    width, inner, heads, positions, treatment = STACKS[name]
    values = {"x": torch.bfloat16} | dict.fromkeys(("cos", "sin"), torch.float32) | {"first": "i32"}
    values |= {"cache": torch.float32, "table": torch.int64}
    values |= dict.fromkeys(("qkv", "mixed", "inner", "out"), torch.bfloat16) | {"arrived": "*i32"}
    values |= dict.fromkeys(("batch", "layers"), "i32") | dict.fromkeys(("scale", "eps"), "fp32")
    programs = {"H100": 132, "RTX 4090": 128}[card]
    values |= triton_whole_stack.constants(streams, tokens, width, inner, *heads, positions, programs)
    values |= dict(zip(("IS_NORMED", "IS_PAIRED", "IS_ROUNDED"), treatment, strict=True))
    values |= {"PHASE": -1, "IS_ASKED_FOR": True}
    registers, stack, shared = build(triton_whole_stack._run_stack, values, CARDS[card], tmp_path)
    print(f"{card} {name} {streams} x {tokens}: {registers} registers, {stack} B stack, {shared} B shared")
    assert stack == 0, f"{stack} bytes per thread do not fit into registers"
    assert shared <= 99 << 10, f"{shared} bytes of shared memory are more than an RTX 4090 has"


@pytest.mark.compile
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_draws_build_without_spills(width, card, tmp_path):
    values = {
        "logits": torch.float32,
        "temperature": torch.float32,
        "top_k": torch.int64,
        "top_p": torch.float32,
    }
    values |= {"noise": torch.float32, "out": torch.int64}
    strides = ("logits", "temperature", "top_k", "top_p", "noise")
    values |= dict.fromkeys(("width", *(f"{name}_stride" for name in strides)), "i32")
    values |= triton_sampling._sizes(width)
    registers, stack, shared = build(triton_sampling._draw, values, CARDS[card], tmp_path)
    print(f"{card} draw of {width}: {registers} registers, {stack} B stack, {shared} B shared")
    assert stack == 0, f"{stack} bytes per thread do not fit into registers"


@pytest.mark.compile
@pytest.mark.parametrize("card", CARDS)
def test_draws_from_a_vocabulary_build_without_spills(card, tmp_path):
    values = {
        "logits": torch.float32,
        "temperature": torch.float32,
        "top_k": torch.int64,
        "top_p": torch.float32,
    }
    values |= {"noise": torch.float32, "scaled": torch.float32, "out": torch.int64}
    strides = ("logits", "temperature", "top_k", "top_p", "noise")
    values |= dict.fromkeys(("width", *(f"{name}_stride" for name in strides)), "i32")
    registers, stack, shared = build(
        triton_sampling._draw_wide, values | triton_sampling.WIDE_SIZES, CARDS[card], tmp_path
    )
    print(f"{card} draw of a vocabulary: {registers} registers, {stack} B stack, {shared} B shared")
    assert stack == 0, f"{stack} bytes per thread do not fit into registers"


@pytest.mark.compile
@pytest.mark.parametrize("card", CARDS)
def test_noise_and_the_kept_set_build(card, tmp_path):
    values = {"seed": torch.int64, "step": torch.int64, "out": torch.float32}
    values |= dict.fromkeys(("first", "streams", "width"), "i32") | {"BLOCK": 1024}
    assert build(triton_sampling._uniform, values, CARDS[card], tmp_path)[1] == 0
    values = {"logits": torch.float32, "top_k": torch.int64, "top_p": torch.float32, "out": torch.float32}
    values |= {"width": "i32"} | triton_sampling._sizes(3072)
    assert build(triton_sampling._keep_likely, values, CARDS[card], tmp_path)[1] == 0


@pytest.mark.compile
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# the first shape is that of a published model
@pytest.mark.parametrize("shape", [(8, 64), (2, 16), (4, 80), (8, 128)], ids=str)
@pytest.mark.parametrize("is_relative", [False, True], ids=["plain", "relative"])
def test_attention_over_stretches_builds_without_spills(shape, dtype, card, is_relative, tmp_path):
    lengths = dict.fromkeys((*triton_stretch.LENGTHS, "token_stride"), "i32")
    numbers = dict.fromkeys(("pages", "layers", "start", "count", "num_kept"), torch.int64)
    values = (
        dict.fromkeys(("q", "k", "v", "by_distance", "arena"), dtype)
        | numbers
        | {"out": dtype}
        | lengths
        | {"num_distances": "i32", "scale": "fp32"}
    )
    sizes = triton_stretch.constants(1 if is_relative else 2, *shape, dtype, is_relative)
    registers, stack, shared = build(triton_stretch._attend_stretch, values | sizes, CARDS[card], tmp_path)
    print(f"{card} {shape} {dtype}: {registers} registers, {stack} B stack, {shared} B shared")
    assert stack == 0, f"{stack} bytes per thread do not fit into registers"
    assert shared <= 99 << 10, f"{shared} bytes of shared memory are more than an RTX 4090 has"
    values = dict.fromkeys(("k", "v", "arena"), dtype)
    values |= dict.fromkeys(("pages", "layers", "index"), torch.int64) | lengths
    sizes = triton_stretch.keeping_constants(2, shape[0] * shape[1])
    assert build(triton_stretch._keep_stretch, values | sizes, CARDS[card], tmp_path)[1] == 0


@pytest.mark.compile
@pytest.mark.parametrize("card", CARDS)
def test_the_past_of_a_stretch_is_moved_in_words_of_16_bytes(card):
    lengths = dict.fromkeys((*triton_stretch.LENGTHS, "token_stride"), "i32")
    numbers = dict.fromkeys(("pages", "layers", "start", "count", "num_kept"), torch.int64)
    tensors = "q", "k", "v", "by_distance", "arena", "out"
    values = dict.fromkeys(tensors, torch.bfloat16) | numbers | lengths | {"num_distances": "i32"}
    sizes = triton_stretch.constants(2, 8, 64, torch.bfloat16, is_relative=False)
    tile, threads = sizes["BLOCK"] * sizes["DIM"] * 2, 32 * sizes["num_warps"]  # bytes of keys or of values
    values |= {"scale": "fp32"} | sizes
    loads = compiled(triton_stretch._attend_stretch, values, CARDS[card]).asm["ptx"]
    # keys and values of two stages of the loop over the past, in the background: cp.async takes 16 bytes a thread
    assert loads.count("cp.async.cg.shared.global") >= 2 * 2 * tile // (16 * threads)
    values = dict.fromkeys(("k", "v", "arena"), torch.bfloat16)
    values |= dict.fromkeys(("pages", "layers", "index"), torch.int64) | lengths
    stores = compiled(
        triton_stretch._keep_stretch, values | triton_stretch.keeping_constants(2, 512), CARDS[card]
    )
    assert "st.global.b16" not in stores.asm["ptx"]


SHARED_BYTES = {"H100": 232448, "RTX 4090": 101376}  # per program
GATED = {
    "voxcpm2's solver": (4096, 1024),
    "no multiple of a tile": (300, 200),
}  # columns of the result, and of x


@pytest.mark.compile
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("shape", GATED.values(), ids=GATED)
def test_gated_products_build_without_spills(shape, card, tmp_path):
    for rows in (*triton_swiglu.FEW, 100, triton_swiglu.LARGE_ROWS):
        sizes = triton_swiglu.constants(rows, *shape, SHARED_BYTES[card])
        values = dict.fromkeys(("x", "weight", "out"), torch.bfloat16) | {"rows": "i32", "row_stride": "i32"}
        registers, stack, shared = build(triton_swiglu._swiglu_linear, values | sizes, CARDS[card], tmp_path)
        print(f"{card} {shape} of {rows} rows: {registers} registers, {stack} B stack, {shared} B shared")
        assert stack == 0, f"{rows} rows: {stack} bytes per thread do not fit into registers"
        assert shared <= SHARED_BYTES[card], f"{rows} rows: {shared} bytes of shared memory"
    values = {
        "gate_up": torch.bfloat16,
        "out": torch.bfloat16,
        "INNER": shape[0],
        "BLOCK": triton_swiglu.GATED_BLOCK,
    }
    assert build(triton_swiglu._gate, values, CARDS[card], tmp_path)[1] == 0


CONVOLVED = {  # channels of x, of the result, taps
    "qwen3_tts and voxcpm2, first residual unit": (768, 768, 7),
    "qwen3_tts, third and last one": (192, 192, 7),
    "qwen3_tts and fish_s2, last one": (96, 96, 7),
    "higgs_v3, last ones": (64, 64, 7),
    "higgs_v3, last one": (32, 32, 7),
    "qwen3_tts, first upsampling": (1536, 6144, 2),
    "qwen3_tts, last upsampling": (192, 288, 2),
    "glm4_voice, in the flow": (512, 256, 3),
    "no multiple of a tile": (40, 72, 3),
}


@pytest.mark.compile
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("shape", CONVOLVED.values(), ids=CONVOLVED)
def test_convolutions_build_without_spills(shape, card, tmp_path):
    properties = SimpleNamespace(multi_processor_count=132)
    for rows, size in ((100, "usual"), (1 << 20, "usual"), (1 << 20, "large")):
        if size == "large" and card != "H100":
            continue
        sizes = triton_conv.constants(rows, *shape, size, properties)
        values = dict.fromkeys(("x", "weight", "out"), torch.float16)
        values |= dict.fromkeys(("rows", "length", "dilation"), "i32") | sizes
        registers, stack, shared = build(triton_conv._convolve_rows, values, CARDS[card], tmp_path)
        kind = f"{shape}, {sizes['ROWS']} x {sizes['COLUMNS']} x {sizes['STEP']}"
        print(f"{card} {kind}: {registers} registers, {stack} B stack, {shared} B shared")
        assert stack == 0, f"{kind}: {stack} bytes per thread do not fit into registers"
        assert shared <= SHARED_BYTES[card], f"{kind}: {shared} bytes of shared memory"
