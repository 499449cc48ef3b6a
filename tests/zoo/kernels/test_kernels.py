"""The CPU kernels, compared with the operators as written in torch."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch

from zoo import kernels
from zoo.cosyvoice2.sampling import nucleus
from zoo.nn.sampling import gumbel, keep_likely, normal
from zoo.nn.snake import snake


@pytest.fixture(autouse=True)
def _built():
    kernels.build()


def plain(call):
    with kernels.plain():
        return call()


@pytest.mark.parametrize("top_k", [0, 1, 5, 500, 507])
@pytest.mark.parametrize("top_p", [0.0, 1e-6, 0.3, 0.9, 1.0])
def test_the_kept_set_equals_torch(top_k, top_p):
    logits = 3 * torch.randn(50, 500, generator=torch.Generator().manual_seed(0))
    logits[:25, 100:130] = -torch.inf
    logits[::2] = logits[::2].round()  # many ties, also at the edge
    settings = torch.full((50,), top_k), torch.full((50,), top_p)
    assert torch.equal(keep_likely(logits, *settings), plain(lambda: keep_likely(logits, *settings)))


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("top_p", [0.0, 0.8, 0.9999])
def test_a_wide_nucleus_holds_as_little_more_than_top_p_as_possible(spread, top_p):
    logits = 20 + spread * torch.randn(2, 150_000, generator=torch.Generator().manual_seed(0))
    kept = keep_likely(logits, torch.zeros(2, dtype=torch.int64), torch.full((2,), top_p))
    share, is_kept = logits.double().softmax(-1), kept > -torch.inf
    assert torch.equal(kept[is_kept], logits[is_kept])
    for row, stays in zip(share, is_kept, strict=True):
        least = row[stays].min()
        assert torch.equal(stays, row >= least), "a likelier token is missing"
        assert row[row > least].sum() < max(top_p, 1e-9) + 1e-5 and row[stays].sum() > top_p - 1e-5


def test_nan_does_no_harm():
    logits = torch.full((3, 100), torch.nan)
    logits[1, ::2] = 1.0
    logits[2] = -torch.inf
    kept = keep_likely(logits, torch.tensor([5, 5, 5]), torch.tensor([0.5, 0.5, 0.5]))
    assert kept[0].isnan().all() and (kept[1, ::2] == 1.0).all() and (kept[2] == -torch.inf).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_snake_equals_torch(threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generator = torch.Generator().manual_seed(0)
    x = 5 * torch.randn(3, 8, 5000, generator=generator)
    # phases of up to 20,000
    frequency, gain = torch.logspace(-3, 3, 8)[:, None], torch.rand(1, 8, 1, generator=generator)
    exact = plain(lambda: snake(x.double(), frequency.double(), gain.double()))
    ours = (snake(x, frequency, gain) - exact).abs().max()
    theirs = (plain(lambda: snake(x, frequency, gain)) - exact).abs().max()
    assert ours < 1.5 * theirs, f"{ours:.2g} from the truth, torch's {theirs:.2g}"
    assert torch.equal(snake(x[:1], frequency, gain), snake(x, frequency, gain)[:1])
    rows = x.mT.contiguous().mT  # contiguous channels
    found = snake(rows, frequency, gain)
    torch.testing.assert_close(found, snake(x, frequency, gain), rtol=0, atol=1e-6)
    assert found.stride() == rows.stride()
    assert torch.equal(snake(rows[..., 7:4007], frequency, gain), found[..., 7:4007])
    # not contiguous
    assert torch.equal(snake(x[..., 7:4007], frequency, gain), snake(x, frequency, gain)[..., 7:4007])


def test_snake_of_huge_values_stays_within_its_gain():
    x = torch.tensor([[[3e7, -1e20, 0.0]]])
    found = snake(x, torch.ones(1, 1), torch.ones(1, 1))
    assert ((found - x)[..., :2].abs() <= 1.01).all() and found[0, 0, 2] == 0
    assert snake(torch.full((1, 1, 20), torch.nan), torch.ones(1, 1), torch.ones(1, 1)).isnan().all()


@pytest.mark.parametrize("layout", [kernels.panels, kernels.nine_filters])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dilation", [1, 3])
@pytest.mark.parametrize("taps", [1, 2, 3, 4, 6, 7, 11])
# several tiles, less than one tile, and incomplete blocks of outputs
@pytest.mark.parametrize(("channels", "out_channels", "num"), [(256, 20, 500), (5, 70, 40), (16, 64, 2100)])
def test_a_snake_and_its_convolution_equal_torch(
    channels, out_channels, num, taps, dilation, threads, layout, monkeypatch
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generator = torch.Generator().manual_seed(taps)
    reach = (taps - 1) * dilation
    x, more = (
        torch.randn(2, n, c, generator=generator).mT
        for n, c in ((num + reach, channels), (num + 6, out_channels))
    )
    weight = torch.randn(out_channels, channels, taps, generator=generator) / (channels * taps) ** 0.5
    bias = torch.randn(out_channels, generator=generator)
    frequency, gain = torch.rand(2, channels, generator=generator) + 0.5
    mask = (torch.rand(2, num + reach + 2, generator=generator) < 0.8)[:, 1:-1]
    filters, residual = layout(weight), more[:, :, 3:-3]

    def ours(x, mask, residual):
        return kernels.convolve_snake(x, (frequency, gain), filters, bias, taps, dilation, mask, residual)

    wave = plain(lambda: snake(x.double(), frequency[:, None].double(), gain[:, None].double()))
    for is_there, added in ((None, None), (mask, residual)):
        read = wave if is_there is None else wave * is_there[:, None]
        truth = torch.nn.functional.conv1d(read, weight.double(), bias.double(), dilation=dilation)
        truth = truth if added is None else truth + added
        found = ours(x, is_there, added)
        torch.testing.assert_close(found.double(), truth, rtol=0, atol=3e-5)
        assert found.mT.is_contiguous()
    assert torch.equal(ours(x[1:], mask[1:], residual[1:]), found[1:])  # a row does not depend on the others


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("channels", "num", "dilation"), [(20, 300, 1), (70, 55, 9), (64, 2100, 3)])
def test_a_depthwise_unit_without_a_past_lacks_the_ends(channels, num, dilation, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generator, taps = torch.Generator().manual_seed(num), 7
    x = torch.randn(2, num, channels, generator=generator).mT
    depthwise, product = (
        torch.randn(channels, inputs, width, generator=generator) / (inputs * width) ** 0.5
        for inputs, width in ((1, taps), (channels, 1))
    )
    bias, bias2 = torch.randn(2, channels, generator=generator)
    waves = torch.rand(2, 2, channels, generator=generator) + 0.5
    then = kernels.Pointwise(kernels.panels(product), bias2, tuple(waves[1]))
    filters = depthwise[:, 0].T.contiguous()
    found = kernels.depthwise_unit(x, tuple(waves[0]), filters, bias, dilation, None, then)

    def activated(x, wave):
        return plain(lambda: snake(x, wave[0][:, None].double(), wave[1][:, None].double()))

    read, edge, conv1d = activated(x.double(), waves[0]), 3 * dilation, torch.nn.functional.conv1d
    middle = conv1d(read, depthwise.double(), bias.double(), dilation=dilation, groups=channels)
    truth = x[..., edge:-edge] + conv1d(activated(middle, waves[1]), product.double(), bias2.double())
    torch.testing.assert_close(found.double(), truth, rtol=0, atol=2e-5)


@pytest.mark.parametrize("taps", [3, 4, 6, 7, 11])
def test_a_short_signal_is_convolved_tap_by_tap_with_the_filters_of_a_long_one(taps):
    generator = torch.Generator().manual_seed(taps)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((1, 60, 32), (70, 32, taps), 70))
    whole, nine = (
        kernels.convolve_snake(x.mT, None, layout(weight), bias, taps, 2)
        for layout in (kernels.panels, kernels.nine_filters)
    )
    assert torch.equal(whole, nine)


@pytest.mark.parametrize("top_k", [0, 1, 25, 500, 507])
@pytest.mark.parametrize("top_p", [0.0, 1e-6, 0.3, 0.8, 1.0])
def test_the_nucleus_equals_torch(top_k, top_p):
    logits = 3 * torch.randn(50, 500, generator=torch.Generator().manual_seed(0))
    logits[:25, 100:130] = -torch.inf
    logits[::2] = logits[::2].round()  # many ties, also at the edge, where the first ones are kept
    settings = torch.full((50,), top_k), torch.full((50,), top_p)
    found, expected = nucleus(logits, *settings), plain(lambda: nucleus(logits, *settings))
    # an entry whose share equals the edge up to the last digit may fall on either side
    assert (found != expected).sum() <= 2
    assert torch.equal(nucleus(logits[7:8], settings[0][:1], settings[1][:1]), found[7:8])


def test_noise_equals_torch():
    seed, step = torch.tensor([0, 7, -5, 1 << 40, -(1 << 62)]), torch.tensor([0, 3, 1 << 20, 1 << 35, 5])
    width = 4321
    assert torch.equal(
        gumbel(seed, step, range(2, 5), width), plain(lambda: gumbel(seed, step, range(2, 5), width))
    )
    found, expected = normal(seed, step, width), plain(lambda: normal(seed, step, width))
    torch.testing.assert_close(found, expected, rtol=3e-6, atol=1e-6)
    assert torch.equal(normal(seed[2:3], step[2:3], 100), found[2:3, :100])


def test_the_normal_quantile_is_right_at_both_ends(monkeypatch):
    """All values of 23 bits are drawn, including the first and the last."""
    rows = torch.arange(400)
    noise = normal(rows, rows, 40_000).double()
    assert noise.isfinite().all() and 5.0 < noise.abs().max() < 5.4
    assert abs(noise.mean()) < 1e-3 and abs(noise.std() - 1) < 1e-3
    assert abs((noise.abs() > 3).double().mean() - 0.0026998) < 5e-5


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str)
def test_a_norm_and_its_mish_equal_torch(dtype, most, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generator = torch.Generator().manual_seed(0)
    x, (weight, bias, shift) = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((3, 300, 70), (3, 70))
    )
    weight[:3], bias[:3] = 0, torch.tensor([-80.0, 0.0, 90.0]).to(dtype)
    for added in (None, shift):
        found = kernels.norm_mish(x, weight, bias, added, 1e-5)
        normed = torch.nn.functional.layer_norm(x.double(), (70,), weight.double(), bias.double())
        truth = torch.nn.functional.mish(normed) + (0 if added is None else added.double())
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), truth, rtol=most, atol=most)
    assert torch.equal(kernels.norm_mish(x[1:2, 5:6], weight, bias, shift, 1e-5), found[1:2, 5:6])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("channels", "groups"), [(16, 8), (80, 1), (256, 8)])
def test_a_norm_over_groups_and_its_mish_equal_torch(channels, groups, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(0)
    x, shift = torch.randn(2, channels, 300) * 3 + 1, torch.randn(channels)
    norm = torch.nn.GroupNorm(groups, channels).requires_grad_(False)
    norm.weight.copy_(torch.randn(channels)), norm.bias.copy_(torch.randn(channels))
    sizes = groups, norm.weight.double(), norm.bias.double(), norm.eps
    truth = torch.nn.functional.mish(torch.nn.functional.group_norm(x.double(), *sizes))
    for added in (None, shift):
        found = kernels.group_norm_mish(x, norm, added)
        expected = truth if added is None else truth + added.double()[:, None]
        torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=2e-6)
    assert torch.equal(kernels.group_norm_mish(x[1:], norm, shift)[0], found[1])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("length", [1, 7, 300])  # the last one by nine short filters
@pytest.mark.parametrize("taps", [1, 3])
def test_a_padded_convolution_equals_torch(taps, length, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(0)
    x, bias, more = torch.randn(2, 24, length), torch.randn(40), torch.randn(2, 40, length)
    weight = torch.randn(40, 24, taps) / 8
    filters = kernels.convolution_filters(weight)
    found = kernels.convolve_snake(x, None, filters, bias, taps, 1, residual=more, padding=taps // 2)
    expected = torch.nn.functional.conv1d(x, weight, bias, padding=taps // 2) + more
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_compiled_code_uses_the_kernels_only_in_operators():
    x = torch.ones(2)
    traced = torch.compile(lambda x: x + 1 if kernels.know(x) else x + 2, backend="eager", fullgraph=True)
    assert kernels.know(x) and traced(x).tolist() == [3.0, 3.0]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instruction sets of another processor")
def test_the_kernels_keep_to_the_instruction_set_that_torch_is_limited_to(monkeypatch):
    keys = set()
    for limit, level in ((None, None), ("avx2", "x86-64-v3"), ("avx512", "x86-64-v4"), ("default", "x86-64")):
        monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
        if limit is not None:
            monkeypatch.setenv("ATEN_CPU_CAPABILITY", limit)
        assert kernels.level() == level
        keys.add(kernels.key())
    assert len(keys) == 4
    with pytest.raises(AssertionError, match="another instruction set"):
        kernels.build()


ANY_PROCESSOR = """
import sys
import torch
from zoo import kernels
from zoo.nn.packed import BlockedLinear
kernels.build()
layer = torch.nn.Linear(3, 5, bias=False)
layer.weight.data = layer.weight.data.bfloat16().float()
narrow, x = BlockedLinear(layer), torch.randn(7, 3)
assert narrow.blocks.shape == (1, 3, int(sys.argv[1])), narrow.blocks.shape
torch.testing.assert_close(narrow(x), layer(x))

num, heads, dim = 45, 2, 16
q, k, v = torch.randn(num, 3 * heads * dim).chunk(3, -1)
mask = (torch.rand(num, num) < 0.5) | (torch.arange(num) < 20)
cache, slots, index = torch.zeros(1, num, 1, 2 * heads * dim), torch.zeros(1).long(), torch.arange(num)
found = kernels.attend_stretch(q[None], k[None], v[None], cache, slots, index[None], mask[None], heads)
split = [x.unflatten(1, (heads, dim)).transpose(0, 1) for x in (q, k, v)]
truth = torch.nn.functional.scaled_dot_product_attention(*split, attn_mask=mask)
torch.testing.assert_close(found[0], truth.transpose(0, 1).flatten(1))
torch.testing.assert_close(cache[0, :, 0], torch.cat((k, v), -1))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instruction sets of another processor")
@pytest.mark.parametrize(("limit", "columns"), [("default", 4 * 4), ("avx2", 4 * 8)])
def test_the_kernels_run_on_any_processor(limit, columns):
    command = [sys.executable, "-c", ANY_PROCESSOR, str(columns)]
    subprocess.run(command, env=os.environ | {"ATEN_CPU_CAPABILITY": limit}, check=True)
