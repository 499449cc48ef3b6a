"""Compilation as on a GPU, without inductor."""

import pytest
import torch
from torch import Tensor

from compile_cache import lower as lowering


@pytest.fixture
def _as_on_gpu(monkeypatch):
    """Compile without inductor, which takes longer and does not affect what these tests check."""

    def mark(tensors: tuple[Tensor, ...], dim: int, name: str) -> None:
        for tensor in tensors:
            torch._dynamo.mark_dynamic(tensor, dim)

    compiled = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, **how: compiled(function, backend="eager", fullgraph=True, dynamic=False),
    )
    monkeypatch.setattr(lowering, "any_size", mark)
    torch._dynamo.reset()
