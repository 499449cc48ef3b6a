"""The parts of a soak and their times. All of it follows from the seed and from the time."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass

from tests.soak.kinds import KINDS, Kind

# Of the capacity. Every cycle has each of them for the same time, and ends with the queue empty.
LEVELS = (1.0, 5.0, 2.0, 0.5, 0.1)
WARMUP_SHARE, LOAD_SHARE = 0.1, 0.65  # of the time; the rest is for open requests to end, and for kills
LEAST_KILLS_S = 20.0
LAST_S = 10.0  # for the last requests to end
CYCLE_S = 120.0  # a cycle has at most this length, and every third of the load has as many cycles
ROUND_S = 75.0  # of kills: the supervisor forgives deaths that are a minute apart
STRIKES: tuple[tuple[str, signal.Signals], ...] = (
    ("engine", signal.SIGKILL),
    ("http", signal.SIGKILL),
    ("engine", signal.SIGSTOP),  # followed by SIGCONT
)
MORE_STRIKES = {  # by what the soak must have
    "on demand": ("model on demand", signal.SIGKILL),
    "works": ("process of a work", signal.SIGKILL),
}


@dataclass(frozen=True)
class Plan:
    """abilities: what the soak has beyond speech (`Material.abilities`)."""

    seed: int
    duration_s: float
    abilities: frozenset[str] = frozenset()

    @property
    def warmup_s(self) -> float:
        return WARMUP_SHARE * self.duration_s

    def kills_s(self, now_s: float) -> float:
        """Return the time for kills that is left."""
        return max(LEAST_KILLS_S, self.duration_s - LAST_S - now_s)

    @property
    def num_cycles(self) -> int:
        """A multiple of three, because the first and the last third are compared."""
        return 3 * max(1, round(LOAD_SHARE * self.duration_s / (3 * CYCLE_S)))

    @property
    def rungs(self) -> list[tuple[float, float]]:
        """The (level, seconds) of the load, one after the other."""
        rung_s = LOAD_SHARE * self.duration_s / (self.num_cycles * len(LEVELS))
        return [(level, rung_s) for _ in range(self.num_cycles) for level in LEVELS]

    @property
    def strikes(self) -> list[tuple[str, signal.Signals]]:
        return [*STRIKES, *(strike for name, strike in MORE_STRIKES.items() if name in self.abilities)]

    def request(self, index: int) -> tuple[str, Kind, random.Random]:
        """Return the kind of request number `index`, and its chances."""
        chance = random.Random(f"{self.seed} request {index}")
        kinds = {name: kind for name, kind in KINDS.items() if kind.needs in ("", *self.abilities)}
        [name] = chance.choices(list(kinds), [kind.weight for kind in kinds.values()])
        return name, kinds[name], chance
