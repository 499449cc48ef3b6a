"""Codecs whose convolutions run over rows, in fp32 and in 16 bits, and flows in 16 bits, next to the plain form."""

from __future__ import annotations

import pytest
import torch
from models import TOYS, directory

import zoo
from benchmarks.device_codec import snr_db, spoken
from serving.engine.device.runner import NARROW_CODECS
from serving.engine.engine import Engine
from zoo.glm4_voice.estimator import GroupNorm
from zoo.nn.conv import CausalConv1d, CausalConvTranspose1d, CodecState, StateLayout

NARROW = ("qwen3_tts", "voxcpm2", "higgs_v3", "fish_s2", "zonos")
FLOWS = ("glm4_voice", "step_audio2")
CODES = 8  # that every tiny codec has
LEAST_DB = {torch.float32: 95.0, torch.float16: 33.0, torch.bfloat16: 18.0}
LEAST_MEL_DB = {torch.float16: 56.0, torch.bfloat16: 38.0}


def load(name: str, dtype: torch.dtype | None):
    family = zoo.load(directory(name, "tiny"), "cpu", "float32")
    if dtype is not None:
        family.narrow_codec(dtype)
    return family


@pytest.mark.slow
@pytest.mark.parametrize("name", NARROW)
def test_rows_give_the_plain_form_s_samples(name):
    with torch.inference_mode():
        expected = spoken(load(name, None), False, CODES)
        for dtype, least_db in LEAST_DB.items():
            samples = spoken(load(name, dtype), False, CODES)
            assert samples.shape == expected.shape
            assert snr_db(samples, expected) >= least_db, f"{name} in {dtype}"
            assert dtype == torch.float32 or not torch.equal(samples, expected), "nothing was rounded"


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOWS)
def test_flows_in_16_bits_give_the_plain_form_s_mel(name, monkeypatch):
    """Samples cannot be compared: the vocoder sums the pitch, so a small error shifts the phase of all that follows."""
    monkeypatch.setattr("benchmarks.device_codec.STREAMS", 1)

    def mel(dtype):
        made, family = [], load(name, dtype)
        family.flow.register_forward_hook(lambda _, given, result: made.append(result))
        spoken(family, False, CODES)
        assert {part.dtype for part in made} == {torch.float32}
        return torch.cat(made, 1)

    with torch.inference_mode():
        expected = mel(None)
        for dtype, least_db in LEAST_MEL_DB.items():
            found = mel(dtype)
            assert snr_db(found, expected) >= least_db, f"{name} in {dtype}"
            assert not torch.equal(found, expected), "nothing was rounded"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_norm_counts_more_frames_than_16_bits_can(dtype):
    """fp16 counts to 65,504 and bf16 to 256 exactly; a group of a long answer has 88,000 values."""
    torch.manual_seed(0)
    norm = GroupNorm(8, 256)
    x, mask = torch.randn(1, 256, 2752) + 3, torch.ones(1, 1, 2752)
    mask[..., -5:] = 0  # a padded row, which no kernel of torch computes
    expected = norm.masked(x, mask)
    found = norm.to(dtype).masked(x.to(dtype), mask.to(dtype))
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("num_frames", [6, 7])
def test_frames_at_half_of_the_rate_are_a_product_in_16_bits(num_frames):
    estimator = load("glm4_voice", None).flow.estimator
    torch.manual_seed(0)
    x = torch.randn(2, estimator.shrink.in_channels, num_frames)
    with torch.inference_mode():
        expected = estimator.shrink(x)
        estimator.narrow(torch.float16)
        torch.testing.assert_close(estimator._shrunk(x.half()).float(), expected, rtol=0, atol=5e-3)


@pytest.mark.parametrize("name", sorted(set(zoo.families()) - set(NARROW) - set(FLOWS)))
def test_other_codecs_say_which_formats_they_have(name):
    with pytest.raises(ValueError, match=r"has no form in 16 bits; possible for --codec: float32, tf32"):
        zoo.load(directory(name, "tiny"), "cpu", "float32").narrow_codec(torch.float16)


def test_the_engine_asks_for_the_format_of_its_option(monkeypatch):
    asked = []
    monkeypatch.setattr("serving.engine.engine.check_settings", lambda *_: None)
    for codec, dtype in NARROW_CODECS.items():
        toy = TOYS["toy"]()
        toy.narrow_codec = asked.append
        Engine(toy, max_slots=2, compile=False, codec=codec)
        assert asked.pop() is dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cuts", [(9,), (4, 5), (1, 1, 7)])
def test_windows_of_any_cut_agree(dtype, cuts):
    """The past is kept in fp32, which holds 16 bits exactly."""
    torch.manual_seed(0)

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.up = CausalConv1d(6, 8, 3, dilation=2), CausalConvTranspose1d(8, 4, 4, 2)
            self.depthwise = CausalConv1d(4, 4, 3, groups=4)

    layers = Two()
    for parameter in layers.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    layout = StateLayout(layers)
    for layer in (layers.first, layers.up, layers.depthwise):
        layer.to_rows(dtype)

    def run(cuts):
        rows, made, start = torch.zeros(2, layout.size), [], 0
        for count in cuts:
            state = CodecState(layout, rows, count, torch.full((2,), count))
            x = whole[..., start : start + count]
            for layer in (layers.first, layers.up, layers.depthwise):
                x = layer(x, state)
            made.append(x)
            rows, start = state.next(), start + count
            assert rows.dtype == torch.float32
        return torch.cat(made, 2)

    whole = torch.randn(2, 6, 9)
    with torch.inference_mode():
        assert torch.allclose(run(cuts), run((9,)), atol=2e-2, rtol=0)
        assert run(cuts).dtype == dtype
