"""Streaming convolutions equal offline ones, for any cut and any padding after a row's valid frames."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from zoo.nn.conv import (
    CausalConv1d,
    CausalConvTranspose1d,
    CodecState,
    Stateful,
    StateLayout,
    is_short,
    reach,
    slots_state,
)

FRAMES, PER_FRAME = 13, 2
# channels, out channels, kernel, dilation, groups
CONVS = [
    (3, 5, 7, 1, 1),
    (4, 4, 7, 9, 1),
    (6, 6, 7, 1, 6),
    (4, 8, 3, 2, 2),
    (3, 2, 1, 1, 1),
    (96, 4, 7, 3, 1),
    (96, 4, 1, 1, 1),
]
# channels, out channels, kernel, stride
TRANSPOSED = [(3, 5, 8, 4), (4, 3, 3, 3), (4, 2, 1, 1), (96, 2, 6, 3), (96, 2, 2, 2)]


def filled(layer):
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer.double().requires_grad_(False)


def stream(layer, x, shapes):
    """x [B, C, FRAMES * PER_FRAME] -> [B, Cout, N], in calls of `shapes` frames. Each row fills a different
    part of a call; the rest is noise."""
    batch = x.shape[0]
    done = torch.zeros(batch, dtype=torch.int64)
    layout = StateLayout(layer)
    kept = torch.zeros(batch, layer.state_size, dtype=x.dtype)
    rows = [[] for _ in range(batch)]
    calls = 0
    while (done < FRAMES).any():
        frames = shapes[calls % len(shapes)]
        # row 0 fills every call
        wish = torch.tensor([frames - (calls + b) % (frames + 1) if b else frames for b in range(batch)])
        count = torch.minimum(wish, FRAMES - done)
        part = torch.randn(batch, x.shape[1], frames * PER_FRAME, dtype=x.dtype)
        for b in range(batch):
            start, size = int(done[b]) * PER_FRAME, int(count[b]) * PER_FRAME
            part[b, :, :size] = x[b, :, start : start + size]
        state = CodecState(layout, kept, frames, count)
        y = layer(part, state)
        kept = state.next() if layer.state_size else kept
        for b in range(batch):
            rows[b].append(y[b, :, : int(count[b]) * y.shape[2] // frames])
        done, calls = done + count, calls + 1
        assert calls < 1000
    return torch.stack([torch.cat(row, -1) for row in rows])


@pytest.mark.parametrize("shapes", [(1,), (2,), (5,), (FRAMES,), (3, 1, 7)])
@pytest.mark.parametrize("sizes", CONVS)
def test_causal_conv(sizes, shapes):
    torch.manual_seed(0)
    channels, _, kernel, dilation, groups = sizes
    layer = filled(CausalConv1d(*sizes))
    assert layer.state_size == channels * (kernel - 1) * dilation
    x = torch.randn(3, channels, FRAMES * PER_FRAME, dtype=torch.float64)
    whole = F.conv1d(
        F.pad(x, ((kernel - 1) * dilation, 0)), layer.weight, layer.bias, dilation=dilation, groups=groups
    )
    torch.testing.assert_close(stream(layer, x, shapes), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shapes", [(1,), (2,), (5,), (FRAMES,), (3, 1, 7)])
@pytest.mark.parametrize("sizes", TRANSPOSED)
def test_causal_conv_transpose(sizes, shapes):
    torch.manual_seed(0)
    channels, _, kernel, stride = sizes
    layer = filled(CausalConvTranspose1d(*sizes))
    assert layer.state_size == channels * (kernel // stride - 1)
    x = torch.randn(3, channels, FRAMES * PER_FRAME, dtype=torch.float64)
    whole = F.conv_transpose1d(x, layer.weight, layer.bias, stride=stride)[
        :, :, : FRAMES * PER_FRAME * stride
    ]
    torch.testing.assert_close(stream(layer, x, shapes), whole, rtol=0, atol=1e-12)


def test_both_implementations_are_tested():
    """The sizes above use both the matrix product and the convolution kernel."""
    for sizes in CONVS[-1], TRANSPOSED[-1]:
        assert is_short(torch.empty(1, sizes[0], PER_FRAME)) and not is_short(
            torch.empty(1, sizes[0], FRAMES * PER_FRAME)
        )


def test_kernel_that_cannot_stream():
    with pytest.raises(ValueError, match=r"kernel of 5 with a stride of 2 .* possible kernels: 2, 4"):
        CausalConvTranspose1d(1, 1, 5, 2)


# a stream's row


class Pair(nn.Module):
    """Two convolutions of the same input; either may run first."""

    def __init__(self) -> None:
        super().__init__()
        self.left = CausalConv1d(3, 4, 7)
        self.one = CausalConv1d(3, 4, 1)  # has no state
        self.right = CausalConvTranspose1d(3, 4, 2, 1)
        self.layout = StateLayout(self)


def pair() -> tuple[Pair, CodecState, torch.Tensor]:
    """Return a decoder, the state of two streams with a past, and their next input."""
    torch.manual_seed(0)
    module = filled(Pair())
    rows = torch.randn(2, module.layout.size, dtype=torch.float64)
    return (
        module,
        CodecState(module.layout, rows, 5, torch.tensor([5, 2])),
        torch.randn(2, 3, 5, dtype=torch.float64),
    )


def test_places_are_by_name():
    module = Pair()
    assert module.layout.places == {"left": slice(0, 18), "right": slice(18, 21)} and module.layout.size == 21


def test_the_order_of_calls_does_not_matter():
    (one, first, x), (other, second, _) = pair(), pair()
    told = [one.left(x, first), one.right(x, first)]
    back = [other.right(x, second), other.left(x, second)]
    assert torch.equal(told[0], back[1]) and torch.equal(told[1], back[0])
    assert torch.equal(first.next(), second.next())


def test_a_layer_that_runs_twice_is_refused():
    module, state, x = pair()
    module.left(x, state)
    with pytest.raises(AssertionError, match="layer 'left' ran twice in one forward"):
        module.left(x, state)


def test_a_layer_that_does_not_run_is_refused():
    module, state, x = pair()
    module.right(x, state)
    with pytest.raises(AssertionError, match=r"layers \['left'\] did not run"):
        state.next()


def test_a_layer_without_a_place_is_refused():
    _, state, x = pair()
    with pytest.raises(AssertionError, match="a CausalConv1d has no place in the state"):
        CausalConv1d(3, 4, 7).double()(x, state)


def test_one_graph_for_every_batch():
    """The graph has no breaks, and does not depend on the traced order of calls."""
    module, state, x = pair()

    def both(x, rows, count):
        state = CodecState(module.layout, rows, 5, count)
        return module.right(x, state) + module.left(x, state), state.next()

    compiled = torch.compile(both, fullgraph=True, backend="eager", dynamic=True)
    for batch in (2, 3, 4):
        given = x[:1].expand(batch, -1, -1), state.rows[:1].expand(batch, -1), torch.arange(batch)
        for ours, plain in zip(compiled(*given), both(*given), strict=True):
            assert torch.equal(ours, plain)


@pytest.mark.parametrize("dim", [1, 2])
def test_the_input_before_the_padding_is_kept(dim):
    x = torch.arange(1.0, 9).view(1, 1, 8).repeat(3, 1, 1)  # four frames of two
    layer = Stateful(1, 3, dim)
    state = CodecState(
        StateLayout(layer), torch.tensor([[-2.0, -1, 0]]).repeat(3, 1), 4, torch.tensor([0, 1, 4])
    )
    whole = state.extend(layer, x.transpose(dim, 2))
    assert whole.flatten(1).tolist() == [[-2, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8]] * 3
    assert state.next().tolist() == [[-2, -1, 0], [0, 1, 2], [6, 7, 8]]


class Mixed(nn.Module):
    """Layers of both kinds of positions."""

    def __init__(self):
        super().__init__()
        self.conv = CausalConv1d(3, 4, 7)
        self.rows = Stateful(4, 5, dim=1)
        self.up = CausalConvTranspose1d(4, 2, 8, 4)
        self.layout = StateLayout(self)

    def forward(self, x, state):
        whole = state.extend(self.rows, self.conv(x, state).mT)
        return whole, self.up(whole[:, 5:].mT, state)


def test_slots_change_their_rows_in_place():
    """On a CPU. The bytes are those of rows that are copied out and back, and other slots keep theirs."""
    torch.manual_seed(0)
    module, slots, count = filled(Mixed()), torch.tensor([3, 0]), torch.tensor([5, 2])
    rows = torch.randn(5, module.layout.size, dtype=torch.float64)
    copied = rows.clone()
    for _ in range(3):
        x = torch.randn(2, 3, 5, dtype=torch.float64)
        ours, theirs = (
            slots_state(module.layout, rows, slots, 5, count),
            CodecState(module.layout, copied[slots], 5, count),
        )
        for one, other in zip(module(x, ours), module(x, theirs), strict=True):
            assert torch.equal(one, other)
        assert torch.equal(ours.next(), theirs.next())
        ours.store(rows, slots)
        theirs.store(copied, slots)
        assert torch.equal(rows, copied)


def test_slots_whose_layers_did_not_all_run_are_refused():
    module, _, x = pair()
    rows, slots = torch.zeros(3, module.layout.size, dtype=torch.float64), torch.tensor([0, 2])
    state = slots_state(module.layout, rows, slots, 5, torch.tensor([5, 2]))
    module.right(x, state)
    with pytest.raises(AssertionError, match=r"layers \['left'\] did not run"):
        state.store(rows, slots)


def test_how_far_convolutions_look_back():
    """Six frames, then two positions at four per frame, then one at twelve per frame: 6 + 1 + 2 / 4 + 1 / 12
    frames, rounded up to eight."""
    layers = [
        CausalConv1d(2, 2, 7),
        CausalConvTranspose1d(2, 2, 8, 4),
        CausalConv1d(2, 2, 3),
        CausalConvTranspose1d(2, 2, 3, 3),
    ]
    assert reach([*layers, nn.Identity(), CausalConv1d(2, 2, 2)]) == 8
    assert reach(layers[:1]) == 6 and reach([]) == 0
