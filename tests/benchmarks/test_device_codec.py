"""The times of a codec's convolutions, without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from benchmarks import device_codec, device_kernels
from compile_cache import choices
from zoo import kernels
from zoo.kernels.operator import is_plain
from zoo.nn import row_convolution

WAYS = ("triton", "cudnn")


@pytest.fixture(autouse=True)
def _kernel(monkeypatch):
    """Run plain code in the place of a GPU's kernel; its results are too large by 1."""
    monkeypatch.setattr(kernels, "use_gpu", lambda tensor: not is_plain())
    monkeypatch.setattr(row_convolution, "ways", lambda device: WAYS)
    monkeypatch.setattr(
        kernels, "on_gpu", lambda _, __, x, w, dilation, size: F.conv1d(x.mT, w.mT, dilation=dilation).mT + 1
    )
    monkeypatch.setattr(choices, "time_us", lambda way: 7.0)


def test_each_convolution_of_a_render_is_timed_once():
    x, weight = torch.zeros(2, 10, 4, dtype=torch.float16), torch.zeros(6, 3, 4, dtype=torch.float16)
    with device_codec.convolved() as seen:
        for rows in (x, x, x[:1]):
            torch.ops.zoo.convolve_rows.default(rows, weight, 3)
    torch.ops.zoo.convolve_rows.default(x, weight, 2)
    found = device_codec.ways_of(seen)
    assert list(found) == [f"{rows} x 10 x 4 to 6, 3 taps 3 apart" for rows in (1, 2)]
    for row in found.values():
        assert row.pop("triton, gap") == pytest.approx(1, abs=0.01)
        assert row == dict.fromkeys(("triton, us", "cudnn, us"), 7.0)


def test_a_wrong_kernel_is_named():
    wrong = []

    def compare(name, dtype, operator, given):
        if device_kernels.gap(operator, *given) > device_kernels.KERNEL_GAPS[dtype]:
            wrong.append(name)

    device_kernels.convolved((2, 20, 8, 4, 3, 3), compare)
    assert wrong == [f"convolution of (2, 20, 8, 4, 3, 3) {kind}, triton" for kind in ("bfloat16", "float16")]
