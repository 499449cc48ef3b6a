"""A worker process of the load client. It makes its share of the requests and measures its own delays.

    python -m serving.tools.load.worker

Each line on stdin is a `Job`. The worker prints `READY` once, `Ended` when a request ends, and `Done` after
the last one of a job. When stdin closes, it reports the records so far and exits. Only the parent handles
Ctrl-C.
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
MAX_LINE_BYTES = 1 << 26  # a job can hold a recording as base64


class Arrival(msgspec.Struct, array_like=True):
    """A request of an open loop."""

    index: int
    at_s: float  # seconds from the start


class Stream(msgspec.Struct, array_like=True):
    """A listener of a closed loop. It makes requests first, first + step, ... below `end`, one after the
    other, until `until_s`."""

    first: int
    step: int
    end: int | None
    until_s: float | None  # seconds from the start


class Job(msgspec.Struct):
    """A worker's share of a rung: either arrivals or streams."""

    target: Target
    work: Work
    start_s: float  # on the monotonic clock, which all processes share
    arrivals: list[Arrival] = []
    streams: list[Stream] = []


class Effort(msgspec.Struct):
    """The load on this process during a job. If it is high, the client was measured instead of the server."""

    cpu_share: float  # of one core
    lag_p99_ms: float  # delay of the event loop, measured with a tick every 5 ms
    late_p99_ms: float  # delay of requests behind the plan


class Ended(msgspec.Struct, tag=True):
    """A request ended."""

    record: Record


class Done(msgspec.Struct, tag=True):
    """A job is done."""

    effort: Effort


Emit = Callable[[Ended | Done], None]
job_decoder = msgspec.json.Decoder(Job)
line_decoder = msgspec.json.Decoder(Ended | Done)


async def run(job: Job, emit: Emit, lates_s: list[float]) -> None:
    """Make all requests of a job. If cancelled, it ends the open requests and emits their records too."""
    async with connections(job.target) as usual, connections(job.target, is_slow=True) as slow:

        async def ask(index: int, submitted_s: float) -> Record:
            planned = job.work.request(index)
            session = slow if planned.role == "slow" else usual
            record = await speak(session, job.target, planned, index, submitted_s)
            lates_s.append(record.sent_s - submitted_s)
            emit(Ended(record))
            return record

        async def follow(stream: Stream) -> None:
            """Make the next request as soon as an answer is complete."""
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
    """Sleep until a time. It never wakes early, although uvloop rounds timers to milliseconds."""
    while (left_s := at_s - time.monotonic()) > 0:
        await asyncio.sleep(left_s)


async def watch(lags_s: list[float]) -> None:
    """Record the delay of the event loop until cancelled."""
    while True:
        due_s = time.monotonic() + TICK_S
        await asyncio.sleep(TICK_S)
        lags_s.append(time.monotonic() - due_s)


async def work(job: Job, emit: Emit, stop: asyncio.Future[bytes]) -> None:
    """Run a job until it or `stop` is done."""
    lags_s: list[float] = []
    lates_s: list[float] = []
    watching = asyncio.create_task(watch(lags_s))
    await sleep_until(job.start_s)
    cpu_s = time.process_time()
    began_s = time.monotonic()
    running = asyncio.create_task(run(job, emit, lates_s))
    await asyncio.wait((running, stop), return_when=asyncio.FIRST_COMPLETED)
    wall_s = time.monotonic() - began_s
    cpu_s = time.process_time() - cpu_s
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
