"""Sampling of Fish Audio S2, in cases that the recorded ones in tests/parity do not cover."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zoo import kernels
from zoo.fish_s2.sampling import _keep_likely, draw, keep_likely


def one_by_one(logits: Tensor, top_k: int, top_p: float) -> list[int]:
    """Return the kept entries of a row, by a plain loop over a stable sort."""
    order = logits.sort(stable=True, descending=True).indices.tolist()
    chances, total, kept = logits.double().softmax(-1), 0.0, []
    for rank, index in enumerate(order):
        total += float(chances[index])
        if rank == 0 or ((top_p >= 1 or total <= top_p) and (top_k == 0 or rank < top_k)):
            kept.append(index)
    return sorted(kept)


def kept(logits: Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero()[:, 0].tolist() for row in logits]


SETTINGS = [(30, 0.8), (0, 0.9), (1, 0.9), (5, 1.0), (0, 1.0), (64, 1e-6), (1_000_000, 0.5), (2, 0.999)]


@pytest.fixture(params=["torch", "kernel"])
def _both(request):
    """Run the test with torch's operators and with the CPU kernel."""
    if request.param == "kernel":
        kernels.build()
        yield
        return
    with kernels.plain():
        yield


@pytest.mark.usefixtures("_both")
@pytest.mark.parametrize("has_ties", [False, True])
def test_rows_keep_what_a_plain_loop_keeps(has_ties):
    """Each of eight rows has its own settings. bf16 logits have many ties, of which the first entries are
    kept."""
    logits = 2 * torch.randn(len(SETTINGS), 300, generator=torch.Generator().manual_seed(0))
    if has_ties:
        logits = (logits / 2).round() * 2
    top_k, top_p = (torch.tensor(values) for values in zip(*SETTINGS, strict=True))
    expected = [one_by_one(row, *setting) for row, setting in zip(logits, SETTINGS, strict=True)]
    assert kept(keep_likely(logits, top_k, top_p)) == expected
    assert kept(_keep_likely(logits, top_k, top_p, logits.shape[1])) == expected  # as on a GPU


@pytest.mark.parametrize("threads", [1, 2])
def test_the_kernel_equals_torch_at_the_published_size(threads, monkeypatch):
    """Rows of 4,097 with a banned end, alone and batched. NaN is not kept."""
    kernels.build()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    logits = 3 * torch.randn(len(SETTINGS), 4097, generator=torch.Generator().manual_seed(4))
    logits[:, -1] = -torch.inf
    top_k, top_p = (torch.tensor(values) for values in zip(*SETTINGS, strict=True))
    made = keep_likely(logits, top_k, top_p)
    assert torch.equal(made, _keep_likely(logits, top_k, top_p, 4097))
    for row in range(len(SETTINGS)):
        assert torch.equal(keep_likely(logits[row, None], top_k[row, None], top_p[row, None])[0], made[row])
    logits[0, 7], logits[1] = torch.nan, torch.nan
    made = keep_likely(logits, top_k, top_p)
    assert not made.isnan().any() and (made[0] > -torch.inf).sum() > 1


@pytest.mark.usefixtures("_both")
def test_a_row_does_not_depend_on_its_batch():
    """The number of ranked entries depends on the whole batch, but the kept entries do not."""
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).round()
    limits = torch.tensor([3, 30, 0]), torch.tensor([0.9, 0.8, 0.7])
    together = keep_likely(logits, *limits)
    for row in range(3):
        alone = keep_likely(logits[row, None], *(limit[row, None] for limit in limits))
        assert torch.equal(alone[0], together[row])


def test_the_temperature_applies_after_top_k_and_top_p():
    """A high temperature does not add entries."""
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).repeat(4000, 1)
    noise = torch.rand(4000, 4, generator=torch.Generator().manual_seed(2)).log().neg().log().neg()
    limits = torch.full((4000,), 0), torch.full((4000,), 0.9)
    drawn = draw(logits, torch.full((4000,), 2.0), *limits, noise)
    assert set(drawn.tolist()) == {0, 1}  # their probabilities are .64 and .24
    share = (drawn == 0).float().mean()
    assert abs(share - torch.tensor(0.5).sigmoid()) < 0.02
