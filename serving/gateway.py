"""The engine's side of the protocol in front of several engines: to the HTTP process they are one.

cluster/gateway.py has the engines of a Ray cluster behind it, on_demand/gateway.py one engine for each model
that is loaded.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Protocol

import structlog

from serving import protocol
from serving.connections import Connections

ALIVE_S = 1.0
LOOK_S = 0.05  # how often the gateway looks whether the engines' state has changed

Answers = dict[str, asyncio.Task[None]]  # by request

log = structlog.get_logger()


class Requests(Protocol):
    """Answers requests with engines. Cancelling the task of `answer` cancels its request. The other methods
    ignore unknown requests."""

    async def answer(self, message: protocol.Speak, send: Callable[[protocol.Outcome], None], /) -> None: ...

    def feed(self, more: protocol.Feed, /) -> None: ...

    def interrupt(self, id: str, /) -> None: ...

    def heard(self, id: str, frames: int, /) -> None: ...


class Gateway(ABC):
    """The engine's side of the protocol. A subclass says in which state the engines are."""

    def __init__(self, requests: Requests):
        self.requests = requests
        self.clients: set[asyncio.StreamWriter] = set()
        self.connections = Connections(self._connection)
        self.server: asyncio.Server | None = None

    @abstractmethod
    def state(self) -> tuple[protocol.Message, ...]:
        """Return the models and the status. The status comes last, so a client that hears of a ready engine
        has its models already."""

    @abstractmethod
    def figures(self) -> tuple[protocol.Message, ...]:
        """Return the sum of all engines' figures, if there are any."""

    async def listen(self, path: str) -> None:
        self.server = await asyncio.start_unix_server(self.connections.accept, path)

    async def close(self) -> None:
        """Take no more connections, and end all of them."""
        if self.server is not None:
            self.server.close()
        await self.connections.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.clients.add(writer)
        answers: Answers = {}
        tell(writer, *self.state())
        try:
            async for message in protocol.read(reader, protocol.to_engine):
                match message:
                    case protocol.Speak(id):
                        answers[id] = task = asyncio.create_task(self._answer(message, writer))
                        task.add_done_callback(partial(self._ended, writer, answers, id))
                    case protocol.Cancel(id) if id in answers:
                        answers[id].cancel()
                    case protocol.Feed():
                        self.requests.feed(message)
                    case protocol.Interrupt(id):
                        self.requests.interrupt(id)
                    case protocol.Heard(id, frames):
                        self.requests.heard(id, frames)
        except protocol.ProtocolError as error:
            log.error("protocol", error=str(error))
        finally:
            self.clients.discard(writer)
            for task in answers.values():
                task.cancel()

    async def _answer(self, message: protocol.Speak, writer: asyncio.StreamWriter) -> None:
        await self.requests.answer(message, lambda outcome: tell(writer, outcome))

    def _ended(
        self, writer: asyncio.StreamWriter, answers: Answers, id: str, task: asyncio.Task[None]
    ) -> None:
        """Forget a request. If an error of ours ended it, its client is told, and does not wait for ever."""
        del answers[id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("unexpected", id=id, exc_info=error)
            tell(writer, protocol.Failed(id, "an error in the gateway; its log says more"))

    async def tell_state(self) -> None:
        """Tell clients each change, and something each second, as a sign of life. Runs until cancelled."""
        state: tuple[protocol.Message, ...] = ()
        figures = state
        told_s = 0.0
        while True:
            news: list[protocol.Message] = []
            if figures != (figures := self.figures()) or time.monotonic() - told_s > ALIVE_S:
                news += figures or state
            before = state
            state = self.state()
            news += [message for message in state if message not in before]
            if news:
                told_s = time.monotonic()
                for client in self.clients:
                    tell(client, *news)
            await asyncio.sleep(LOOK_S)


def tell(client: asyncio.StreamWriter, *messages: protocol.Message) -> None:
    client.write(b"".join(map(protocol.pack, messages)))
