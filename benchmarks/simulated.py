"""What the simulator says of an engine beside what the engine does: the same arrivals go to a model on this machine and to the
same queue, admission and scheduler on a virtual clock, at the costs that the engine itself had learned by the end.

    python benchmarks/simulated.py [DIR] [--seconds 20] [--times 0.5 1 2]

DIR: a model; left out, a tiny random Qwen3-TTS, run eagerly, on one thread. times: of the rate at which eight slots are busy all the time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import zoo
from serving.engine.engine import Engine, Finished, Full
from serving.engine.model_worker import ModelWorker
from serving.tools.simulate import Cost, Heard, Simulation, Voice
from zoo.contract import Family, Request

SETTINGS: dict[str, Any] = {"max_slots": 8, "max_ttfa_s": 1.0}
TEXT = "Good morning, everybody who is here today."
FRAMES = 50  # of a speech, on the average


def frames_of(seed: int) -> int:
    return int(np.random.default_rng(seed).integers(FRAMES // 2, 3 * FRAMES // 2))


def asked(family: Family[Any], seed: int) -> Request:
    return Request(
        text=TEXT, voice=next(iter(family.spec.voices), None), seed=seed, max_frames=frames_of(seed)
    )


def learned(family: Family[Any]) -> ModelWorker:
    """What the engine knows after sixty speeches, from one to eight at a time."""
    engine = Engine(family, **SETTINGS | {"max_ttfa_s": None}, compile=False, clock=CpuClock())
    for seed in range(60):
        engine.speak(str(seed), asked(family, seed), lambda event: None)
        for _ in range(np.random.default_rng(seed).integers(1, 16)):
            engine.turn()
    while engine.num_requests:
        engine.turn()
    [model] = engine.models.values()
    return model


def cost_of(model: ModelWorker) -> Cost:
    costs = model.forecaster.costs
    own_s = costs.turn_s()
    return Cost(
        step_s=lambda slots: costs.turn_s(slots=slots),
        prefill_s=costs.prefill_s,
        render_s=lambda rows, frames: costs.turn_s(frames=rows * frames) - own_s,
        turn_s=1e-5,
    )


def arrivals(rate: float, seconds: float) -> list[float]:
    at_s = np.cumsum(np.random.default_rng(1).exponential(1 / rate, int(2 * rate * seconds) + 20))
    return at_s[at_s < seconds].tolist()


class CpuClock:
    """What this thread has computed, and what was skipped: who else uses the machine is in no figure."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def __call__(self) -> float:
        return time.thread_time() + self.skipped_s


def measured(family: Family[Any], at_s: list[float]) -> tuple[list[Heard], float, ModelWorker]:
    """The engine's answers, and what it had learned by the end."""
    clock = CpuClock()
    engine = Engine(family, **SETTINGS, compile=False, clock=clock)
    began_s, heard = clock(), []
    rate_hz = family.spec.sample_rate_hz

    def submit(seed: int) -> None:
        one = Heard(began_s + at_s[seed])
        heard.append(one)
        try:
            engine.speak(str(seed), asked(family, seed), lambda event: one.take(event, clock(), rate_hz))
        except Full as full:
            one.end = full

    while len(heard) < len(at_s) or engine.num_requests:
        while len(heard) < len(at_s) and began_s + at_s[len(heard)] <= clock():
            submit(len(heard))
        if not engine.turn() and not engine.num_requests and len(heard) < len(at_s):
            clock.skipped_s += max(began_s + at_s[len(heard)] - clock(), 0.0)
    [model] = engine.models.values()
    return heard, clock() - began_s, model


def spoken_frames(heard: list[Heard]) -> list[int]:
    """Of each speech: random weights end before their cap now and then. Of who was refused, the mean."""
    known = [one.end.frames for one in heard if isinstance(one.end, Finished)]
    return [one.end.frames if isinstance(one.end, Finished) else round(np.mean(known)) for one in heard]


def simulated(
    family: Family[Any], model: ModelWorker, at_s: list[float], frames: list[int]
) -> tuple[list[Heard], float]:
    spec = family.spec
    voice = Voice(spec.window, 1 / spec.frame_rate_hz, guard=1.0)
    simulation = Simulation(voice, cost_of(model), settings=SETTINGS)
    text = "x" * round(model.forecaster.prompt_tokens)
    requests = [Request(text=text, seed=seed, max_frames=max(n, 1)) for seed, n in enumerate(frames)]
    heard = simulation.run(list(zip(at_s, requests, strict=True)))
    return heard, simulation.clock.now_s


def facts(heard: list[Heard], took_s: float) -> dict[str, float]:
    ended = [one for one in heard if isinstance(one.end, Finished) and one.ttfa_s is not None]
    ttfa_ms = np.array([one.ttfa_s for one in ended]) * 1e3
    return {
        "accepted": len(ended) / len(heard),
        "ttfa_p50_ms": float(np.percentile(ttfa_ms, 50)),
        "ttfa_p95_ms": float(np.percentile(ttfa_ms, 95)),
        "in_time": float(np.mean([one.late_s < 0.05 for one in ended])),
        "audio_s_per_s": sum(one.audio_s for one in heard) / took_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--times", type=float, nargs="+", default=[0.5, 1, 2])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        directory = options.directory or zoo.families()["qwen3_tts"].write_demo(Path(place) / "demo", "tiny")
        family = zoo.load(directory, "cpu", "float32")
    torch.set_num_threads(1)
    model = learned(family)
    turn_s = float(model.forecaster.costs.steady_s(8))
    print(
        f"a turn of 1 and of 8: {1e3 * float(model.forecaster.costs.steady_s(1)):.1f}, {1e3 * turn_s:.1f} ms"
    )
    for times in options.times:
        at_s = arrivals(times * 8 / (FRAMES * turn_s), options.seconds)
        heard, took_s, served = measured(family, at_s)
        real, told = facts(heard, took_s), facts(*simulated(family, served, at_s, spoken_frames(heard)))
        for name, value in real.items():
            print(f"{times:g} x capacity, {name}: engine {value:.3g}, simulator {told[name]:.3g}", flush=True)


if __name__ == "__main__":
    main()
