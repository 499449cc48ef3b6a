"""The benchmark of attention over stretches: what it runs on a GPU is a launch in which everything is seen and kept."""

from __future__ import annotations

import pytest

from benchmarks import device_kernels, device_stretch


def test_each_launch_is_compared(monkeypatch):
    monkeypatch.setattr(device_stretch, "LAUNCHES", ((1, 50, 0, False), (2, 100, 39, True)))
    found = {}

    def compare(name, dtype, operator, given):
        found[name] = device_kernels.gap(operator, *given)

    device_stretch.stretches(compare, lambda name, value: pytest.fail(f"{name} was timed on a CPU"), None)
    # plain operators, compared with themselves: a launch that changes its arguments would differ
    assert found == {
        "attention over a stretch, 1 x 50 from 0": 0.0,
        "relative attention over a stretch, 2 x 100 from 39": 0.0,
    }


@pytest.mark.parametrize("is_relative", [False, True])
def test_a_launch_writes_all_of_its_keys(is_relative):
    given = device_stretch.arguments(2, 100, 0, is_relative)
    mixed, kept = device_stretch.attended(*given)
    assert mixed.shape == given[0].shape and mixed.isfinite().all()
    changed = (kept != given[4][1:]).any(1)
    assert int(changed.sum()) == 2 * 2, "a stream writes two chunks of 50 frames"
