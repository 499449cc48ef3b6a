"""The comparison of a code predictor's launches, on a CPU, where both sides are the plain operator."""

import pytest

from benchmarks import device_stack
from benchmarks.device_stack import Sizes
from zoo.nn.frame_stack import FrameBlock
from zoo.qwen3_tts.depth import DepthBlock

SMALL = {
    "qwen3_tts": Sizes(DepthBlock, 2, 32, 48, 4, 2, positions=4, head_dim=8),
    "csm": Sizes(FrameBlock, 1, 24, 40, 2, 2, positions=3, head_dim=6),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(device_stack, "PUBLISHED", SMALL)
    monkeypatch.setattr(device_stack, "DEVICE", "cpu")


def test_every_way_equals_the_plain_operator():
    found = {}
    assert device_stack.stacks(found.__setitem__, None, list(SMALL), ["whole"], (1, 3)) == []
    names = [f"code predictor of {name}, {n} streams, whole" for name in SMALL for n in (1, 3)]
    assert found == dict.fromkeys(names, 0.0)


def test_a_gap_is_found(monkeypatch):
    monkeypatch.setattr(device_stack, "GAP", -1.0)
    wrong = device_stack.stacks(lambda name, value: None, None, ["csm"], list(device_stack.WAYS), (1, 3))
    assert wrong == [
        f"code predictor of csm, {n} streams, {way}" for way in device_stack.WAYS for n in (1, 3)
    ]
