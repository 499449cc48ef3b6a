"""A session (session.py) without a WebSocket of its own, for routes whose clients know other messages.

route ─ tell ─> session ─ take_audio, take_event ─> route
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any

import msgspec
from litestar.types import Message

from serving.http.server import Server
from serving.http.session import Session


class InnerSession(ABC):
    """`session.run` returns when it ends. A subclass says what happens to its audio and its events."""

    def __init__(self, server: Server, id: str | None, path: str, max_waiting: int = 0):
        """id: the request ID. path: of the route, for the log. max_waiting: how many messages may wait for the session;
        0: any number."""
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue(max_waiting)
        self.session = Session(server, self._receive, self._send, id, path)  # type: ignore[arg-type]

    @abstractmethod
    async def take_audio(self, audio: bytes) -> None:
        """Handle audio. The session waits meanwhile."""

    @abstractmethod
    async def take_event(self, event: dict[str, Any]) -> None:
        """Handle an event. Left (socket.py) ends the session."""

    async def _receive(self) -> dict[str, Any]:
        return await self.messages.get()

    async def _send(self, message: Message) -> None:
        match message:
            case {"type": "websocket.send", "bytes": bytes(audio)}:
                await self.take_audio(audio)
            case {"type": "websocket.send", "text": str(text)}:
                await self.take_event(msgspec.json.decode(text))


def told(type: str, **fields: Any) -> dict[str, Any]:
    """Return an event of a client as the session receives it."""
    text = msgspec.json.encode({"type": type, **fields}).decode()
    return {"type": "websocket.receive", "text": text}
