"""The function behind `zoo warm`."""

from __future__ import annotations

import pytest
import torch
from toy import Toy

import zoo
from compile_cache.strategy import Whole
from serving.engine.device.lowered import Lowered
from serving.settings import Memory, ModelOptions, Settings
from serving.tools.warm import warm
from zoo.contract import KV


@pytest.mark.slow
@pytest.mark.compile
def test_warm_reports_what_it_compiled_for_each_model(monkeypatch, tmp_path):
    monkeypatch.setattr(
        "serving.engine.device.lowered.lower",
        lambda verb, how: torch.compile(verb, backend="eager", fullgraph=True) if how == Whole() else verb,
    )
    monkeypatch.setattr(Lowered, "take_step", lambda *_: None)
    torch._dynamo.reset()
    toys = {"toy": Toy(), "other": Toy(kv=KV(num_layers=3, num_heads=1, head_dim=20))}
    monkeypatch.setattr(zoo, "find", lambda model: model)
    monkeypatch.setattr(zoo, "load", lambda model, *_, **__: toys[model])
    steps: list[tuple[float, str]] = []
    settings = Settings({"a": "toy", "b": "other"}, model=ModelOptions("cpu"), memory=Memory(2))
    one, two = warm(settings, lambda *step: steps.append(step))
    assert (one["model"], two["model"]) == ("a", "b")
    for done in (one, two):
        # The eager backend keeps no kernels.
        assert (done["graphs"], done["found"], done["compiled"]) == (1, 0, 0)
        assert done["cache"].startswith(str(tmp_path / "cache")) and done["warm_s"] > 0
    assert one["cache"] != two["cache"]
    assert steps[0][0] == 0 and steps[-1] == (1.0, "b: warm")
