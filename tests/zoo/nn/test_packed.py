"""Packed matrices give the results of plain ones, and a row's result does not depend on the other rows."""

from __future__ import annotations

import pytest
import torch
from models import directory, family
from torch import nn

import zoo
from zoo.nn.linear import FusedLinear
from zoo.nn.packed import PackedLinear, convolve, pack, packed_convolution
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
    # in float32, just below 512 KiB and exactly 512 KiB
    module = nn.Sequential(nn.Linear(512, 255), nn.Linear(512, 256))
    pack(module)
    assert type(module[0]) is nn.Linear and type(module[1]) is PackedLinear


def test_a_packed_family_speaks_the_same():
    request = Request(text="Good morning, everybody.", voice="vivian", temperature=0.0, max_frames=6)
    plain = zoo.generate(family("qwen3_tts"), request)
    packed = zoo.load(directory("qwen3_tts", "tiny"), "cpu", "float32")
    pack(packed, 0)
    assert not any(isinstance(module, nn.Linear | FusedLinear) for module in packed.modules())
    speech = zoo.generate(packed, request)
    assert torch.equal(speech.frames, plain.frames)
    torch.testing.assert_close(speech.samples, plain.samples, rtol=0, atol=5e-5)


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
