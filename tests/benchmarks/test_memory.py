"""The measured memory of a model's weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from models import directory

from benchmarks.memory import anonymous_bytes, measured
from compile_cache import artifacts
from zoo import kernels
from zoo.kernels import cpu

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux")


def test_a_tensor_counts_once_it_is_written():
    before = anonymous_bytes()
    kept = torch.empty(64 << 20, dtype=torch.uint8)
    assert anonymous_bytes() - before < 32 << 20
    kept.fill_(1)
    assert 60 << 20 < anonymous_bytes() - before < 80 << 20


@pytest.fixture
def kept_kernels(tmp_path, monkeypatch):
    """A compile cache with the kernels that the tests share, so that no process of a form builds them."""
    monkeypatch.setenv("ZOO_CACHE_DIR", str(tmp_path))
    kernels.build()
    library = Path(cpu._library._name)
    with artifacts.opened(artifacts.place("kernels", kernels.key())) as entry:
        shutil.copytree(library.parent, entry.directory / library.parent.name)


@pytest.mark.slow
def test_both_forms_of_a_model_are_measured(kept_kernels):
    place = str(directory("qwen3_tts", "tiny"))
    assert all(0 < measured(place, form) < 200e6 for form in ("plain", "served"))
