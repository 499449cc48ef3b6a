"""HiFT in windows: the state it carries from one to the next, and its lag."""

from __future__ import annotations

import copy

import pytest
import torch
from models import family
from torch import Tensor
from torch.nn import functional as F

from compile_cache.counts import counts
from compile_cache.lower import lower
from compile_cache.strategy import Parts
from zoo.nn.s3.hift import NO_LIMIT, ConvTranspose, Vocoder
from zoo.nn.s3.parts import VOCODER
from zoo.nn.s3.sizes import MEL_SAMPLES, MELS

FRAMES = 90


@pytest.fixture(scope="module")
@torch.inference_mode()
def vocoder() -> Vocoder:
    made = copy.deepcopy(family("cosyvoice2").vocoder).double()
    for module in made.modules():
        if isinstance(module, ConvTranspose):
            module.prepare()  # a graph must not lay out its weights itself
    return made


@pytest.fixture(scope="module")
def mel() -> Tensor:
    return torch.randn(FRAMES, MELS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@torch.inference_mode()
def spoken(vocoder: Vocoder, mel: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return samples [F * MEL_SAMPLES] of mel [F, MELS], in windows of these sizes.

    The last size is repeated. Silence follows until all samples are out.
    """
    plan, harmonics, num = vocoder.plan, vocoder.config.harmonics, len(mel)
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(num + 2 * plan.flush, MEL_SAMPLES, harmonics, generator=generator)
    noise = F.pad(noise, (0, 0, 0, 0, plan.f0_lag + 1, 0))
    given = F.pad(mel, (0, 0, 0, plan.flush))
    rows, phase = torch.zeros(1, vocoder.layout.size).double(), torch.zeros(1, harmonics).double()
    start, heard = 0, []
    while start < len(given):
        size = sizes[min(len(heard), len(sizes) - 1)]
        frames = min(size, len(given) - start)
        limit = num if start + frames > num else NO_LIMIT
        place = (torch.tensor([n]) for n in (start, limit, frames))
        values = noise[None, start : start + frames + 1]
        samples, phases, rows = vocoder(given[None, start : start + frames], *place, rows, phase, values)
        phase = phases[:, frames]
        heard.append(samples[0])
        start += frames
    return torch.cat(heard)[plan.lag :][: num * MEL_SAMPLES]


@pytest.mark.parametrize("sizes", [(1,), (2,), (7,), (50, 3, 20), (5, 1, 1, 60)], ids=str)
def test_windows_joined_equal_the_whole(vocoder, mel, sizes):
    whole = spoken(vocoder, mel, (1000,))
    assert len(whole) == FRAMES * MEL_SAMPLES and whole.std() > 0.01
    torch.testing.assert_close(spoken(vocoder, mel, sizes), whole, rtol=0, atol=1e-10)


def test_no_sample_is_held_longer_than_necessary(vocoder, mel):
    """A mel frame changes samples before it up to the vocoder's lag, to within a frame."""
    at = 60
    changed = mel.clone()
    changed[at] += 3
    differs = spoken(vocoder, changed, (1000,)) != spoken(vocoder, mel, (1000,))
    reads_ahead = at * MEL_SAMPLES - int(differs.nonzero()[0]) + MEL_SAMPLES
    assert vocoder.plan.lag - MEL_SAMPLES < reads_ahead <= vocoder.plan.lag + MEL_SAMPLES


@pytest.mark.compile
@torch.inference_mode()
def test_the_vocoder_is_one_graph_for_any_number_of_streams_and_frames(vocoder, _as_on_gpu):
    class Speech:
        def __init__(self) -> None:
            self.vocoder = vocoder

        def say(self, *given: object) -> tuple[Tensor, Tensor, Tensor]:
            return self.vocoder(*given)

    fast, before = lower(Speech().say, Parts((VOCODER,))), counts().graphs
    generator = torch.Generator().manual_seed(0)
    harmonics = vocoder.config.harmonics

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).double()

    for num, frames in ((3, 40), (5, 63), (2, 21)):
        first = torch.tensor([0, 500, 7, 0, 3000])[:num]
        limit = torch.tensor([30, NO_LIMIT, 20, NO_LIMIT, 3020])[:num]
        count, rows = torch.tensor([frames, 20, 0, 1, 2])[:num], random(num, vocoder.layout.size)
        phase, noise = random(num, harmonics).abs() % 1, random(num, frames + 1, MEL_SAMPLES, harmonics)
        given = random(num, frames, MELS), first, limit, count, rows, phase, noise
        for found, truth in zip(fast(*given), vocoder(*given), strict=True):
            torch.testing.assert_close(found, truth, rtol=0, atol=1e-9)
    assert counts().graphs - before == 1
