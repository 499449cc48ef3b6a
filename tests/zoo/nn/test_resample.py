"""The resampler that models were trained with."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from zoo.nn import resample
from zoo.nn.resample import resampled


def tone(rate_hz: int) -> torch.Tensor:
    """Return a second of a tone at 440 Hz."""
    return torch.sin(2 * torch.pi * 440 * torch.arange(rate_hz) / rate_hz)


@pytest.mark.parametrize("from_hz", [8000, 11_025, 22_050, 44_100, 47_999, 48_000, 191_999])
def test_a_tone_stays_the_same_except_at_its_edges(from_hz):
    found = resampled(tone(from_hz), from_hz, 16_000)
    assert found.dtype == torch.float32 and len(found) == 16_000
    np.testing.assert_allclose(found[500:-500], tone(16_000)[500:-500], atol=5e-3)


@pytest.mark.parametrize("to_hz", [16_000, 24_000, 44_100])
def test_a_filter_between_rates_without_a_common_divisor_is_not_made(monkeypatch, to_hz):
    monkeypatch.setattr(resample, "Resample", None)
    assert len(resampled(tone(47_999), 47_999, to_hz)) == to_hz
