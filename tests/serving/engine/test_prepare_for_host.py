"""The place of a model's compiled code: its own for everything that the code depends on."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from models import directory, family
from torch import nn

import zoo
from compile_cache import artifacts
from serving.engine.prepare_for_host import prepare_for_host
from zoo.nn.packed import PackedLinear


@pytest.fixture(autouse=True)
def _environment(monkeypatch, tmp_path):
    monkeypatch.setenv("ZOO_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")


def keep(model: nn.Module, facts: object = "facts", code=()):
    return artifacts.use_cache_dir("model", model, facts, code)


@pytest.mark.compile
def test_fit_names_a_place_of_its_own_and_lays_out_the_matrices(tmp_path):
    fitted = zoo.load(directory("qwen3_tts", "tiny"), "cpu", "float32")
    fitted.wide = nn.Linear(512, 512)
    place = prepare_for_host(fitted)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(place) and place.is_dir()
    assert place.parent.parent == tmp_path / "compiled" / f"torch-{torch.__version__}"
    # a tiny model has one thread
    assert place.parent.name == f"{torch.backends.cpu.get_cpu_capability().lower()}-1-threads"
    assert isinstance(fitted.wide, PackedLinear)
    assert place == prepare_for_host(fitted)
    assert place != prepare_for_host(zoo.load(directory("qwen3_tts", "tiny"), "cpu", "float32"))


def test_the_place_changes_with_all_that_compiled_code_depends_on(tmp_path, monkeypatch):
    code = tmp_path / "code"
    code.mkdir()
    (code / "model.py").write_text("x = 1\n")
    strategy = family("toy").strategy
    places = [
        keep(nn.Linear(3, 4), strategy, [code]),
        keep(nn.Linear(3, 5), strategy, [code]),
        keep(nn.Linear(3, 4, dtype=torch.bfloat16), strategy, [code]),
        keep(nn.Linear(3, 4), replace(strategy, batches=(1, 2)), [code]),
    ]
    (code / "model.py").write_text("x = 2\n")
    places.append(keep(nn.Linear(3, 4), strategy, [code]))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    places.append(keep(nn.Linear(3, 4), strategy, [code]))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    places.append(keep(nn.Linear(3, 4), strategy, [code]))
    monkeypatch.setattr(torch, "__version__", "9.9")
    places.append(keep(nn.Linear(3, 4), strategy, [code]))
    assert len(set(places)) == len(places)
    assert keep(nn.Linear(3, 4), strategy, [code]) == places[-1]


def test_a_place_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot hold compiled code"):
        artifacts.use_cache_dir("model", nn.Linear(1, 1), "facts", (), root=tmp_path / "file")
