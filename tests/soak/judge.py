"""Judge what a soak has seen: every answer, every curve, and the server after the load."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tests.attack.report import Row
from tests.soak.run import Ended, Run, counts, exceeding
from tests.soak.server import Process, Sample

PROCESSES = ("supervisor", "engine", "http")
ON_DEMAND = ("gateway on demand", "http on demand")  # of the second server, if the soak has it
MIN_SAMPLES = 6  # of a third, else there are no curves
MIN_LOAD_SAMPLES = 200  # of a third, else a curve that follows the load is shown but not judged
MIN_HEARD = 100  # first audios of a third, else their p95 is not judged
MAX_BACK_S = 60.0
MAX_NAMES = 5  # of files, in full
TOO_FEW = "too few to judge"


@dataclass(frozen=True)
class Tolerance:
    """How much more than the first third's median the last third's may be: a share of it plus a constant."""

    share: float
    plus: float

    def most(self, first: float) -> float:
        return first * (1 + self.share) + self.plus


@dataclass(frozen=True)
class Curve:
    name: str
    unit: str
    tolerance: Tolerance
    value: Callable[[Sample], float]
    follows_load: bool = False  # few samples say little about it


def of_process(process: str, name: str) -> Callable[[Sample], float]:
    return lambda found: float(getattr(found.processes[process], name)) if process in found.processes else 0.0


def in_state(state: str) -> Callable[[Sample], float]:
    return lambda found: found.requests.get(state, 0.0)


CURVES = (
    *(
        Curve(f"{process}: memory", "MiB", Tolerance(0.10, 24), of_process(process, "resident_mib"))
        for process in (*PROCESSES, *ON_DEMAND)
    ),
    # processes that decode recordings, which come and go
    Curve(
        "others: memory", "MiB", Tolerance(0.25, 64), of_process("others", "resident_mib"), follows_load=True
    ),
    *(
        Curve(f"{process}: {name}", "", Tolerance(0.5, 12), of_process(process, name), follows_load=True)
        for name in ("descriptors", "sockets", "threads")
        for process in ("engine", "http", *ON_DEMAND)
    ),
    Curve("requests with a slot", "", Tolerance(0.5, 4), in_state("running"), follows_load=True),
    Curve("queued requests", "", Tolerance(0.5, 8), in_state("waiting"), follows_load=True),
    Curve("pages in use", "", Tolerance(0.5, 32), lambda found: found.pages, follows_load=True),
    Curve("WebSocket sessions", "", Tolerance(0.5, 8), lambda found: found.sessions, follows_load=True),
    Curve("disk", "MiB", Tolerance(0.1, 4), lambda found: found.disk_mib),
)
TTFA = Tolerance(0.5, 0.5)  # of p95, in seconds
IDLE_MEMORY = Tolerance(0.25, 48)  # MiB of a process after the load, compared with after the warm-up
CPUS = os.cpu_count() or 2
# Pools grow to their limits, and keep idle threads. The HTTP process has the most: asyncio's own, one that
# encodes and one that reads bodies. Before Python 3.12 a thread waits for the end of each decoder process.
IDLE_THREADS = Tolerance(0, min(32, CPUS + 4) + CPUS + 2 * max(1, CPUS // 2))


def rows(run: Run) -> list[Row]:
    return [*requests(run.ended), *strikes(run), *curves(run), *first_audio(run), *idle(run), *log(run)]


def failed(run: Run) -> bool:
    return not run.is_complete or any(row.failed for row in rows(run))


def requests(ended: Sequence[Ended]) -> list[Row]:
    """Return a row for each kind of request, with what became of it."""
    found = []
    for kind in sorted({one.kind for one in ended}):
        mine = [one for one in ended if one.kind == kind]
        seen = Counter("wrong" if one.wrong else one.how for one in mine)
        text = ", ".join(f"{number} {how}" for how, number in seen.most_common())
        found.append(Row(kind, len(mine), sum(bool(one.wrong) for one in mine), text))
    return found


def strikes(run: Run) -> list[Row]:
    found = []
    for name in sorted({strike.name for strike in run.strikes}):
        times = [strike.back_s for strike in run.strikes if strike.name == name]
        late = [back_s for back_s in times if back_s is None or back_s > MAX_BACK_S]
        seen = ", ".join("not back" if back_s is None else f"{back_s:.1f} s" for back_s in times)
        found.append(Row(name, len(times), len(late), f"ready again after {seen}"))
    return found


def thirds(run: Run) -> tuple[list[Sample], list[Sample]]:
    """Return the samples of the first and of the last third of the load."""
    begin_s, end_s = run.parts.get("load", (0.0, 0.0))
    # the load alone, without the time until its last requests have ended
    end_s = min(end_s, begin_s + sum(duration_s for _, duration_s in run.plan.rungs))
    third_s = (end_s - begin_s) / 3
    first = [one for one in run.samples if begin_s <= one.at_s < begin_s + third_s]
    last = [one for one in run.samples if end_s - third_s <= one.at_s < end_s]
    return first, last


def curves(run: Run) -> list[Row]:
    first, last = thirds(run)
    if min(len(first), len(last)) < MIN_SAMPLES:
        return []
    found = []
    has_demand = any(name in first[0].processes for name in ON_DEMAND)
    for curve in CURVES:
        if "on demand" in curve.name and not has_demand:
            continue
        before, after = (statistics.median(map(curve.value, part)) for part in (first, last))
        most = curve.tolerance.most(before)
        is_judged = not curve.follows_load or min(len(first), len(last)) >= MIN_LOAD_SAMPLES
        limit = f"at most {most:.1f}" if is_judged else TOO_FEW
        seen = f"median {before:.1f}, then {after:.1f} {curve.unit}".rstrip() + f" ({limit})"
        found.append(Row(curve.name, len(first) + len(last), int(is_judged and after > most), seen))
    return found


def listeners(ended: Sequence[Ended]) -> list[Ended]:
    """Return the ordinary streams that were heard."""
    return [one for one in ended if one.kind == "stream" and one.ttfa_s]


def first_audio(run: Run) -> list[Row]:
    """Compare p95 of first audio where the server has capacity. Few listeners are shown but not judged."""
    begin_s, end_s = run.parts.get("load", (0.0, 0.0))
    third_s = (end_s - begin_s) / 3
    heard = [one for one in listeners(run.ended) if one.part == "load" and one.level <= 1]
    first = [one.ttfa_s or 0.0 for one in heard if one.at_s < begin_s + third_s]
    last = [one.ttfa_s or 0.0 for one in heard if one.at_s >= end_s - third_s]
    if not first or not last:
        return []
    before, after = (float(np.quantile(part, 0.95)) for part in (first, last))
    is_judged = min(len(first), len(last)) >= MIN_HEARD
    seen = f"{before:.2f}, then {after:.2f} s" + (
        f" (at most {TTFA.most(before):.2f})" if is_judged else f" ({TOO_FEW})"
    )
    name = "first audio, p95, up to the capacity"
    return [Row(name, len(first) + len(last), int(is_judged and after > TTFA.most(before)), seen)]


def idle(run: Run) -> list[Row]:
    """Compare the idle server after the load and after the kills with the one after the warm-up."""
    before, found = run.idle.get("warm-up"), []
    for part in ("load", "kills"):
        if part in run.idle and before is not None:
            new = set(run.files.get(part, ())) - set(run.files.get("warm-up", ()))
            found.append(idle_again(f"idle after the {part}", before, run.idle[part], sorted(new)))
    return found


def idle_again(name: str, before: Sample, after: Sample | None, new: Sequence[str] = ()) -> Row:
    """new: files that were not there before."""
    if after is None:
        return Row(name, 1, 1, "the server does not say what it holds")
    differ = exceeding(before, after)
    if after.files > before.files:
        differ[-1] += f" ({', '.join(new[:MAX_NAMES])})"
    watched = [name for name in (*PROCESSES, *ON_DEMAND) if name in before.processes]
    for process in watched:
        was, now = before.processes[process], after.processes.get(process, Process())
        if now.resident_mib > IDLE_MEMORY.most(was.resident_mib):
            differ.append(f"{process}: memory {was.resident_mib:.0f}, then {now.resident_mib:.0f} MiB")
        if now.threads > IDLE_THREADS.most(was.threads):
            differ.append(f"{process}: threads {was.threads}, then {now.threads}")
    num = len(counts(before)) + 2 * len(watched)
    return Row(
        name,
        num,
        len(differ),
        "; ".join(differ)
        or "no more than before: slots, pages, sessions, works, models, descriptors, sockets, files",
    )


def log(run: Run) -> list[Row]:
    """Count errors in the log, without the part in which processes were killed."""
    found = {part: number for part, number in run.num_errors.items() if part != "kills"}
    seen = ", ".join(f"{number} in the {part}" for part, number in found.items())
    return [Row("errors in the log", len(found), sum(found.values()), seen)]
