"""The benchmark of transformer blocks: its arguments are those of the operators, and its old form is the same block."""

from __future__ import annotations

import pytest
import torch

from benchmarks import device_blocks, device_kernels

ROWS = ((2, 50), (4, 100))


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(device_blocks, "ROWS", ROWS)
    monkeypatch.setattr(device_blocks, "BLOCKS", 1)


def test_each_kernel_is_compared_at_each_size(monkeypatch):
    found = {}

    def compare(name, dtype, operator, given):
        found[name] = device_kernels.gap(operator, *given)

    device_blocks.blocks(compare, lambda name, value: pytest.fail(f"{name} was timed on a CPU"), None)
    parts = "norm and product", "after attention, in three", "after attention, in one", "attention"
    assert list(found) == [f"block of {rows} x {frames}, {part}" for rows, frames in ROWS for part in parts]
    assert set(found.values()) == {0.0}  # plain operators, compared with themselves


def test_the_old_form_is_both_operators():
    before, after = device_blocks.before_and_after(2, 50, seed=3)
    x, product = device_blocks.plain_block(before, after)
    expected = torch.ops.zoo.after_attention.default(*after)
    assert torch.equal(x, expected)
    assert torch.equal(product, torch.ops.zoo.norm_linear.default(expected, *before[1:]))


def test_attention_writes_a_whole_stretch_and_leaves_its_arguments():
    given = device_blocks.stretch(4, 100)
    q, arena = given[0], given[3]
    old = arena.clone()
    mixed, kept = device_blocks.attended(*given)
    assert mixed.shape == q.shape and mixed.isfinite().all()
    assert torch.equal(arena, old)
    changed = (kept != old[1:]).any(1)
    assert int(changed.sum()) == 2 * 2, "a stream writes two chunks of 50 frames"
