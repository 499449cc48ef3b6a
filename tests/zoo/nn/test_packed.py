"""Packed matrices give the results of plain ones, and a row's result does not depend on the other rows."""

from __future__ import annotations

import pytest
import torch
from models import directory, family
from torch import nn

import zoo
from compile_cache import choices
from serving.tools.requests import every_request
from zoo import kernels
from zoo.checkpoint import loading
from zoo.contract import Speech
from zoo.nn.linear import FusedLinear, Tables
from zoo.nn.narrow import BF16FusedLinear, BF16Linear, NarrowEmbedding, NarrowTables, narrow, tied_head
from zoo.nn.pack import pack
from zoo.nn.packed import (
    BlockedLinear,
    PackedLinear,
    TiedRows,
    convolve,
    packed_convolution,
    rounded_to_int8,
)
from zoo.request import Request

DTYPES = [torch.float32, torch.bfloat16] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else [torch.float32]
CLOSE = {torch.float32: {"rtol": 0, "atol": 2e-6}, torch.bfloat16: {"rtol": 0.02, "atol": 0.02}}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_matrix_gives_the_results_of_the_plain_one(dtype, bias):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(70, 200, bias=bias)).to(dtype)
    x = torch.randn(2, 3, 70).to(dtype)  # any number of leading dimensions
    with torch.inference_mode():
        expected = plain(x)
        pack(plain, 0)
        torch.testing.assert_close(plain(x), expected, **CLOSE[dtype])
    assert isinstance(plain[0], PackedLinear) and not list(plain.parameters())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_parts_of_a_fused_matrix_stay_apart(dtype):
    torch.manual_seed(0)
    plain = FusedLinear(64, (96, 32))
    nn.init.normal_(plain.weight)
    holder = nn.ModuleDict({"qkv": plain.to(dtype)})
    x = torch.randn(5, 64).to(dtype)
    with torch.inference_mode():
        expected = plain(x)
        pack(holder, 0)
        for part, same in zip(holder["qkv"](x), expected, strict=True):
            torch.testing.assert_close(part, same, rtol=0.02, atol=1e-4 if dtype == torch.float32 else 0.2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_other_rows(dtype):
    torch.manual_seed(0)
    packed = nn.Sequential(nn.Linear(96, 160)).to(dtype)
    x = torch.randn(17, 96).to(dtype)
    with torch.inference_mode():
        pack(packed, 0)
        together = packed(x)
        for rows in (slice(0, 1), slice(3, 5), slice(5, 13)):
            assert torch.equal(packed(x[rows]), together[rows])


def test_other_dtypes_and_devices_are_left_as_they_are():
    for module in (nn.Sequential(nn.Linear(4, 4).double()), nn.Sequential(nn.Linear(4, 4, device="meta"))):
        pack(module, 0)
        assert type(module[0]) is nn.Linear


def test_small_matrices_are_left_as_they_are():
    # in float32, just below 64 KiB and exactly 64 KiB
    module = nn.Sequential(nn.Linear(64, 255), nn.Linear(64, 256))
    pack(module)
    assert type(module[0]) is nn.Linear and type(module[1]) in (BlockedLinear, PackedLinear)


def test_a_packed_family_speaks_the_same():
    request = Request(text="Good morning, everybody.", voice="vivian", temperature=0.0, max_frames=6)
    plain = zoo.generate(family("qwen3_tts"), request)
    packed = zoo.load(directory("qwen3_tts", "tiny"), "cpu", "float32")
    pack(packed, 0)
    assert not any(isinstance(module, nn.Linear | FusedLinear) for module in packed.modules())
    speech = zoo.generate(packed, request)
    assert torch.equal(speech.frames, plain.frames)
    torch.testing.assert_close(speech.samples, plain.samples, rtol=0, atol=5e-5)


def rounded(layer: nn.Module) -> nn.Module:
    """Round a layer's weight to the numbers that bf16 has."""
    with torch.no_grad():
        layer.weight.copy_(layer.weight.bfloat16())
    return layer


# sizes that fill blocks of columns, and stretches of summed positions, on no CPU
@pytest.mark.parametrize("sizes", [(70, 200), (600, 515)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bits", [16, 32])
def test_weights_keep_their_bits_and_give_the_results_of_fp32(sizes, bias, bits):
    kernels.build()
    torch.manual_seed(0)
    linear = nn.Linear(*sizes, bias=bias)
    plain = nn.Sequential(rounded(linear) if bits == 16 else linear)
    x = torch.randn(2, 5, sizes[0])
    with torch.inference_mode():
        expected = plain.double()(x.double())
        plain.float()
        with choices.assumed("blocks"):
            pack(plain, 0)
        torch.testing.assert_close(plain(x).double(), expected, rtol=0, atol=5e-6)
    narrow = plain[0]
    assert isinstance(narrow, BlockedLinear) and not list(plain.parameters())
    assert narrow.blocks.nbytes <= bits // 8 * sizes[0] * (sizes[1] + 127)  # whole blocks


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("bits", [16, 32])
def test_a_row_of_a_product_in_blocks_depends_on_neither_the_others_nor_the_threads(bits, threads):
    kernels.build()
    torch.manual_seed(0)
    linear = nn.Linear(700, 160)
    narrow = nn.Sequential(rounded(linear) if bits == 16 else linear)
    x = torch.randn(40, 700)
    with torch.inference_mode():
        with choices.assumed("blocks"):
            pack(narrow, 0)
        assert isinstance(narrow[0], BlockedLinear)
        together = narrow(x)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        for rows in (slice(0, 1), slice(3, 5), slice(5, 8), slice(8, 13), slice(13, 29)):
            assert torch.equal(narrow(x[rows]), together[rows])
        torch.set_num_threads(before)


def int8(layer: nn.Module) -> nn.Module:
    module = nn.Sequential(layer)
    pack(module, 0, is_int8=True)
    return module


# inputs in whole groups, and in none; outputs that fill no block
@pytest.mark.parametrize("sizes", [(192, 515), (70, 40)], ids=str)
def test_int8_weights_give_the_results_of_the_rounded_weights(sizes):
    kernels.build()
    torch.manual_seed(0)
    plain = rounded(nn.Linear(*sizes))
    weight, scales = rounded_to_int8(plain.weight.detach())
    assert weight.abs().amax(1).min() >= 127 and scales.shape[1] == (3 if sizes[0] == 192 else 1)
    groups = weight.unflatten(1, (scales.shape[1], -1)) * scales.double()[..., None]
    near = groups.flatten(1)
    assert (near - plain.weight).abs().max() <= 0.51 * scales.max()  # half a step
    x = torch.randn(7, sizes[0])
    expected = x.double() @ near.T + plain.bias
    module = int8(plain)
    with torch.inference_mode():
        found = module(x)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=5e-6)
        for rows in (slice(0, 1), slice(1, 3), slice(3, 7)):
            assert torch.equal(module(x[rows]), found[rows])
    assert module[0].blocks.nbytes <= sizes[0] * (sizes[1] + 127)


def test_a_row_of_zeros_stays_zero_in_int8():
    kernels.build()
    plain = rounded(nn.Linear(64, 64, bias=False))
    plain.weight.data[3] = 0
    with torch.inference_mode():
        assert int8(plain)(torch.randn(2, 64))[:, 3].tolist() == [0, 0]


def test_heads_and_weights_of_more_bits_are_not_rounded_to_int8():
    kernels.build()
    module = nn.ModuleDict(
        {
            "codec_head": rounded(nn.Linear(64, 64)),
            "heads": nn.ModuleList([rounded(nn.Linear(64, 64))]),
            "out": rounded(nn.Linear(64, 64)),
            "fp32": nn.Linear(64, 64),
        }
    )
    with choices.assumed("blocks"):
        pack(module, 0, is_int8=True)
    assert module["codec_head"].scales is None and module["heads"][0].scales is None
    assert module["out"].scales is not None
    assert module["fp32"].scales is None and module["fp32"].blocks.dtype == torch.float32


def test_weights_of_more_than_16_bits_are_not_rounded():
    kernels.build()
    module = nn.ModuleDict({"linear": nn.Linear(64, 64), "rows": nn.Embedding(64, 64)})
    with choices.assumed("blocks"):
        pack(module, 0)
    assert module["linear"].blocks.dtype == torch.float32 and type(module["rows"]) is nn.Embedding


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_form_that_was_measured_to_be_faster_is_used(dtype):
    kernels.build()
    for form, kind in (("blocks", BlockedLinear), ("onednn", PackedLinear)):
        module = nn.Sequential(rounded(nn.Linear(64, 64)).to(dtype))
        with choices.assumed(form):
            pack(module, 0)
        assert type(module[0]) is kind
        assert module(torch.ones(2, 64, dtype=dtype)).dtype == dtype


def test_bf16_products_without_kernels_of_onednn_are_computed_in_fp32(monkeypatch):
    kernels.build()
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    module = nn.Sequential(nn.Linear(64, 64)).bfloat16()
    x = torch.randn(3, 64).bfloat16()
    with torch.inference_mode():
        expected = module.double()(x.double())
        module.bfloat16()
        pack(module, 0)
        torch.testing.assert_close(module(x), expected.bfloat16(), rtol=0.01, atol=1e-3)
    assert isinstance(module[0], BlockedLinear)


def test_embeddings_of_16_bits_stay_in_bf16_and_return_the_same():
    kernels.build()
    tables = Tables(3, 20, 8)
    nn.init.normal_(tables.weight)
    module = nn.ModuleDict({"one": rounded(nn.Embedding(50, 8)), "three": rounded(tables)})
    index = torch.tensor([[1, 2, 19]])
    expected = module["one"](index), module["three"](index), module["three"].rows(2, index[0])
    pack(module, 0)
    found = module["one"](index), module["three"](index), module["three"].rows(2, index[0])
    assert isinstance(module["one"], NarrowEmbedding) and isinstance(module["three"], NarrowTables)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    for same, value in zip(found, expected, strict=True):
        assert same.dtype == torch.float32 and torch.equal(same, value)


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("form", ["blocks", "onednn"])
@torch.inference_mode()
def test_a_table_that_is_also_a_head_is_kept_once_in_our_layout(bits, form):
    kernels.build()
    torch.manual_seed(0)
    tables = Tables(3, 50, 70)
    nn.init.normal_(tables.weight)
    module = nn.ModuleDict({"one": nn.Embedding(515, 70), "three": tables, "other": nn.Embedding(515, 70)})
    module.update({"head": tied_head(module["one"]), "heads": tied_head(tables)})
    if bits == 16:
        rounded(module["one"])
        rounded(tables)
    one, three = torch.tensor([[0, 7, 8], [77, 511, 514]]), torch.tensor([[1, 2, 49]])
    x = torch.randn(2, 70)

    def results() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        tables = module["three"]
        return [module["one"](one), tables(three), tables.rows(2, one[0, :2])], [
            module["head"](x),
            module["heads"](x),
        ]

    rows, scores = results()
    with choices.assumed(form):
        pack(module, 0)
    found_rows, found_scores = results()
    assert isinstance(module["one"], TiedRows) == isinstance(module["three"], TiedRows) == (form == "blocks")
    assert not isinstance(module["other"], TiedRows)
    for same, value in zip(found_rows, rows, strict=True):
        assert same.dtype == torch.float32 and torch.equal(same, value)
    torch.testing.assert_close(found_scores, scores, rtol=0, atol=2e-5)
    if form == "blocks":
        with pytest.raises(RuntimeError, match="row 515 of 515"):
            module["one"](torch.tensor([3, 515]))


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.families())
def test_every_family_speaks_in_bf16_with_our_products(name, tmp_path):
    """Other tensors take their dtype from these layers and their biases."""
    if name == "zonos":
        pytest.importorskip("espeakng_loader")
    kernels.build()
    place = zoo.families()[name].write_demo(tmp_path / name, "tiny")
    family = zoo.load(place, "cpu", "bfloat16")
    with choices.assumed("blocks"):
        pack(family, 4096)
    assert any(isinstance(module, BlockedLinear) for module in family.modules())
    spoken = zoo.generate(family, next(iter(every_request(family, 5)[0].values())))
    assert len(spoken.samples) and spoken.samples.isfinite().all()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("qwen3_tts", "voxcpm2") else pytest.mark.slow)
        for name in zoo.families()
    ],
)
def test_every_family_generates_the_same_codes_with_weights_in_bf16(name, tmp_path, monkeypatch):
    if name == "zonos":
        pytest.importorskip("espeakng_loader")
    place = zoo.families()[name].write_demo(tmp_path / name, "tiny", dtype=torch.bfloat16)
    fp32 = zoo.load(place, "cpu", "float32")
    request = next(iter(every_request(fp32, 5)[0].values()))
    plain = zoo.generate(fp32, request)
    monkeypatch.setattr(loading, "LEAST_NUMBERS", 1024)
    narrow = zoo.load(place, "cpu", "float32", keeps_bf16=True)
    assert narrow.dtype == torch.float32
    assert any(isinstance(module, BF16Linear) for module in narrow.modules())
    assert_same(zoo.generate(narrow, request), plain)
    kernels.build()
    pack(narrow, 4096)
    assert any(isinstance(module, BlockedLinear) for module in narrow.modules())
    assert_same(zoo.generate(narrow, request), plain)


def assert_same(speech: Speech, plain: Speech) -> None:
    assert len(plain.frames)
    if plain.frames.is_floating_point():  # latents, not codes
        torch.testing.assert_close(speech.frames, plain.frames, rtol=0, atol=2e-5)
    else:
        assert torch.equal(speech.frames, plain.frames)
    torch.testing.assert_close(speech.samples, plain.samples, rtol=0, atol=5e-5)


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("reads_many_rows", [True, False])
def test_layers_that_kept_bf16_are_packed_as_if_they_were_loaded_in_fp32(
    has_kernels, reads_many_rows, monkeypatch
):
    kernels.build()
    monkeypatch.setattr(kernels, "has", lambda tensor: has_kernels)
    torch.manual_seed(0)
    fused = FusedLinear(64, (40, 30), bias=True)
    nn.init.normal_(fused.weight)
    nn.init.normal_(fused.bias)
    plain = nn.ModuleDict({"linear": rounded(nn.Linear(64, 64)), "fused": rounded(fused)})
    kept = nn.ModuleDict({name: narrow(layer) for name, layer in plain.items()})
    assert isinstance(kept["linear"], BF16Linear) and isinstance(kept["fused"], BF16FusedLinear)
    x = torch.randn(3, 64)
    with torch.inference_mode():
        for module in (plain, kept):
            module.reads_many_rows = reads_many_rows
            pack(module, 0)
        for name, layer in plain.items():
            assert type(kept[name]) is type(layer)
            for part, same in zip(kept[name](x), layer(x), strict=True):
                assert torch.equal(part, same)


class Block(nn.Module):
    def __init__(self, reads_many_rows):
        super().__init__()
        self.reads_many_rows = reads_many_rows
        self.small = nn.Linear(8, 8)


@pytest.mark.parametrize("reads_many_rows", [True, False])
def test_a_small_matrix_is_packed_if_many_rows_are_read(reads_many_rows):
    block = Block(reads_many_rows)
    pack(block)
    assert isinstance(block.small, PackedLinear) == reads_many_rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 7, 24, 40), (1, 3, 16, 16), (5, 60, 70, 33)])
def test_a_packed_convolution_gives_the_results_of_the_plain_one(dtype, shape):
    torch.manual_seed(0)
    batch, length, channels, out = shape
    x, bias = torch.randn(batch, length, channels).to(dtype), torch.randn(out).to(dtype)
    weight = (torch.randn(out, channels, 3) * channels**-0.5).to(dtype)
    with torch.inference_mode():
        expected = nn.functional.conv1d(x.mT, weight, bias).mT
        found = convolve(x, packed_convolution(weight), bias)
    close = CLOSE[dtype] if dtype == torch.bfloat16 else {"rtol": 0, "atol": 1e-5}  # sums of 210 products
    torch.testing.assert_close(found, expected, **close)
