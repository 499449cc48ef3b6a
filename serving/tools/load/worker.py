"""A process of the load client: it makes its share of the requests and watches itself meanwhile.

    python -m serving.tools.load.worker

Each line on stdin is a `Job`; on stdout it says `READY` once, then `Ended` as requests end, and after the last one of a job
`Done`. The end of stdin means: hand in what there is, and go. Ctrl-C is the parent's.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Callable

import msgspec
import numpy as np
import uvloop

from serving.tools.load.client import Target, connections, speak
from serving.tools.load.metrics import Record
from serving.tools.load.plan import Work

TICK_S = 0.005
READY = b"ready\n"
MAX_LINE_BYTES = 1 << 26  # a recording as base64 is in a job


class Arrival(msgspec.Struct, array_like=True):
    """A request of an open loop."""

    index: int
    at_s: float  # from the start


class Stream(msgspec.Struct, array_like=True):
    """Of a closed loop: requests first, first + step, ... one after the other, below `end` and until `until_s`."""

    first: int
    step: int
    end: int | None
    until_s: float | None  # from the start


class Job(msgspec.Struct):
    """Either arrivals or streams. start_s: of the monotonic clock, which all processes share."""

    target: Target
    work: Work
    start_s: float
    arrivals: list[Arrival] = []
    streams: list[Stream] = []


class Effort(msgspec.Struct):
    """What the job cost this process: where it is much, the client was measured and not the server."""

    cpu_share: float  # of one core
    lag_p99_ms: float  # of the event loop, behind a tick every 5 ms
    late_p99_ms: float  # of requests, behind the plan


class Ended(msgspec.Struct, tag=True):
    record: Record


class Done(msgspec.Struct, tag=True):
    effort: Effort


Emit = Callable[[Ended | Done], None]
job_decoder, line_decoder = msgspec.json.Decoder(Job), msgspec.json.Decoder(Ended | Done)


async def run(job: Job, emit: Emit, lates_s: list[float]) -> None:
    """All requests of a job. Cancelled, it ends those that are under way, and emits them too."""
    async with connections(job.target) as usual, connections(job.target, is_slow=True) as slow:

        async def ask(index: int, submitted_s: float) -> Record:
            planned = job.work.request(index)
            session = slow if planned.role == "slow" else usual
            record = await speak(session, job.target, planned, index, submitted_s)
            lates_s.append(record.sent_s - submitted_s)
            emit(Ended(record))
            return record

        async def follow(stream: Stream) -> None:
            """A listener who asks again as soon as an answer is over."""
            await sleep_until(job.start_s)
            for index in itertools.count(stream.first, stream.step):
                now_s = time.monotonic()
                if stream.end is not None and index >= stream.end:
                    return
                if stream.until_s is not None and now_s >= job.start_s + stream.until_s:
                    return
                if (await ask(index, now_s)).outcome == "interrupted":
                    return

        async with asyncio.TaskGroup() as tasks:
            for stream in job.streams:
                tasks.create_task(follow(stream))
            for arrival in job.arrivals:
                await sleep_until(job.start_s + arrival.at_s)
                tasks.create_task(ask(arrival.index, job.start_s + arrival.at_s))


async def sleep_until(at_s: float) -> None:
    """Never early: uvloop's timers are of whole milliseconds."""
    while (left_s := at_s - time.monotonic()) > 0:
        await asyncio.sleep(left_s)


async def watch(lags_s: list[float]) -> None:
    """How late the loop is, for as long as nobody cancels."""
    while True:
        due_s = time.monotonic() + TICK_S
        await asyncio.sleep(TICK_S)
        lags_s.append(time.monotonic() - due_s)


async def work(job: Job, emit: Emit, stop: asyncio.Future[bytes]) -> None:
    """A job, until it is done or `stop` is."""
    lags_s: list[float] = []
    lates_s: list[float] = []
    watching = asyncio.create_task(watch(lags_s))
    await sleep_until(job.start_s)
    cpu_s, began_s = time.process_time(), time.monotonic()
    running = asyncio.create_task(run(job, emit, lates_s))
    await asyncio.wait((running, stop), return_when=asyncio.FIRST_COMPLETED)
    wall_s, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
    running.cancel()
    watching.cancel()
    await asyncio.wait((running, watching))
    if not running.cancelled():
        running.result()
    emit(Done(Effort(cpu_s / wall_s, p99_ms(lags_s), p99_ms(lates_s))))


def p99_ms(values_s: list[float]) -> float:
    return 1e3 * float(np.quantile(values_s, 0.99)) if values_s else 0.0


async def main() -> None:
    reader = asyncio.StreamReader(MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )

    def emit(line: Ended | Done) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
        sys.stdout.buffer.flush()

    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    reading = asyncio.ensure_future(reader.readline())
    while line := await reading:
        reading = asyncio.ensure_future(reader.readline())
        await work(job_decoder.decode(line), emit, reading)


if __name__ == "__main__":
    uvloop.run(main())
