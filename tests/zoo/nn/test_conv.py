"""Streaming convolutions equal the offline ones, whatever the cut and whatever stands behind a row's valid frames."""

import pytest
import torch
from torch.nn import functional as F

from zoo.nn.conv import CausalConv1d, CausalConvTranspose1d, Past, is_short

FRAMES, PER_FRAME = 13, 2
# channels, out channels, kernel, dilation, groups
CONVS = [(3, 5, 7, 1, 1), (4, 4, 7, 9, 1), (6, 6, 7, 1, 6), (4, 8, 3, 2, 2), (3, 2, 1, 1, 1), (96, 4, 7, 3, 1), (96, 4, 1, 1, 1)]
# channels, out channels, kernel, stride
TRANSPOSED = [(3, 5, 8, 4), (4, 3, 3, 3), (4, 2, 1, 1), (96, 2, 6, 3), (96, 2, 2, 2)]


def filled(layer):
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer.double().requires_grad_(False)


def stream(layer, x, shapes):
    """x [B, C, FRAMES * PER_FRAME] -> [B, Cout, N], in calls of `shapes` frames. Rows take different shares of each; the rest is junk."""
    batch = x.shape[0]
    done = torch.zeros(batch, dtype=torch.int64)
    past = torch.zeros(batch, layer.past_values, dtype=x.dtype)
    rows = [[] for _ in range(batch)]
    calls = 0
    while (done < FRAMES).any():
        frames = shapes[calls % len(shapes)]
        wish = torch.tensor([frames - (calls + b) % (frames + 1) if b else frames for b in range(batch)])  # row 0 fills every call
        count = torch.minimum(wish, FRAMES - done)
        part = torch.randn(batch, x.shape[1], frames * PER_FRAME, dtype=x.dtype)
        for b in range(batch):
            start, size = int(done[b]) * PER_FRAME, int(count[b]) * PER_FRAME
            part[b, :, :size] = x[b, :, start : start + size]
        pasts = Past(past, frames, count)
        y = layer(part, pasts)
        past = pasts.next() if layer.past_values else past
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
    assert layer.past_values == channels * (kernel - 1) * dilation
    x = torch.randn(3, channels, FRAMES * PER_FRAME, dtype=torch.float64)
    whole = F.conv1d(F.pad(x, ((kernel - 1) * dilation, 0)), layer.weight, layer.bias, dilation=dilation, groups=groups)
    torch.testing.assert_close(stream(layer, x, shapes), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shapes", [(1,), (2,), (5,), (FRAMES,), (3, 1, 7)])
@pytest.mark.parametrize("sizes", TRANSPOSED)
def test_causal_conv_transpose(sizes, shapes):
    torch.manual_seed(0)
    channels, _, kernel, stride = sizes
    layer = filled(CausalConvTranspose1d(*sizes))
    assert layer.past_values == channels * (kernel // stride - 1)
    x = torch.randn(3, channels, FRAMES * PER_FRAME, dtype=torch.float64)
    whole = F.conv_transpose1d(x, layer.weight, layer.bias, stride=stride)[:, :, : FRAMES * PER_FRAME * stride]
    torch.testing.assert_close(stream(layer, x, shapes), whole, rtol=0, atol=1e-12)


def test_both_ways_are_tested():
    """The sizes above take the matrix product as well as the convolution kernel."""
    for sizes in CONVS[-1], TRANSPOSED[-1]:
        assert is_short(torch.empty(1, sizes[0], PER_FRAME)) and not is_short(torch.empty(1, sizes[0], FRAMES * PER_FRAME))


def test_kernel_that_cannot_stream():
    with pytest.raises(ValueError, match=r"kernel of 5 with a stride of 2 .* possible kernels: 2, 4"):
        CausalConvTranspose1d(1, 1, 5, 2)


def test_past_is_used_up():
    past = Past(torch.zeros(1, 9), 1, torch.ones(1, dtype=torch.int64))
    past.extend(torch.zeros(1, 4, 1), 2, 2)
    with pytest.raises(AssertionError, match="took 8 values of 9"):
        past.next()


@pytest.mark.parametrize("dim", [1, 2])
def test_past_keeps_what_came_before_the_padding(dim):
    x = torch.arange(1.0, 9).view(1, 1, 8).repeat(3, 1, 1)  # four frames of two
    values = torch.tensor([[-2.0, -1, 0]]).repeat(3, 1)
    past = Past(values, 4, torch.tensor([0, 1, 4]))
    whole = past.extend(x.transpose(dim, 2), 3, dim)
    assert whole.flatten(1).tolist() == [[-2, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8]] * 3
    assert past.next().tolist() == [[-2, -1, 0], [0, 1, 2], [6, 7, 8]]
