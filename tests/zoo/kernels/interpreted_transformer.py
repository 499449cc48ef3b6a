"""The GPU's parts of a transformer block in Triton's interpreter, compared with the plain operators.
test_triton.py runs this file in a new process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from bf16_products import multiply_numbers, round_numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels import triton_transformer
from zoo.nn import transformer

EXAMPLES = settings(max_examples=8, deadline=None, derandomize=True, database=None)
BF16, FP16 = torch.bfloat16, torch.float16
EPS = 1e-5
TINY, PUBLISHED = (16, 16), (256, 512)  # channels, and numbers of all heads
SMALL_CARD, LARGE_CARD = 101376, 232448  # bytes of shared memory per program
AFTER = {"in one": triton_transformer.mlp_in_one, "in three": triton_transformer.mlp_in_three}


@pytest.fixture(autouse=True, scope="module")
def _numbers():
    with pytest.MonkeyPatch.context() as patch:
        multiply_numbers(patch)
        round_numbers(patch)
        yield


@pytest.fixture(autouse=True)
def _card(monkeypatch):
    on_card(monkeypatch, LARGE_CARD)


def on_card(patch: pytest.MonkeyPatch, shared_bytes: int) -> None:
    facts = SimpleNamespace(shared_memory_per_block_optin=shared_bytes)
    patch.setattr(torch.cuda, "get_device_properties", lambda device: facts)


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(dtype)


def norm(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
    return 1 + random(width, dtype=dtype, scale=0.2), random(width + 1, dtype=dtype, scale=0.2)[1:], EPS


def before(rows: int, width: int, inner: int, dtype: torch.dtype) -> tuple[Tensor | float, ...]:
    x = 3 * random(rows, width, dtype=dtype) + 1
    return x, *norm(width, dtype), random(3 * inner, width, dtype=dtype, scale=width**-0.5)


def after(rows: int, width: int, inner: int, dtype: torch.dtype) -> tuple[Tensor | float, ...]:
    def linear(out: int, into: int) -> tuple[Tensor, Tensor]:
        return random(out, into, dtype=dtype, scale=into**-0.5), random(out, dtype=dtype)

    y, x = random(rows, inner, dtype=dtype), random(rows, width, dtype=dtype)
    return (
        y,
        *linear(width, inner),
        x,
        *norm(width, dtype),
        *linear(4 * width, width),
        *linear(width, 4 * width),
    )


def near(found: Tensor, operator, given: tuple[Tensor | float, ...]) -> None:
    """Check the error against fp64. The plain operator's own error, with the same dtype, is the scale."""
    exact = operator(*(one.double() if isinstance(one, Tensor) else one for one in given))
    plain = operator(*given)
    assert found.shape == plain.shape and found.dtype == plain.dtype
    allowed = 2 * float((plain - exact).abs().max()) + torch.finfo(found.dtype).eps
    assert float((found - exact).abs().max()) <= allowed


def plain_norm_linear(x: Tensor, weight: Tensor, bias: Tensor, eps: float, factor: Tensor) -> Tensor:
    return F.linear(F.layer_norm(x, x.shape[-1:], weight, bias, eps), factor)


shapes = st.sampled_from([TINY, (32, 48), (64, 32), (128, 80)])


@given(st.integers(1, 140), shapes, st.sampled_from([BF16, FP16]))
@EXAMPLES
def test_any_number_of_rows(rows, shape, dtype):
    given = before(rows, *shape, dtype)
    near(triton_transformer.norm_linear(*given, None), plain_norm_linear, given)
    given = after(rows, *shape, dtype)
    for in_launches in AFTER.values():
        near(in_launches(*given), transformer.plain, given)


@pytest.mark.parametrize("card", [SMALL_CARD, LARGE_CARD])
@pytest.mark.parametrize("rows", [1, 70])
def test_the_published_width(rows, card, monkeypatch):
    on_card(monkeypatch, card)
    given = before(rows, *PUBLISHED, BF16)
    near(triton_transformer.norm_linear(*given, None), plain_norm_linear, given)
    given = after(rows, *PUBLISHED, BF16)
    for in_launches in AFTER.values():
        near(in_launches(*given), transformer.plain, given)


@pytest.mark.parametrize("card", [SMALL_CARD, LARGE_CARD])
@pytest.mark.parametrize("rows", [200, 1100, 4200])
def test_every_size_of_a_tile(rows, card, monkeypatch):
    on_card(monkeypatch, card)
    given = after(rows, 32, 16, BF16)
    for in_launches in AFTER.values():
        near(in_launches(*given), transformer.plain, given)
    given = before(rows, 32, 80, BF16)
    near(triton_transformer.norm_linear(*given, None), plain_norm_linear, given)


def test_the_widest_rows():
    given = before(70, 512, 16, BF16)
    near(triton_transformer.norm_linear(*given, None), plain_norm_linear, given)


@pytest.mark.parametrize("way", AFTER)
def test_a_row_does_not_depend_on_the_others_of_its_tile(way):
    y, weight, bias, x, *rest = after(100, 64, 32, BF16)
    whole = AFTER[way](y, weight, bias, x, *rest)
    assert torch.equal(whole[40:], AFTER[way](y[40:], weight, bias, x[40:], *rest))
    x, *rest = before(100, 64, 32, BF16)
    whole = triton_transformer.norm_linear(x, *rest, None)
    assert torch.equal(whole[40:], triton_transformer.norm_linear(x[40:], *rest, None))


def test_more_axes():
    y, weight, bias, x, *rest = after(6, 32, 16, BF16)
    for in_launches in AFTER.values():
        found = in_launches(y.view(2, 3, 16), weight, bias, x.view(2, 3, 32), *rest)
        assert torch.equal(found.flatten(0, 1), in_launches(y, weight, bias, x, *rest))
    x, *rest = before(6, 32, 16, BF16)
    found = triton_transformer.norm_linear(x.view(2, 3, 32), *rest, None)
    assert torch.equal(found.flatten(0, 1), triton_transformer.norm_linear(x, *rest, None))
