"""What FlashInfer is given, checked with the plain twin of its kernel on a CPU; and when it is refused."""

from __future__ import annotations

import inspect
import logging
import sys
import types
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from compile_cache import choices
from compile_cache.lower import any_size
from serving.engine.device.warmup import mark_sizes
from zoo import kernels
from zoo.contract import Batch
from zoo.kernels import gpu
from zoo.nn import attention, flashinfer_attention, swiglu
from zoo.nn.attention import UNTURNED, Paged, Turn
from zoo.nn.flashinfer_attention import flashinfer_decode, kind, pages, plain_decode, takes_over, why_not

HEADS, KV_HEADS, DIM, LAYERS, PAGE = 6, 2, 16, 3, 16
SCALE = DIM**-0.5
SPARE_ROWS = 5  # of each page: models that share an arena do not fill theirs


def batch(lengths: list[int], columns: int = 4) -> Batch:
    """Return a step over shuffled pages; rows that no sequence wrote are NaN."""
    generator = torch.Generator().manual_seed(len(lengths))
    page_rows = 2 * LAYERS * PAGE + SPARE_ROWS
    page_table = torch.randperm(len(lengths) * columns, generator=generator).view(-1, columns) * page_rows
    kv = torch.full((len(lengths) * columns * page_rows, KV_HEADS, DIM), torch.nan)
    last = torch.tensor(lengths) - 1
    for b, length in enumerate(lengths):
        position = torch.arange(length)
        first = page_table[b, position // PAGE] + position % PAGE
        for rows in range(2 * LAYERS):
            kv[first + rows * PAGE] = torch.randn(length, KV_HEADS, DIM, generator=generator)
    sequence = torch.arange(len(lengths))
    return Batch(
        slots=sequence,
        positions=last,
        kv_write_index=page_table[sequence, last // PAGE] + last % PAGE,
        page_table=page_table,
        kv_lens=last + 1,
        cu_seqlens=torch.arange(len(lengths) + 1),
        kv=kv,
        page=torch.arange(PAGE),
        is_audio=torch.zeros(len(lengths), dtype=torch.bool),
        block_tables=page_table.int(),
        seq_lens=(last + 1).int(),
    )


def new(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(rows, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("lengths", [[1], [16], [17, 64, 1, 33]])
def test_the_twin_reads_what_our_page_table_names(lengths, layer):
    step, (q, _, _) = batch(lengths), new(len(lengths))
    found = flashinfer_decode(q, step.kv, step.block_tables, step.seq_lens, PAGE, layer, SCALE)
    given = step.page_table + 2 * layer * PAGE, step.kv_lens, step.cu_seqlens, PAGE, SCALE
    torch.testing.assert_close(found, attention.paged_attention(q, step.kv, *given), rtol=1e-6, atol=1e-6)


def test_a_page_of_flashinfer_is_any_rows_that_follow_each_other():
    kv = torch.arange(400 * KV_HEADS * DIM).float().view(400, KV_HEADS, DIM)
    for layer in range(LAYERS):
        k, v = pages(kv, PAGE, layer)
        assert k.shape[1:] == (PAGE, KV_HEADS, DIM) and k.stride() == v.stride()  # NHD
        assert k.stride() == (KV_HEADS * DIM, KV_HEADS * DIM, DIM, 1)
        for row in (0, 1, 96, len(k) - 1):
            first = row + 2 * layer * PAGE
            assert torch.equal(k[row], kv[first : first + PAGE])
            assert torch.equal(v[row], kv[first + PAGE : first + 2 * PAGE])
        assert first + 2 * PAGE == len(kv)  # the last page ends with the arena


def test_the_twin_takes_any_group_and_sixteen_bits():
    for heads, kv_heads in ((4, 4), (14, 2), (8, 1)):
        kv = torch.randn(8 * 2 * PAGE, kv_heads, 32).bfloat16()
        q, table = torch.randn(2, heads, 32).bfloat16(), torch.tensor([[0, 64], [96, 160]])
        lens, starts = torch.tensor([20, 5]), torch.arange(3)
        found = flashinfer_decode(q, kv, table.int(), lens.int(), PAGE, 0, SCALE)
        expected = attention.paged_attention(q.float(), kv.float(), table, lens, starts, PAGE, SCALE)
        assert found.dtype == q.dtype and found.is_contiguous()
        torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)


def test_tables_of_other_integers_are_refused():
    step, (q, _, _) = batch([3]), new(1)
    with pytest.raises(AssertionError, match=r"torch\.int64"):
        flashinfer_decode(q, step.kv, step.page_table, step.seq_lens, PAGE, 0, SCALE)


@pytest.mark.parametrize("is_turned", [False, True])
def test_a_step_by_flashinfer_equals_ours(is_turned, monkeypatch):
    """Both write the new keys and values to the same rows first."""
    lengths = [17, 64, 1, 33]
    angle = torch.randn(len(lengths), DIM // 2).repeat(1, 2)
    turn = Turn(angle.cos(), angle.sin(), *torch.randn(2, DIM), 1e-6) if is_turned else UNTURNED
    found = []
    for is_theirs in (False, True):
        monkeypatch.setattr(flashinfer_attention, "takes_over", lambda *_, is_theirs=is_theirs: is_theirs)
        step = batch(lengths)
        out = as_on_a_gpu(*new(len(lengths)), Paged(step, 1), turn)
        found.append((out, step.kv))
    (ours, our_kv), (theirs, their_kv) = found
    torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=1e-6)
    assert torch.equal(our_kv.nan_to_num(7), their_kv.nan_to_num(7))


def as_on_a_gpu(q: Tensor, k: Tensor, v: Tensor, paged: Paged, turn: Turn = UNTURNED) -> Tensor:
    """Attend by the operator that `attend` uses on a GPU."""
    step = paged.batch
    where = *kv_places(step), PAGE, paged.layer, SCALE, step.block_tables, step.seq_lens, "flashinfer"
    return torch.ops.zoo.rotary_paged_attention.default(q, k, v, *turn, step.kv, *where)


def kv_places(step: Batch) -> tuple[Tensor, ...]:
    return step.kv_write_index, step.page_table, step.kv_lens, step.cu_seqlens


def test_the_operators_are_whole_for_a_compiler():
    step, (q, _, _) = batch([17, 64]), new(2)
    step.kv = step.kv.nan_to_num(0)
    given = q, step.kv, step.block_tables, step.seq_lens, PAGE, 1, SCALE
    torch.library.opcheck(torch.ops.zoo.flashinfer_decode.default, given)


def test_a_step_with_both_tables_is_one_graph_for_any_number_of_slots():
    @torch.compiler.nested_compile_region
    def layer(q: Tensor, k: Tensor, v: Tensor, paged: Paged) -> Tensor:
        return as_on_a_gpu(q, k, v, paged)

    def step(q: Tensor, k: Tensor, v: Tensor, given: Batch) -> Tensor:
        return sum(layer(q, k, v, Paged(given, i)) for i in range(LAYERS))

    compiled = torch.compile(step, fullgraph=True, dynamic=False, backend="aot_eager")
    first, given = new(2), batch([3, 9])
    mark_sizes(given, tokens="sequences")
    any_size(first, 0, "sequences")
    torch.testing.assert_close(compiled(*first, given), step(*first, given))
    lengths = [17, 64, 1, 33]
    with torch.compiler.set_stance("fail_on_recompile"):
        found = compiled(*new(4), batch(lengths))
    torch.testing.assert_close(found, step(*new(4), batch(lengths)))


# --- when it is refused ---


def cache(dtype: torch.dtype = torch.bfloat16, rows: int = 640, heads: int = 8, dim: int = 128) -> Tensor:
    """Return a stand-in for a cache on a GPU."""
    return mock.Mock(device=torch.device("cuda", 0), dtype=dtype, shape=(rows, heads, dim))


@pytest.fixture
def hopper(monkeypatch):
    """A GPU of compute capability 9.0 with FlashInfer."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(flashinfer_attention, "find_spec", lambda name: name == "flashinfer")


def test_flashinfer_reads_caches_of_published_models(hopper):
    assert why_not(cache(), 16) is None
    assert (
        kind("flashinfer", cache(), 16, False) == "flashinfer" and kind("auto", cache(), 16, False) == "auto"
    )


@pytest.mark.parametrize(
    ("kv", "page_tokens", "reason"),
    [
        (cache(torch.float32), 16, "computes in bfloat16 and float16, and the model in float32"),
        (cache(), 21, "pages of 16, 32, 64, 128 positions, and the model's have 21; serve the model alone"),
        (cache(dim=24), 16, "heads of 16 to 256 values in steps of 16, and the model's have 24"),
        (cache(dim=512), 16, "heads of 16 to 256 values"),
        (cache(rows=1 << 29), 16, "use a smaller --kv-memory"),
    ],
)
def test_a_cache_that_it_cannot_read_is_refused(kv, page_tokens, reason, hopper):
    with pytest.raises(ValueError, match="attention flashinfer is not possible: .*" + reason):
        kind("flashinfer", kv, page_tokens, False)
    assert kind("auto", kv, page_tokens, False) == "triton"


def test_other_gpus_are_refused(hopper, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    with pytest.raises(ValueError, match=r"compute capability 9\.x, 10\.x, 12\.x, and this GPU has 8\.9"):
        kind("flashinfer", cache(), 16, False)
    assert kind("auto", cache(), 16, False) == "triton"


def test_without_the_package_it_is_refused(hopper, monkeypatch):
    monkeypatch.setattr(flashinfer_attention, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"not installed: pip install -e '\.\[flashinfer\]'"):
        kind("flashinfer", cache(), 16, False)
    assert kind("auto", cache(), 16, False) == "triton"
    assert flashinfer_attention.version() is None


def test_reproducible_launches_are_ours(hopper):
    with pytest.raises(ValueError, match="number of streams, which --deterministic excludes"):
        kind("flashinfer", cache(), 16, True)
    assert kind("auto", cache(), 16, True) == "triton"


def test_a_cpu_has_no_choice():
    for asked in ("triton", "flashinfer"):
        with pytest.raises(
            ValueError, match=f"attention {asked} is for GPUs, and the model is on cpu: use auto"
        ):
            kind(asked, torch.zeros(64, 2, 16), 16, False)
    assert kind("auto", torch.zeros(64, 2, 16), 16, False) == "triton"
    with pytest.raises(
        ValueError, match="attention 'xqa' is not possible; possible: auto, triton, flashinfer"
    ):
        kind("xqa", torch.zeros(64, 2, 16), 16, False)


# --- which one is faster ---


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Times of both by name, and the calls of each; nothing is known yet."""
    taken, calls = {"triton": 2.0, "flashinfer": 1.0}, []
    monkeypatch.setattr(choices, "_known", {})
    monkeypatch.setattr(choices, "device_name", lambda: "card")
    monkeypatch.setattr(choices, "time_us", lambda way: taken[way()])
    monkeypatch.setattr(kernels, "use_gpu", lambda tensor: True)
    monkeypatch.setattr(kernels, "on_gpu", lambda module, function, *given: None)  # its kernel builds

    def way(name: str):
        def run(table: Tensor, lens: Tensor) -> str:
            calls.append((name, table, lens))
            return name

        return run

    q, kv = torch.zeros(3, HEADS, DIM), torch.zeros(4000, KV_HEADS, DIM)
    given = q, kv, PAGE, way("triton"), way("flashinfer")
    return taken, calls, given, tmp_path


def test_the_faster_one_computes_a_shape(measured):
    taken, calls, given, place = measured
    with choices.kept_in(place):
        assert takes_over("auto", *given)
    taken["flashinfer"] = 9.0
    assert takes_over("auto", *given) and len(calls) == 2  # measured once
    with choices.kept_in(place):
        more_rows = torch.zeros(40, HEADS, DIM), *given[1:]
        assert not takes_over("auto", *more_rows)


def test_both_are_measured_on_full_sequences_in_their_own_integers(measured):
    """In a warm-up all sequences have one position."""
    _, calls, given, place = measured
    with choices.kept_in(place):
        takes_over("auto", *given)
    for name, table, lens in calls:
        kind = torch.int32 if name == "flashinfer" else torch.int64
        assert table.dtype == lens.dtype == kind and table.shape == (3, 512 // PAGE)
        assert (lens == 512).all() and table.min() >= 0 and table.max() + 2 * PAGE <= 4000
        assert len(table.unique()) > 3 * 512 // PAGE // 2


def test_nothing_is_measured_or_built_for_a_request(measured):
    _, calls, given, _ = measured
    assert not takes_over("auto", *given) and calls == []
    assert takes_over("flashinfer", *given) and calls == []


def test_a_kernel_that_cannot_be_built_leaves_steps_to_ours(measured, monkeypatch, caplog):
    _, calls, given, place = measured
    monkeypatch.setattr(kernels, "on_gpu", lambda *_: "it needs nvcc")
    with choices.kept_in(place), caplog.at_level(logging.INFO):
        assert not takes_over("auto", *given)
    assert calls == [] and "FlashInfer is not used: it needs nvcc" in caplog.text


def test_a_cpu_never_takes_it():
    assert not takes_over("flashinfer", torch.zeros(1, 2, 16), torch.zeros(64, 2, 16), 16, None, None)


# --- what its functions get ---


@pytest.fixture
def theirs(monkeypatch):
    """FlashInfer's functions, which note what they are given."""
    seen = {}

    def trtllm_batch_decode_with_kv_cache(**given):
        seen.update(given)
        k_cache, v_cache = given["kv_cache"]
        where = k_cache, v_cache, given["block_tables"], given["seq_lens"]
        return plain_decode(given["query"], *where, given["bmm1_scale"])

    def get_xqa_module(*shape):
        seen["shape"] = shape
        if shape[4] == 3 and seen.get("fails"):
            raise RuntimeError("Ninja build failed.\nmore")

    def get_act_and_mul_module(name):
        if seen.get("fails"):
            raise FileNotFoundError("nvcc")

    def silu_and_mul(gate_up):
        assert gate_up.is_contiguous()
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    functions = {
        "decode": [trtllm_batch_decode_with_kv_cache],
        "xqa": [get_xqa_module],
        "activation": [get_act_and_mul_module, silu_and_mul],
    }
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    for module, defined in functions.items():
        made = types.ModuleType(f"flashinfer.{module}")
        vars(made).update({function.__name__: function for function in defined})
        monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.delitem(sys.modules, "zoo.kernels.flashinfer_kernels", raising=False)
    yield gpu.of_gpu("flashinfer_kernels"), seen
    sys.modules.pop("zoo.kernels.flashinfer_kernels", None)


def test_flashinfer_gets_the_strides_and_scales_that_its_kernel_reads(theirs):
    module, seen = theirs
    step, (q, _, _) = batch([17, 64, 1, 33]), new(4)
    given = *pages(step.kv, PAGE, 2), step.block_tables, step.seq_lens, SCALE
    found = module.decode(q.transpose(0, 1).contiguous().transpose(0, 1), *given)
    torch.testing.assert_close(found, plain_decode(q, *given))
    assert seen["query"].is_contiguous() and seen["block_tables"].is_contiguous()
    assert (seen["kv_layout"], seen["backend"], seen["max_seq_len"]) == ("NHD", "xqa", 64)
    assert seen["shape"] == (
        torch.float32,
        torch.float32,
        PAGE,
        DIM,
        HEADS // KV_HEADS,
        False,
        torch.float32,
        1,
    )
    workspace = seen["workspace_buffer"]
    assert workspace.dtype == torch.uint8 and workspace.numel() == 32 << 20 and not workspace.any()
    module.decode(q, *given)
    assert seen["workspace_buffer"] is workspace  # a recorded launch keeps its address


def test_a_build_that_fails_is_one_line(theirs):
    module, seen = theirs
    seen["fails"] = True
    step, (q, _, _) = batch([17]), new(1)
    line = "attention flashinfer is not possible: its kernel for 3 queries a key and heads of 16 cannot be built: "
    with pytest.raises(ValueError, match=line + r"Ninja build failed\.$"):
        module.decode(q, *pages(step.kv, PAGE, 0), step.block_tables, step.seq_lens, SCALE)


def test_a_gated_product_may_be_flashinfer_s(theirs, monkeypatch):
    module, seen = theirs
    x, weight = torch.randn(5, 16).bfloat16(), torch.randn(24, 16).bfloat16()
    monkeypatch.setattr(swiglu, "find_spec", lambda name: name == "flashinfer")
    monkeypatch.setattr(choices, "is_measuring", lambda: True)
    assert swiglu.ways() == ("fused", "apart", "apart, by flashinfer")
    found = swiglu.computed(swiglu.ways()[2], x, weight)
    torch.testing.assert_close(found, swiglu.plain(x, weight))
    seen["fails"] = True
    module.gate_failure.cache_clear()
    assert module.gate_failure() == "nvcc" and swiglu.ways() == swiglu.WAYS
    monkeypatch.setattr(choices, "is_measuring", lambda: False)
    assert len(swiglu.ways()) == 3  # what an earlier start measured, whose kernel is kept


def test_flashinfer_has_what_is_called():
    """With the package installed, which imports without a GPU."""
    decode = pytest.importorskip("flashinfer.decode", reason=flashinfer_attention.INSTALL)
    from flashinfer.activation import get_act_and_mul_module, silu_and_mul
    from flashinfer.xqa import get_xqa_module

    known = inspect.signature(decode.trtllm_batch_decode_with_kv_cache).parameters
    named = {"query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len", "bmm1_scale"}
    assert named | {"kv_layout", "backend"} <= set(known) and known["bmm2_scale"].default == 1.0
    assert list(inspect.signature(get_xqa_module).parameters)[:8] == [
        "input_dtype",
        "kv_cache_dtype",
        "page_size",
        "head_dim",
        "head_group_ratio",
        "use_sliding_window",
        "output_dtype",
        "q_seq_len",
    ]
    assert "input" in inspect.signature(silu_and_mul).parameters
    assert list(inspect.signature(get_act_and_mul_module).parameters) == ["act_func_name"]
