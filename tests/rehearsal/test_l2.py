"""Tests of the bytes of a launch that reach a card's memory."""

from __future__ import annotations

import pytest
import torch

from benchmarks.rehearsal.l2 import L2

KB = 1024


def tensor(kilobytes: int) -> torch.Tensor:
    return torch.empty(kilobytes * KB, dtype=torch.uint8)


def moved(cache: L2, reads: list[torch.Tensor], writes: list[torch.Tensor] | None = None) -> float:
    """Return the KB that a launch moves if it touches these tensors."""
    touched = ([(one, one.numel()) for one in some] for some in (reads, writes or []))
    return cache.launch(*touched) / KB


def test_recently_used_tensors_stay_in_the_cache():
    cache, x, y = L2(200 * KB), tensor(10), tensor(20)  # half of its size is used
    assert moved(cache, [x], [y]) == 10
    assert moved(cache, [x, y]) == 0
    assert moved(cache, [y[: 5 * KB]]) == 0  # a part of y


def test_the_least_recently_used_tensor_is_evicted_and_written_if_it_changed():
    cache, x, y, z = L2(200 * KB), tensor(40), tensor(40), tensor(40)
    assert moved(cache, [x], [y]) == 40
    assert moved(cache, [z]) == 40  # evicts x
    assert moved(cache, [x]) == 40 + 40  # evicts y, which was written
    assert moved(cache, [y]) == 40
    assert moved(cache, [x]) == 0


@pytest.mark.parametrize("size", [0, 30])
def test_a_tensor_that_does_not_fit_is_moved_completely(size):
    cache, x, y = L2(2 * size * KB), tensor(31), tensor(31)
    assert moved(cache, [x], [y]) == moved(cache, [x], [y]) == 62


def test_freed_memory_is_overwritten_in_the_cache():
    cache = L2(200 * KB)
    for _ in range(10):
        assert moved(cache, [], [tensor(60)]) == 0
    held = [tensor(60) for _ in range(3)]
    assert sum(moved(cache, [], [one]) for one in held) == 120  # the last one is not written yet
