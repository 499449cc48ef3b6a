"""Strict loading: errors name missing, unknown and misshapen tensors; parts and shards are read; every tensor
is filled."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from compile_cache import choices
from serving.engine.memory.memory_plan import Peak
from zoo import kernels
from zoo.checkpoint import loading
from zoo.checkpoint.json_files import read_json
from zoo.checkpoint.loading import bf16_kept, load, published
from zoo.nn.linear import FusedLinear, Tables
from zoo.nn.narrow import BF16FusedLinear, NarrowTables
from zoo.nn.pack import pack

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


@pytest.mark.parametrize("forgotten", ["qkv.weight[1]", "tables.weight[1]"])
def test_a_table_that_lacks_a_part_is_our_mistake(forgotten, model):
    with pytest.raises(AssertionError, match="not in the table"):
        published(model, {theirs: ours for theirs, ours in TABLE.items() if ours != forgotten})


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


def test_a_table_that_lacks_a_tensor_is_our_mistake(model):
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
    assert torch.equal(
        model.tables(index)[0], torch.stack((tensors["embed.0.weight"][4], tensors["embed.1.weight"][0]))
    )


def test_large_weights_that_are_bf16_in_the_files_are_kept(model, tensors, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "LEAST_NUMBERS", 6)
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    halves["out.weight"] = tensors["out.weight"]
    save_file(halves, tmp_path / "model.safetensors")
    with bf16_kept():
        load(model, TABLE, tmp_path, CPU, torch.float32)
    kinds = [type(layer) for layer in (model.qkv, model.tables, model.out, model.encoder)]
    assert kinds == [BF16FusedLinear, NarrowTables, nn.Linear, nn.Linear]  # `encoder` is small
    assert model.qkv.weight.dtype == torch.bfloat16 and model.encoder.weight.dtype == torch.float32
    assert torch.equal(model.qkv(torch.eye(3))[1], halves["attn.k.weight"].float().T)
    assert torch.equal(model.tables.rows(1, torch.tensor([4])), halves["embed.1.weight"][4:].float())


def test_a_change_that_needs_more_bits_is_not_rounded_to_bf16(model, tensors, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "LEAST_NUMBERS", 6)
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with bf16_kept(), pytest.raises(AssertionError, match=r"was changed to torch\.float32"):
        load(model, TABLE, tmp_path, CPU, torch.float32, change=lambda name, tensor: tensor.float() / 3)


def test_loading_and_packing_take_little_more_than_the_weights_of_16_bits(tmp_path):
    """Of 16 layers of 2 MiB, loading has the mapped file and the layers, and packing one layer more in three
    forms. Copies in float32 would have 64 MiB more."""
    kernels.build()
    with torch.device("meta"):
        layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(16))
    table = {f"{i}.weight": f"{i}.weight" for i in range(16)}
    weights = {name: torch.full((1024, 1024), 0.5, dtype=torch.bfloat16) for name in table}
    save_file(weights, tmp_path / "model.safetensors")
    with choices.assumed("blocks"), bf16_kept(), Peak() as peak:
        load(layers, table, tmp_path, CPU, torch.float32)
        loading_bytes, peak.most = peak.most, peak.now
        pack(layers)
    assert sum(layer.blocks.nbytes for layer in layers) == 32 << 20
    assert loading_bytes < 68 << 20 and peak.most < 48 << 20


def test_tensors_are_converted_to_the_requested_dtype(model, tensors, tmp_path):
    save_file({name: tensor.half() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    load(model, TABLE, tmp_path, CPU, torch.bfloat16)
    assert torch.equal(model.out.weight, tensors["out.weight"].half().bfloat16())


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_an_unusual_dtype_is_refused(dtype, model, tensors, tmp_path):
    save_file(tensors | {"out.bias": torch.zeros(3, dtype=dtype)}, tmp_path / "model.safetensors")
    named = "F8_E4M3" if dtype == torch.float8_e4m3fn else str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=f"out.bias is {named}, expected float32 or bfloat16 or float16$"):
        load(model, TABLE, tmp_path, CPU, torch.float32)
    assert model.out.bias.is_meta


def test_a_buffer_of_integers_keeps_its_dtype(tmp_path):
    with torch.device("meta"):
        norm = nn.BatchNorm1d(2, affine=False)
    table = {name: name for name in ("running_mean", "running_var", "num_batches_tracked")}
    tensors = {"running_mean": torch.zeros(2), "running_var": torch.ones(2)}
    tensors["num_batches_tracked"] = torch.tensor(1 << 40)
    save_file(tensors, tmp_path / "model.safetensors")
    load(norm, table, tmp_path, CPU, torch.bfloat16)
    assert norm.num_batches_tracked.item() == 1 << 40 and norm.running_var.dtype == torch.bfloat16
    save_file(tensors | {"num_batches_tracked": torch.tensor(1.0)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="num_batches_tracked is float32, expected int64"):
        load(norm, table, tmp_path, CPU, torch.bfloat16)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("where", [0, 7, -1])
def test_a_weight_that_is_not_finite_is_refused(value, dtype, where, model, tensors, tmp_path):
    tensors["attn.q.weight"].view(-1)[where] = value
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"safetensors: attn.q.weight holds NaN or infinity as torch.float32"
    ):
        load(model, TABLE, tmp_path, CPU, torch.float32)


def test_a_value_beyond_the_models_dtype_is_refused(model, tensors, tmp_path):
    tensors["out.bias"][1] = 3.4e38
    save_file(tensors, tmp_path / "model.safetensors")
    load(model, TABLE, tmp_path, CPU, torch.float32)
    with pytest.raises(ValueError, match=r"out.bias holds NaN or infinity as torch.bfloat16"):
        load(model, TABLE, tmp_path, CPU, torch.bfloat16)


def test_a_tensor_without_values(tmp_path):
    empty = nn.ParameterDict({"rows": torch.empty(2, 0, device="meta")})
    save_file({"rows": torch.zeros(2, 0)}, tmp_path / "model.safetensors")
    load(empty, {"rows": "rows"}, tmp_path, CPU, torch.float32)
    assert empty.rows.shape == (2, 0) and not empty.rows.is_meta


def test_a_submodule_may_be_skipped_but_is_checked(model, tensors, tmp_path):
    save_file(tensors, tmp_path / "model.safetensors")
    load(model, TABLE, tmp_path, CPU, torch.float32, skip="encoder")
    assert model.encoder.weight.is_meta
    assert not any(
        tensor.is_meta for name, tensor in model.named_parameters() if not name.startswith("encoder")
    )
    del tensors["encoder.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing encoder.weight \[2, 2\]"):
        load(model, TABLE, tmp_path, CPU, torch.float32, skip="encoder")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found.pop("attn.k.weight"), r"missing attn.k.weight \[2, 3\]"),
        (lambda found: found.update({"lora.weight": torch.zeros(7)}), r"unknown lora.weight \[7\]"),
        (
            lambda found: found.update({"embed.1.weight": torch.zeros(6, 3)}),
            r"embed.1.weight has shape \[6, 3\], expected \[5, 3\]",
        ),
        (
            lambda found: found.update({"attn.q.weight": torch.zeros(3, 4)}),
            r"attn.q.weight has shape \[3, 4\], expected \[4, 3\]",
        ),
        (
            lambda found: [found.pop(name) for name in list(found)[:9]] and found.update(x=torch.zeros(1)),
            r"missing .*\(and 2 more\)",
        ),
    ],
    ids=["missing", "extra", "misshapen", "transposed", "many"],
)
def test_mismatches_are_named_before_anything_is_filled(change, message, model, tensors, tmp_path):
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message) as refused:
        load(model, TABLE, tmp_path, CPU, torch.float32)
    assert str(tmp_path) in str(refused.value)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(kept, model, tensors, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(
        ValueError, match=r"is not a whole safetensors file .*it may have been cut short; copy it again"
    ):
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
def test_unreadable_json_is_refused(content, message, tmp_path):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as refused:
        read_json(path)
    assert str(path) in str(refused.value)
