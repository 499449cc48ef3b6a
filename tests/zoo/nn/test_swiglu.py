"""The gated half of an MLP: the choice of its implementation, and its shape for a compiler. test_triton.py
tests the results of the GPU kernel."""

from __future__ import annotations

import pytest
import torch
from masquerade import Mask
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from compile_cache import choices
from zoo import kernels
from zoo.nn import swiglu

OPERATOR = torch.ops.zoo.swiglu_linear.default


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, 16, generator=random).to(dtype), torch.randn(24, 16, generator=random).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_runs_the_plain_code(dtype):
    x, weight = operands(dtype)
    gate, up = F.linear(x, weight).split(12, -1)
    assert torch.equal(OPERATOR(x, weight), F.silu(gate) * up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiler_knows_the_shape_of_the_result(dtype):
    with FakeTensorMode() as mode:
        found = OPERATOR(*(mode.from_tensor(one) for one in operands(dtype)))
    assert (found.shape, found.dtype) == ((2, 3, 12), dtype)


@pytest.fixture(name="asked")
def _asked(monkeypatch) -> list[str]:
    """Return the names of the GPU functions that were called; plain code runs in their place."""
    asked: list[str] = []

    def on_gpu(module, function, *arguments):
        asked.append(function)
        if function == "swiglu_linear":
            return swiglu.plain(*arguments)
        gate, up = arguments[0].chunk(2, -1)
        return F.silu(gate) * up

    monkeypatch.setattr(kernels, "use_gpu", lambda tensor: True)
    monkeypatch.setattr(kernels, "on_gpu", on_gpu)
    return asked


@pytest.mark.parametrize(("way", "function"), [("fused", "swiglu_linear"), ("apart", "gate")])
def test_the_faster_implementation_is_used(way, function, asked):
    x, weight = operands(torch.bfloat16)
    with choices.assumed(way):
        assert torch.equal(OPERATOR(x, weight), swiglu.plain(x, weight))
    assert asked == [function]


def test_an_unmeasured_size_needs_no_kernel(asked, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    x, weight = operands(torch.bfloat16)
    assert torch.equal(OPERATOR(x, weight), swiglu.plain(x, weight))
    assert asked == []


@pytest.mark.parametrize(("dtype", "is_chosen"), [(torch.float32, False), (torch.bfloat16, True)])
def test_an_mlp_in_half_precision_on_a_gpu_calls_the_operator(dtype, is_chosen, monkeypatch):
    mlp = swiglu.FusedSwiGLU(16, 12).to(dtype)
    x, _ = operands(dtype)
    called: list[torch.Size] = []
    monkeypatch.setattr(swiglu, "plain", lambda x, weight: called.append(x.shape) or x.new_zeros(2, 3, 12))
    with torch.inference_mode():
        mlp(x)
        assert called == []  # on a CPU, packed matrices and fused code are faster
        with kernels.plain(), Mask():
            mlp(x)
    assert called == [x.shape] * is_chosen
