"""The HTTP process's end of the protocol: one connection to the engine, made again whenever it is lost, and
an inbox per request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from serving import protocol

RETRY_S = 0.1
SILENT_S = 5.0  # an engine that is ready says something every second

log = structlog.get_logger()
Inbox = asyncio.Queue[protocol.Outcome]


class Away(Exception):
    """The engine cannot take a request now. `status` says where it stands."""

    def __init__(self, status: protocol.Status):
        super().__init__(f"the engine is {status.state}" + (f": {status.detail}" if status.detail else ""))
        self._status = status


class EngineClient:
    """`run` holds the connection; `status`, `models` and `stats` are what the engine said last; `speak` opens
    an inbox."""

    def __init__(self, path: str):
        self.path = path
        self._status = protocol.Status("away", detail="it is being started")
        self._heard_s = 0.0  # when the engine said something last
        self.models: list[protocol.ModelInfo] = []
        self.stats: protocol.Stats | None = None
        self._inboxes: dict[str, Inbox] = {}
        self._writer: asyncio.StreamWriter | None = None
        self.num_restarts = 0  # of the engine, as far as this process has seen
        self._is_closed = False

    @property
    def status(self) -> protocol.Status:
        """As the engine said last; away, as long as one that was ready is silent: it sleeps or hangs."""
        silent_s = time.monotonic() - self._heard_s
        if self._status.state == "ready" and silent_s > SILENT_S:
            return protocol.Status("away", detail=f"it has not answered for {silent_s:.0f} s")
        return self._status

    async def run(self) -> None:
        while True:
            try:
                reader, self._writer = await asyncio.open_unix_connection(self.path)
            except OSError:  # not there yet, or not there now
                await asyncio.sleep(RETRY_S)
                continue
            try:
                async for message in protocol.read(reader, protocol.to_http):
                    self._take(message)
            except protocol.ProtocolError as error:
                log.error("protocol", error=str(error))
            finally:
                self._lost()
            await asyncio.sleep(RETRY_S)

    @contextmanager
    def speak(self, message: protocol.Speak) -> Iterator[Inbox]:
        """Sends the request and gives the inbox of its answers; leaving early cancels it. Raises Away."""
        if self._is_closed or self._writer is None or self.status.state != "ready":
            raise Away(self.status)
        id = message.id
        inbox = self._inboxes[id] = asyncio.Queue()
        self._writer.write(protocol.pack(message))
        del message  # its recordings are megabytes, and the answer takes minutes
        try:
            yield inbox
        finally:
            if self._inboxes.pop(id, None) is not None and self._writer is not None:
                self._writer.write(protocol.pack(protocol.Cancel(id)))

    def feed(self, id: str, text: str, is_last: bool = False) -> None:
        """More text for a request that is open."""
        if id in self._inboxes and self._writer is not None:
            self._writer.write(protocol.pack(protocol.Feed(id, text, is_last)))

    def heard(self, id: str, frames: int) -> None:
        """The client of a request took so many frames of its audio."""
        if id in self._inboxes and self._writer is not None:
            self._writer.write(protocol.pack(protocol.Heard(id, frames)))

    def _take(self, message: protocol.ToHTTP) -> None:
        self._heard_s = time.monotonic()
        match message:
            case protocol.Status():
                if not self._is_closed:
                    self._status = message
            case protocol.Models(models):
                self.models = models
            case protocol.Stats():
                self.stats = message
            case protocol.Audio(id) | protocol.Text(id) | protocol.Spoken(id):
                if (inbox := self._inboxes.get(id)) is not None:  # none: cancelled while this was on its way
                    inbox.put_nowait(message)
            case protocol.Rejected(id) | protocol.Finished(id) | protocol.Failed(id):
                if (inbox := self._inboxes.pop(id, None)) is not None:
                    inbox.put_nowait(message)

    def close(self, why: str) -> None:
        """No request is taken any more, and those that are open fail."""
        self._is_closed = True
        self._status = protocol.Status("away", detail=why)
        self._fail_all(why)

    def _lost(self) -> None:
        assert self._writer is not None
        self._writer.close()
        self._writer = None
        self.num_restarts += not self._is_closed
        if not self._is_closed:
            self._status = protocol.Status("away", detail="it stopped and is being started again")
        self.stats = None
        self._fail_all("the engine stopped while it worked on this request")

    def _fail_all(self, why: str) -> None:
        for id, inbox in self._inboxes.items():
            inbox.put_nowait(protocol.Failed(id, why, 503, "engine_stopped"))
        self._inboxes.clear()
