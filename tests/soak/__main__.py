"""Load a server on this machine for hours with clients of every kind, and check that nothing is lost or left.

    python -m tests.soak --hours 1 [--compile] [--output DIR] [--seed 0] [--models NAME ...]
    python -m tests.soak --minutes 2

Every answer is compared with the first answer to the same request. Memory, descriptors, threads, slots, pages
and first audio must stay flat, and the idle server must hold what it held before. The server is a `zoo serve`
with tiny demo checkpoints on a loopback port. It ends with the soak, also after Ctrl-C.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from tests.attack.report import table
from tests.soak import judge, report
from tests.soak.cases import record
from tests.soak.clients import Material
from tests.soak.conversations import record_talks
from tests.soak.demand import OnDemand
from tests.soak.hostile import corpus
from tests.soak.plan import Plan
from tests.soak.run import Run, soaked
from tests.soak.server import MODELS, SHORT_FORM, Soaked
from tests.soak.works import record_work, volume_of

SHORT_S = 600.0  # a shorter soak has the models of SHORT_FORM, and speech alone, by default
INTERRUPTED = 130


def main(arguments: Sequence[str]) -> int:
    options = parsed(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs ignore the first one
        signal.signal(number, signal.default_int_handler)
    duration_s = 3600 * options.hours + 60 * options.minutes
    is_full = options.full or duration_s >= SHORT_S
    models = options.models or (list(MODELS) if is_full else list(SHORT_FORM))
    run = Run(Plan(options.seed, duration_s))
    said = report.About("python -m tests.soak " + " ".join(arguments), models, datetime.now(UTC))
    server, is_interrupted = None, False
    with tempfile.TemporaryDirectory(prefix="zoo-soak-") as directory:
        try:
            with started(models, Path(directory), options.compile, is_full) as server:
                soak(server, run)
        except KeyboardInterrupt:
            is_interrupted = True
    report.write(options.output, said, run, server.logged if server else [])
    print(table(judge.rows(run)))
    for one in [one for one in run.ended if one.wrong][:20]:
        print(f"request {one.index} ({one.kind}, {one.part}, {one.at_s:.0f} s): {one.wrong[:300]}")
    return INTERRUPTED if is_interrupted else int(judge.failed(run))


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="determines the requests and their arrivals")
    parser.add_argument("--models", nargs="+", choices=MODELS, metavar="NAME", help=f"of {', '.join(MODELS)}")
    parser.add_argument(
        "--full",
        action="store_true",
        help="all models, works and models on demand also in a run of less than 10 minutes",
    )
    parser.add_argument("--compile", action="store_true", help="compile the models first (minutes)")
    parser.add_argument("--output", type=Path, default=Path("soak"), help="directory of the report")
    options = parser.parse_args(arguments)
    if options.hours + options.minutes <= 0:
        parser.error("give --hours or --minutes")
    return options


@contextmanager
def started(models: Sequence[str], directory: Path, is_compiled: bool, is_full: bool) -> Iterator[Soaked]:
    """Run the server, and the one of models on demand next to it if the soak is full."""
    with ExitStack() as stack:
        server = Soaked(models, directory, is_compiled=is_compiled, has_works=is_full)
        stack.enter_context(server)
        if is_full:
            server.demand = stack.enter_context(OnDemand(directory))
        yield server


def soak(server: Soaked, run: Run) -> None:
    """Record the first answers, and run all parts."""
    began_s = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began_s:7.0f} s  {line}", file=sys.stderr, flush=True)

    hostile = corpus(server.url, run.plan.seed)
    cases = record(server.http)
    if not any(case.has_kept_voice for case in cases):
        raise SystemExit("no model clones voices: add one to --models, for example higgs_v3")
    talks = record_talks(server.http)
    volume = record_work(server.http, volume_of(cases)) if server.has_works else None
    if server.demand is not None:
        server.demand.record()
    material = Material(cases, hostile, talks, volume, server.demand)
    run.plan = replace(run.plan, abilities=material.abilities)
    damaged = f"{len(hostile.recordings)} damaged recordings, {len(hostile.bodies)} invalid bodies"
    more = ", ".join(sorted(material.abilities)) or "nothing else"
    say(f"{len(cases)} first speeches, {len(talks)} first answers, {damaged}; next to speech: {more}")
    soaked(server, material, run, say)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
