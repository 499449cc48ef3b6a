"""The GPU's gated product in Triton's interpreter, compared with the plain operator. test_triton.py runs this
file in a new process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from bf16_products import multiply_numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zoo.kernels import triton_swiglu
from zoo.nn import swiglu

EXAMPLES = settings(max_examples=12, deadline=None, derandomize=True, database=None)
BF16, FP16 = torch.bfloat16, torch.float16
SMALL_CARD, LARGE_CARD = 101376, 232448  # bytes of shared memory per program


@pytest.fixture(autouse=True, scope="module")
def _numbers():
    with pytest.MonkeyPatch.context() as patch:
        multiply_numbers(patch)
        yield


@pytest.fixture(autouse=True)
def _card(monkeypatch):
    on_card(monkeypatch, SMALL_CARD)


def on_card(patch: pytest.MonkeyPatch, shared_bytes: int) -> None:
    facts = SimpleNamespace(shared_memory_per_block_optin=shared_bytes)
    patch.setattr(torch.cuda, "get_device_properties", lambda device: facts)


def operands(rows: int, inner: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(rows + inner + width)
    x = torch.randn(rows, width, generator=random)
    return x.to(dtype), (torch.randn(2 * inner, width, generator=random) * width**-0.5).to(dtype)


def exact(x: Tensor, weight: Tensor) -> Tensor:
    """Return the result in fp64, with gate and up rounded like the results of a product."""
    gate, up = (x.double() @ weight.double().mT).to(x.dtype).double().chunk(2, -1)
    return gate * gate.sigmoid() * up


def near(found: Tensor, x: Tensor, weight: Tensor) -> None:
    """Check the error against that of rounding the result and of summing in another order."""
    expected, eps = exact(x, weight), torch.finfo(x.dtype).eps
    assert found.shape == expected.shape and found.dtype == x.dtype
    assert torch.allclose(found.double(), expected, rtol=3 * eps, atol=eps / 4), (
        (found - expected).abs().max()
    )


@given(st.integers(1, 150), st.integers(1, 150), st.integers(1, 200), st.sampled_from([BF16, FP16]))
@EXAMPLES
def test_any_shape(rows, inner, width, dtype):
    x, weight = operands(rows, inner, width, dtype)
    near(triton_swiglu.swiglu_linear(x, weight), x, weight)


@given(st.integers(1, 9), st.integers(1, 1500), st.sampled_from([BF16, FP16]))
@EXAMPLES
def test_after_a_product_of_cublas(rows, inner, dtype):
    x, weight = operands(rows, inner, 8, dtype)
    near(triton_swiglu.gate(x @ weight.mT), x, weight)


@pytest.mark.parametrize("card", [SMALL_CARD, LARGE_CARD])
@pytest.mark.parametrize(
    ("rows", "inner", "width"), [(16, 64, 256), (33, 160, 64), (520, 300, 128), (1300, 130, 70)]
)
def test_every_tile_size(rows, inner, width, card, monkeypatch):
    on_card(monkeypatch, card)
    x, weight = operands(rows, inner, width, BF16)
    near(triton_swiglu.swiglu_linear(x, weight), x, weight)


def test_rows_with_gaps_and_more_axes():
    x, weight = operands(35, 40, 96, BF16)
    apart = torch.full((35, 128), torch.nan, dtype=BF16)[:, 16:112].copy_(x)
    near(triton_swiglu.swiglu_linear(apart, weight), x, weight)
    found = triton_swiglu.swiglu_linear(x.view(5, 7, 96), weight)
    assert torch.equal(found.flatten(0, 1), triton_swiglu.swiglu_linear(x, weight))


def test_a_row_does_not_depend_on_the_others_of_its_tile():
    x, weight = operands(200, 70, 96, BF16)
    assert torch.equal(
        triton_swiglu.swiglu_linear(x, weight)[65:130], triton_swiglu.swiglu_linear(x[65:130], weight)
    )


def test_large_numbers_stay_finite_where_the_plain_operator_does():
    x, weight = operands(4, 8, 16, BF16)
    large = x * 1000
    found, expected = triton_swiglu.swiglu_linear(large, weight), swiglu.plain(large, weight)
    assert found.isfinite().all() and torch.allclose(found.float(), expected.float(), rtol=2e-2, atol=1e-2)
