"""Accept connections, and say so when the system does not give any more."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from collections.abc import Callable

import structlog

from serving.http.metrics import Metrics

RETRY_S = 0.5  # between tries to accept a connection
QUIET_S = 10.0  # between lines in the log about it
BATCH = 100  # connections accepted before other work gets its turn
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

log = structlog.get_logger()


class Acceptor:
    """Accepts the connections of a listening socket. It has the methods of `asyncio.Server` that uvicorn
    calls.

    uvloop accepts and closes at once what does not fit into the limit of file descriptors. Here a connection
    waits in the backlog until another one ends.
    """

    def __init__(
        self, listener: socket.socket, protocol: Callable[[], asyncio.Protocol], metrics: Metrics
    ) -> None:
        self.listener, self.protocol, self.metrics = listener, protocol, metrics
        self.loop = asyncio.get_running_loop()
        self.opening: set[asyncio.Task[object]] = set()
        self.retry: asyncio.TimerHandle | None = None
        self.logged_s = -QUIET_S
        listener.setblocking(False)
        self._resume()

    def _resume(self) -> None:
        self.retry = None
        self.loop.add_reader(self.listener, self._accept)

    def _accept(self) -> None:
        for _ in range(BATCH):
            try:
                connection, _ = self.listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in SHORTAGES:
                    raise
                return self._wait(error)
            self._open(connection)

    def _open(self, connection: socket.socket) -> None:
        opening = self.loop.create_task(self.loop.connect_accepted_socket(self.protocol, connection))
        self.opening.add(opening)
        opening.add_done_callback(self.opening.discard)

    def _wait(self, error: OSError) -> None:
        """Count a connection that could not be accepted, and try again later."""
        self.metrics.unaccepted.inc()
        self.loop.remove_reader(self.listener)
        self.retry = self.loop.call_later(RETRY_S, self._resume)
        if self.loop.time() - self.logged_s >= QUIET_S:
            self.logged_s = self.loop.time()
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            log.error("accept", error=error.strerror, max_descriptors=limit)

    def close(self) -> None:
        if self.retry is not None:
            self.retry.cancel()
        else:
            self.loop.remove_reader(self.listener)

    async def wait_closed(self) -> None:
        await asyncio.gather(*self.opening, return_exceptions=True)
