"""Fixtures for the tests of the tools."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor
from toy import END, Toy


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Give each test its own compile cache, and no kernels: they take half a minute to build, and would stay
    for other tests."""
    monkeypatch.setattr("zoo.kernels.build", lambda: None)
    monkeypatch.setenv("ZOO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))


def with_end(toy: Toy, score: float) -> Toy:
    """Fix the score of the end: with -inf the toy speaks until its cap, with inf it says nothing."""
    scores = toy.scores

    def fixed(*args: Tensor) -> Tensor:
        logits = scores(*args)  # [B, 2, V]
        logits[:, 0, END] = score
        return logits

    toy.scores = fixed
    return toy


@pytest.fixture(name="with_end")
def _with_end():
    return with_end
