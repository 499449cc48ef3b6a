"""The engine process: loads its models, warms them, runs the engine, and answers the HTTP process.

    python -m serving.engine.engine_process '{"settings": {...}, "socket": PATH, ...}'

The supervisor starts it so, with `EngineArguments` as JSON. The engine's loop has the main thread.
Connections live on an event loop in a second one, prompts are built in small pools, and the three meet only
through thread-safe calls: nothing that happens on a connection can delay a step. Exit status 2: a model
cannot be loaded as asked; one line on stderr says why, and starting again would not help.
"""

from __future__ import annotations

import asyncio
import importlib
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial

import msgspec

from compile_cache import threads
from serving import logs, protocol
from serving.engine.connections import Bridge
from serving.engine.device.prepare_for_host import cached, prepare_for_host
from serving.engine.disk_full import REFUSED, one_line_if_full
from serving.engine.engine import Engine
from serving.engine.loading import load, placement, sizes
from serving.engine.wire import describe
from serving.exit_with_parent import exit_with_parent
from serving.settings import EngineArguments, Settings

# Seconds after which a thread that runs Python gives the interpreter to the loop. With Python's own 5 ms, an
# iteration waits for them at each return from torch: next to such a thread one of 11 ms took 23, and 17 with
# this (two cores, busy with other work).
SWITCH_S = 2e-4


def call_on_signal(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    """Call `stop` on the loop's thread after SIGTERM, SIGINT or SIGHUP. To be called on the main thread.

    A handler would wait for the main thread, which may wait for a lock or for the device, and is not woken if
    the system interrupts another one. The byte that Python writes to the wake-up socket waits for no thread.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def read() -> None:
        reader.recv(16)
        stop()

    loop.call_soon_threadsafe(loop.add_reader, reader, read)
    signal.set_wakeup_fd(writer.detach())  # open for as long as the process lives
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)


def load_engine(settings: Settings, progress: Callable[[float, str], None]) -> Engine:
    """Load the models and return an engine with them. Raises ValueError."""
    how = settings.model
    max_slots, kv_memory_bytes = sizes(settings)
    devices = placement(settings, max_slots, kv_memory_bytes)
    families = load(settings.models, how.device, how.dtype, progress, devices, how.chunked)
    # The hooks that copy a layer change its tensors, which a graph would hold.
    is_compiled = how.compile and not devices
    for name, family in families.items():
        if family.spec.licence:
            sys.stderr.write(f"zoo: the weights of {name} are under a licence: {family.spec.licence}\n")
    with one_line_if_full():
        prepare_for_host(*families.values(), compile=is_compiled, weights=how.weights, depth=how.depth)
    return Engine(
        families,
        max_slots=max_slots,
        kv_memory_bytes=kv_memory_bytes,
        swap_memory_bytes=settings.memory.swap_memory_bytes,
        policy=settings.latency.policy,
        report_lag=None if settings.latency.run_async else 0,
        max_waiting=settings.limits.waiting,
        reference_memory_bytes=settings.memory.reference_memory_bytes,
        max_ttfa_s=settings.latency.max_ttfa_s,
        max_unread_s=settings.limits.unread_s,
        max_stall_s=settings.limits.stall_s,
        compile=is_compiled,
        is_deterministic=how.deterministic,
        codec=how.codec,
        attention=how.attention,
    )


def warm_up(engine: Engine, progress: Callable[[float, str], None]) -> None:
    """Import the packages that encode recordings, and compile. Raises ValueError if a kernel that was asked
    for cannot be built."""
    # The first recording would import them, and stop the steps of all listeners for up to two seconds.
    for package in {package for model in engine.models.values() for package in model.family.encoder_packages}:
        importlib.import_module(package)
    with one_line_if_full():
        engine.warm(progress, cached)


def main() -> None:
    arguments = msgspec.json.decode(sys.argv[1], type=EngineArguments)
    logs.configure("engine")
    sys.setswitchinterval(SWITCH_S)
    if arguments.parent_fd is not None:
        exit_with_parent(arguments.parent_fd, arguments.socket)
    bridge = Bridge()
    bridge.listen(arguments.socket)

    def tell(state: protocol.State, progress: float, detail: str) -> None:
        bridge.tell(protocol.Status(state, progress, detail))

    try:
        engine = load_engine(arguments.settings, partial(tell, "loading"))
        if arguments.settings.model.warm:
            warm_up(engine, partial(tell, "warming"))
    except ValueError as error:
        sys.stderr.write(f"zoo: {error}\n")
        sys.exit(REFUSED)
    call_on_signal(bridge.loop, engine.stop)
    bridge.open(engine, [describe(name, model.family.spec) for name, model in engine.models.items()])
    if engine.arena.device.type == "cpu":
        threads.keep_team_on_cores()
    engine.run()


if __name__ == "__main__":
    main()
