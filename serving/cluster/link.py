"""The gateway's connection to the engine of one replica."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from serving import protocol
from serving.cluster.routing import Load
from serving.engine_client import EngineClient

LOST_S = 10.0  # an engine that worked and is silent for longer is lost: its machine may be gone


@dataclass(frozen=True)
class Address:
    """The address of a replica's relay. token: the secret that it asks for, in hexadecimal digits."""

    host: str
    port: int
    token: str

    @classmethod
    def of(cls, told: dict[str, Any]) -> Address:
        return cls(told["host"], told["port"], told["token"])


class Link(EngineClient):
    """An engine client over TCP, with the facts about its engine that routing needs."""

    def __init__(self, address: Address):
        super().__init__(f"{address.host}:{address.port}")
        self.address = address
        self._load = Load()
        self.is_draining = False  # Ray Serve has taken it off its list

    @property
    def load(self) -> Load:
        self._load.is_ready = self.status.state == "ready" and not self.is_draining
        self._load.num_open = len(self._inboxes)
        return self._load

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self.address.host, self.address.port)
        writer.write(bytes.fromhex(self.address.token))
        return reader, writer

    def _take(self, message: protocol.ToHTTP) -> None:
        super()._take(message)
        if isinstance(message, protocol.Stats):
            self.load.report(message.models)

    def _lost(self) -> None:
        before = self.num_restarts
        super()._lost()
        if self.is_draining:  # it was to end
            self.num_restarts = before

    def drop_if_silent(self) -> None:
        """Close the connection of an engine that sends nothing any more, so that its requests end."""
        is_lost = self._status.state == "ready" and self.silent_s > LOST_S
        if self._writer is not None and is_lost:
            self._writer.transport.abort()
