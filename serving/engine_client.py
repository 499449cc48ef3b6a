"""The HTTP process's side of the protocol: one connection to the engine, reopened when it is lost, and an
inbox for each request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from serving import protocol

RETRY_S = 0.1
SILENT_S = 5.0  # a ready engine sends a message every second

log = structlog.get_logger()
Inbox = asyncio.Queue[protocol.Outcome]


class Away(Exception):
    """The engine cannot accept a request now; the message says why."""

    def __init__(self, status: protocol.Status):
        super().__init__(f"the engine is {status.state}" + (f": {status.detail}" if status.detail else ""))
        self._status = status


class EngineClient:
    """A client of the engine process. `run` keeps the connection; `status`, `models` and `stats` are the
    engine's latest; `speak` sends a request and opens its inbox."""

    def __init__(self, path: str):
        self.path = path
        self._status = protocol.Status("away", detail="it is being started")
        self._heard_s = 0.0  # when the engine sent its latest message
        self.models: list[protocol.ModelInfo] = []
        self.states: dict[str, protocol.ModelState] = {}  # of models on demand
        self.stats: protocol.Stats | None = None
        self._inboxes: dict[str, Inbox] = {}
        self._writer: asyncio.StreamWriter | None = None
        self.num_restarts = 0  # restarts of the engine that this process has seen
        self._is_closed = False

    @property
    def status(self) -> protocol.Status:
        """The engine's latest status, or away if a ready engine has been silent: it is suspended or hung."""
        if self.is_ready and self.silent_s > SILENT_S:
            return protocol.Status("away", detail=f"it has not answered for {self.silent_s:.0f} s")
        return self._status

    @property
    def is_ready(self) -> bool:
        """Whether the engine said that it is ready, even if it has been silent since."""
        return self._status.state == "ready"

    @property
    def silent_s(self) -> float:
        """Seconds since the engine's latest message."""
        return time.monotonic() - self._heard_s

    async def run(self) -> None:
        """Connect, read messages, and reconnect, until cancelled."""
        while True:
            try:
                reader, self._writer = await self._open()
            except OSError:  # the engine does not listen yet, or is being restarted
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

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises OSError."""
        return await asyncio.open_unix_connection(self.path)

    @contextmanager
    def speak(self, message: protocol.Speak) -> Iterator[Inbox]:
        """Send a request and yield the inbox of its answers. Leaving early cancels it. Raises Away."""
        if self._is_closed or self._writer is None or self.status.state != "ready":
            raise Away(self.status)
        id = message.id
        inbox = self._inboxes[id] = asyncio.Queue()
        self._writer.write(protocol.pack(message))
        del message  # its recordings take megabytes, and the answer can take minutes
        try:
            yield inbox
        finally:
            if self._inboxes.pop(id, None) is not None and self._writer is not None:
                self._writer.write(protocol.pack(protocol.Cancel(id)))

    def feed(self, id: str, text: str, is_last: bool = False) -> None:
        """Send more text for an open request."""
        if id in self._inboxes and self._writer is not None:
            self._writer.write(protocol.pack(protocol.Feed(id, text, is_last)))

    def interrupt(self, id: str) -> None:
        """End a request now. Its last message follows."""
        if id in self._inboxes and self._writer is not None:
            self._writer.write(protocol.pack(protocol.Interrupt(id)))

    def heard(self, id: str, frames: int) -> None:
        """Report that the client consumed `frames` more frames of the request's audio."""
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
            case protocol.ModelStates(models):
                self.states = models
            case protocol.Stats():
                self.stats = message
            case protocol.Loading(id) | protocol.Audio(id) | protocol.Text(id) | protocol.Spoken(id):
                if (
                    inbox := self._inboxes.get(id)
                ) is not None:  # None: cancelled while the message was on its way
                    inbox.put_nowait(message)
            case protocol.Rejected(id) | protocol.Finished(id) | protocol.Failed(id):
                if (inbox := self._inboxes.pop(id, None)) is not None:
                    inbox.put_nowait(message)

    def close(self, why: str) -> None:
        """Refuse new requests and fail the open ones, for the given reason."""
        self._is_closed = True
        self._status = protocol.Status("away", detail=why)
        self._fail_all(why)

    def _lost(self) -> None:
        assert self._writer is not None
        self._writer.close()
        self._writer = None
        if not self._is_closed:
            # A relay accepts connections while its engine is away.
            self.num_restarts += self._status.state != "away"
            self._status = protocol.Status("away", detail="it stopped and is being started again")
        self.stats = None
        self._fail_all("the engine stopped while it worked on this request")

    def _fail_all(self, why: str) -> None:
        for id, inbox in self._inboxes.items():
            inbox.put_nowait(protocol.Failed(id, why, 503, "engine_stopped"))
        self._inboxes.clear()
