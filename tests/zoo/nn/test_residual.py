"""Streamed snakes and convolutions: CPU kernels compared with torch's operators."""

from __future__ import annotations

import pytest
import torch
from models import alone, directory
from torch import Tensor, nn

import zoo
from serving.tools.requests import every_request
from zoo import kernels
from zoo.nn.conv import CodecState, StateLayout, slots_state
from zoo.nn.residual import (
    Elu,
    Identity,
    SnakeConv1d,
    SnakeConvTranspose1d,
    convolve_snake,
    depthwise_unit,
    has_filters,
    has_kernel,
    prepare,
    residual_unit,
    upsample_snake,
)
from zoo.nn.snake import Snake, SnakeBeta

FRAMES, PER_FRAME, STRIDE = 23, 24, 2


@pytest.fixture(autouse=True)
def _built():
    kernels.build()


class Part(nn.Module):
    """An upsampling, three residual units and a final convolution; every other unit is depthwise."""

    def __init__(self, channels: int, wave: type[Snake] | type[SnakeBeta]):
        super().__init__()
        half = channels // 2
        self.snake, self.up = wave(channels), SnakeConvTranspose1d(channels, half, 2 * STRIDE, STRIDE)
        self.units = nn.ModuleList()
        for dilation, groups in ((1, 1), (3, half), (9, 1)):
            convs = SnakeConv1d(half, half, 7, dilation, groups), SnakeConv1d(half, half, 1)
            self.units.append(nn.ModuleList((wave(half), convs[0], wave(half), convs[1])))
        self.last, self.tail = wave(half), SnakeConv1d(half, 1, 7)
        self.layout = StateLayout(self)
        generator = torch.Generator().manual_seed(channels)
        for name, parameter in self.named_parameters():
            scale = parameter[0].numel() ** -0.5 if "weight" in name else 0.3
            parameter.data = scale * torch.randn(parameter.shape, generator=generator)
            if "alpha" in name and wave is Snake:
                parameter.data = parameter.data.abs() + 0.5
        self.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, SnakeBeta):
                module.prepare()

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        x = upsample_snake(x, self.snake, self.up, state)
        for unit in self.units:
            run = depthwise_unit if unit[1].groups > 1 else residual_unit
            x = run(x, *unit, state)
        return convolve_snake(x, self.last, self.tail, state)


def stream(
    part: Part | EluPart | Ends, x: Tensor, cuts: tuple[int, ...], plain: tuple[bool, ...] = (False,)
) -> tuple[Tensor, Tensor]:
    """Stream x [B, C, FRAMES * PER_FRAME] in calls of `cuts` frames, some of which are padding -> all samples
    and the state. The calls alternate between the kernels and torch."""
    batch, start, pieces = len(x), 0, []
    rows = x.new_zeros(batch, part.layout.size)
    while start < FRAMES:
        frames = cuts[len(pieces) % len(cuts)]
        count = min(frames, FRAMES - start)
        given = torch.full((batch, x.shape[1], frames * PER_FRAME), 7.0, dtype=x.dtype)
        given[..., : count * PER_FRAME] = x[..., start * PER_FRAME : (start + count) * PER_FRAME]
        state = CodecState(part.layout, rows, frames, torch.full((batch,), count))
        if plain[len(pieces) % len(plain)]:
            with kernels.plain():
                y = part(given, state)
        else:
            y = part(given, state)
        rows, start = state.next(), start + count
        pieces.append(y[..., : count * PER_FRAME * STRIDE])
    return torch.cat(pieces, -1), rows


def heard(channels: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, channels, FRAMES * PER_FRAME, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("wave", [Snake, SnakeBeta])
@pytest.mark.parametrize("channels", [10, 32, 96, 260])
@torch.inference_mode()
def test_the_kernels_equal_torch_for_any_cut_of_a_stream(channels, wave, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    part, x = Part(channels, wave), heard(channels)
    truth = stream(Part(channels, wave).double(), x.double(), (FRAMES,))
    theirs = stream(part, x, (FRAMES,), (True,))
    for cuts, plain in (
        ((FRAMES,), (False,)),
        ((1,), (False,)),
        ((5, 1, 8), (False,)),
        ((4, 1), (False, True, True)),
    ):
        ours = stream(part, x, cuts, plain)
        for what, exact, expected, found in zip(("samples", "state"), truth, theirs, ours, strict=True):
            error, usual = (found - exact).abs().max(), (expected - exact).abs().max()
            assert error < 4 * usual + 1e-6, (
                f"{what}, {cuts}: {error:.2g} from the truth, torch's {usual:.2g}"
            )


class EluPart(nn.Module):
    """What Mimi has: an upsampling and a residual unit with half of the channels in its middle."""

    def __init__(self, channels: int):
        super().__init__()
        half = channels // 2
        self.up = SnakeConvTranspose1d(channels, half, 2 * STRIDE, STRIDE)
        self.conv1, self.conv2 = SnakeConv1d(half, half // 2, 3), SnakeConv1d(half // 2, half, 1)
        self.layout = StateLayout(self)
        generator = torch.Generator().manual_seed(channels)
        for name, parameter in self.named_parameters():
            scale = parameter[0].numel() ** -0.5 if "weight" in name else 0.3
            parameter.data = scale * torch.randn(parameter.shape, generator=generator)
        self.requires_grad_(False)

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        x = upsample_snake(x, Elu(), self.up, state)
        return residual_unit(x, Elu(), self.conv1, Elu(), self.conv2, state)


@pytest.mark.parametrize("channels", [12, 72, 256])
@torch.inference_mode()
def test_elus_in_the_kernels_equal_torch_for_any_cut_of_a_stream(channels):
    part, x = EluPart(channels), 3 * heard(channels)
    expected = stream(part, x, (FRAMES,), (True,))
    for cuts in ((FRAMES,), (1,), (5, 1, 8)):
        for found, same in zip(stream(part, x, cuts), expected, strict=True):
            torch.testing.assert_close(found, same, rtol=0, atol=2e-5)


@torch.inference_mode()
def test_a_stream_does_not_depend_on_the_others(monkeypatch):
    part, x = Part(96, Snake), heard(96, 5)
    together = stream(part, x, (8, 3))[0]
    for threads in 1, 4:
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for b in range(5):
            assert torch.equal(stream(part, x[b : b + 1], (8, 3))[0], together[b : b + 1])


@torch.inference_mode()
def test_padding_and_ended_streams_are_not_remembered():
    """The streams have 0, 1 and all frames of a call."""
    part, x = Part(32, Snake), heard(32, 3)
    rows = torch.randn(3, part.layout.size, generator=torch.Generator().manual_seed(2))
    count = torch.tensor([0, 1, FRAMES])
    states = [CodecState(part.layout, rows, FRAMES, count) for _ in range(2)]
    part(x, states[0])
    with kernels.plain():
        part(x, states[1])
    torch.testing.assert_close(states[0].next(), states[1].next(), rtol=1e-4, atol=1e-4)
    assert torch.equal(states[0].next()[0], rows[0])


class Ends(nn.Module):
    """What stands before a decoder's blocks: an upsampling whose kernel is one stride long, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.stem = SnakeConvTranspose1d(48, 40, STRIDE, STRIDE), SnakeConv1d(40, 70, 7)
        self.layout = StateLayout(self)
        for parameter in self.parameters():
            nn.init.normal_(
                parameter, std=parameter[0].numel() ** -0.5, generator=torch.Generator().manual_seed(0)
            )
        self.requires_grad_(False)

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        return convolve_snake(upsample_snake(x, Identity(), self.up, state), Identity(), self.stem, state)


@torch.inference_mode()
def test_convolutions_without_an_activation_equal_torch_for_any_cut_of_a_stream():
    part, x = Ends(), heard(48)
    expected = stream(part, x, (FRAMES,), (True,))
    for cuts in ((FRAMES,), (1,), (5, 1, 8)):
        for found, same in zip(stream(part, x, cuts), expected, strict=True):
            torch.testing.assert_close(found, same, rtol=0, atol=2e-5)


@pytest.mark.parametrize("threads", [1, 3])
@torch.inference_mode()
def test_the_kernels_change_the_pasts_of_slots_in_place(threads, monkeypatch):
    """To the bytes of rows that are copied out and back. The last two rows are padding, of the spare slot."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    part, x = Part(32, Snake), heard(32, 5)
    ours = torch.randn(6, part.layout.size, generator=torch.Generator().manual_seed(2))
    theirs, slots, count = ours.clone(), torch.tensor([4, 0, 2, 5, 5]), torch.tensor([2, 1, FRAMES, 0, 0])
    for _ in range(3):
        state, copied = (
            slots_state(part.layout, ours, slots, FRAMES, count),
            CodecState(part.layout, theirs[slots], FRAMES, count),
        )
        assert torch.equal(part(x, state), part(x, copied))
        state.store(ours, slots)
        copied.store(theirs, slots)
        assert torch.equal(ours, theirs)


def test_the_kernel_is_used_for_float32_on_a_cpu():
    conv, x = SnakeConv1d(32, 32, 7, 9), torch.empty(1, 32, 100)
    assert not has_kernel(x.double(), conv.double()) and not has_filters(conv)
    with kernels.plain():
        assert not has_kernel(x, SnakeConv1d(32, 32, 7, 9))
    with torch.device("meta"):
        conv = SnakeConv1d(64, 64, 7)
    assert has_filters(conv) and not has_kernel(torch.empty(1, 64, 100, device="meta"), conv)


def test_the_bytes_of_filters_are_counted():
    part = Part(96, Snake)
    weights = sum(parameter.nbytes for name, parameter in part.named_parameters() if name.endswith("weight"))
    made = prepare(part)
    assert prepare(Part(96, Snake).to("meta")) == made
    # short filters have seventeen taps instead of seven; outputs are padded to a multiple of 64
    up, unit, apart, tail = 2 * 96 * 128, 17 * 48 * 64 + 48 * 64, 7 * 48 + 48 * 64, 17 * 48 * 64
    assert made == 4 * (up + 2 * unit + apart + tail) - weights


@torch.inference_mode()
def test_weights_that_filters_replace_are_freed():
    part, x = Part(96, Snake), heard(96)
    convs = [layer for layer in part.modules() if isinstance(layer, SnakeConv1d | SnakeConvTranspose1d)]
    expected = stream(part, x, (5,))
    prepare(part)
    assert all(layer.weight.is_meta for layer in convs)
    for found, same in zip(stream(part, x, (5,)), expected, strict=True):
        assert torch.equal(found, same)


WITH_FILTERS = [
    "bagpiper",
    "cosyvoice2",
    "csm",
    "fish_s2",
    "glm4_voice",
    "opuslm",
    "orpheus",
    "qwen3_tts",
    "voxcpm2",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_FILTERS)
def test_the_plain_loop_speaks_without_the_freed_weights(name):
    model = zoo.load(directory(name, "tiny"), "cpu", "float32")
    request = next(iter(every_request(model, 5)[0].values()))
    prepare(model)
    assert any(parameter.is_meta for parameter in model.parameters())
    found, expected = zoo.generate(model, request), alone(name, request)
    assert torch.equal(found.frames, expected.frames)
    torch.testing.assert_close(found.samples, expected.samples, rtol=0, atol=1e-4)


@torch.inference_mode()
def test_a_compiler_traces_the_torch_operators():
    part, x = Part(32, Snake), heard(32)

    def run(x: Tensor) -> Tensor:
        rows = x.new_zeros(len(x), part.layout.size)
        return part(x, CodecState(part.layout, rows, FRAMES, torch.full((len(x),), FRAMES)))

    with kernels.plain():
        expected = run(x)
    torch.testing.assert_close(
        torch.compile(run, backend="eager", fullgraph=True)(x), expected, rtol=0, atol=1e-4
    )
