"""The GPU's convolution over rows in Triton's interpreter, compared with the plain operator. test_triton.py runs
this file in a new process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from bf16_products import multiply_numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels import triton_conv
from zoo.nn.conv import rows_of, strides_apart, upsampling_taps

EXAMPLES = settings(max_examples=15, deadline=None, derandomize=True, database=None)
DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True, scope="module")
def _numbers():
    with pytest.MonkeyPatch.context() as patch:
        multiply_numbers(patch)
        yield


@pytest.fixture(autouse=True)
def _card(monkeypatch):
    on_card(monkeypatch, 1)


def on_card(patch: pytest.MonkeyPatch, processors: int) -> None:
    card = SimpleNamespace(multi_processor_count=processors)
    patch.setattr(torch.cuda, "get_device_properties", lambda device: card)


def operands(
    batch: int, length: int, channels: int, out_channels: int, kernel: int, dilation: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(batch + length + channels + out_channels)
    x = torch.randn(batch, length + (kernel - 1) * dilation, channels, generator=random)
    weight = torch.randn(out_channels, kernel, channels, generator=random) * (kernel * channels) ** -0.5
    return x.to(dtype), weight.to(dtype)


def near(found: Tensor, x: Tensor, weight: Tensor, dilation: int) -> None:
    """Check the error against that of rounding the result and of summing in another order."""
    expected = F.conv1d(x.double().mT, weight.double().mT, dilation=dilation).mT
    eps = torch.finfo(x.dtype).eps
    assert found.shape == expected.shape and found.dtype == x.dtype and found.is_contiguous()
    assert torch.allclose(found.double(), expected, rtol=eps, atol=eps / 4), (found - expected).abs().max()


@given(
    st.integers(1, 5),
    st.integers(1, 90),
    st.integers(1, 70),
    st.integers(1, 140),
    st.sampled_from([2, 3, 7]),
    st.sampled_from([1, 3, 9]),
    st.sampled_from(DTYPES),
)
@EXAMPLES
def test_any_shape(batch, length, channels, out_channels, kernel, dilation, dtype):
    x, weight = operands(batch, length, channels, out_channels, kernel, dilation, dtype)
    near(triton_conv.convolve_rows(x, weight, dilation, "usual"), x, weight, dilation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", ["usual", "large"])
@pytest.mark.parametrize(
    ("shape", "kernel", "dilation"),
    [
        ((2, 150, 32, 32), 7, 9),
        ((3, 100, 64, 64), 7, 3),
        ((2, 130, 96, 96), 7, 1),
        ((2, 9, 128, 288), 2, 1),
        ((1, 1500, 32, 160), 3, 1),
    ],
    ids=str,
)
def test_tiles_of_published_shapes(shape, kernel, dilation, size, dtype):
    x, weight = operands(*shape, kernel, dilation, dtype)
    near(triton_conv.convolve_rows(x, weight, dilation, size), x, weight, dilation)


def test_few_programs_get_smaller_tiles(monkeypatch):
    x, weight = operands(2, 70, 64, 96, 7, 3, DTYPES[0])
    many = triton_conv.convolve_rows(x, weight, 3, "usual")
    on_card(monkeypatch, 132)
    card = torch.cuda.get_device_properties(0)
    assert triton_conv.constants(140, 64, 96, 7, "large", card)["ROWS"] == triton_conv.FEW[0]
    assert torch.equal(triton_conv.convolve_rows(x, weight, 3, "large"), many)


def test_a_stream_does_not_depend_on_the_others_of_its_tile():
    x, weight = operands(4, 50, 32, 32, 7, 1, DTYPES[0])
    x[[0, 3]] = torch.nan
    found = triton_conv.convolve_rows(x, weight, 1, "usual")
    assert torch.equal(found[1:3], triton_conv.convolve_rows(x[1:3], weight, 1, "usual"))
    assert found[1:3].isfinite().all()


def test_an_upsampling_has_two_taps():
    x, _ = operands(2, 21, 48, 1, 1, 1, DTYPES[1])
    filters = torch.randn(48, 24, 8, generator=torch.Generator().manual_seed(0)).half() / 8
    weight = rows_of(upsampling_taps(filters, 4), DTYPES[1]).mT
    found = strides_apart(triton_conv.convolve_rows(x, weight, 1, "usual").mT, 4)
    expected = F.conv_transpose1d(x.double().mT, filters.double(), stride=4)[:, :, 4:-4]
    assert torch.allclose(found.double(), expected, rtol=1e-3, atol=1e-3)
