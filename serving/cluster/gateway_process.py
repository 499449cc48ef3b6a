"""The gateway process: takes the engine's place in front of replicas on Ray Serve.

    python -m serving.cluster.gateway_process '{"settings": {...}, "socket": PATH, ...}'

The supervisor starts it with `EngineArguments` as JSON. Exit status 2: the replicas cannot be started as
asked; one line on stderr says why, and starting again would not help.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from serving import logs
from serving.cluster import deployment
from serving.cluster.dispatch import Dispatcher
from serving.cluster.gateway import ClusterGateway
from serving.cluster.link import Address
from serving.cluster.routing import Ask
from serving.cluster.table import TABLE
from serving.exit_with_parent import exit_with_parent
from serving.settings import EngineArguments, Settings
from serving.supervisor import REFUSED


def connected(loop: asyncio.AbstractEventLoop) -> Dispatcher:
    """Return a dispatcher that routes through Ray Serve."""

    @asynccontextmanager
    async def choose(ask: Ask) -> AsyncIterator[str]:
        async with deployment.handle().choose_replica(ask) as selection:
            yield selection.replica_id

    dispatcher = Dispatcher(choose)

    def update(replicas: Mapping[str, Address]) -> None:
        loop.call_soon_threadsafe(dispatcher.update, replicas)

    TABLE.route, TABLE.update = dispatcher.route, update
    return dispatcher


async def run(arguments: EngineArguments) -> bool:
    """Serve until a signal arrives. Return whether this process started the replicas. Raises RuntimeError,
    ValueError."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stopping.set)
    settings = arguments.settings
    dispatcher = connected(loop)
    gateway = ClusterGateway(dispatcher, settings.replicas.counts[0])
    await gateway.listen(arguments.socket)
    running = [asyncio.create_task(work) for work in (gateway.tell_state(), dispatcher.look_after())]
    if settings.replicas.address is None:
        running.append(asyncio.create_task(end_if_lost()))
    is_ours = await serve(settings, stopping)
    await stopping.wait()
    for task in running:
        task.cancel()
    await gateway.close()
    await dispatcher.close()
    return is_ours


async def end_if_lost() -> None:
    """End this process if its own cluster has lost this machine. The supervisor then starts it anew, with another
    cluster; Ray would wait for a node for ever. Runs until cancelled."""
    while await asyncio.to_thread(deployment.has_node):
        await asyncio.sleep(deployment.LOOK_S)
    sys.stderr.write("zoo: Ray's process for this machine (raylet) has ended: the gateway ends, too\n")
    os._exit(1)  # disconnecting would wait for the node


async def serve(settings: Settings, stopping: asyncio.Event) -> bool:
    """Start the replicas, or find them running. Return whether they were started; False too if a signal came
    first."""
    pool = ThreadPoolExecutor(1, "deploy")  # of its own: asyncio waits for its default one at the end
    deploying = asyncio.get_running_loop().run_in_executor(pool, deployment.deploy, settings)
    waiting = asyncio.create_task(stopping.wait())
    both: list[asyncio.Future[Any]] = [deploying, waiting]
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not deploying.done():
        return False
    is_ours = deploying.result()
    await asyncio.to_thread(deployment.handle)
    return is_ours


def main() -> None:
    arguments = msgspec.json.decode(sys.argv[1], type=EngineArguments)
    logs.configure("gateway")
    if arguments.parent_fd is not None:
        exit_with_parent(arguments.parent_fd, arguments.socket)
    address = arguments.settings.replicas.address
    try:
        deployment.join(address)
        is_ours = asyncio.run(run(arguments))
    except (ConnectionError, RuntimeError, ValueError) as error:
        sys.stderr.write(f"zoo: {error}\n")
        sys.exit(REFUSED)
    deployment.leave(is_ours, is_local=address is None)
    os._exit(0)  # a thread may still wait for replicas to be ready


if __name__ == "__main__":
    main()
