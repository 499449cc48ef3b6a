"""Layers over a sliding window: streamed, whole, and as one operator."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from compile_cache import choices
from zoo import kernels
from zoo.fish_s2.layers import Layer
from zoo.nn.conv import CodecState, StateLayout, slots_state
from zoo.nn.linear import SwiGLU
from zoo.nn.norm import RMSNorm
from zoo.nn.pack import pack
from zoo.nn.rope import rope_table
from zoo.nn.window_attention import GeluMLP, WindowLayer, ring, run_window

HIDDEN, HEADS, HEAD_DIM, INNER = 24, 3, 8, 40


class PairedLayer(WindowLayer):
    """As in Fish Audio S2."""

    is_paired, rotate = Layer.is_paired, staticmethod(Layer.rotate)


class Stack(nn.Module):
    """Three layers, and a norm behind them unless their norms are layer norms."""

    def __init__(self, kind: str, window: int):
        super().__init__()
        make = PairedLayer if kind == "fish_s2" else WindowLayer
        norm = partial(nn.LayerNorm if kind == "csm" else RMSNorm, HIDDEN, 1e-5)
        mlp = GeluMLP if kind == "csm" else SwiGLU
        self.layers = nn.ModuleList(
            make(HIDDEN, HEADS, HEAD_DIM, window, norm, mlp(HIDDEN, INNER)) for _ in range(3)
        )
        self.norm = None if kind == "csm" else norm()
        self.layout = StateLayout(self)
        for parameter in self.parameters():
            nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.3)

    def forward(self, x: Tensor, start: Tensor, state: CodecState) -> Tensor:
        at = start[:, None] + torch.arange(x.shape[1])
        cos, sin = rope_table(at, HEAD_DIM, 10_000, x.dtype)
        if self.layers[0].is_paired:
            cos, sin = (part[..., : HEAD_DIM // 2].repeat_interleave(2, -1) for part in (cos, sin))
        return run_window(self.layers, self.norm, x, (cos, sin), start, state)


def stack(kind: str, window: int = 6) -> Stack:
    torch.manual_seed(0)
    return Stack(kind, window).requires_grad_(False)


KINDS = ["qwen3_tts", "csm", "fish_s2"]


@pytest.mark.parametrize("sizes", [(1,), (2, 5), (3, 9, 1)], ids=str)
@pytest.mark.parametrize("window", [2, 6])
def test_positions_see_their_window_however_they_arrive(window, sizes):
    """A position's result is that of its window alone."""
    model = stack("qwen3_tts", window).double()
    x, start, pieces = torch.randn(1, 13, HIDDEN, dtype=torch.float64), 0, []
    rows = torch.zeros(1, model.layout.size, dtype=torch.float64)
    while start < 13:
        piece = x[:, start : start + sizes[len(pieces) % len(sizes)]]
        state = CodecState(model.layout, rows, piece.shape[1], torch.tensor([piece.shape[1]]))
        pieces.append(model(piece, torch.tensor([start]), state))
        rows, start = state.next(), start + piece.shape[1]
    zeros = torch.zeros(1, model.layout.size, dtype=torch.float64)
    state = CodecState(model.layout, zeros, 13, torch.tensor([13]))
    whole = model(x, torch.tensor([0]), state)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(rows, state.next(), rtol=0, atol=1e-12)
    far = x.clone()
    far[:, : max(0, 12 - 3 * (window - 1))] = 7  # what three layers cannot reach from the last position
    state = CodecState(model.layout, zeros, 13, torch.tensor([13]))
    torch.testing.assert_close(model(far, torch.tensor([0]), state)[:, -1], whole[:, -1], rtol=0, atol=1e-12)
    if 3 * (window - 1) < 13:
        far[:, 12 - 3 * (window - 1)] = 7
        state = CodecState(model.layout, zeros, 13, torch.tensor([13]))
        assert (model(far, torch.tensor([0]), state)[:, -1] - whole[:, -1]).abs().max() > 1e-9


def test_a_ring_keeps_the_last_positions_at_their_places():
    """Of a ring of five places: a new stream, one with three of four new positions, and one that gets only
    padding."""
    seen, kept = ring(torch.tensor([0, 4, 7]), torch.tensor([2, 3, 0]), 4, 5)
    assert kept.tolist() == [[5, 6, 2, 3, 4], [6, 7, 2, 3, 5], [0, 1, 2, 3, 4]]
    assert seen[0].int().tolist() == [[0] * 5 + [1] * (i + 1) + [0] * (3 - i) for i in range(4)]
    assert seen[1, :, :5].int().tolist() == [
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 0],
        [0, 1, 1, 1, 0],
        [0, 0, 1, 1, 0],
    ]
    # places 0 and 1 have positions 5 and 6, and the others 2 to 4
    assert seen[2, :, :5].int().tolist() == [
        [1, 1, 1, 1, 1],
        [1, 1, 0, 1, 1],
        [1, 1, 0, 0, 1],
        [1, 1, 0, 0, 0],
    ]


@pytest.mark.usefixtures("built")
class TestOneOperator:
    @pytest.mark.parametrize("threads", [1, 3])
    @pytest.mark.parametrize("is_narrow", [False, True])
    @pytest.mark.parametrize("kind", KINDS)
    def test_it_gives_what_the_layers_give(self, kind, is_narrow, threads):
        """Three passes over slots in any order; some rows are padding, and one has more positions than the ring."""
        model = stack(kind)
        if is_narrow:
            for parameter in model.parameters():
                parameter.data = parameter.bfloat16().float()
        with choices.assumed("blocks"):
            pack(model, 0)
        torch.set_num_threads(threads)
        slots, start = torch.tensor([3, 0, 2]), torch.tensor([4, 0, 9])
        ours = torch.randn(5, model.layout.size)
        theirs = ours.clone()
        for frames, counts in ((1, [1, 1, 0]), (4, [4, 1, 3]), (9, [9, 7, 0])):
            x, count = torch.randn(3, 2 * frames, HIDDEN), torch.tensor(counts)
            state = slots_state(model.layout, ours, slots, frames, count)
            found = model(x, start, state)
            state.store(ours, slots)
            plain = slots_state(model.layout, theirs, slots, frames, count)
            with kernels.plain():
                expected = model(x, start, plain)
            plain.store(theirs, slots)
            for b in range(3):
                valid = slice(2 * counts[b])
                torch.testing.assert_close(found[b, valid], expected[b, valid], rtol=1e-5, atol=3e-5)
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=3e-5)
            start = start + 2 * count
        assert torch.equal(ours[[1, 4]], theirs[[1, 4]])

    def test_a_stream_depends_on_neither_the_others_nor_the_threads(self):
        model = stack("csm")
        with choices.assumed("blocks"):
            pack(model, 0)
        rows, x, start = torch.randn(3, model.layout.size), torch.randn(3, 7, HIDDEN), torch.tensor([4, 0, 9])

        def run(own: slice) -> tuple[Tensor, Tensor]:
            changed, slots, count = rows.clone(), torch.arange(3)[own], torch.tensor([7, 7, 5])[own]
            made = model(x[own], start[own], slots_state(model.layout, changed, slots, 7, count))
            return made, changed[own]

        together = run(slice(3))
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            for b in range(3):
                for alone, one in zip(run(slice(b, b + 1)), together, strict=True):
                    assert torch.equal(alone, one[b : b + 1])
