"""A request that becomes a whole file, for a server that takes the file itself."""

from __future__ import annotations

import asyncio

from litestar.types import Message

from serving.http.errors import LEFT
from serving.http.speech import Speech


class WholeFile(Speech):
    """A request without a separate HTTP answer: it returns its file, and raises its errors."""

    async def spoken(self) -> bytes:
        """Return the file. Raises the refusal, Away."""
        parts: list[bytes] = []

        async def take(message: Message) -> None:
            if message["type"] == "http.response.body":
                parts.append(message["body"])

        try:
            await self.answer(take)
        except asyncio.CancelledError:
            self.ended("cancelled", LEFT)
            raise
        return b"".join(parts)
