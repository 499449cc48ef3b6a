"""Tests of benchmarks/listening.py, with a tiny GLM-4-Voice."""

import numpy as np
import pytest
from models import directory, family

from benchmarks import listening
from serving.engine.engine import Engine


@pytest.mark.slow
def test_steps_are_measured_alone_and_next_to_clips():
    model = family("glm4_voice")
    lines = listening.measure(Engine(model, max_slots=2, compile=False), 2, 0.3, 1.0, clips=2)
    alone, beside = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:4])
    assert (alone[0], beside[0]) == ("alone", "next to clips of 1 s")
    for row in (alone, beside):
        launch_p50, launch_p99, since_p50, since_p99 = map(float, row[2:])
        assert int(row[1]) > 0 and 0 < launch_p50 <= launch_p99 and 0 < since_p50 <= since_p99
    assert "median of 2" in lines[-1]


def test_no_two_clips_are_equal():
    first, second = (listening.clip_of(0.1, seed) for seed in (1, 2))
    assert not np.array_equal(first.samples, second.samples) and len(first.samples) == 1600


def test_a_model_that_does_not_listen_is_refused():
    with pytest.raises(ValueError, match="does not listen"):
        listening.loaded(str(directory("qwen3_tts", "tiny")), 1, is_compiled=False)
