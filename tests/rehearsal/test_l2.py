"""Which bytes of a launch reach a card's memory."""

from __future__ import annotations

import pytest
import torch

from benchmarks.rehearsal.l2 import L2

KB = 1024


def tensor(kilobytes: int) -> torch.Tensor:
    return torch.empty(kilobytes * KB, dtype=torch.uint8)


def moved(cache: L2, reads: list[torch.Tensor], writes: list[torch.Tensor] | None = None) -> float:
    """KB that a launch moves which touches these."""
    touched = ([(one, one.numel()) for one in some] for some in (reads, writes or []))
    return cache.launch(*touched) / KB


def test_what_was_just_read_or_written_is_still_there():
    cache, x, y = L2(200 * KB), tensor(10), tensor(20)  # of which a half is used
    assert moved(cache, [x], [y]) == 10
    assert moved(cache, [x, y]) == 0
    assert moved(cache, [y[: 5 * KB]]) == 0  # a part of it


def test_what_was_touched_longest_ago_leaves_and_is_written_if_it_changed():
    cache, x, y, z = L2(200 * KB), tensor(40), tensor(40), tensor(40)
    assert moved(cache, [x], [y]) == 40
    assert moved(cache, [z]) == 40  # x leaves
    assert moved(cache, [x]) == 40 + 40  # y leaves, which changed
    assert moved(cache, [y]) == 40
    assert moved(cache, [x]) == 0


@pytest.mark.parametrize("size", [0, 30])
def test_what_does_not_fit_is_all_of_it_moved(size):
    cache, x, y = L2(2 * size * KB), tensor(31), tensor(31)
    assert moved(cache, [x], [y]) == moved(cache, [x], [y]) == 62


def test_memory_that_nobody_needs_is_overwritten_where_it_is():
    cache = L2(200 * KB)
    for _ in range(10):
        assert moved(cache, [], [tensor(60)]) == 0
    held = [tensor(60) for _ in range(3)]
    assert sum(moved(cache, [], [one]) for one in held) == 120  # the last is not written yet
