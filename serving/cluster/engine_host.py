"""The engine process of a replica. A thread starts, watches and restarts it as the supervisor does, and
gateways reach it through a relay."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import Future

from serving import protocol
from serving.cluster.link import Address
from serving.cluster.relay import Relay
from serving.engine_client import EngineClient
from serving.settings import EngineArguments, Settings
from serving.supervisor import KILL_AFTER_S, Child, command, kill_if_hung, log_line, pipe, socket_directory

LOOK_S = 0.1


class EngineHost:
    """An engine process. `start` returns once it is ready, and `stop` once it has ended."""

    def __init__(self, settings: Settings, host: str):
        """host: this machine's address, on which gateways reach it."""
        self.settings = settings
        self.host = host
        self.ready: Future[Address] = Future()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="engine", daemon=True)

    def start(self) -> Address:
        """Return where gateways connect. Raises ValueError if the engine ends before it is ready."""
        self.thread.start()
        return self.ready.result()

    @property
    def is_alive(self) -> bool:
        """Whether there is an engine, or one is being started again."""
        return self.thread.is_alive()

    @property
    def stats(self) -> protocol.Stats | None:
        return self.client.stats

    def stop(self) -> None:
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.stopping.set)
            self.thread.join(2 * KILL_AFTER_S)

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.stopping = asyncio.Event()
        with socket_directory() as directory, pipe() as (parent_fd, _):
            path = f"{directory}/engine.sock"
            settings = EngineArguments(self.settings, path, parent_fd)
            started = command("serving.engine.engine_process", settings)
            engine = Child("engine", started, [parent_fd], dict(os.environ), is_proven=False)
            self.client = EngineClient(path)
            await self._supervise(engine, Relay(path))

    async def _supervise(self, engine: Child, relay: Relay) -> None:
        """Run until the engine ends for good, or is to stop."""
        address = Address(self.host, await relay.listen(self.host), relay.token)
        ending = asyncio.create_task(engine.supervise())
        watching = [
            asyncio.create_task(self._watch(engine, address)),
            asyncio.create_task(kill_if_hung(engine)),
            asyncio.create_task(self.client.run()),
        ]
        stopping = asyncio.create_task(self.stopping.wait())
        await asyncio.wait([ending, stopping], return_when=asyncio.FIRST_COMPLETED)
        await engine.stop(KILL_AFTER_S)
        await relay.connections.close()
        for task in (*watching, stopping):
            task.cancel()
        if not self.ready.done():
            self.ready.set_exception(
                ValueError("the engine of a replica ended before it was ready; see the log")
            )

    async def _watch(self, engine: Child, address: Address) -> None:
        """Log the engine's progress, and note its signs of life. Runs until cancelled."""
        shown = ""
        while True:
            await asyncio.sleep(LOOK_S)
            status = self.client.status
            line = f"{status.state} {round(10 * status.progress) * 10:3d} %"
            if status.state != "away" and line != shown:
                log_line(f"replica {os.getpid()}: {line}")
                shown = line
            if status.state != "ready":
                engine.silent_s = None
                continue
            engine.is_proven = True
            engine.silent_s = int(self.client.silent_s)
            if not self.ready.done():
                self.ready.set_result(address)
