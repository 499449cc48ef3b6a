"""A stack of blocks as one operator, compared with its blocks one after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from compile_cache import choices
from zoo import kernels
from zoo.contract import Batch
from zoo.fish_s2.block import SlowBlock
from zoo.fish_s2.depth import FastBlock
from zoo.nn import qwen3
from zoo.nn.block import PagedBlock, PreNormBlock
from zoo.nn.blocked_stack import is_whole, run_blocks
from zoo.nn.frame_stack import FrameBlock, frame_stack
from zoo.nn.norm import RMSNorm
from zoo.nn.pack import pack
from zoo.qwen3_tts.depth import DepthBlock
from zoo.voxcpm2.block import CausalBlock

PAGE, FIRST_LAYER = 4, 1


@dataclass(frozen=True)
class Sizes:
    hidden: int = 24
    inner: int = 40
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 8
    eps: float = 1e-5


pytestmark = pytest.mark.usefixtures("built")


def packed(make, bits: int = 16, count: int = 3) -> nn.Module:
    """Return `layers` and `norm` with random weights in our layout."""
    torch.manual_seed(0)
    made = nn.Module()
    made.layers, made.norm = nn.ModuleList(make() for _ in range(count)), RMSNorm(Sizes.hidden, Sizes.eps)
    for parameter in made.parameters():
        nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.3)
        if bits < 32:
            parameter.data = parameter.bfloat16().float()
    with choices.assumed("blocks"):
        pack(made, 0, is_int8=bits == 8)
    return made


def launch(lengths: list[int], new: list[int]) -> Batch:
    """Return a launch of sequences that have `lengths` positions, of which `new` are written now. Their pages
    are shuffled; older positions are random, and unwritten ones are NaN."""
    generator = torch.Generator().manual_seed(0)
    pages, rows_of_page, num = -(-max(lengths) // PAGE), 2 * PAGE * (FIRST_LAYER + 3), len(lengths)
    table = torch.randperm(num * pages, generator=generator).view(num, pages) * rows_of_page
    kv = torch.full((num * pages * rows_of_page, Sizes.kv_heads, Sizes.head_dim), torch.nan)
    written, positions = [], []
    for row, length, count in zip(table, lengths, new, strict=True):
        places = [int(row[i // PAGE]) + i % PAGE for i in range(length)]
        for place in places[: length - count]:
            for layer in range(rows_of_page // PAGE):
                kv[place + layer * PAGE] = torch.randn(*kv.shape[1:], generator=generator)
        written += places[length - count :]
        positions += range(length - count, length)
    return Batch(
        slots=torch.arange(num),
        positions=torch.tensor(positions),
        kv_write_index=torch.tensor(written),
        page_table=table,
        kv_lens=torch.tensor(lengths),
        cu_seqlens=torch.tensor([0, *new]).cumsum(0),
        kv=kv,
        page=torch.arange(PAGE),
        is_audio=torch.ones(len(positions), dtype=torch.bool),
    )


def rotary(batch: Batch, make) -> tuple[Tensor, Tensor] | tuple[()]:
    if make is CausalBlock:  # as in the residual model
        return ()
    angle = batch.positions[:, None] * torch.rand(
        Sizes.head_dim // 2, generator=torch.Generator().manual_seed(1)
    )
    angle = angle.repeat_interleave(2, -1) if make is SlowBlock else torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


PAGED = {"qwen3": qwen3.Block, "llama": PagedBlock, "fish_s2": SlowBlock, "voxcpm2": CausalBlock}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("new", [[1, 1, 1], [5, 1, 9], [2, 0, 1]], ids=["step", "prompts", "as many queries"])
@pytest.mark.parametrize("name", PAGED)
def test_paged_blocks_give_the_same_as_one_operator(name, new, threads):
    make = PAGED[name]
    model, (ours, theirs) = packed(lambda: make(Sizes())), (launch([6, 1, 17], new) for _ in range(2))
    x, turned = torch.randn(sum(new), Sizes.hidden), rotary(ours, make)
    torch.set_num_threads(threads)
    for norm in (model.norm, None):
        found = run_blocks(model.layers, norm, x, turned, ours, FIRST_LAYER)
        with kernels.plain():
            assert not is_whole(model.layers, x)
            expected = run_blocks(model.layers, norm, x, turned, theirs, FIRST_LAYER)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=3e-5)
        torch.testing.assert_close(ours.kv, theirs.kv, rtol=1e-5, atol=3e-5, equal_nan=True)


@pytest.mark.parametrize("bits", [8, 32])
def test_biases_and_weights_of_other_sizes_are_used(bits):
    model = packed(lambda: PagedBlock(Sizes(), has_bias=True), bits)
    x, (ours, theirs) = torch.randn(2, Sizes.hidden), (launch([3, 9], [1, 1]) for _ in range(2))
    turned = rotary(ours, PagedBlock)
    found = run_blocks(model.layers, model.norm, x, turned, ours)
    with kernels.plain():
        expected = run_blocks(model.layers, model.norm, x, turned, theirs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_row_of_paged_blocks_depends_on_neither_the_others_nor_the_threads():
    model, lengths = packed(lambda: qwen3.Block(Sizes())), [6, 1, 17]
    x = torch.randn(3, Sizes.hidden)
    batch = launch(lengths, [1, 1, 1])
    together = run_blocks(model.layers, model.norm, x, rotary(batch, qwen3.Block), batch)
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        for b in range(3):
            batch, own = launch(lengths, [1, 1, 1]), slice(b, b + 1)
            turned = tuple(part[own] for part in rotary(batch, qwen3.Block))
            names = "positions", "kv_write_index", "page_table", "kv_lens"
            parts = {name: getattr(batch, name)[own] for name in names}
            alone = replace(batch, cu_seqlens=torch.tensor([0, 1]), **parts)
            assert torch.equal(run_blocks(model.layers, model.norm, x[own], turned, alone), together[own])


FRAMES = {"qwen3_tts": DepthBlock, "csm": FrameBlock, "fish_s2": FastBlock}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", FRAMES)
def test_blocks_of_a_frame_give_the_same_as_one_operator(name, threads):
    """The first pass has two tokens, and the others have one."""
    model = packed(lambda: FRAMES[name](Sizes()))
    torch.set_num_threads(threads)
    angle = torch.rand(5, Sizes.head_dim // 2)
    angle = angle.repeat_interleave(2, -1) if name == "fish_s2" else torch.cat((angle, angle), -1)
    given = model.layers, model.norm, angle.cos(), angle.sin()
    inputs = [(slice(0, 2), torch.randn(3, 2, Sizes.hidden))]
    inputs += [(slice(at, at + 1), torch.randn(3, 1, Sizes.hidden)) for at in (2, 3, 4)]
    ours, one = frame_stack(*given, inputs[0][1]), frame_stack(*given, inputs[0][1][:1])
    with kernels.plain():
        theirs = frame_stack(*given, inputs[0][1])
    for here, x in inputs:
        found = ours(x, here)
        with kernels.plain():
            torch.testing.assert_close(found, theirs(x, here), rtol=1e-5, atol=1e-5)
        assert torch.equal(one(x[:1], here), found[:1])


def test_blocks_of_other_layouts_stay_apart():
    torch.manual_seed(0)
    layers = nn.ModuleList([qwen3.Block(Sizes())])
    assert isinstance(layers[0], PreNormBlock) and not is_whole(layers, torch.zeros(1, Sizes.hidden))
    model, x = packed(lambda: qwen3.Block(Sizes())), torch.zeros(1, Sizes.hidden)
    assert is_whole(model.layers, x) and not is_whole(model.layers, x.bfloat16())


def test_a_stack_refuses_what_does_not_fit():
    model = packed(lambda: FrameBlock(Sizes()))
    table = torch.ones(3, Sizes.head_dim)
    with pytest.raises(RuntimeError, match="position 2 of 3"):
        frame_stack(model.layers, model.norm, table, table, torch.zeros(1, 1, Sizes.hidden))(
            torch.zeros(1, 2, Sizes.hidden), slice(2, 3)
        )
