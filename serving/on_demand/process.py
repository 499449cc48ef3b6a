"""The engine process of one model, from its start to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from serving import protocol
from serving.engine_client import EngineClient
from serving.settings import EngineArguments
from serving.supervisor import REFUSED, Child, command, how_it_ended, kill_if_hung

LOOK_S = 0.02
STOP_S = 3.0  # for an idle engine to end; less than the supervisor gives the gateway
STUCK_S = 1800.0  # an engine that is not ready by then is given up: no other model is loaded meanwhile


class NotLoaded(Exception):
    """The model cannot be loaded; the message says why."""


class EngineProcess:
    """An engine process and the connection to it. `running` opens both."""

    def __init__(self, name: str, arguments: EngineArguments, env: dict[str, str]):
        fds = [] if arguments.parent_fd is None else [arguments.parent_fd]
        started = command("serving.engine.engine_process", arguments)
        self.child = Child(f"engine of {name}", started, fds, env, is_proven=False)
        self.child.is_relayed = True  # its last line says why it cannot load the model
        self.socket = arguments.socket
        self.client = EngineClient(arguments.socket)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[int]]:
        """Run the process in this context. Yields the task that ends with it, with its exit status."""
        ending = asyncio.create_task(self.child.run())
        others = [
            asyncio.create_task(work) for work in (self.client.run(), self._watch(), kill_if_hung(self.child))
        ]
        try:
            yield ending
        finally:
            self.client.close("its model is being unloaded")
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            while self.child.process is None and not ending.done():  # it is being started
                await asyncio.sleep(LOOK_S)
            await self.child.stop(STOP_S)
            await ending
            with suppress(FileNotFoundError):
                Path(self.socket).unlink()

    async def ready(self, ending: asyncio.Task[int], told: Callable[[protocol.Status], None]) -> None:
        """Wait until the engine is ready. told: is called with each change of its status. Raises NotLoaded."""
        shown = protocol.Status("away")
        try:
            async with asyncio.timeout(STUCK_S):
                while shown.state != "ready":
                    if ending.done():
                        raise NotLoaded(self._why(ending.result()))
                    await asyncio.sleep(LOOK_S)
                    if shown != (status := self.client.status):
                        shown = status
                        told(status)
        except TimeoutError:
            raise NotLoaded(f"its engine was not ready after {STUCK_S:g} s") from None

    def _why(self, status: int) -> str:
        if status == REFUSED and self.child.last_line:
            return self.child.last_line
        return f"its engine ended {how_it_ended(status)} before it was ready; the log says more"

    async def _watch(self) -> None:
        """Note the signs of life of an engine that is ready. Runs until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            is_ready = self.client.is_ready
            self.child.silent_s = int(self.client.silent_s) if is_ready else None
