"""The comparison of fp8 products on a device, with the plain form in the place of the device's."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from benchmarks import device_kernels
from compile_cache import choices
from zoo.nn import fp8

SHAPE = ((64, 96),)


def alone(put):
    return nullcontext()


@pytest.fixture(name="found")
def _found(monkeypatch) -> dict:
    """Return where the findings of small products go. No time is measured."""
    monkeypatch.setattr(fp8, "why_not", lambda device, dtype: None)
    monkeypatch.setattr(fp8, "scaled", fp8.plain)
    monkeypatch.setattr(choices, "time_us", lambda way: float(way() is not None))
    monkeypatch.setattr(device_kernels, "FP8", {"a model": SHAPE})
    return {}


def test_each_shape_has_gaps_and_times(found):
    device_kernels.fp8_products(found.__setitem__, alone)
    names = [f"a model, {rows} x 64 x 96" for rows in device_kernels.FP8_ROWS]
    assert set(found) == {*names, *(f"{name}, us" for name in names)}
    for name in names:
        assert found[name] == 0 and set(found[f"{name}, us"]) == {"fp8", "bf16"}


def test_a_gap_fails_the_part(found, monkeypatch):
    plain = fp8.plain
    monkeypatch.setattr(fp8, "scaled", lambda *given: 1.1 * plain(*given))
    with pytest.raises(
        AssertionError, match="differ from the plain form: a model, 1 x 64 x 96, a model, 64 x"
    ):
        device_kernels.fp8_products(found.__setitem__, alone)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU may have it")
def test_a_machine_without_fp8_says_why():
    found = {}
    device_kernels.fp8_products(found.__setitem__, alone)
    assert found == {
        "skipped": "weights fp8 need a GPU of compute capability 8.9 or newer, and the model is on cpu"
    }
