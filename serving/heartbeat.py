"""Tell the supervisor that a process's event loop still runs: a byte a second through a pipe."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress

PERIOD_S = 1.0


async def beat(fd: int) -> None:
    """Write to the pipe's end `fd` every PERIOD_S, until cancelled or until the supervisor has ended."""
    os.set_blocking(fd, False)
    with suppress(BrokenPipeError):  # the supervisor has ended, and this process is about to
        while True:
            with suppress(BlockingIOError):  # the supervisor has not read for a day
                os.write(fd, b".")
            await asyncio.sleep(PERIOD_S)


def listen(fd: int, heard: Callable[[], None]) -> None:
    """Call `heard` in this event loop whenever something has arrived at the pipe's end `fd`."""

    def take() -> None:
        os.read(fd, 1 << 16)
        heard()

    asyncio.get_running_loop().add_reader(fd, take)
