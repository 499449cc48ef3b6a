"""Strict loading: what is missing, left over or misshapen is named; parts and shards; nothing is left unfilled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from zoo.nn.checkpoint import load, published, read_json
from zoo.nn.linear import FusedLinear, Tables

CPU = torch.device("cpu")
TABLE = {
    "attn.q.weight": "qkv.weight[0]",
    "attn.k.weight": "qkv.weight[1]",
    "attn.v.weight": "qkv.weight[2]",
    "embed.0.weight": "tables.weight[0]",
    "embed.1.weight": "tables.weight[1]",
    "out.weight": "out.weight",
    "out.bias": "out.bias",
    "flag": "flag",
    "encoder.weight": "encoder.weight",
}
SHAPES = {
    "attn.q.weight": (4, 3),
    "attn.k.weight": (2, 3),
    "attn.v.weight": (2, 3),
    "embed.0.weight": (5, 3),
    "embed.1.weight": (5, 3),
    "out.weight": (3, 4),
    "out.bias": (3,),
    "flag": (1,),
    "encoder.weight": (2, 2),
}


class Model(nn.Module):
    flag: Tensor

    def __init__(self):
        super().__init__()
        self.qkv = FusedLinear(3, (4, 2, 2))
        self.tables = Tables(2, 5, 3)
        self.out = nn.Linear(4, 3)
        self.encoder = nn.Linear(2, 2, bias=False)
        self.register_buffer("flag", torch.zeros(1))


@pytest.fixture
def model() -> Model:
    with torch.device("meta"):
        return Model()


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}


def test_published_names_and_shapes(model):
    assert published(model, TABLE) == SHAPES


def test_a_tensor_that_the_table_forgets_is_our_own_mistake(model):
    with pytest.raises(AssertionError, match=r"not in the table: \['flag'\]"):
        published(model, {theirs: ours for theirs, ours in TABLE.items() if ours != "flag"})


def test_everything_is_filled(model, tensors, tmp_path):
    save_file(tensors, tmp_path / "model.safetensors")
    load(model, TABLE, tmp_path, CPU, torch.float32)
    assert torch.equal(model.qkv.weight, torch.cat([tensors[f"attn.{part}.weight"] for part in "qkv"]))
    for which in (0, 1):
        assert torch.equal(model.tables.table(which), tensors[f"embed.{which}.weight"])
    assert torch.equal(model.out.weight, tensors["out.weight"]) and torch.equal(model.flag, tensors["flag"])
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor.device == CPU and tensor.dtype == torch.float32 and not tensor.requires_grad, name
    first, second, third = model.qkv(torch.eye(3))
    assert torch.equal(first, tensors["attn.q.weight"].T)
    assert torch.equal(second, tensors["attn.k.weight"].T) and torch.equal(third, tensors["attn.v.weight"].T)
    index = torch.tensor([[4, 0]])
    assert torch.equal(model.tables(index)[0], torch.stack((tensors["embed.0.weight"][4], tensors["embed.1.weight"][0])))


def test_the_files_dtype_gives_way_to_the_one_asked_for(model, tensors, tmp_path):
    save_file({name: tensor.double() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    load(model, TABLE, tmp_path, CPU, torch.bfloat16)
    assert torch.equal(model.out.weight, tensors["out.weight"].bfloat16())


def test_a_submodule_may_be_skipped_but_is_checked(model, tensors, tmp_path):
    save_file(tensors, tmp_path / "model.safetensors")
    load(model, TABLE, tmp_path, CPU, torch.float32, skip="encoder")
    assert model.encoder.weight.is_meta
    assert not any(tensor.is_meta for name, tensor in model.named_parameters() if not name.startswith("encoder"))
    del tensors["encoder.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing encoder.weight \[2, 2\]"):
        load(model, TABLE, tmp_path, CPU, torch.float32, skip="encoder")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found.pop("attn.k.weight"), r"missing attn.k.weight \[2, 3\]"),
        (lambda found: found.update({"lora.weight": torch.zeros(7)}), r"unknown lora.weight \[7\]"),
        (lambda found: found.update({"embed.1.weight": torch.zeros(6, 3)}), r"embed.1.weight has shape \[6, 3\], expected \[5, 3\]"),
        (lambda found: found.update({"attn.q.weight": torch.zeros(3, 4)}), r"attn.q.weight has shape \[3, 4\], expected \[4, 3\]"),
        (lambda found: [found.pop(name) for name in list(found)[:9]] and found.update(x=torch.zeros(1)), r"missing .*\(and 2 more\)"),
    ],
    ids=["missing", "extra", "misshapen", "transposed", "many"],
)
def test_what_does_not_fit_is_named_before_anything_is_filled(change, message, model, tensors, tmp_path):
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message) as refused:
        load(model, TABLE, tmp_path, CPU, torch.float32)
    assert str(tmp_path) in str(refused.value)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_file_that_was_cut_short(kept, model, tensors, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"is not a whole safetensors file .*it may have been cut short; copy it again"):
        load(model, TABLE, tmp_path, CPU, torch.float32)


def sharded(tensors: dict[str, Tensor], directory: Path) -> None:
    names = list(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:4], "model-00002-of-00002.safetensors": names[4:]}
    for shard, inside in shards.items():
        save_file({name: tensors[name] for name in inside}, directory / shard)
    index = {"metadata": {}, "weight_map": {name: shard for shard, inside in shards.items() for name in inside}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards(model, tensors, tmp_path):
    sharded(tensors, tmp_path)
    load(model, TABLE, tmp_path, CPU, torch.float32)
    assert torch.equal(model.qkv.weight, torch.cat([tensors[f"attn.{part}.weight"] for part in "qkv"]))
    assert torch.equal(model.out.bias, tensors["out.bias"])


def test_a_missing_shard_is_named(model, tensors, tmp_path):
    sharded(tensors, tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002.safetensors does not exist"):
        load(model, TABLE, tmp_path, CPU, torch.float32)


def test_no_file_at_all(model, tmp_path):
    with pytest.raises(ValueError, match=r"model.safetensors does not exist"):
        load(model, TABLE, tmp_path, CPU, torch.float32)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"{", "cannot be read: Expecting"),
        (b"[1]", "is not a JSON object"),
        (b"\xff\xfe", "cannot be read: 'utf-8'"),
    ],
)
def test_json_that_cannot_be_read(content, message, tmp_path):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as refused:
        read_json(path)
    assert str(path) in str(refused.value)
