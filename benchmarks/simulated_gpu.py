"""Compare the simulator with a GPU that was measured, and simulate other rules at the same costs.

    python -m benchmarks.simulated_gpu benchmarks/results/2026-11-26-h200-128-slots.json [--families NAME ...]
        [--rules NAME ...] [--renders-part 0.5] [--seconds 6] [--arrivals 1] [--processes 2]

The costs are the launches that benchmarks/device.py timed, each alone. The real engine runs on a virtual clock,
and steps and renders share the device (serving/tools/simulated_device.py). The loads are those of device.py:
streams that begin together or are each followed by the next, and random arrivals.

--rules are those of benchmarks/rules.py, of which each is left out in turn. --seconds is the length of a load; of
streams that follow each other, the first 2 s do not count. --arrivals is the number of seeds of random arrivals.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.launch_costs import render_s
from benchmarks.rehearsal.costs import Counts
from benchmarks.rules import RULES
from benchmarks.simulated_loads import Experience, arrivals, followed, together, voice_of
from serving.tools.simulate import Cost, Simulation, use_gpu_rules
from serving.tools.simulated_device import RENDERS_PART, SimulatedDevice

COUNTS = Path(__file__).parent / "counts"  # has the windows of each family
RESULTS = Path(__file__).parent / "results"
SPEECH_S, RAMP_S = 4.2, 2.0  # as in device.py
ALL_RULES = "all rules"


def timed(figures: dict[str, Any], name: str) -> dict[tuple[int, ...], float]:
    """Return the seconds of the launches of a kind, by their sizes."""
    found = (re.fullmatch(rf"{name} ([\d ]+), ms", key) for key in figures)
    return {tuple(map(int, match[1].split())): figures[match[0]] / 1e3 for match in found if match}


def recorded(seconds: dict[tuple[int, ...], float]) -> Callable[[int], float]:
    """Return the time of a launch: that of the smallest recorded one that has room."""
    known = sorted((size, took_s) for (size,), took_s in seconds.items())
    return lambda size: next((took_s for room, took_s in known if room >= size), known[-1][1])


@dataclass(frozen=True)
class Measured:
    """A model that was measured. figures: those of device.py."""

    family: str
    figures: dict[str, Any]

    @property
    def counts(self) -> Counts:
        return Counts.read(COUNTS / f"{self.family}.json")

    @property
    def speech_frames(self) -> int:
        return round(SPEECH_S / self.counts.frame_s)

    @property
    def slots(self) -> int:
        return max(slots for (slots,) in timed(self.figures, "step"))

    @property
    def renders_ms(self) -> dict[int, dict[int, float]]:
        """By frames and rows. A launch that was timed with several lengths of the past has the longest."""
        table: dict[int, dict[int, float]] = {}
        for (rows, frames, _), took_s in sorted(timed(self.figures, "render").items()):
            table.setdefault(frames, {})[rows] = 1e3 * took_s
        return table

    @property
    def cost(self) -> Cost:
        matches = (re.fullmatch(r"(\d+) streams", name) for name in self.figures)
        host_s = {
            int(match[1]): self.figures[match[0]]["host_ms_per_step"] / 1e3 for match in matches if match
        }
        fewest, most = min(host_s), max(host_s)
        each_s = (host_s[most] - host_s[fewest]) / (most - fewest)
        return Cost(
            step_s=recorded(timed(self.figures, "step")),
            prefill_s=self._added_s,
            prefill_alone_s=recorded(timed(self.figures, "prefill")),
            render_s=partial(render_s, self.renders_ms),
            turn_s=host_s[fewest] - fewest * each_s,
            turn_slot_s=each_s,
        )

    def _added_s(self, tokens: int) -> float:
        """Return what prompts add to a step. A result without mixed launches does not say it; then it is what
        the positions add to the shortest prefill."""
        if mixed := timed(self.figures, "mixed"):
            rows = max(rows for rows, _ in mixed)
            known = {(num,): took_s for (slots, num), took_s in mixed.items() if slots == rows}
            return recorded(known)(tokens) - timed(self.figures, "step")[(rows,)]
        alone = timed(self.figures, "prefill")
        return recorded(alone)(tokens) - min(alone.values())

    def simulation(self, rule: str, renders_part: float) -> Simulation:
        counts, table = self.counts, self.renders_ms
        voice = voice_of(counts.window, counts.frame_s, counts.sample_rate_hz)
        simulation = Simulation(voice, self.cost, True, {"max_slots": self.slots})
        simulation.model.runner.device = SimulatedDevice(renders_part)
        use_gpu_rules(simulation.model, simulation.cost, lambda frames: table[frames])
        RULES[rule](simulation)
        return simulation


def read(path: Path) -> Iterator[Measured]:
    """Yield the models of a result whose launches were timed."""
    for name, figures in json.loads(path.read_text()).items():
        if name.startswith("figures=") and timed(figures, "render"):
            yield Measured(name.split("=")[1], figures)


def shown(figures: dict[str, Any]) -> str:
    """Return what device.py found for a load."""
    rate = f"{figures['audio_s_per_s']:.0f} audio-s/s, " if "audio_s_per_s" in figures else ""
    ttfa_ms = figures["ttfa_ms"]
    if not isinstance(ttfa_ms, dict):
        ttfa_ms = {"p50": ttfa_ms, "p90": figures["ttfa_p90_ms"]}
    return f"{rate}first audio " + ", ".join(f"{q} {ms:.0f}" for q, ms in ttfa_ms.items()) + " ms"


def told(job: tuple[Measured, str, argparse.Namespace]) -> str:
    """Return two lines for each load that was measured."""
    measured, rule, options = job
    frames, seconds = measured.speech_frames, options.seconds
    lines = [measured.family if rule == ALL_RULES else f"{measured.family}, without: {rule}"]
    for name, figures in measured.figures.items():
        if match := re.fullmatch(r"(\d+) streams, each followed by the next", name):
            simulation = measured.simulation(rule, options.renders_part)
            rate, heard = followed(simulation, int(match[1]), frames, seconds, RAMP_S)
            lines.append(f"  {name}: {rate:.0f} audio-s/s, {Experience.of(heard)}")
        elif match := re.fullmatch(r"([\d.]+) requests a second", name):
            heard = []
            for seed in range(options.arrivals):
                simulation = measured.simulation(rule, options.renders_part)
                heard += arrivals(simulation, float(match[1]), frames, seconds, seed)
            lines.append(f"  {name}: {Experience.of(heard)}")
        elif match := re.fullmatch(r"(\d+) streams", name):
            simulation = measured.simulation(rule, options.renders_part)
            heard = together(simulation, int(match[1]), frames)
            rate = sum(one.audio_s for one in heard) / simulation.clock.now_s
            lines.append(f"  {name} that begin together: {rate:.0f} audio-s/s, {Experience.of(heard)}")
        else:
            continue
        lines.append(f"    measured: {shown(figures)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path)
    parser.add_argument("--families", nargs="+")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=[ALL_RULES])
    parser.add_argument("--renders-part", type=float, default=RENDERS_PART)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--arrivals", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    if not options.result.is_file():
        parser.error(f"{options.result} is no file; results of benchmarks/device.py are in {RESULTS}")
    known = list(read(options.result))
    unknown = set(options.families or ()) - {measured.family for measured in known}
    if not known or unknown:
        there = ", ".join(measured.family for measured in known) or "none"
        parser.error(f"{options.result} has launch times of these families: {there}")
    models = [measured for measured in known if not options.families or measured.family in options.families]
    jobs = [(measured, rule, options) for measured in models for rule in options.rules]
    with ProcessPoolExecutor(options.processes) as pool:
        for lines in pool.map(told, jobs):
            print(lines, flush=True)


if __name__ == "__main__":
    main()
