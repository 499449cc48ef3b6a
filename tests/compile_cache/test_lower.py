"""Functions that are lowered do not get into each other's way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compile_cache.lower import lower
from compile_cache.strategy import Whole


class Model:
    def __init__(self, weight: int):
        self.weight = weight

    def step(self, x: Tensor, *, more: int = 1) -> Tensor:
        return x * self.weight + more


@pytest.mark.compile
def test_a_process_may_load_any_number_of_models(monkeypatch):
    """Dynamo allows a function eight graphs, and all these models have the same one."""
    compiled = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, **how: compiled(function, backend="eager", fullgraph=True, dynamic=False),
    )
    steps = [lower(Model(weight).step, Whole()) for weight in range(12)]
    assert [int(step(torch.tensor(10))) for step in steps] == [10 * weight + 1 for weight in range(12)]
    assert int(steps[3](torch.tensor(10), more=5)) == 35
