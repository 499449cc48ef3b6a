"""Routing among replicas, simulated: the real engines on virtual clocks, with the launch costs of an H200.

    python -m benchmarks.replicas [--replicas 1 2 4 8] [--rates 70 100 130] [--routing random least soonest] [--json]

Requests arrive at random, so many a second for each replica. Their voices follow Zipf's law; a third of the
voices are recordings, which a replica encodes at first use. `random` and `least` (the fewest open requests)
are what a load balancer without knowledge does; `soonest` is the server's own routing, with reports that are
up to a second old. A request that a replica refuses goes to the next one, in all three.

Goodput counts requests that were heard within half a second, without a gap of more than 50 ms.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace

import msgspec
import numpy as np

from benchmarks.rules import DEVICES, Device, load_of, simulation_of
from serving.cluster.routing import KNOWN_RECORDING_SAVES_S, KNOWN_VOICE_SAVES_S, Ask, Load, ranked
from serving.engine.engine import Finished, Full
from serving.engine.stats import model_stats
from serving.protocol import ModelStats
from serving.tools.simulate import Heard
from zoo.request import Request

NUM_VOICES = 500
ZIPF = 1.1
RECORDED = 3  # one voice in so many is a recording
# Assumed, not measured: for a recording on an H200, next to the streams.
ENCODE_S = 0.05
STATS_S = 1.0  # between an engine's reports
STARTING_S = 2.0  # of each run, which do not count: engines learn what launches cost
MAX_TTFA_S = 0.5
GAP_S = 0.05
MODEL = "voice"


@dataclass
class Arrival:
    """A request with its voice. is_recorded: the voice is a recording."""

    at_s: float
    request: Request
    voice: str
    is_recorded: bool

    @property
    def ask(self) -> Ask:
        saved_s = KNOWN_RECORDING_SAVES_S if self.is_recorded else KNOWN_VOICE_SAVES_S
        return Ask(MODEL, voice=self.voice, saved_s=saved_s)


@dataclass
class Replica:
    """A simulated engine, what routing knows of it, and requests whose recordings it encodes."""

    device: Device
    load: Load = field(default_factory=lambda: Load(is_ready=True))
    reported_s: float = -STATS_S
    encoding: list[tuple[float, Arrival]] = field(default_factory=list)
    heard: list[tuple[Arrival, Heard]] = field(default_factory=list)
    num_encoded: int = 0

    def __post_init__(self) -> None:
        self.simulation = simulation_of(self.device, self.device.cost)

    def advance(self, until_s: float) -> None:
        """Let the engine run until then. Requests whose recordings are encoded in between begin."""
        while self.encoding and self.encoding[0][0] <= until_s:
            ready_s, arrival = self.encoding.pop(0)
            self._run(ready_s)
            self._submit(arrival)
        self._run(until_s)
        if until_s - self.reported_s >= STATS_S:
            self.reported_s = until_s
            stats = model_stats(self.simulation.model)
            self.load.models = {MODEL: msgspec.convert(stats, ModelStats)}
        self.load.num_open = self.simulation.engine.num_requests + len(self.encoding)

    def _run(self, until_s: float) -> None:
        clock = self.simulation.clock
        while clock.now_s < until_s and self.simulation.engine.num_requests:
            self.simulation.turn()
        clock.now_s = max(clock.now_s, until_s)

    def take(self, arrival: Arrival) -> bool:
        """Begin a request, and return whether it was accepted."""
        is_known = arrival.voice in self.load.known
        self.load.learn(arrival.voice)
        self.load.num_open += 1
        if is_known or not arrival.is_recorded:
            return self._submit(arrival)
        self.num_encoded += 1
        self.encoding.append((arrival.at_s + ENCODE_S, arrival))
        return True

    def _submit(self, arrival: Arrival) -> bool:
        heard = self.simulation.submit(arrival.request)
        if isinstance(heard.end, Full):
            return False
        heard.submitted_s = arrival.at_s
        self.heard.append((arrival, heard))
        return True


Rank = Callable[[Ask, list[Replica], np.random.Generator], list[int]]


def at_random(ask: Ask, replicas: list[Replica], chance: np.random.Generator) -> list[int]:
    return [int(index) for index in chance.permutation(len(replicas))]


def fewest(ask: Ask, replicas: list[Replica], chance: np.random.Generator) -> list[int]:
    return sorted(at_random(ask, replicas, chance), key=lambda index: replicas[index].load.num_open)


def soonest(ask: Ask, replicas: list[Replica], chance: np.random.Generator) -> list[int]:
    names = ranked(ask, [(str(index), replica.load) for index, replica in enumerate(replicas)])
    return [int(name) for name in names]


ROUTING: dict[str, Rank] = {"random": at_random, "least": fewest, "soonest": soonest}


@dataclass(frozen=True)
class Row:
    """What the listeners had. rate and goodput: requests a second of all replicas together."""

    routing: str
    replicas: int
    rate: float
    goodput: float
    ttfa_p50_ms: float
    ttfa_p95_ms: float
    refused: float
    encoded: int


def arrivals_of(device: Device, rate: float, seed: int) -> list[Arrival]:
    chance = np.random.default_rng(seed)
    shares = 1 / np.arange(1, NUM_VOICES + 1) ** ZIPF
    found = []
    for at_s, request in load_of(device, rate, seed):
        voice = int(chance.choice(NUM_VOICES, p=shares / shares.sum()))
        found.append(Arrival(at_s, request, f"voice {voice}", voice % RECORDED == 0))
    return found


def run(routing: str, count: int, rate: float, seconds: float, seed: int = 0) -> Row:
    """Simulate `count` replicas with `rate` requests a second each."""
    device = replace(DEVICES["h200"], seconds=seconds)
    replicas = [Replica(device) for _ in range(count)]
    arrivals = arrivals_of(device, rate * count, seed)
    chance = np.random.default_rng(seed)
    num_refused = 0
    for arrival in arrivals:
        for replica in replicas:
            replica.advance(arrival.at_s)
        order = ROUTING[routing](arrival.ask, replicas, chance)
        num_refused += not any(replicas[index].take(arrival) for index in order)
    for replica in replicas:
        replica.advance(seconds + 1000)
    return row_of(routing, rate, seconds, replicas, num_refused / len(arrivals))


def row_of(routing: str, rate: float, seconds: float, replicas: list[Replica], refused: float) -> Row:
    pairs = (pair for replica in replicas for pair in replica.heard)
    counted = [heard for arrival, heard in pairs if arrival.at_s >= STARTING_S]
    ttfa_ms = [1e3 * (heard.ttfa_s or np.inf) for heard in counted]
    good = sum(
        isinstance(heard.end, Finished) and ms <= 1e3 * MAX_TTFA_S and heard.late_s <= GAP_S
        for heard, ms in zip(counted, ttfa_ms, strict=True)
    )
    p50_ms, p95_ms = np.percentile(ttfa_ms, (50, 95))
    count = len(replicas)
    goodput = good / (seconds - STARTING_S)
    encoded = sum(replica.num_encoded for replica in replicas)
    return Row(routing, count, rate * count, goodput, float(p50_ms), float(p95_ms), refused, encoded)


def report(row: Row, one: dict[float, Row]) -> str:
    """Return a line; the goodput is also given relative to that of as many single replicas."""
    alone = one.get(row.rate / row.replicas)
    of_alone = f"{row.goodput / row.replicas / alone.goodput:6.3f}" if alone else "     -"
    return (
        f"{row.routing:8} N {row.replicas}  {row.rate:5.0f}/s  goodput {row.goodput:6.1f}/s = N x {of_alone}  "
        f"first audio p50 {row.ttfa_p50_ms:5.0f} p95 {row.ttfa_p95_ms:6.0f} ms  refused {row.refused:6.2%}  "
        f"encoded {row.encoded}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rates", type=float, nargs="+", default=[70.0, 100.0, 130.0], help="of a replica")
    parser.add_argument("--routing", nargs="+", choices=ROUTING, default=list(ROUTING))
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    jobs = [
        (routing, count, rate, options.seconds)
        for count in options.replicas
        for rate in options.rates
        for routing in options.routing
    ]
    rows: list[Row] = []
    one: dict[float, Row] = {}
    with ProcessPoolExecutor(options.processes) as pool:
        for row in pool.map(run, *zip(*jobs, strict=True)):
            rows.append(row)
            if row.replicas == 1:
                one[row.rate] = row
            if not options.json:
                print(report(row, one), flush=True)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
