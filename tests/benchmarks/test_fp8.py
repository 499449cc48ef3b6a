"""The comparison of fp8 products on a device, with the plain form in the place of the device's; and the table of steps
that fp8 weights change."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from models import family

from benchmarks import device_kernels
from benchmarks import fp8 as table
from compile_cache import choices
from zoo.nn import fp8

SHAPE = ((64, 96),)


def alone(put):
    return nullcontext()


@pytest.fixture(name="found")
def _found(monkeypatch) -> dict:
    """Return where the findings of small products go. No time is measured."""
    monkeypatch.setattr(fp8, "why_not", lambda device, dtype: None)
    monkeypatch.setattr(fp8, "scaled", lambda *given, has_fast_sums=False: fp8.plain(*given))
    monkeypatch.setattr(choices, "time_us", lambda way: float(way() is not None))
    monkeypatch.setattr(device_kernels, "FP8", {"a model": SHAPE})
    return {}


def test_each_shape_has_gaps_and_times(found):
    device_kernels.fp8_products(found.__setitem__, alone)
    names = [f"a model, {rows} x 64 x 96" for rows in device_kernels.FP8_ROWS]
    assert set(found) == {f"{name}, {what}" for name in names for what in ("gaps", "us")}
    for name in names:
        assert found[f"{name}, gaps"] == {"fp8": 0, "fp8, fast sums": 0}
        assert set(found[f"{name}, us"]) == {"fp8", "fp8, fast sums", "bf16"}


def test_a_gap_fails_the_part(found, monkeypatch):
    monkeypatch.setattr(fp8, "scaled", lambda *given, has_fast_sums=False: 1.1 * fp8.plain(*given))
    with pytest.raises(
        AssertionError, match="differ from the plain form: a model, 1 x 64 x 96, a model, 16 x"
    ):
        device_kernels.fp8_products(found.__setitem__, alone)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU may have it")
def test_a_machine_without_fp8_says_why():
    found = {}
    device_kernels.fp8_products(found.__setitem__, alone)
    assert found == {
        "skipped": "weights fp8 need a GPU of compute capability 8.9 or newer, and the model is on cpu"
    }


def test_equal_forms_agree_at_every_step():
    found = table.agreement(family("toy"), family("toy"), 4)
    assert found.steps == found.equal > 0 and found.noise == 0 < found.signal
    assert found.cell(has_codes=True) == str(found.steps) and found.cell(has_codes=False) == "equal"


def test_latents_have_their_ratio_to_the_error():
    assert table.Agreement(4, 0, signal=200.0, noise=2.0).cell(has_codes=False) == "20.0 dB"
