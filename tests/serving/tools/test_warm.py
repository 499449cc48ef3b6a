"""`zoo warm` below its command."""

from __future__ import annotations

import pytest
import torch
from toy import Toy

import zoo
from compile_cache.strategy import Whole
from serving.tools.warm import warm


@pytest.mark.compile
def test_warm_says_what_it_made(monkeypatch, tmp_path):
    monkeypatch.setattr(
        "serving.engine.runner.lower",
        lambda verb, how: torch.compile(verb, backend="eager", fullgraph=True) if how == Whole() else verb,
    )
    torch._dynamo.reset()
    monkeypatch.setattr(zoo, "load", lambda model, device, dtype: Toy())
    steps: list[tuple[float, str]] = []
    done = warm("toy", device="cpu", max_slots=2, progress=lambda *step: steps.append(step))
    assert (done["graphs"], done["found"], done["compiled"]) == (1, 0, 0)  # it keeps no kernels
    assert done["cache"].startswith(str(tmp_path / "cache")) and done["warm_s"] > 0
    assert steps[0][0] == 0 and steps[-1] == (1.0, "warm")
