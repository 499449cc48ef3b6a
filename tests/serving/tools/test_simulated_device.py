"""The GPU on a virtual clock."""

from __future__ import annotations

import numpy as np
import pytest

from serving.engine.engine import Audio
from serving.tools.simulate import Heard
from serving.tools.simulated_device import SimulatedDevice


def test_launches_of_one_stream_run_one_after_the_other():
    device = SimulatedDevice()
    first, second = device.launch("lm", 2, now_s=1), device.launch("lm", 3, now_s=1)
    assert device.finish(second) == 6 and first.done_s == 3


def test_two_streams_share_the_device_and_nothing_is_lost():
    device = SimulatedDevice(renders_part=0.25)
    render, step = device.launch("renders", 10, now_s=0), device.launch("lm", 3, now_s=2)
    # From 2 to 6 the step has three quarters of the device; then the render has 10 - 2 - 1 left.
    assert device.finish(step) == 6
    assert device.finish(render) == 13


def test_the_clock_may_stop_in_the_middle_of_a_launch():
    device = SimulatedDevice()
    render = device.launch("renders", 10, now_s=0)
    assert device.finish(render, until_s=4) == 4 and render.done_s is None
    device.launch("lm", 1, now_s=4)
    device.advance(5)
    assert render.done_s is None and render.left_s == pytest.approx(5.5)
    assert device.finish(render, until_s=50) == 11


def test_a_launch_that_takes_no_time_ends_at_once():
    device = SimulatedDevice()
    assert device.finish(device.launch("lm", 0, now_s=7)) == 7


def test_a_window_without_samples_is_not_heard():
    """CosyVoice 2 holds back 0.4 s, so a first window may have none."""
    heard = Heard(0.5)
    for now_s, num in ((1.0, 0), (2.0, 500), (2.5, 500)):
        heard.take(Audio(np.zeros(num, np.float32), 1), now_s, 1000)
    assert (heard.ttfa_s, heard.late_s, heard.audio_s) == (1.5, 0.0, 1.0)
