"""Compare the simulator with the engine: the same arrivals on this machine and on a virtual clock.

    python benchmarks/simulated.py [DIR] [--seconds 20] [--times 0.5 1 2]
    python benchmarks/simulated.py DIR --dtype bfloat16 --ladder RESULT.json [--seconds 30]

The simulator runs the engine's own queue, admission and scheduler, at the costs that the engine has learned
by the end of its run.

DIR is a model. Without it, the benchmark uses a tiny random Qwen3-TTS, eager and on one thread. --times are
multiples of the rate that keeps eight slots busy.

--ladder reads a result of benchmarks/under_load.py for the same model and simulates each of its rungs. The
times of launches are drawn at random from launches that an engine without HTTP took on this machine. Then it
simulates other arrivals, for which a measured ladder has no time, and prints their highest rates.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import zoo
from benchmarks.under_load import PATIENT_S, highest_rate
from serving.engine.device.prepare_for_host import cached, prepare_for_host
from serving.engine.engine import Engine, Finished, Full
from serving.engine.model_worker import ModelWorker
from serving.engine.schedule.policy import Fifo, Streaming
from serving.tools.load.plan import SENTENCES
from serving.tools.load.plan import poisson as arrivals_of
from serving.tools.simulate import Cost, Heard, Simulation, Voice
from zoo.contract import Family
from zoo.request import Request

SETTINGS: dict[str, Any] = {"max_slots": 8, "max_ttfa_s": 1.0}
TEXT = "Good morning, everybody who is here today."
FRAMES = 50  # mean length of a speech


def frames_of(seed: int) -> int:
    return int(np.random.default_rng(seed).integers(FRAMES // 2, 3 * FRAMES // 2))


def asked(family: Family[Any], seed: int) -> Request:
    return Request(
        text=TEXT, voice=next(iter(family.spec.voices), None), seed=seed, max_frames=frames_of(seed)
    )


def learned(family: Family[Any]) -> ModelWorker:
    """Return the model worker of an engine that has spoken sixty texts, one to eight at a time."""
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
    own_s = costs.iteration_s()
    return Cost(
        step_s=lambda slots: costs.iteration_s(slots=slots),
        prefill_s=costs.prefill_s,
        render_s=lambda rows, frames: costs.iteration_s(frames=rows * frames) - own_s,
        turn_s=1e-5,
    )


def arrivals(rate: float, seconds: float) -> list[float]:
    at_s = np.cumsum(np.random.default_rng(1).exponential(1 / rate, int(2 * rate * seconds) + 20))
    return at_s[at_s < seconds].tolist()


class CpuClock:
    """A clock of this thread's CPU time plus skipped idle time, so that other processes do not count."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def __call__(self) -> float:
        return time.thread_time() + self.skipped_s


def measured(family: Family[Any], at_s: list[float]) -> tuple[list[Heard], float, ModelWorker]:
    """Run the engine. Return the answers, the seconds it took, and the model worker with its learned
    costs."""
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
    """Return the frames of each speech; the mean for requests that were refused.

    Random weights sometimes end a speech before its cap."""
    known = [one.end.frames for one in heard if isinstance(one.end, Finished)]
    return [one.end.frames if isinstance(one.end, Finished) else round(np.mean(known)) for one in heard]


def simulated(
    family: Family[Any], model: ModelWorker, at_s: list[float], frames: list[int]
) -> tuple[list[Heard], float]:
    voice = Voice.like(family)
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


# a ladder that was measured


Launches = dict[tuple[int, ...], list[float]]  # seconds of each launch, by shape
SEEDS = 20  # number of simulated arrivals, for the highest rates


def launches_of(family: Family[Any], seconds: float) -> dict[str, Launches]:
    """Measure launches in an engine without HTTP. Return their seconds by shape.

    Shapes are slots for steps, positions for prefills, and frames and rows for renders. One to eight requests
    run at a time, half of the time under each policy."""
    engine = Engine(family, max_slots=SETTINGS["max_slots"])
    engine.warm(lambda fraction, stage: None, cached)
    [model] = engine.models.values()
    took: dict[str, Launches] = {name: defaultdict(list) for name in ("step", "prefill", "render")}

    def timed(name: str, shape: Callable[[Any], tuple[int, ...]]) -> None:
        launch = getattr(model.runner, name)

        def work(what: Any) -> Any:
            began_s = time.perf_counter()
            result = launch(what)
            took[name][shape(what)].append(time.perf_counter() - began_s)
            return result

        setattr(model.runner, name, work)

    timed("step", lambda slots: (len(slots),))
    timed("prefill", lambda chunks: (sum(chunk.stop - chunk.start for chunk in chunks),))
    timed("render", lambda due: (due.frames, len(due.slots)))
    random = np.random.default_rng(0)
    for policy in (Streaming(), Fifo()):
        model.scheduler.policy = policy
        end_s = time.perf_counter() + seconds / 2
        while time.perf_counter() < end_s:
            text, voice = str(random.choice(SENTENCES)), next(iter(family.spec.voices), None)
            seed = int(random.integers(1 << 31))
            engine.speak(
                str(seed), Request(text=text, voice=voice, seed=seed, max_frames=FRAMES), lambda event: None
            )
            for _ in range(random.integers(1, 22)):
                engine.turn()
        while engine.num_requests:
            engine.turn()
    return took


def drawn(took: dict[str, Launches], seed: int) -> Cost:
    """Return costs that are drawn at random from measured launches of the same shape.

    For a shape without measurements, the nearest one is used, and renders scale with the number of rows."""
    chance = np.random.default_rng(seed)

    def draw(name: str, *shape: int) -> float:
        seen = [known for known in took[name] if known[:-1] == shape[:-1]] or list(took[name])
        nearest = min(seen, key=lambda known: (abs(known[-1] - shape[-1]), len(took[name][known])))
        scale = max(shape[-1] / nearest[-1], 1.0) if name == "render" else 1.0
        return scale * float(chance.choice(took[name][nearest]))

    return Cost(
        step_s=lambda slots: draw("step", slots),
        prefill_s=lambda tokens: draw("prefill", tokens),
        render_s=lambda rows, frames: draw("render", frames, rows),
        turn_s=0.001,
    )


def climbed(
    family: Family[Any], cost: Cost, policy: str, rates: list[float], requests: int, frames: int, seed: int
) -> list[dict[str, Any]]:
    """Simulate the rungs of a ladder. Return the fields that benchmarks/under_load.py reports for each."""
    rungs: list[dict[str, Any]] = []
    for rate in rates:
        voice = Voice.like(family)
        settings = {"max_slots": SETTINGS["max_slots"], "policy": policy}
        settings["max_ttfa_s"] = PATIENT_S if policy == "streaming" else None
        simulation = Simulation(voice, cost, settings=settings)
        text = "x" * 12  # positions that a short text adds to the shared prefix
        simulation.run(
            [(0.3 * i, Request(text=text, seed=requests + i, max_frames=frames)) for i in range(8)]
        )
        begins_s = simulation.clock.now_s
        at_s = [begins_s + at for at in arrivals_of(rate, seed, 0, None, requests)]
        heard = simulation.run(
            [(at, Request(text=text, seed=i, max_frames=frames)) for i, at in enumerate(at_s)]
        )
        ttfa_ms = [1e3 * one.ttfa_s for one in heard if one.ttfa_s is not None]
        rungs.append(
            {
                "rate_requests_per_s": rate,
                "ttfa_p50_ms": float(np.percentile(ttfa_ms, 50)),
                "ttfa_p90_ms": float(np.percentile(ttfa_ms, 90)),
                "stream_viability": float(np.mean([one.late_s <= 1e-9 for one in heard])),
                "c50": float(np.mean([one.late_s <= 0.05 for one in heard])),
                "failed": requests - len(ttfa_ms),
            }
        )
    return rungs


def kept(family: Family[Any], seconds: float, path: Path | None) -> dict[str, Launches]:
    """Return launch times from a file; without one, measure them and write them there."""
    if path is not None and path.exists():
        found = json.loads(path.read_text())
        return {
            name: {tuple(json.loads(shape)): each for shape, each in found[name].items()} for name in found
        }
    prepare_for_host(family)
    took = launches_of(family, seconds)
    if path is not None:
        named = {name: {json.dumps(shape): each for shape, each in took[name].items()} for name in took}
        path.write_text(json.dumps(named))
    return took


def beside_a_ladder(family: Family[Any], path: Path, seconds: float, launches_path: Path | None) -> None:
    took = kept(family, seconds, launches_path)
    ladder = json.loads(path.read_text())["ladder"]
    requests, frames = ladder["options"]["requests"], ladder["options"]["frames"]
    for name, launches in took.items():
        shapes = {
            " x ".join(map(str, shape)): 1e3 * float(np.median(launches[shape])) for shape in sorted(launches)
        }
        print(f"{name}, ms: {facts_of(shapes)}", flush=True)
    for policy, runs in ladder["runs"].items():
        rates = [run["rate_requests_per_s"] for run in runs]
        rungs = climbed(family, drawn(took, 0), policy, rates, requests, frames, 0)
        for run, rung in zip(runs, rungs, strict=True):
            for name in ("ttfa_p50_ms", "ttfa_p90_ms", "stream_viability", "c50"):
                told = f"engine {run[name]:.3g}, simulator {rung[name]:.3g}"
                print(f"{policy}, {rung['rate_requests_per_s']:g} requests/s, {name}: {told}", flush=True)
        found = [
            climbed(family, drawn(took, seed), policy, rates, requests, frames, seed) for seed in range(SEEDS)
        ]
        for limit_ms in ladder["limits_ttfa_p90_ms"]:
            highest = [highest_rate(rungs, limit_ms) for rungs in found]
            quartiles = ", ".join(f"{rate:.3g}" for rate in np.percentile(highest, (25, 50, 75)))
            print(
                f"{policy}, {limit_ms:g} ms, highest of {SEEDS} arrivals: mean {np.mean(highest):.3g}, quartiles {quartiles}"
            )


def facts_of(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in values.items())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--times", type=float, nargs="+", default=[0.5, 1, 2])
    parser.add_argument("--ladder", type=Path, help="simulate this result of benchmarks/under_load.py")
    parser.add_argument(
        "--launches",
        type=Path,
        help="file that stores launch times for --ladder; measured if it does not exist",
    )
    parser.add_argument("--dtype", default="float32", help="dtype of DIR")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        directory = options.directory or zoo.families()["qwen3_tts"].write_demo(Path(place) / "demo", "tiny")
        family = zoo.load(directory, "cpu", options.dtype)
    if options.ladder is not None:
        return beside_a_ladder(family, options.ladder, options.seconds, options.launches)
    torch.set_num_threads(1)
    model = learned(family)
    turn_s = float(model.forecaster.costs.steady_s(8))
    print(
        f"a step of 1 and of 8: {1e3 * float(model.forecaster.costs.steady_s(1)):.1f}, {1e3 * turn_s:.1f} ms"
    )
    for times in options.times:
        at_s = arrivals(times * 8 / (FRAMES * turn_s), options.seconds)
        heard, took_s, served = measured(family, at_s)
        real, told = facts(heard, took_s), facts(*simulated(family, served, at_s, spoken_frames(heard)))
        for name, value in real.items():
            print(f"{times:g} x capacity, {name}: engine {value:.3g}, simulator {told[name]:.3g}", flush=True)


if __name__ == "__main__":
    main()
