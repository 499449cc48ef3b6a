"""Sampling by row: the right distribution, draws that do not depend on a row's index, and the processors of
transformers as the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from zoo.cosyvoice2.sampling import repetition_aware
from zoo.fish_s2 import sampling as fish_s2
from zoo.nn.sampling import draw, gumbel, keep_likely, penalise

WIDTH = 40


def logits(rows: int, width: int = WIDTH, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def rows(value: float, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((count,), value, dtype=dtype)


def ints(value: int, count: int) -> Tensor:
    return rows(value, count, torch.int64)


# the kept tokens


@pytest.mark.parametrize("top_k", [0, 1, 5, WIDTH, WIDTH + 7])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 1.0])
def test_the_kept_set_equals_that_of_transformers(top_k, top_p):
    scores = logits(200)
    kept = scores.clone()
    if top_k:
        kept = TopKLogitsWarper(top_k)(None, kept)
    if top_p < 1.0:
        kept = TopPLogitsWarper(top_p)(None, kept)
    differing = (keep_likely(scores, ints(top_k, 200), rows(top_p, 200)) != kept).sum()
    assert differing == 0, f"{differing} of {scores.numel()}"


def test_every_row_has_its_own_settings():
    scores = logits(6)
    top_k, top_p = torch.tensor([0, 1, 3, 0, 5, 40]), torch.tensor([1.0, 1.0, 1.0, 0.5, 0.5, 0.01])
    together = keep_likely(scores, top_k, top_p)
    for row in range(6):
        assert torch.equal(
            together[row : row + 1],
            keep_likely(scores[row : row + 1], top_k[row : row + 1], top_p[row : row + 1]),
        )
    assert (together > -torch.inf).sum(-1).tolist()[:3] == [40, 1, 3]


def test_a_banned_token_is_never_kept():
    scores = logits(50)
    scores[:, 10:] = -torch.inf
    kept = keep_likely(scores, ints(25, 50), rows(0.99, 50))
    assert (kept[:, 10:] == -torch.inf).all() and not kept.isnan().any()
    drawn = draw(scores, rows(5.0, 50), ints(25, 50), rows(1.0, 50), noise(50))
    assert drawn.max() < 10


@pytest.mark.parametrize("penalty", [1.0, 1.05, 1.7])
def test_the_penalty_equals_that_of_transformers(penalty):
    scores = logits(30)
    # some tokens occur twice
    said = torch.randint(WIDTH, (30, 12), generator=torch.Generator().manual_seed(1))
    seen = torch.zeros(30, WIDTH, dtype=torch.bool).scatter_(1, said, True)
    assert torch.equal(
        penalise(scores, seen, rows(penalty, 30)), RepetitionPenaltyLogitsProcessor(penalty)(said, scores)
    )


# draws


def noise(count: int, width: int = WIDTH, seed: int = 0, stream: int = 0) -> Tensor:
    return gumbel(torch.arange(count) + seed, torch.arange(count) % 100, range(stream, stream + 1), width)[
        :, 0
    ]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.6, 6, 1.0), (1.0, 0, 0.8), (0.9, 10, 0.7)],
    ids=str,
)
def test_draws_follow_the_softmax_of_the_kept_tokens(temperature, top_k, top_p):
    """Pearson's chi-square over 20,000 seeds, with rare tokens as one group. The level is one in a million,
    so that only a mistake fails."""
    count, scores = 20000, logits(1, width=20)
    truth = TemperatureLogitsWarper(temperature)(None, scores)
    if top_k:
        truth = TopKLogitsWarper(top_k)(None, truth)
    if top_p < 1:
        truth = TopPLogitsWarper(top_p)(None, truth)
    expected = truth.softmax(-1)[0].double() * count
    drawn = draw(
        scores.expand(count, -1),
        rows(temperature, count),
        ints(top_k, count),
        rows(top_p, count),
        noise(count, 20),
    )
    seen = drawn.bincount(minlength=20).double()
    assert seen[expected == 0].sum() == 0
    rare = expected < 20
    expected = torch.cat((expected[~rare], expected[rare].sum(0, keepdim=True)))
    seen = torch.cat((seen[~rare], seen[rare].sum(0, keepdim=True)))
    expected, seen = expected[expected > 0], seen[expected > 0]
    chi_square = ((seen - expected).square() / expected).sum()
    tail = torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), chi_square / 2)
    assert tail > 1e-6, (
        f"chi-square {chi_square:.1f} of {len(expected)} kinds: {seen.tolist()}, expected {expected.tolist()}"
    )


def test_temperature_zero_takes_the_largest_with_any_other_settings():
    scores = logits(100)
    drawn = draw(scores, rows(0.0, 100), ints(3, 100), rows(0.5, 100), noise(100))
    assert torch.equal(drawn, scores.argmax(-1))


@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 1e-38, 1e-40])
def test_a_tiny_temperature_takes_the_largest(temperature):
    """Logits divided by 1e-38 are infinite, so a draw would take token 0."""
    scores = logits(100) - 20
    settings = rows(temperature, 100), ints(0, 100), rows(1.0, 100)
    largest = scores.argmax(-1)
    assert torch.equal(draw(scores, *settings, noise(100)), largest)
    assert torch.equal(fish_s2.draw(scores, *settings, noise(100)), largest)
    two = torch.stack((noise(100), noise(100, seed=7)), 1)  # [B, 2, V]
    drawn = repetition_aware(scores, *settings, lambda ids: torch.zeros_like(ids, dtype=torch.bool), two)
    assert torch.equal(drawn, largest)


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (0, 1e-6)])
def test_a_single_candidate_is_always_drawn(top_k, top_p):
    scores = logits(100)
    assert torch.equal(
        draw(scores, rows(2.0, 100), ints(top_k, 100), rows(top_p, 100), noise(100)), scores.argmax(-1)
    )


def test_hot_and_cold_rows_share_a_batch():
    scores, temperature = logits(100), torch.tensor([0.0, 1.5]).repeat(50)
    drawn = draw(scores, temperature, ints(0, 100), rows(1.0, 100), noise(100))
    assert torch.equal(drawn[::2], scores.argmax(-1)[::2])
    assert not torch.equal(drawn[1::2], scores.argmax(-1)[1::2])


# noise


def test_noise_depends_only_on_seed_step_and_stream():
    """A row's noise does not depend on the other rows, on its index, or on the range of streams."""
    seed, step = torch.tensor([5, 2**40 + 1, 5, 2**63 - 1]), torch.tensor([0, 3, 1, 100000])
    together = gumbel(seed, step, range(1, 16), 64)  # [4, 15, 64]
    assert together.shape == (4, 15, 64) and together.dtype == torch.float32 and together.isfinite().all()
    for row in reversed(range(4)):
        for stream in (1, 7, 15):
            alone = gumbel(seed[row : row + 1], step[row : row + 1], range(stream, stream + 1), 64)
            assert torch.equal(together[row, stream - 1], alone[0, 0])
    assert torch.equal(together[..., :20], gumbel(seed, step, range(1, 16), 20))


def test_noise_never_changes():
    """Stored seeds must give the same speech; a change here changes every voice."""
    found = gumbel(torch.tensor([12345678901234]), torch.tensor([7]), range(2, 4), 3)
    pinned = [[[-0.5564111, 0.1510806, -0.2529464], [0.4518663, -0.1465947, 1.5338584]]]
    torch.testing.assert_close(found, torch.tensor(pinned), rtol=0, atol=1e-6)


def test_every_bit_of_the_seed_counts():
    """64 seeds that each differ from the first in one bit, including the sign bit and the high word; also
    steps and streams."""
    bits = [0, *(1 << bit for bit in range(63)), -(1 << 63)]
    found = gumbel(torch.tensor(bits), torch.zeros(65, dtype=torch.int64), range(1), 256)[:, 0]
    assert len({tuple(row.tolist()) for row in found}) == 65
    steps = gumbel(ints(1, 200), torch.arange(200), range(16), 8).flatten(0, 1)
    assert len({tuple(row.tolist()) for row in steps}) == 3200


@pytest.mark.parametrize("pair", ["seed", "high word", "step", "stream", "token"])
def test_neighbours_are_independent(pair):
    """The noise of neighbours is uncorrelated and has the mean and variance of a Gumbel distribution."""
    seed, zero = torch.arange(400), ints(0, 400)
    left = gumbel(seed, zero, range(1), 256)[:, 0]
    right = {
        "seed": gumbel(seed + 1, zero, range(1), 256)[:, 0],
        "high word": gumbel(seed + (1 << 32), zero, range(1), 256)[:, 0],
        "step": gumbel(seed, zero + 1, range(1), 256)[:, 0],
        "stream": gumbel(seed, zero, range(1, 2), 256)[:, 0],
        "token": left.roll(1, -1),
    }[pair]
    count = left.numel()
    correlation = torch.corrcoef(torch.stack((left.flatten(), right.flatten())))[0, 1]
    assert abs(correlation) < 5 / count**0.5
    assert abs(right.mean() - 0.5772157) < 5 * 1.2825 / count**0.5
    assert abs(right.var() - torch.pi**2 / 6) < 0.03
