"""Kill a process that comes and goes: that of a model on demand, or one that reads or joins a work."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from tests.attack.target import command_line
from tests.soak import demand
from tests.soak.answers import READY_S, UNAVAILABLE
from tests.soak.watched import Watched, alive

if TYPE_CHECKING:
    from tests.soak.run import Soak

WORK_PROCESS = "serving.books.process"
FOUND_S = 60.0  # for a process to appear
LOOK_S = 0.05
RETRY_S = 0.5


async def strike_model(soak: Soak, number: signal.Signals) -> bool:
    """Kill the process of a model while it loads or speaks. Return whether the model speaks again."""
    server = soak.client.material.demand
    assert server is not None, "no models on demand"
    name = next(iter(demand.MODELS))

    async def speak() -> None:
        await demand.speak(soak.client.session, server, name)

    speaking = asyncio.create_task(speak())
    is_killed = await killed(server, demand.ENGINE, number)
    await asyncio.gather(speaking, return_exceptions=True)
    return is_killed and await succeeds(soak, speak)


async def strike_work(soak: Soak, number: signal.Signals) -> bool:
    """Kill a process of a work. Return whether the server takes the next document."""

    async def add() -> None:
        path = await soak.client.library.added()
        await soak.client.library.called("DELETE", path)

    adding = asyncio.create_task(add())
    is_killed = await killed(soak.server, WORK_PROCESS, number)
    await asyncio.gather(adding, return_exceptions=True)
    return is_killed and await succeeds(soak, add)


STRIKE = {"model on demand": strike_model, "process of a work": strike_work}


async def killed(server: Watched, module: str, number: signal.Signals) -> bool:
    """Kill the first process below a server that runs a module. Return whether one was found in time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(FOUND_S):
            while True:
                for pid in alive(server.process.pid):
                    if module in command_line(pid):
                        with suppress(ProcessLookupError):
                            os.kill(pid, number)
                            return True
                await asyncio.sleep(LOOK_S)
    return False


async def succeeds(soak: Soak, act: Callable[[], Awaitable[None]]) -> bool:
    """Return whether an act succeeds within the time for a server to be ready again."""
    end_s = soak.now_s + READY_S
    while soak.now_s < end_s:
        try:
            await act()
        except UNAVAILABLE:
            await asyncio.sleep(RETRY_S)
        else:
            return True
    return False
