"""Check that nothing on the device makes the host wait between two reports, in any family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import NAMES, family, requests
from no_waits import Waits, no_waits

from zoo.contract import Family, View
from zoo.loop import SoloBatches


class Speaking:
    """A family with one slot whose prompt has been admitted."""

    def __init__(self, name: str):
        self.family: Family[Any] = family(name)
        self.prompt = next(self.family.prompts(requests(name, 3)[2]))
        self.state = self.family.state(1, self.prompt.max_frames)
        self.family.admit(self.state, 0, self.prompt)
        self.batches = SoloBatches(self.family, self.prompt)

    def prefill(self, lane: int) -> None:
        self.family.hidden(self.prompt.lanes[lane].inputs[:-1], self.batches.prefill(lane))


@pytest.fixture(params=NAMES)
@torch.inference_mode()
def speaking(request: pytest.FixtureRequest) -> Speaking:
    return Speaking(request.param)


@torch.inference_mode()
def test_no_step_waits(speaking: Speaking) -> None:
    for lane in range(len(speaking.prompt.lanes)):
        speaking.prefill(lane)
    for _ in range(3):
        batch = speaking.batches.step()
        with no_waits():
            speaking.family.step(speaking.state, batch)
    assert int(speaking.state.steps[0]) + int(speaking.state.done[0]) >= 1


@torch.inference_mode()
def test_no_prefill_waits(speaking: Speaking) -> None:
    batch = speaking.batches.prefill()
    inputs = speaking.prompt.lanes[0].inputs[:-1]
    with no_waits():
        speaking.family.hidden(inputs, batch)


@torch.inference_mode()
def test_no_render_waits(speaking: Speaking) -> None:
    window = speaking.family.spec.window
    start, count = torch.tensor([[0], [1]])
    for frames in window.sizes:
        view = View(
            torch.tensor([0]), start, count, torch.tensor([False]), frames, window.length_bucket(frames)
        )
        with no_waits():
            samples, _ = speaking.family.render(speaking.state, view)
        assert samples.isfinite().all()


@pytest.mark.parametrize(
    "asks",
    [
        lambda x: x.tolist(),
        lambda x: int(x.sum()),
        lambda x: bool((x > 0).all()),
        lambda x: x[x > 0],
        lambda x: torch.repeat_interleave(x, x),
        lambda x: x + torch.tensor(1, device=x.device),
        lambda x: x.cpu(),
    ],
)
def test_code_that_needs_a_value_is_refused(asks: Any) -> None:
    x = torch.arange(3)
    with pytest.raises(Waits, match="waits"), no_waits():
        asks(x)


def test_a_tensor_pretends_to_be_on_a_gpu() -> None:
    x = torch.arange(3)
    with no_waits():
        assert x.device.type == "cuda" and x.is_cuda and not x.is_cpu
        y = torch.ones(3, device=x.device) + x
    assert y.device.type == "cpu" and y.tolist() == [1, 2, 3]
