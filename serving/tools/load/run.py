"""`zoo load`: climb a ladder of rates or of streams, one rung after the other, with several processes.

    plan ─> jobs ─> workers (worker.py) ─> records ─> summary (metrics.py)      for each rung

An interrupted run returns the results so far.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from serving.tools.load.client import Target
from serving.tools.load.metrics import Record, Slo, summary
from serving.tools.load.plan import Work, poisson
from serving.tools.load.worker import (
    MAX_LINE_BYTES,
    READY,
    Arrival,
    Done,
    Effort,
    Ended,
    Job,
    Stream,
    line_decoder,
)

LEAD_S = 0.2  # for the workers to read a job before it starts
STOP_S = 5.0
WARMUP_S = 2.0  # default warm-up of an open loop

# If a worker exceeds one of these, the client may be the limit instead of the server.
MAX_CPU_SHARE = 0.8
MAX_LAG_MS = 10.0
MAX_LATE_MS = 10.0

MAX_WORKERS = 4  # default maximum

Progress = Callable[[float, str], None]  # takes the fraction done and the name of the next rung


class Rung(msgspec.Struct, frozen=True):
    """One rung of the ladder: arrivals per second, or concurrent streams."""

    rate: float | None = None
    streams: int | None = None

    @property
    def name(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g} requests/s"
        return f"{self.streams} stream" + "s" * (self.streams != 1)


class Plan(msgspec.Struct):
    """A run of `zoo load`.

    num_warmup: requests of each rung that do not count; None: two seconds of arrivals, or one per stream.
    """

    target: Target
    work: Work
    rungs: list[Rung]
    duration_s: float | None
    num_requests: int | None
    num_warmup: int | None = None
    num_workers: int = 1
    slo: Slo = Slo()

    def warmup(self, rung: Rung) -> int:
        """Return the number of requests that do not count."""
        if self.num_warmup is not None:
            return self.num_warmup
        return rung.streams or math.ceil(WARMUP_S * (rung.rate or 0.0))

    def jobs(self, rung: Rung, start_s: float) -> tuple[list[Job], float | None]:
        """Return a job for each worker, and how long an open loop submits requests that count, else None."""
        num_warmup = self.warmup(rung)
        count = self.num_workers
        jobs = [Job(self.target, self.work, start_s) for _ in range(count)]
        if rung.rate is not None:
            times = poisson(rung.rate, self.work.seed, num_warmup, self.duration_s, self.num_requests)
            for index, at_s in enumerate(times):
                jobs[index % count].arrivals.append(Arrival(index, at_s))
            begin_s = times[num_warmup - 1] if 0 < num_warmup <= len(times) else 0.0
            is_timed = self.num_requests is None or len(times) < num_warmup + self.num_requests
            assert self.duration_s is not None or not is_timed
            return jobs, self.duration_s if is_timed else times[-1] - begin_s
        assert rung.streams is not None
        end = None if self.num_requests is None else num_warmup + self.num_requests
        for first in range(rung.streams):
            jobs[first % count].streams.append(Stream(first, rung.streams, end, self.duration_s))
        return jobs, None


async def measure(plan: Plan, progress: Progress) -> tuple[list[dict[str, Any]], bool]:
    """Return the results of each rung, and whether the run was interrupted."""
    results: list[dict[str, Any]] = []
    async with Workers(plan.num_workers) as workers:
        for i, rung in enumerate(plan.rungs):
            progress(i / len(plan.rungs), rung.name)
            jobs, offered_s = plan.jobs(rung, time.monotonic() + LEAD_S)
            records, efforts, is_whole = await workers.work(jobs)
            results.append(judged(plan, rung, records, efforts, offered_s if is_whole else None))
            if not is_whole:
                return results, True
    return results, False


def judged(
    plan: Plan, rung: Rung, records: Sequence[Record], efforts: Sequence[Effort], offered_s: float | None
) -> dict[str, Any]:
    """Return the results of a rung."""
    num_warmup = plan.warmup(rung)
    counted = [record for record in records if record.index >= num_warmup]
    reasons = client_limits(efforts)
    details = {record.outcome: record.detail for record in counted if record.detail}
    return {
        "arrivals": "poisson" if rung.rate is not None else "closed",
        "rate_requests_per_s": rung.rate,
        "streams": rung.streams,
        "warmup_requests": len(records) - len(counted),
        "offered_s": offered_s,
        **summary(counted, plan.slo, offered_s),
        "failure_examples": details,
        "client_cpu_share": max((effort.cpu_share for effort in efforts), default=None),
        "client_lag_p99_ms": max((effort.lag_p99_ms for effort in efforts), default=None),
        "client_late_p99_ms": max((effort.late_p99_ms for effort in efforts), default=None),
        "client_is_limit": bool(reasons),
        "client_limits": reasons,
    }


def client_limits(efforts: Sequence[Effort]) -> list[str]:
    """Return why the client may have been the limit; empty if it had time to spare."""
    reasons = []
    for effort in efforts:
        if effort.cpu_share > MAX_CPU_SHARE:
            reasons.append(f"a worker used {effort.cpu_share:.0%} of a core; use more --workers")
        if effort.lag_p99_ms > MAX_LAG_MS:
            reasons.append(f"the event loop was {effort.lag_p99_ms:.0f} ms late (p99), and saw chunks late")
        if effort.late_p99_ms > MAX_LATE_MS:
            reasons.append(
                f"requests were sent {effort.late_p99_ms:.0f} ms late (p99), which counts as latency"
            )
    return sorted(set(reasons))


class Workers:
    """The worker processes of a run."""

    def __init__(self, count: int):
        self.count = count
        self.processes: list[Process] = []

    async def __aenter__(self) -> Workers:
        command = (sys.executable, "-m", "serving.tools.load.worker")
        for _ in range(self.count):
            self.processes.append(
                await asyncio.create_subprocess_exec(
                    *command, stdin=PIPE, stdout=PIPE, limit=MAX_LINE_BYTES, start_new_session=True
                )
            )
        for process in self.processes:
            assert process.stdout is not None
            if await process.stdout.readline() != READY:
                raise RuntimeError(f"a worker of the load client ended with status {await process.wait()}")
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop()
        ends = [asyncio.ensure_future(process.wait()) for process in self.processes]
        await asyncio.wait(ends, timeout=STOP_S)
        for process in self.processes:
            if process.returncode is None:
                process.kill()
        await asyncio.wait(ends)

    def stop(self) -> None:
        """Tell the workers to report their records so far and exit."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()

    async def work(self, jobs: Sequence[Job]) -> tuple[list[Record], list[Effort], bool]:
        """Run the jobs. Returns the records, each worker's effort, and whether the jobs completed without an
        interrupt. Raises RuntimeError if a worker dies."""
        records: list[Record] = []
        efforts: list[Effort] = []
        for process, job in zip(self.processes, jobs, strict=True):
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(job) + b"\n")
        reading = [asyncio.create_task(read(process, records, efforts)) for process in self.processes]
        is_whole = True
        try:
            await asyncio.wait(reading)
        except asyncio.CancelledError:  # Ctrl-C
            is_whole = False
            self.stop()
            await asyncio.wait(reading, timeout=STOP_S)
        for task in reading:
            if task.done():
                task.result()
            task.cancel()
        return records, efforts, is_whole


async def read(process: Process, records: list[Record], efforts: list[Effort]) -> None:
    """Read a worker's output until its job is done."""
    assert process.stdout is not None
    while line := await process.stdout.readline():
        match line_decoder.decode(line):
            case Ended(record):
                records.append(record)
            case Done(effort):
                efforts.append(effort)
                return
    raise RuntimeError(f"a worker of the load client ended with status {await process.wait()}")


def usable_workers() -> int:
    """Return the default number of workers. It leaves half the cores to a server on this machine."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, min(cores // 2, MAX_WORKERS))
