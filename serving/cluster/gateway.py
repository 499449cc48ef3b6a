"""The engine's side of the protocol in front of all replicas: to the HTTP process they are one engine."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import structlog

from serving import protocol
from serving.cluster.connections import Connections
from serving.cluster.dispatch import Dispatcher
from serving.cluster.totals import total

ALIVE_S = 1.0
LOOK_S = 0.05  # how often the gateway looks whether the replicas' state has changed

Answers = dict[str, asyncio.Task[None]]  # by request

log = structlog.get_logger()


class Gateway:
    """The engine's side of the protocol, in front of a dispatcher."""

    def __init__(self, dispatcher: Dispatcher, num_wanted: int):
        self.dispatcher = dispatcher
        self.num_wanted = num_wanted
        self.clients: set[asyncio.StreamWriter] = set()
        self.connections = Connections(self._connection)

    async def listen(self, path: str) -> None:
        await asyncio.start_unix_server(self.connections.accept, path)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.clients.add(writer)
        answers: Answers = {}
        self._tell(writer, *self._state())
        try:
            async for message in protocol.read(reader, protocol.to_engine):
                match message:
                    case protocol.Speak(id):
                        answers[id] = task = asyncio.create_task(self._answer(message, writer))
                        task.add_done_callback(partial(self._ended, writer, answers, id))
                    case protocol.Cancel(id) if id in answers:
                        answers[id].cancel()
                    case protocol.Feed():
                        self.dispatcher.feed(message)
                    case protocol.Interrupt(id):
                        self.dispatcher.interrupt(id)
                    case protocol.Heard(id, frames):
                        self.dispatcher.heard(id, frames)
        except protocol.ProtocolError as error:
            log.error("protocol", error=str(error))
        finally:
            self.clients.discard(writer)
            for task in answers.values():
                task.cancel()

    async def _answer(self, message: protocol.Speak, writer: asyncio.StreamWriter) -> None:
        await self.dispatcher.answer(message, lambda outcome: self._tell(writer, outcome))

    def _ended(
        self, writer: asyncio.StreamWriter, answers: Answers, id: str, task: asyncio.Task[None]
    ) -> None:
        """Forget a request. If an error of ours ended it, its client is told, and does not wait for ever."""
        del answers[id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("unexpected", id=id, exc_info=error)
            self._tell(writer, protocol.Failed(id, "an error in the gateway; its log says more"))

    # the replicas' state

    def _state(self) -> tuple[protocol.Message, ...]:
        """Return the models and the status. The status comes last, so a client that hears of a ready engine
        has its models already. In an update the old replicas are ready until the new ones are connected."""
        ready = [link for link in self.dispatcher.links.values() if link.status.state == "ready"]
        if ready:
            return protocol.Models(ready[0].models), protocol.Status("ready", 1.0)
        return (protocol.Status("loading", detail=f"none of {self.num_wanted} replicas is ready"),)

    async def tell_state(self) -> None:
        """Tell clients each change, and something each second, as a sign of life. Runs until cancelled."""
        state: tuple[protocol.Message, ...] = ()
        figures = state
        told_s = 0.0
        while True:
            news: list[protocol.Message] = []
            if figures != (figures := self._figures()) or time.monotonic() - told_s > ALIVE_S:
                news += figures or state
            if state != (state := self._state()):
                news += state
            if news:
                told_s = time.monotonic()
                for client in self.clients:
                    self._tell(client, *news)
            await asyncio.sleep(LOOK_S)

    def _figures(self) -> tuple[protocol.Message, ...]:
        """Return the sum of all replicas' figures, if there are any."""
        links = self.dispatcher.links.items()
        replicas = {name: link.stats for name, link in links if link.stats is not None}
        return (total(replicas),) if replicas else ()

    def _tell(self, client: asyncio.StreamWriter, *messages: protocol.Message) -> None:
        client.write(b"".join(map(protocol.pack, messages)))
