"""The place of a model's compiled code: its own for everything that the code depends on, and nothing else."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog
import torch
from models import directory, family
from torch import nn
from torch._inductor.codecache import CppCodeCache

import zoo
from compile_cache import artifacts, choices
from serving.engine.device import prepare_for_host as module
from serving.engine.device.prepare_for_host import cache_place, prepare_for_host
from zoo.kernels import build
from zoo.nn.fp8 import FP8Linear
from zoo.nn.packed import PackedLinear


@pytest.fixture(autouse=True)
def _environment(monkeypatch, tmp_path):
    monkeypatch.setattr("zoo.kernels.build", lambda: None)
    monkeypatch.setenv("ZOO_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    # a toy's code would be all files of the tests
    code = str(Path(zoo.__file__).parent / "orpheus" / "model.py")
    monkeypatch.setattr(module, "inspect", SimpleNamespace(getfile=lambda kind: code))


class Linear(nn.Linear):
    eps = 0.0


def keep(model: nn.Module, facts: object = "facts", code=()):
    return artifacts.place("model", artifacts.digest(model, facts, code))


COUNT_FAULTS = """
import resource
from ctypes import memset

import torch
from serving.engine.device.prepare_for_host import keep_freed_memory

def work():
    tensors = [torch.empty(24 << 20, dtype=torch.uint8) for _ in range(3)]
    for tensor in tensors:
        memset(tensor.data_ptr(), 1, tensor.nbytes)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for _ in range(3):
    work()
given_back = faults()
keep_freed_memory()
for _ in range(3):
    work()
print(given_back, faults())
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="a C library of its own ways"
)
def test_memory_that_is_freed_is_kept():
    ran = subprocess.run([sys.executable, "-c", COUNT_FAULTS], capture_output=True, text=True, check=True)
    given_back, kept = map(int, ran.stdout.split())
    assert kept < given_back / 2, (given_back, kept)  # many of small pages, few of huge ones


@pytest.mark.compile
def test_matrices_are_laid_out_and_kernels_kept(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("zoo.kernels.build", build)
    # what this process built before is built anew, here
    monkeypatch.setattr(CppCodeCache, "cache", {})
    fitted = zoo.load(directory("qwen3_tts", "tiny"), "cpu", "float32")
    fitted.wide = nn.Linear(512, 512)
    with choices.assumed("onednn"):
        prepare_for_host(fitted)
    assert capsys.readouterr().err == "zoo: building the CPU's kernels, which takes up to a minute\n"
    place = cache_place(fitted)
    assert place.parents[2] == tmp_path / "compiled"
    assert torch.backends.cpu.get_cpu_capability().lower() in place.parent.name
    assert isinstance(fitted.wide, PackedLinear)
    [kernels] = place.parent.glob("kernels-*")
    libraries = {file: file.stat().st_mtime_ns for file in kernels.rglob("*.so")}
    assert libraries
    with choices.assumed("onednn"):
        prepare_for_host(fitted)
    assert capsys.readouterr().err == ""
    assert {file: file.stat().st_mtime_ns for file in kernels.rglob("*.so")} == libraries
    assert place == cache_place(fitted)
    assert place != cache_place(zoo.load(directory("qwen3_tts", "tiny"), "cpu", "float32"))


@pytest.mark.parametrize(
    "weights, compile, why",
    [
        ("int4", True, "weights 'int4' are not possible; possible: published, int8, fp8"),
        (
            "fp8",
            True,
            "GPU of compute capability 8.9 or newer, and the model is on cpu: use weights published or int8",
        ),
        ("int8", False, "compiled kernels without --no-compile"),
        ("int8", True, "published in 16 bits, and toy has none: use weights published"),
    ],
)
def test_weights_that_cannot_be_rounded_are_refused(weights, compile, why):
    with pytest.raises(ValueError, match=why):
        prepare_for_host(family("toy"), compile=compile, weights=weights)


def test_the_log_names_the_models_that_are_not_rounded_if_some_are(monkeypatch):
    rounded, whole = family("toy"), family("toy_delay")
    monkeypatch.setattr(module, "num_in_int8", lambda each: int(each is rounded))
    with structlog.testing.capture_logs() as lines:
        module.check_rounded([rounded, whole])
    assert [line["model"] for line in lines] == [whole.spec.name or whole.spec.family]


def test_a_gpu_with_fp8_gets_rounded_matrices(monkeypatch, tmp_path):
    fitted = zoo.load(directory("qwen3_tts", "tiny"), "cpu", "bfloat16")
    fitted.wide, fitted.device = nn.Linear(512, 512, dtype=torch.bfloat16), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(choices, "time_us", lambda way: 1.0)  # the first of equal ways is taken
    place = cache_place(fitted)
    prepare_for_host(fitted, weights="fp8")
    assert isinstance(fitted.wide, FP8Linear)
    [kept] = tmp_path.rglob("*.choices")
    assert "fp8_linear 64 x 512 x 512" in kept.read_text()
    assert place != cache_place(fitted)


@pytest.mark.parametrize(
    "name, depth, device, why",
    [
        ("qwen3_tts", "one", "cuda", "depth 'one' is not possible; possible: layers, whole"),
        ("qwen3_tts", "whole", "cpu", "the model is on cpu: use depth layers"),
        ("higgs_v3", "whole", "cuda", "Higgs Audio V3 has none: use depth layers"),
    ],
)
def test_depths_that_are_not_possible_are_refused(name, depth, device, why):
    fitted = zoo.load(directory(name, "tiny"), "cpu", "bfloat16")
    fitted.device = torch.device(device)
    with pytest.raises(ValueError, match=why):
        prepare_for_host(fitted, depth=depth)


def test_whole_code_predictors_have_compiled_code_of_their_own():
    fitted, other = (zoo.load(directory(name, "tiny"), "cpu", "bfloat16") for name in ("csm", "higgs_v3"))
    fitted.device = other.device = torch.device("cuda")
    place, place_of_other = cache_place(fitted), cache_place(other)
    with structlog.testing.capture_logs() as lines:
        prepare_for_host(fitted, other, depth="whole")
    assert place != cache_place(fitted) and place_of_other == cache_place(other)
    assert [line["why"] for line in lines] == ["the model has no code predictor"]


def test_the_place_changes_with_all_that_compiled_code_depends_on(tmp_path, monkeypatch):
    code, changed = tmp_path / "code", tmp_path / "changed"
    for folder, source in ((code, "x = 1\n"), (changed, "x = 2\n")):
        folder.mkdir()
        (folder / "model.py").write_text(source)
    strategy = family("toy").strategy
    other_eps = Linear(3, 4)
    other_eps.eps = 1e-6
    places = [
        keep(Linear(3, 4), strategy, [code]),
        keep(Linear(3, 5), strategy, [code]),
        keep(Linear(3, 4, dtype=torch.bfloat16), strategy, [code]),
        keep(other_eps, strategy, [code]),
        keep(Linear(3, 4), replace(strategy, batches=(1, 2)), [code]),
        keep(Linear(3, 4), strategy, [changed]),
    ]
    with torch._inductor.config.patch(max_autotune=True):
        places.append(keep(Linear(3, 4), strategy, [code]))
    another = "AVX512" if torch.backends.cpu.get_cpu_capability() == "AVX2" else "AVX2"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: another)
    places.append(keep(Linear(3, 4), strategy, [code]))
    monkeypatch.setattr(torch, "__version__", "9.9")
    places.append(keep(Linear(3, 4), strategy, [code]))
    assert len(set(places)) == len(places)
    assert keep(Linear(3, 4), strategy, [code]) == places[-1]


def test_the_place_does_not_change_with_what_compiled_code_knows_nothing_of(tmp_path, monkeypatch):
    code = tmp_path / "model.py"
    code.write_text("x = 1\n")
    place = keep(Linear(3, 4), "facts", [code])
    code.write_text("# one\nx = 1\n")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert keep(Linear(3, 4), "facts", [code]) == place


def test_a_new_entry_is_kept_where_old_ones_cannot_be_dropped(monkeypatch):
    """They belong to another user, such as root."""

    def refuse(root):
        raise PermissionError(13, "Permission denied", str(root))

    monkeypatch.setattr(module.store, "prune", refuse)
    with structlog.testing.capture_logs() as lines, module.cached(family("toy")):
        pass
    assert ["Permission denied" in line["why"] for line in lines] == [True]
    with module.cached(family("toy")) as entry:
        assert entry.is_found


def test_the_place_does_not_change_with_the_name_that_a_model_is_served_by(monkeypatch):
    model = family("toy")
    place = cache_place(model)
    monkeypatch.setattr(model, "spec", replace(model.spec, name="model 'qwen'"))
    assert cache_place(model) == place
