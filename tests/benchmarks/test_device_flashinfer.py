"""The comparison with FlashInfer, with torch in the place of its functions: each way gets what it reads."""

from __future__ import annotations

import sys
import types
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F

from benchmarks import device_flashinfer, device_kernels
from compile_cache import choices
from zoo.kernels import gpu
from zoo.nn import flashinfer_attention


class Wrapper:
    def __init__(self, workspace, kv_layout):
        assert kv_layout == "NHD"

    def plan(self, starts, kv_starts, indices, last_page_len, heads, kv_heads, dim, page, **how):
        assert how["causal"] and {x.dtype for x in (starts, kv_starts, indices, last_page_len)} == {
            torch.int32
        }
        assert len(indices) == kv_starts[-1] and (last_page_len == page).all()
        self.planned = starts, kv_starts, indices, how["sm_scale"]

    def run(self, q, kv):
        starts, kv_starts, indices, scale = self.planned
        out = []
        for i in range(len(starts) - 1):
            k, v = (x[indices[kv_starts[i] : kv_starts[i + 1]]].flatten(0, 1).transpose(0, 1) for x in kv)
            own = q[starts[i] : starts[i + 1]].transpose(0, 1)
            given = {"is_causal": True, "scale": scale, "enable_gqa": True}
            out.append(F.scaled_dot_product_attention(own, k, v, **given).transpose(0, 1))
        return torch.cat(out)


def rmsnorm(x, weight, eps):
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


def apply_rope_with_cos_sin_cache(positions, q, k, dim, cache):
    assert cache.dtype == torch.float32 and cache.is_contiguous()
    cos, sin = (part[positions].repeat(1, 2)[:, None] for part in cache.chunk(2, 1))

    def turned(x):
        x = x.view(len(x), -1, dim).float()
        left, right = x.chunk(2, -1)
        return (x * cos + torch.cat((-right, left), -1) * sin).flatten(1)

    return turned(q).to(q.dtype), turned(k).to(k.dtype)


def top_k_top_p_sampling_from_logits(logits, top_k, top_p, seed, offset):
    assert seed.dtype == offset.dtype == torch.int64
    assert top_k.dtype == torch.int32 and logits.shape[:1] == top_k.shape == top_p.shape
    return logits.argmax(-1)


@pytest.fixture
def theirs(monkeypatch):
    functions = {
        "prefill.BatchPrefillWithPagedKVCacheWrapper": Wrapper,
        "norm.rmsnorm": rmsnorm,
        "rope.apply_rope_with_cos_sin_cache": apply_rope_with_cos_sin_cache,
        "sampling.top_k_top_p_sampling_from_logits": top_k_top_p_sampling_from_logits,
        "norm.get_norm_module": object,
        "rope.get_rope_module": object,
        "sampling.get_sampling_module": object,
    }
    package = types.ModuleType("flashinfer")
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    for name, function in functions.items():
        module, attribute = name.split(".")
        made = vars(package).setdefault(module, types.ModuleType(f"flashinfer.{module}"))
        setattr(made, attribute, function)
        monkeypatch.setitem(sys.modules, made.__name__, made)
    kernels = types.SimpleNamespace(failure=lambda *_: None, gate_failure=lambda: None)
    monkeypatch.setattr(gpu, "of_gpu", lambda name: kernels)
    monkeypatch.setattr(flashinfer_attention, "why_not", lambda kv, page_tokens: None)
    monkeypatch.setattr(flashinfer_attention, "version", lambda: "0.6.4")
    monkeypatch.setattr(choices, "time_us", lambda way: way() is None or 1.0)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    shapes = {"a": device_flashinfer.Shape(6, 2, 16, 32, 50), "b": device_flashinfer.Shape(2, 2, 32, 32, 0)}
    for name, value in (
        ("SHAPES", shapes),
        ("STREAMS", (1, 3)),
        ("ROWS", (1, 3)),
        ("PROMPTS", (1, 2)),
        ("POSITIONS", 64),
    ):
        monkeypatch.setattr(device_flashinfer, name, value)
    monkeypatch.setattr(device_flashinfer, "DEVICE", "cpu")
    monkeypatch.setattr(device_kernels, "DEVICE", "cpu")


def run(kind: str) -> dict[str, object]:
    found: dict[str, object] = {}
    put = lambda name, value: found.update({name: value})  # noqa: E731
    device_flashinfer.compared(kind, put, lambda put: nullcontext(), tuple(device_flashinfer.SHAPES)[:2])
    return found


@pytest.mark.parametrize(
    "kind, counts",
    [("step", (1, 3)), ("prompt", (1, 2)), ("norm", (1, 3)), ("rope", (1, 3)), ("draw", (1, 3))],
)
def test_every_family_has_a_row_for_each_number_of_streams(theirs, kind, counts):
    found = run(kind)
    assert found.pop("version") == "0.6.4"
    assert found.pop("not built") == {} and found.pop("building took, s") >= 0
    families = "a" if kind == "draw" else "ab"  # b draws nothing
    assert set(found) == {f"{kind}, {family}, {n}" for n in counts for family in families}
    assert all({"ours_us", "theirs_us"} <= set(row) for row in found.values())
    assert kind == "draw" or all(row["gap"] <= 2e-2 for row in found.values())


def test_a_gap_fails_the_part(theirs, monkeypatch):
    monkeypatch.setattr(sys.modules["flashinfer.norm"], "rmsnorm", lambda x, weight, eps: x + 1)
    with pytest.raises(AssertionError, match="differs from the plain form: norm, a, 1, norm, a, 3, norm, b"):
        run("norm")


def test_a_row_that_fails_says_why_and_the_others_are_measured(theirs, monkeypatch):
    failures = ["no kernel image"]

    def fail(*given, **named):
        if failures:
            raise RuntimeError(failures.pop())
        return real(*given, **named)

    real = sys.modules["flashinfer.rope"].apply_rope_with_cos_sin_cache
    monkeypatch.setattr(sys.modules["flashinfer.rope"], "apply_rope_with_cos_sin_cache", fail)
    found: dict[str, object] = {}
    with pytest.raises(AssertionError, match=r"failed or differs from the plain form: rope, a, 1$"):
        put = lambda name, value: found.update({name: value})  # noqa: E731
        device_flashinfer.compared("rope", put, lambda put: nullcontext(), ("a", "b"))
    assert found["rope, a, 1"] == {"error": "no kernel image"}
    assert "ours_us" in found["rope, a, 3"]


def test_a_machine_without_it_says_why():
    assert run("norm") == {"skipped": "it is for GPUs, and the model is on cpu"}
