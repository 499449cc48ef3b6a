"""A TCP port in front of an engine's Unix socket. A client sends the token first."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress

from serving.connections import Connections

TOKEN_BYTES = 32
TOKEN_S = 5.0  # for a client to send the token
CHUNK_BYTES = 256 << 10


class Relay:
    """Carries bytes between connections that begin with the token and the engine's socket at `path`."""

    def __init__(self, path: str):
        self.path = path
        self.token = secrets.token_hex(TOKEN_BYTES)
        self.connections = Connections(self._connection)

    async def listen(self, host: str) -> int:
        """Listen on a free port, and return it. Raises OSError."""
        server = await asyncio.start_server(self.connections.accept, host, 0)
        return int(server.sockets[0].getsockname()[1])

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The client leaves, has no token, or the engine does not listen.
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            await self._carry(reader, writer)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(TOKEN_S):
            given = await reader.readexactly(TOKEN_BYTES)
        if not secrets.compare_digest(given.hex(), self.token):
            return
        from_engine, to_engine = await asyncio.open_unix_connection(self.path)
        ways = [copy(reader, to_engine), copy(from_engine, writer)]
        tasks = [asyncio.create_task(way) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            to_engine.close()
            for task in tasks:
                task.cancel()
                with suppress(OSError, asyncio.CancelledError):
                    await task


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes until the reader ends. A slow writer holds the reader back. Raises OSError."""
    while data := await reader.read(CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
