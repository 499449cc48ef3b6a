"""Mixed launches: a step of all slots that reads prompts, too. That they compute what a prefill and a step compute is
in test_recorded.py, for every family."""

from __future__ import annotations

import numpy as np
import pytest
from masquerade import masquerade
from models import TOYS, Clock, Listener, requests

from serving.engine.device.arena import Arena
from serving.engine.device.runner import Runner
from serving.engine.engine import Engine


def test_a_prompt_lies_in_front_of_its_slots_step():
    """Slots 2 and 0 take a step. Slot 2's prompt ends with three positions, and slot 3's goes on with two."""
    toy = TOYS["toy"]()
    runner = Runner(toy, 4, Arena([toy], 1 << 20), compile=False)
    runner.kv_lens[[0, 2, 3]] = 9, 5, 7  # with the positions of this launch
    arrive = runner.staging.mixed(np.array([2, 0]), None, np.array([2, 3]), np.array([3, 2]), num_tokens=8)
    found = {name: value.tolist() for name, value in arrive().items()}
    assert found["positions"] == [1, 2, 3, 4] + [8] + [5, 6] + [0] * 3
    assert found["prompt_rows"] == [0, 1, 2, -1] + [-1] + [3, 4] + [-1] * 3
    assert found["reads"] == [0, 0, 0, 0] + [1] + [0, 0] + [0] * 3
    assert found["outputs"] == [[3, 4]]
    assert found["cu_seqlens"] == [0, 4, 5, 7] + [7] * 4
    assert found["kv_lens"] == [5, 9, 7] + [0] * 4


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_prompts_share_the_launch_of_a_step_unless_equal_requests_must_give_equal_bytes(is_deterministic):
    kinds, listeners, asked = set(), [Listener(), Listener()], requests("toy", 2, max_frames=9)
    with masquerade():
        engine = Engine(
            TOYS["toy"](), max_slots=4, compile=False, clock=Clock(), is_deterministic=is_deterministic
        )
        engine.warm(lambda *_: None)
        [model] = engine.models.values()
        run = model.runner.lowered.step_graphs.run

        def noted(key, launch):
            kinds.add(key[0])
            return run(key, launch)

        model.runner.lowered.step_graphs.run = noted
        for i, request in enumerate(asked):
            engine.speak(str(i), request, listeners[i])
            for _ in range(3):
                engine.turn()
        while engine.turn():
            pass
        assert model.runner.graph_misses == 0
    assert kinds == ({"prefill", "step"} if is_deterministic else {"mixed", "step"})
    assert all(listener.reason for listener in listeners)
