"""The engine's prediction of first audio by the number of open requests, which routing among replicas
uses."""

import numpy as np
import pytest
from toy import Toy

from serving.engine.engine import Engine
from serving.engine.stats import expected_first_audio_s
from serving.tools.simulate import Cost, Simulation, Voice
from zoo.request import Request

COST = Cost(
    step_s=lambda slots: 0.015 + 0.004 * slots,
    prefill_s=lambda tokens: 0.002 + 1e-4 * tokens,
    render_s=lambda rows, frames: 0.001 + 0.0005 * rows * frames,
    turn_s=0.001,
)
SLOTS = 4


def request(seed):
    return Request(text="x" * 80, seed=seed)


@pytest.fixture(scope="module")
def simulation():
    """Return an engine with four slots that has learned what launches cost."""
    simulation = Simulation(Voice(), COST, settings={"max_slots": SLOTS})
    chance = np.random.default_rng(0)
    at_s = np.cumsum(chance.exponential(0.6, 60))
    simulation.run([(float(each), request(seed)) for seed, each in enumerate(at_s)])
    return simulation


def first_audio_s(simulation, num_others, seed):
    """Return the time to first audio of a request that comes once as many others are open."""
    others = [simulation.submit(request(seed + i)) for i in range(num_others)]
    for _ in range(20):
        simulation.turn()
    late = simulation.submit(request(seed + num_others))
    while simulation.engine.num_requests:
        simulation.turn()
    assert all(each.first_s is not None for each in others)
    return late.ttfa_s


def test_before_costs_are_known_nothing_is_predicted():
    [model] = Engine(Toy(), max_slots=SLOTS, compile=False).models.values()
    assert expected_first_audio_s(model) == []


def test_first_audio_is_predicted_by_the_number_of_open_requests(simulation):
    """Within a factor of two: routing compares replicas, and admission corrects its own predictions."""
    predicted_s = np.array(expected_first_audio_s(simulation.model))
    measured_s = [first_audio_s(simulation, num, 1000 * num) for num in (0, SLOTS - 1, 2 * SLOTS - 1)]
    assert np.all(np.diff(predicted_s) > 0)
    assert np.all(np.abs(np.log2(predicted_s / measured_s)) < 1), (predicted_s, measured_s)
