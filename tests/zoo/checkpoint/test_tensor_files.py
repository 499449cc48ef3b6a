"""The formats of published weights, the errors for unreadable files, and the memory that loading takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peak_memory
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from zoo.checkpoint.loading import load
from zoo.checkpoint.tensor_files import contents, open_file

HERE = Path(__file__).parent
CPU = torch.device("cpu")
TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
Save = Callable[[dict[str, Tensor], Path], None]


def save_pickle(tensors: dict[str, Tensor], path: Path) -> None:
    torch.save(tensors, path)


def save_old_pickle(tensors: dict[str, Tensor], path: Path) -> None:
    torch.save(tensors, path, _use_new_zipfile_serialization=False)


def save_state_dict(tensors: dict[str, Tensor], path: Path) -> None:
    torch.save({"state_dict": tensors, "step": 7}, path)


def refused(source: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        contents(source)
    assert "\n" not in str(error.value) and str(source.parent) in str(error.value)


# one file


FILES: list[tuple[str, Save]] = [
    ("model.safetensors", save_file),
    ("pytorch_model.bin", save_pickle),
    ("llm.pt", save_pickle),
    ("vae.pth", save_state_dict),
    ("old.pt", save_old_pickle),
]


@pytest.mark.parametrize(("name", "save"), FILES, ids=[name for name, _ in FILES])
def test_a_file_is_read(name, save, tmp_path):
    path = tmp_path / name
    save(TENSORS, path)
    file = open_file(path)
    assert file.headers == {"a": ((2, 3), "float32", path), "b": ((4,), "bfloat16", path)} == contents(path)
    for key, tensor in TENSORS.items():
        assert torch.equal(file.read(key), tensor) and file.read(key).dtype == tensor.dtype


def test_a_header_counts_the_bytes_of_its_tensor(tmp_path):
    save_file({"a": torch.zeros(3, 5, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    assert open_file(tmp_path / "model.safetensors").headers["a"].num_bytes == 30


def test_parameters_and_views_in_a_pickle_are_read(tmp_path):
    """The weights share memory, like tied ones, and one is transposed."""
    tied = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    torch.save({"embedding": tied, "head": tied, "turned": tied.detach().T}, tmp_path / "llm.pt")
    file = open_file(tmp_path / "llm.pt")
    assert torch.equal(file.read("head"), tied) and not file.read("head").requires_grad
    assert torch.equal(file.read("turned"), tied.T) and file.headers["turned"].shape == (3, 2)


class Object:
    """Not a tensor."""


class Command:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo this should never run",)


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize(
    ("value", "named"),
    [
        (np.zeros(3), r"numpy\._?core\.multiarray\._reconstruct"),
        (np.float64(3), r"numpy\._?core\.multiarray\.scalar"),
        (Object(), r"[\w.]*test_tensor_files\.Object"),
        (Command(), r"posix\.system"),
        (nn.Linear(2, 2), r"torch\.nn\.modules\.linear\.Linear"),
    ],
)
def test_a_pickle_with_more_than_tensors_is_refused(value, named, is_zip, tmp_path, capfd):
    torch.save(TENSORS | {"more": value}, tmp_path / "llm.pt", _use_new_zipfile_serialization=is_zip)
    refused(tmp_path / "llm.pt", rf"llm.pt holds more than tensors \({named}\); only tensors are read$")
    assert "never" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (TENSORS | {"step": 7}, "does not hold tensors by name: 'step' is a int"),
        ({"model": TENSORS}, "does not hold tensors by name: 'model' is a dict"),
        ({3: torch.zeros(1)}, "does not hold tensors by name: 3 is a Tensor"),
        ([torch.zeros(1)], "does not hold tensors by name, but a list"),
    ],
)
def test_a_pickle_without_named_tensors_is_refused(content, message, tmp_path):
    torch.save(content, tmp_path / "llm.pt")
    refused(tmp_path / "llm.pt", message)


@pytest.mark.parametrize(("name", "save"), FILES, ids=[name for name, _ in FILES])
def test_a_truncated_file_is_refused(name, save, tmp_path):
    path = tmp_path / name
    save(TENSORS, path)
    whole = path.read_bytes()
    for kept in (0, 1, 4, 7, 30, len(whole) - 20, len(whole) - 1):
        path.write_bytes(whole[:kept])
        refused(
            path,
            r"is not a whole (safetensors|PyTorch) file \(.+\): it may have been cut short; copy it again",
        )


def test_a_file_of_another_format_is_refused(tmp_path):
    (tmp_path / "llm.pt").write_text("<html>404: not found</html>")
    refused(tmp_path / "llm.pt", "is not a whole PyTorch file")
    torch.jit.script(nn.Linear(2, 2)).save(tmp_path / "flow.pt")
    refused(tmp_path / "flow.pt", r"flow.pt holds more than tensors \(TorchScript archives\)")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    refused(
        tmp_path / "model.gguf", "has no known format; known: .safetensors, .pt, .pth, .bin, .ckpt, .onnx"
    )
    refused(tmp_path / "hift.pt", "hift.pt does not exist")


# ONNX: written by onnx 1.23.2, `numpy_helper.from_array` (raw) and `helper.make_tensor` (typed)


def test_the_initializers_of_an_onnx_file_are_read():
    file = open_file(HERE / "onnx" / "initializers.onnx")
    raw = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    expected = {
        "raw": torch.from_numpy(raw),
        "typed": torch.tensor([[1.0, -2.5], [0.0, 3.25]]),
        "integers": torch.tensor([1, -2, 1 << 40]),
        "raw_integers": torch.tensor([7, -8]),
        "half": torch.from_numpy(raw[:2].astype(np.float16)),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "brain": torch.tensor([1.0, -3.0], dtype=torch.bfloat16),
    }
    for name, tensor in expected.items():
        assert file.headers[name][:2] == (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")), name
        torch.testing.assert_close(file.read(name), tensor, rtol=0, atol=0)
    others = {name: file.headers[name].dtype for name in file.headers.keys() - expected.keys()}
    assert others == {"int32": "int32", "double": "float64", "half_in_int32_data": "float16"}


def test_a_module_is_loaded_from_an_onnx_file(tmp_path):
    with torch.device("meta"):
        linear = nn.Linear(4, 3, bias=False)
    with pytest.raises(ValueError, match=r"unknown typed \[2, 2\]"):
        load(linear, {"raw": "weight"}, HERE / "onnx" / "initializers.onnx", CPU, torch.float32)
    assert linear.weight.is_meta


def test_an_onnx_file_with_external_values_is_refused():
    refused(
        HERE / "onnx" / "external.onnx",
        "keeps the values of outside in another file; they must be in this file",
    )
    file = open_file(HERE / "onnx" / "initializers.onnx")
    with pytest.raises(
        ValueError, match=r"half_in_int32_data is float16 \[2\], but raw_data, .* hold 0 bytes"
    ):
        file.read("half_in_int32_data")


def test_a_truncated_or_invalid_onnx_file_is_refused(tmp_path):
    whole, path = (HERE / "onnx" / "initializers.onnx").read_bytes(), tmp_path / "cut.onnx"
    endless = bytes([7 << 3 | 2]) + b"\xff" * 9 + b"\x01"  # a graph of -1 bytes
    for content in (*(whole[:kept] for kept in (0, 3, 40, 200, len(whole) - 1)), b"<html>", endless):
        path.write_bytes(content)
        refused(path, r"cut.onnx is not a whole ONNX file \(.+\): it may have been cut short")


# shards and their index


SHARDS: list[tuple[str, Save]] = [("model-{}.safetensors", save_file), ("pytorch_model-{}.bin", save_pickle)]


def shard(directory: Path, pattern: str, save: Save, weight_map: Any = None) -> Path:
    """Two shards and their index."""
    names = {"a": pattern.format(1), "b": pattern.format(2)}
    for name, file in names.items():
        save({name: TENSORS[name]}, directory / file)
    index = directory / f"{pattern.replace('-{}', '')}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names if weight_map is None else weight_map}))
    return index


@pytest.mark.parametrize(("pattern", "save"), SHARDS)
def test_shards_are_read(pattern, save, tmp_path):
    index = shard(tmp_path, pattern, save)
    assert contents(tmp_path) == contents(index)
    assert {name: header.path.name for name, header in contents(index).items()} == {
        "a": pattern.format(1),
        "b": pattern.format(2),
    }
    module = nn.ParameterDict(
        {name: nn.Parameter(torch.empty(tensor.shape, device="meta")) for name, tensor in TENSORS.items()}
    )
    load(module, {"a": "a", "b": "b"}, tmp_path, CPU, torch.float32)
    assert all(torch.equal(module[name], tensor.float()) for name, tensor in TENSORS.items())


def test_the_first_main_file_of_a_directory_is_read(tmp_path):
    save_pickle({"pickle": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    assert contents(tmp_path).keys() == {"pickle"}
    save_file({"safetensors": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert contents(tmp_path).keys() == {"safetensors"}
    shard(tmp_path, "model-{}.safetensors", save_file)
    assert contents(tmp_path).keys() == {"a", "b"}


def test_a_directory_without_weights_is_refused(tmp_path):
    refused(tmp_path / "none.safetensors", "none.safetensors does not exist")
    with pytest.raises(
        ValueError, match=r"model.safetensors does not exist, nor does any of: .*pytorch_model.bin"
    ):
        contents(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ([], "has no weight_map; it needs an object of tensor names and file names"),
        ({"a": 1}, "puts a into 1; it needs a file name"),
        (
            {"a": "../model-1.safetensors"},
            r"puts a into \.\./model-1.safetensors, which is outside its directory",
        ),
        ({"a": "x/../../model-1.safetensors"}, "which is outside its directory"),
        ({"a": "/model-1.safetensors"}, "puts a into /model-1.safetensors, which is outside its directory"),
        ({"a": "model-3.safetensors"}, "model-3.safetensors does not exist"),
        ({"a": "model-2.safetensors"}, "puts a into model-2.safetensors, which lacks it"),
    ],
)
def test_an_index_that_is_wrong_is_refused(weight_map, message, tmp_path):
    refused(shard(tmp_path, "model-{}.safetensors", save_file, weight_map), message)


def test_an_index_without_a_weight_map_is_refused(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    refused(tmp_path / "model.safetensors.index.json", "has no weight_map")


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    index = shard(tmp_path, "model-{}.safetensors", save_file)
    save_file(TENSORS, tmp_path / "model-2.safetensors")
    refused(
        index,
        r"index.json: a is in two shards, model-1.safetensors and model-2.safetensors; it must be in one",
    )


def test_a_cache_may_link_to_files_elsewhere(tmp_path):
    """In the cache of the Hugging Face Hub, the directory has the names, but the bytes are elsewhere."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots"
    blobs.mkdir()
    snapshot.mkdir()
    index = shard(blobs, "model-{}.safetensors", save_file)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("..") / "blobs" / path.name)
    assert contents(snapshot).keys() == contents(index).keys()


# memory


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc")
@pytest.mark.parametrize(("pattern", "save"), SHARDS)
def test_loading_takes_the_memory_of_the_model_and_one_shard(pattern, save, tmp_path):
    """The peak is at most 1.1 times the largest shard, for any number of shards."""
    names, weight_map = list(peak_memory.table()), {}
    for start in range(0, len(names), peak_memory.NUM_TENSORS):
        inside = names[start : start + peak_memory.NUM_TENSORS]
        file = pattern.format(start)
        save({name: torch.zeros(peak_memory.ROWS, peak_memory.ROWS) for name in inside}, tmp_path / file)
        weight_map |= dict.fromkeys(inside, file)
    index = tmp_path / f"{pattern.replace('-{}', '')}.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    command = [sys.executable, peak_memory.__file__, str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(HERE.parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    largest_bytes = peak_memory.NUM_TENSORS * peak_memory.ROWS**2 * 4
    assert 0 < int(done.stdout) <= 1.1 * largest_bytes
