"""The measured memory of a model's weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import directory

from benchmarks.memory import anonymous_bytes, measured

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux")


def test_a_tensor_counts_once_it_is_written():
    before = anonymous_bytes()
    kept = torch.empty(64 << 20, dtype=torch.uint8)
    assert anonymous_bytes() - before < 32 << 20
    kept.fill_(1)
    assert 60 << 20 < anonymous_bytes() - before < 80 << 20


@pytest.mark.slow
def test_both_forms_of_a_model_are_measured():
    place = str(directory("qwen3_tts", "tiny"))
    assert all(0 < measured(place, form) < 200e6 for form in ("plain", "served"))
