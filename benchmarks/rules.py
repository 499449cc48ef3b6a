"""What each rule of the scheduler is worth: the same arrivals, each rule left out in turn. Simulated: the
real engine on a virtual clock.

    python -m benchmarks.rules [--devices h200 cpu] [--rules NAME ...] [--arrivals 3] [--times 1.0 1.3]

A row says, for each load: the median and the 90th percentile of time to first audio, and how many streams
were viable (no gap). times: of the launches' time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from benchmarks.launch_costs import CONTEXT_CPU, COSY_CPU, COSY_H200, CPU, H200, SLOW_CPU, times
from compile_cache.strategy import Strategy
from serving.engine.device.staging import up_to
from serving.engine.engine import Finished
from serving.engine.schedule.numbers import GPU_RENDERS_IN_FLIGHT
from serving.engine.schedule.policy import Streaming
from serving.engine.schedule.snapshot import Snapshot
from serving.engine.schedule.windows import WindowPlan
from serving.tools.simulate import Cost, Simulation, Voice, poisson, use_gpu_rules
from zoo.contract import Window
from zoo.request import Request

COSY = Window((25, 50, 100), lookahead=3, grid=25, hold_samples=395)


@dataclass(frozen=True)
class Device:
    """A machine, the model that it serves, and the loads that it is asked for. rates: requests a second, for
    so many seconds, of so many frames on the average. slowed: factor on the launches of the load's middle
    third, which the server does not foresee: another program computes."""

    cost: Cost
    rates: tuple[float, ...]
    seconds: float
    frames: int
    slots: int = 8
    is_gpu: bool = False
    window: Window = Window((1, 4, 25))  # noqa: RUF009, it is frozen
    frame_s: float = 0.08
    slowed: float = 1.0
    rendered_s: float = 25.0  # of audio in one launch


DEVICES = {
    "h200": Device(H200, (70.0, 100.0), 10, 52, slots=64, is_gpu=True),
    "h200 cosy": Device(
        COSY_H200,
        (20.0, 40.0),
        12,
        100,
        slots=64,
        is_gpu=True,
        window=COSY,
        frame_s=0.04,
        rendered_s=50.0,
    ),
    "cpu": Device(CPU, (0.8, 1.4), 60, 25),
    "slow cpu": Device(SLOW_CPU, (0.8, 1.1), 60, 25),
    "busy cpu": Device(
        CONTEXT_CPU, (0.6, 0.8), 60, 25, window=Window((1, 4, 24), lookahead=3, left=3), slowed=2.0
    ),
    "cpu cosy": Device(COSY_CPU, (0.6, 0.9), 60, 100, window=COSY, frame_s=0.04),
}


class OnlyFullWindows(Streaming):
    def is_at_risk(self, now: Snapshot) -> np.ndarray:
        return np.zeros(now.slots.num_slots, bool)


class NotBatched(Streaming):
    def is_batched(self, now: Snapshot, is_due: np.ndarray) -> np.ndarray:
        return np.zeros(now.slots.num_slots, bool)


class SmallestFirst(Streaming):
    def first_size(self, now: Snapshot) -> int:
        return now.shapes.smallest


class FirstIsCut(Streaming):
    def takes_all(self, now: Snapshot) -> np.ndarray:
        return now.is_ending


class NoDelay(Streaming):
    def delays_prompts(self, now: Snapshot, prefill_s: float) -> bool:
        return False


class NoneDry(Streaming):
    def is_dry(self, now: Snapshot) -> np.ndarray:
        return np.zeros(now.slots.num_slots, bool)


class NoneLate(Streaming):
    def is_late(self, now: Snapshot) -> np.ndarray:
        return np.zeros(now.slots.num_slots, bool)


class NotPadded(Streaming):
    def cut(self, now: Snapshot, is_due: np.ndarray, flush: np.ndarray, takes_all: np.ndarray) -> WindowPlan:
        return super().cut(now, is_due, flush, np.zeros_like(takes_all))


def by(policy: type[Streaming]) -> Callable[[Simulation], None]:
    def use(simulation: Simulation) -> None:
        simulation.model.scheduler.policy = policy()

    return use


def prompts_apart(simulation: Simulation) -> None:
    simulation.model.runner.has_mixed = False


def renders_at_once(simulation: Simulation) -> None:
    simulation.model.round.max_renders = np.inf


def several_long_renders(simulation: Simulation) -> None:
    simulation.model.round.max_renders = GPU_RENDERS_IN_FLIGHT


def steps_at_once(simulation: Simulation) -> None:
    simulation.model.round.pace_s = 0.0


def renders_untimed(simulation: Simulation) -> None:
    simulation.model.scheduler.timing.render_times = None


def several_windows(simulation: Simulation) -> None:
    simulation.model.scheduler.timing.window_cost = None


RULES: dict[str, Callable[[Simulation], None]] = {
    "all rules": lambda simulation: None,
    "batched windows": by(NotBatched),
    "first windows last": by(SmallestFirst),
    "a first window takes all": by(FirstIsCut),
    "prompts wait for listeners": by(NoDelay),
    "dry listeners first": by(NoneDry),
    "late listeners": by(NoneLate),
    "padding": by(NotPadded),
    "at risk": by(OnlyFullWindows),
    "prompts in a step's launch": prompts_apart,
    "renders in flight": renders_at_once,
    "one long render": several_long_renders,
    "steps leave the device to long renders": steps_at_once,
    "windows ride in larger launches": renders_untimed,
    "one window at a time": several_windows,
}


def simulation_of(device: Device, cost: Cost) -> Simulation:
    voice = Voice(device.window, device.frame_s, guard=1.0)
    voice.strategy = Strategy(cuts_renders=device.window.grid > 1)
    simulation = Simulation(voice, cost, device.is_gpu, {"max_slots": device.slots, "max_ttfa_s": 10.0})
    if device.slowed != 1:
        simulation.model.runner.cost = slowed(device, cost, simulation)

    def rows_of(frames: int) -> list[int]:
        most = max(1, int(device.rendered_s / (frames * device.frame_s)))
        return up_to(min(most, device.slots), Strategy().render_batches)

    if device.is_gpu:
        use_gpu_rules(simulation.model, cost, rows_of)
    return simulation


def slowed(device: Device, cost: Cost, simulation: Simulation) -> Cost:
    """Return the costs of a device that another program slows down in the middle third of its load."""
    start_s, stop_s = device.seconds / 3, 2 * device.seconds / 3

    def factor() -> float:
        return device.slowed if start_s <= simulation.clock.now_s < stop_s else 1.0

    return Cost(
        step_s=lambda slots: factor() * cost.step_s(slots),
        prefill_s=lambda tokens: factor() * cost.prefill_s(tokens),
        render_s=lambda rows, frames: factor() * cost.render_s(rows, frames),
    )


def load_of(device: Device, rate: float, seed: int) -> list[tuple[float, Request]]:
    chance = np.random.default_rng(seed)
    load = []
    for i, (at_s, _) in enumerate(poisson(rate, device.seconds, seed)):
        frames = int(chance.integers(device.frames // 2, 3 * device.frames // 2))
        load.append((at_s, Request(text="x" * int(chance.integers(40, 90)), seed=i, max_frames=frames)))
    return load


@dataclass(frozen=True)
class Row:
    """What the listeners of one load had."""

    p50_ms: float
    p90_ms: float
    viable: float

    def __str__(self) -> str:
        return f"{self.p50_ms:5.0f} {self.p90_ms:6.0f} ms {self.viable:6.1%}"


def without(rule: str, device: Device, cost: Cost, rate: float, num_arrivals: int) -> Row:
    ttfa_s: list[float] = []
    late_s: list[float] = []
    for seed in range(num_arrivals):
        simulation = simulation_of(device, cost)
        RULES[rule](simulation)
        heard = simulation.run(load_of(device, rate, seed))
        ended = [one for one in heard if isinstance(one.end, Finished)]
        ttfa_s += [one.ttfa_s or np.inf for one in ended]
        late_s += [one.late_s for one in ended]
    p50_s, p90_s = np.percentile(ttfa_s, (50, 90))
    return Row(1e3 * p50_s, 1e3 * p90_s, float(np.mean(np.array(late_s) < 1e-3)))


def told(job: tuple[str, str, float, int]) -> str:
    name, rule, factor, num_arrivals = job
    device = DEVICES[name]
    cost = times(device.cost, factor)
    rows = [without(rule, device, cost, rate, num_arrivals) for rate in device.rates]
    return f"{name:10} x {factor:g}  {rule:36} {'   '.join(map(str, rows))}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", nargs="+", choices=DEVICES, default=list(DEVICES))
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--arrivals", type=int, default=3, help="seeds of each load")
    parser.add_argument("--times", type=float, nargs="+", default=[1.0, 1.3])
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    jobs = [
        (device, rule, factor, options.arrivals)
        for device in options.devices
        for factor in options.times
        for rule in options.rules
    ]
    with ProcessPoolExecutor(options.processes) as pool:
        for row in pool.map(told, jobs):
            print(row, flush=True)


if __name__ == "__main__":
    main()
