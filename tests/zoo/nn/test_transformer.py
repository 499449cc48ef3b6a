"""Parts of a transformer block in few launches: when they are used, and their results' shapes for a compiler.
test_triton.py tests the results of the GPU kernels."""

from __future__ import annotations

import pytest
import torch
from masquerade import Mask
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from compile_cache import choices
from zoo import kernels
from zoo.nn import transformer
from zoo.nn.s3.estimator import PAIR, TransformerBlock
from zoo.nn.s3.stretch import Whole

HEADS, DIM, FRAMES = 2, 8, 6


def block(channels: int, dtype: torch.dtype) -> TransformerBlock:
    made = TransformerBlock(channels, HEADS, DIM)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for one in made.parameters():
            one.copy_(torch.randn(one.shape, generator=generator) * one.shape[-1] ** -0.5)
    return made.to(dtype)


def run(made: TransformerBlock, x: Tensor) -> Tensor:
    """Apply a block to whole streams x [2, FRAMES, C], without a past."""
    seen = Whole(torch.tensor([FRAMES]), FRAMES)
    caches = seen.scratch(x, 1, PAIR, 2 * HEADS * DIM)
    mask = x.new_zeros(PAIR, 1, FRAMES, FRAMES)
    with torch.inference_mode():
        return made(x, seen, mask, caches, torch.arange(1), 0)


def rows(channels: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(PAIR, FRAMES, channels, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.fixture(name="asked")
def _asked(monkeypatch) -> list[str]:
    """Return the names of the GPU functions that were called; plain code runs in their place."""
    asked: list[str] = []

    def on_gpu(module, function, *arguments):
        asked.append(function)
        if function == "norm_linear":
            x, weight, bias, eps, factor, _ = arguments
            return F.linear(F.layer_norm(x, x.shape[-1:], weight, bias, eps), factor)
        return transformer.plain(*arguments)

    monkeypatch.setattr(kernels, "use_gpu", lambda tensor: True)
    monkeypatch.setattr(kernels, "on_gpu", on_gpu)
    return asked


@pytest.mark.parametrize(("way", "function"), [("in one", "mlp_in_one"), ("in three", "mlp_in_three")])
def test_a_block_in_half_precision_on_a_gpu_is_two_operators_and_its_attention(way, function, asked):
    made, x = block(16, torch.bfloat16), rows(16, torch.bfloat16)
    expected = run(made, x)
    assert asked == []
    with Mask(), choices.assumed(way):
        found = run(made, x)
    assert asked == ["norm_linear", function]
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("channels", "dtype", "reason"),
    [
        (16, torch.float32, "precision"),
        (24, torch.bfloat16, "no power of two"),
        (1024, torch.bfloat16, "too wide"),
    ],
)
def test_other_blocks_run_torchs_operators(channels, dtype, reason, asked):
    with Mask():
        run(block(channels, dtype), rows(channels, dtype))
    assert asked == [], reason


def test_a_size_that_was_not_measured_takes_three_launches(asked, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    with Mask():
        run(block(16, torch.bfloat16), rows(16, torch.bfloat16))
    assert asked == ["norm_linear", "mlp_in_three"]


def test_wide_rows_are_never_one_launch(asked):
    with Mask(), choices.assumed("in one"):
        run(block(512, torch.bfloat16), rows(512, torch.bfloat16))
    assert asked == ["norm_linear", "mlp_in_three"]


def test_a_compiler_knows_the_shapes_of_the_results():
    made, x = block(16, torch.bfloat16), rows(16, torch.bfloat16)
    y = x.new_empty(PAIR, FRAMES, HEADS * DIM)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x, y = mode.from_tensor(x), mode.from_tensor(y)
        parts = transformer.project(x, made.attention_norm, made.qkv)
        after = transformer.finish(y, x, made.out, made.mlp_norm, made.widen, made.narrow)
    assert [part.shape for part in parts] == [y.shape] * 3
    assert (after.shape, after.dtype) == (x.shape, x.dtype)
