"""The table of steps that rounded weights change."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from models import family

import zoo
from benchmarks import rounded_weights as table
from zoo.nn.pack import pack


def test_equal_forms_agree_at_every_step():
    found = table.agreement(family("toy"), family("toy"), 4)
    assert found.steps == found.equal > 0 and found.noise == 0 < found.signal
    assert found.cell(has_codes=True) == f"{found.steps} (100%)" and found.cell(has_codes=False) == "equal"


def test_codes_that_differ_are_counted():
    assert table.Agreement(4, 1, codes=64, apart=16).cell(has_codes=True) == "1 (75%)"


def test_latents_have_their_ratio_to_the_error():
    assert table.Agreement(4, 0, signal=200.0, noise=2.0).cell(has_codes=False) == "20.0 dB"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int8_is_counted_where_weights_have_16_bits(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(table, "pack", partial(pack, least_bytes=4096))
    place = zoo.families()["qwen3_tts"].write_demo(tmp_path / "demo", "tiny", dtype=dtype)
    row = table.int8_row("qwen3_tts", place, 3)
    found = re.fullmatch(r"\| qwen3_tts, [1-9]\d* products \| 3 \| [0-3] \(\d+%\) \|", row)
    assert (found is not None) == (dtype == torch.bfloat16), row
    assert (row == "| qwen3_tts, no large matrix of 16 bits | | |") == (dtype == torch.float32), row
