"""Blocks of a frame in one operator, compared with the same blocks one after the other.

tests/zoo/kernels/interpreted_whole_stack.py compares a GPU's kernel with the operator."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from zoo.fish_s2.depth import FastBlock
from zoo.nn import fp8
from zoo.nn.frame_stack import FrameBlock, frame_stack, join
from zoo.nn.norm import RMSNorm
from zoo.qwen3_tts.depth import DepthBlock

BLOCKS = {"qwen3_tts": DepthBlock, "csm": FrameBlock, "fish_s2": FastBlock}
PASSES = (slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5))
BATCH = 3


@dataclass(frozen=True)
class Sizes:
    hidden: int = 24
    inner: int = 40
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 8
    eps: float = 1e-5


def stack(make, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Return `layers` and `norm` with random weights."""
    torch.manual_seed(0)
    made = nn.Module()
    made.layers, made.norm = nn.ModuleList(make(Sizes()) for _ in range(3)), RMSNorm(Sizes.hidden, Sizes.eps)
    for parameter in made.parameters():
        nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.3)
    return made.to(dtype).requires_grad_(False)


def run(model: nn.Module, name: str) -> list[torch.Tensor]:
    """Return the outputs of all passes of a frame."""
    g = torch.Generator().manual_seed(1)
    angle = torch.rand(PASSES[-1].stop, Sizes.head_dim // 2, generator=g)
    angle = angle.repeat_interleave(2, -1) if name == "fish_s2" else torch.cat((angle, angle), -1)
    dtype = model.norm.weight.dtype
    inputs = [
        torch.randn(BATCH, here.stop - here.start, Sizes.hidden, generator=g).to(dtype) for here in PASSES
    ]
    run_pass = frame_stack(model.layers, model.norm, angle.cos(), angle.sin(), inputs[0])
    return [run_pass(x, here) for x, here in zip(inputs, PASSES, strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_joined_blocks_give_the_same_bits(name, dtype):
    model = stack(BLOCKS[name], dtype)
    one_by_one = run(model, name)
    assert join(model)
    for found, expected in zip(run(model, name), one_by_one, strict=True):
        assert torch.equal(found, expected)


def test_the_table_has_the_addresses_of_all_weights():
    model = stack(DepthBlock)
    join(model)
    block, row = model.layers[1], model.layers.table[1].tolist()
    named = (
        block.norm,
        block.mlp_norm,
        block.q_norm,
        block.k_norm,
        block.qkv,
        block.out,
        block.mlp.gate_up,
        block.mlp.down,
    )
    assert row == [module.weight.data_ptr() for module in named]
    assert "layers.table" not in model.state_dict()


def test_what_cannot_be_joined_is_refused():
    assert not join(nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(ValueError, match="bfloat16, not in float32"):
        join(stack(FrameBlock, torch.float32))
    rounded = stack(FrameBlock)
    rounded.layers[1].mlp.down = fp8.FP8Linear(rounded.layers[1].mlp.down)
    with pytest.raises(ValueError, match="use weights published"):
        join(rounded)
