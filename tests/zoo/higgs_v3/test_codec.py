"""The codec of Higgs Audio V3: windows with enough context equal decoding the whole tape."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from models import family
from torch import Tensor
from torch.nn import functional as F

from zoo.contract import View
from zoo.higgs_v3.codec import Decoder
from zoo.nn.resample import Resample

FRAMES = 47


@cache
def decoder(dtype: torch.dtype = torch.float64) -> Decoder:
    return family("higgs_v3", {torch.float32: "float32", torch.float64: "float64"}[dtype]).codec.decoder


def codes(frames: int = FRAMES, seed: int = 0) -> Tensor:
    return torch.randint(64, (frames, 8), generator=torch.Generator().manual_seed(seed))


def window(
    decoder: Decoder, tape: Tensor, start: int, frames: int, left: int = 10, right: int = 10
) -> Tensor:
    """Decode frames start .. start + frames of a tape [F, 8]. The decoder sees `left` and `right` more frames
    of the tape, and noise beyond them."""
    at = torch.arange(start - 10, start + frames + 10)
    seen = (at >= start - left) & (at < start + frames + right) & (at >= 0) & (at < len(tape))
    noise = torch.randint(64, (len(at), 8), generator=torch.Generator().manual_seed(9))
    given = torch.where(seen[:, None], tape[at.clamp(0, len(tape) - 1)], noise)
    return decoder(given[None], torch.tensor([start]), torch.tensor([len(tape)]))[0]


def whole(decoder: Decoder, tape: Tensor) -> Tensor:
    return window(decoder, tape, 0, len(tape))


def test_the_window_has_the_context_that_the_strides_need():
    ours = family("higgs_v3")
    assert ours.codec.decoder.context == ours.spec.window.lookahead == 10


@pytest.mark.parametrize("sizes", [(1,), (4,), (25,), (3, 1, 7)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["float64", "float32"]
)
def test_streamed_windows_equal_the_whole_tape(sizes, dtype, atol):
    """The measured differences are 1e-14 and 2e-6."""
    tape, start, pieces = codes(), 0, []
    while start < FRAMES:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(window(decoder(dtype), tape, start, size)[: 960 * (FRAMES - start)])
        start += size
    torch.testing.assert_close(torch.cat(pieces), whole(decoder(dtype), tape), rtol=0, atol=atol)


def test_ten_frames_on_both_sides_are_needed():
    """Nine frames are too few on either side."""
    tape = codes()
    exact = whole(decoder(), tape)[20 * 960 : 24 * 960]
    assert (window(decoder(), tape, 20, 4) - exact).abs().max() < 1e-10
    for less in ({"left": 9}, {"right": 9}):
        assert (window(decoder(), tape, 20, 4, **less) - exact).abs().max() > 1e-4, less
    # the error of a server that looks only back
    assert (window(decoder(), tape, 20, 4, right=0) - exact).abs().max() > 0.1


def test_windows_equal_the_references_layers():
    """Compared in float64 with decoding the whole tape, with zeros around every convolution and unfolded
    codebooks."""
    codec, tape = copy.deepcopy(family("higgs_v3").codec).double(), codes(13)
    codec.prepare()  # makes the tables in float64 too
    ours = codec.decoder
    x = sum(book(tape[None, :, k]) for k, book in enumerate(codec.quantizer.books))
    x = F.conv1d(ours.project(x).mT, ours.stem.weight, ours.stem.bias, padding=3)
    for block in ours.blocks:
        rate = block.rate
        x = F.conv_transpose1d(block.snake(x), block.up.weight, block.up.bias, rate, -(-rate // 2), rate % 2)
        for unit in block.residuals:
            y = F.conv1d(
                unit.snake1(x),
                unit.conv1.weight,
                unit.conv1.bias,
                padding=unit.edge,
                dilation=unit.conv1.dilation,
            )
            x = x + unit.conv2(unit.snake2(y))
    x = F.conv1d(ours.snake(x), ours.tail.weight, ours.tail.bias, padding=3)[0, 0]
    assert len(x) == 960 * 13
    torch.testing.assert_close(whole(ours, tape), x, rtol=0, atol=1e-10)


def test_render_reads_the_tape_on_both_sides_and_stops_at_its_end():
    """Slots with tapes of different lengths share a launch. The codes of unfinished frames after a tape's end
    have no effect."""
    model = family("higgs_v3", "float64")
    state, tapes = model.state(3, 60), {0: codes(40, 1), 2: codes(9, 2), 1: codes(31, 3)}
    for slot, tape in tapes.items():
        state.tape[slot] = torch.randint(64, (60, 8), generator=torch.Generator().manual_seed(slot))
        state.tape[slot, : len(tape)], state.ready[slot] = tape, len(tape)
    slots = torch.tensor([0, 2, 1])
    is_last = torch.tensor([False, True, True])
    view = View(slots, torch.tensor([12, 5, 27]), torch.tensor([4, 4, 4]), is_last, 4)
    heard, valid = model.render(state, view)
    assert valid.tolist() == [4 * 960] * 3
    for row, (slot, start) in enumerate(((0, 12), (2, 5), (1, 27))):
        exact = whole(decoder(), tapes[slot])[960 * start : 960 * (start + 4)]
        torch.testing.assert_close(heard[row].double(), exact, rtol=0, atol=1e-6)


def test_samples_of_a_window_do_not_change_when_the_tape_grows():
    """With enough lookahead, a window has the same samples during the speech and after its end."""
    model, tape = family("higgs_v3", "float64"), codes(60)
    heard = []
    for ready in (24, 25, 60):
        state = model.state(1, 60)
        state.tape[0], state.ready[0] = tape, ready
        view = View(torch.tensor([0]), torch.tensor([10]), torch.tensor([4]), torch.tensor([False]), 4)
        heard.append(model.render(state, view)[0])
    assert torch.equal(heard[0], heard[1]) and torch.equal(heard[0], heard[2])


def test_resampling_keeps_a_low_tone_and_drops_a_high_one():
    at = torch.arange(4800, dtype=torch.float64) / 24000
    resample = Resample(24000, 16000)
    low = resample((2 * torch.pi * 1000 * at).sin().float()[None])[0]
    high = resample((2 * torch.pi * 10500 * at).sin().float()[None])[0]
    exact = (2 * torch.pi * 1000 * torch.arange(3200, dtype=torch.float64) / 16000).sin()
    assert low.shape == (3200,) and resample(torch.zeros(1, 4801)).shape == (1, 3201)
    assert (low - exact)[50:-50].abs().max() < 0.01
    assert high[50:-50].abs().max() < 0.01
