"""Convolutions over rows: the choice of the implementation, and their shape for a compiler. test_triton.py tests
the results of the GPU kernel."""

from __future__ import annotations

import pytest
import torch
from masquerade import Mask
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from compile_cache import choices
from zoo import kernels
from zoo.nn import conv, row_convolution

OPERATOR = torch.ops.zoo.convolve_rows.default
WAYS = ("triton", "triton, large tiles", "cudnn")


def operands(dtype: torch.dtype, dilation: int = 3) -> tuple[torch.Tensor, torch.Tensor, int]:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, 20, 8, generator=random).to(dtype)
    return x, torch.randn(6, 3, 8, generator=random).to(dtype), dilation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_operator_is_a_convolution_of_rows(dtype):
    x, weight, dilation = operands(dtype)
    found = OPERATOR(x, weight, dilation)
    expected = F.conv1d(x.double().mT, weight.double().mT, dilation=dilation).mT
    assert torch.allclose(found.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiler_knows_the_shape_and_the_strides_of_the_result(dtype):
    x, weight, dilation = operands(dtype)
    torch.library.opcheck(OPERATOR, (x, weight, dilation), test_utils=("test_schema", "test_faketensor"))
    with FakeTensorMode() as mode:
        found = OPERATOR(mode.from_tensor(x), mode.from_tensor(weight), dilation)
    real = OPERATOR(x, weight, dilation)
    assert (found.shape, found.stride(), found.dtype) == (real.shape, real.stride(), dtype)


@pytest.fixture(name="asked")
def _asked(monkeypatch) -> list[str]:
    """Return what was asked of the GPU; plain code runs in its place."""
    asked: list[str] = []

    def on_gpu(module, function, x, weight, dilation, size):
        asked.append(f"{module}.{function}, {size}")
        return F.conv1d(x.mT, weight.mT, dilation=dilation).mT.contiguous()

    monkeypatch.setattr(kernels, "use_gpu", lambda tensor: True)
    monkeypatch.setattr(kernels, "on_gpu", on_gpu)
    monkeypatch.setattr(row_convolution, "ways", lambda device: WAYS)
    return asked


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("triton", ["triton_conv.convolve_rows, usual"]),
        ("triton, large tiles", ["triton_conv.convolve_rows, large"]),
        ("cudnn", []),
    ],
)
def test_the_fastest_way_is_used(way, expected, asked):
    given = operands(torch.float16)
    with choices.assumed(way):
        assert torch.equal(OPERATOR(*given), row_convolution.plain(*given))
    assert asked == expected


def test_our_own_kernel_is_used_where_nothing_was_measured(asked, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    OPERATOR(*operands(torch.float16))
    with choices.assumed("a way of another operator"):
        OPERATOR(*operands(torch.float16))
    assert asked == ["triton_conv.convolve_rows, usual"] * 2


def test_a_choice_is_shared_by_similar_numbers_of_rows(asked, monkeypatch):
    keys = []
    monkeypatch.setattr(choices, "fastest", lambda key, ways: keys.append(key))
    x, weight, dilation = operands(torch.float16)
    for rows in (x, x[:, :17], x[:1]):
        OPERATOR(rows.contiguous(), weight, dilation)
    assert keys == [f"convolve_rows float16 {n} x 8 x 6, 3 taps 3 apart" for n in (32, 32, 16)]


@pytest.mark.parametrize(("dtype", "is_chosen"), [(torch.float32, False), (torch.float16, True)])
def test_long_signals_in_16_bits_on_a_gpu_go_to_the_operator(dtype, is_chosen, monkeypatch):
    x, weight, dilation = operands(dtype)
    weight, bias = conv.rows_of(weight.mT, dtype), torch.randn(6)
    expected = conv.convolve_rows(x.mT, weight, bias, dilation)
    called, plain = [], row_convolution.plain

    def noted(*given):
        called.append(given[0].stride())
        return plain(*given)

    monkeypatch.setattr(row_convolution, "plain", noted)
    with kernels.plain(), Mask():
        assert torch.equal(conv.convolve_rows(x.mT, weight, bias, dilation), expected)
        # a signal this short is a matrix product
        conv.convolve_rows(
            x.new_zeros(2, 32, 7), conv.rows_of(weight.new_zeros(6, 32, 3), dtype), bias, dilation
        )
    assert called == [(160, 8, 1)] * is_chosen
