"""Text in by several HTTP requests, and one answer of audio, as VoxServe's clients speak while they write.

    client  start      text text text ... end
    server  an id            audio ~~~~~~~~~~~~~~

Each stream is a session (session.py) without a WebSocket: it has the same limits, and the same places.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from litestar.exceptions import HTTPException

from serving.http.errors import new_id, refusal
from serving.http.inner_session import InnerSession, told
from serving.http.quota import Share
from serving.http.server import Server
from serving.http.socket import ended

PATH = "/generate/stream"
MAX_WAITING = 64  # pieces of audio that no client has read yet; then the session waits
UNHEARD_S = 60.0  # how long a stream waits for the client that reads its audio
DISCONNECT = {"type": "websocket.disconnect", "code": 1000}


class TextStream(InnerSession):
    """One stream. `run` returns when its session ends."""

    def __init__(self, server: Server, place: Share):
        self.id = new_id()
        self.place = place
        super().__init__(server, self.id, PATH)
        self.audio: asyncio.Queue[bytes | None] = asyncio.Queue()  # None: the end
        self.room = asyncio.Semaphore(MAX_WAITING)  # in `audio`
        self.configured: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.error: HTTPException | None = None
        self.is_heard = False  # whether a client reads, or has read, the audio
        self.is_whole = False  # whether the text has ended
        self.is_spoken = False  # whether all of it was

    async def run(self) -> None:
        """Speak until everything is spoken, the text stops coming, or no client reads the audio."""
        watching = asyncio.create_task(self._watch())
        try:
            await self.session.run()
        finally:
            self.place.release()
            await ended(watching)
            if not self.configured.done():
                self.configured.cancel()
            if not self.is_spoken:  # otherwise the audio would look complete
                self.error = self.error or refusal(503, "the stream has ended early", code="stopping")
            self.audio.put_nowait(None)

    async def _watch(self) -> None:
        await asyncio.sleep(UNHEARD_S)
        if not self.is_heard:
            self.leave()

    def tell(self, type: str, **fields: Any) -> None:
        """Pass an event of the client on."""
        self.messages.put_nowait(told(type, **fields))

    def leave(self) -> None:
        self.messages.put_nowait(DISCONNECT)

    async def heard(self) -> AsyncIterator[bytes]:
        """Yield the audio. Raises the refusal."""
        self.is_heard = True
        while (audio := await self.audio.get()) is not None:
            self.room.release()
            yield audio
        if self.error is not None:
            raise self.error

    async def take_audio(self, audio: bytes) -> None:
        await self.room.acquire()
        self.audio.put_nowait(audio)

    async def take_event(self, event: dict[str, Any]) -> None:
        match event:
            case {"type": "session.configured"} if not self.configured.done():
                self.configured.set_result(None)
            case {"type": "error", "error": error}:
                self.error = refusal(status_of(error), error["message"], error["param"], error["code"])
                if not self.configured.done():
                    self.configured.set_exception(self.error)
                self.leave()
            case {"type": "audio.done"}:
                self.is_spoken = True
                self.leave()


def status_of(error: dict[str, Any]) -> int:
    """Return the status that an error of a session has over HTTP."""
    if error["code"] == "idle":
        return 408
    return 400 if error["type"] == "invalid_request_error" else 503


class TextStreams:
    """The streams that are open, by ID."""

    def __init__(self, server: Server):
        self.server = server
        self.running: dict[str, TextStream] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    async def start(self, config: dict[str, Any]) -> str:
        """Begin a stream, and return its ID. Raises the refusal."""
        stream = TextStream(self.server, self.server.sessions.take())
        task = asyncio.create_task(stream.run())
        self.running[stream.id] = stream
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        task.add_done_callback(lambda _: self._ended(stream))
        stream.tell("session.config", **config)
        try:
            await asyncio.shield(stream.configured)
        except BaseException:
            stream.leave()
            raise
        return stream.id

    def _ended(self, stream: TextStream) -> None:
        """Forget a stream, unless a client may still read its audio."""
        if not stream.is_heard and stream.configured.done() and not stream.configured.cancelled():
            asyncio.get_running_loop().call_later(UNHEARD_S, self.running.pop, stream.id, None)
        else:
            self.running.pop(stream.id, None)

    def find(self, id: str) -> TextStream:
        """Raises the refusal."""
        if id not in self.running:
            raise refusal(
                404, f"there is no stream {id[:80]!r}; it has ended, or never was", code="not_found"
            )
        return self.running[id]

    async def heard(self, stream: TextStream) -> AsyncIterator[bytes]:
        """Yield the audio of a stream, which ends with its client. Raises the refusal."""
        try:
            async for audio in stream.heard():
                yield audio
        finally:
            stream.leave()
            self.running.pop(stream.id, None)

    def say(self, id: str, text: str) -> None:
        """Add text to a stream. Raises the refusal."""
        stream = self.find(id)
        if stream.is_whole:
            raise refusal(400, "the text of this stream has ended", "text")
        if stream.messages.qsize() >= MAX_WAITING:
            raise refusal(
                503, "too much text is waiting; try again in 1 s", code="server_busy", retry_after_s=1
            )
        stream.tell("input.text", text=text)

    def end(self, id: str) -> None:
        """End the text of a stream. Raises the refusal."""
        stream = self.find(id)
        if not stream.is_whole:
            stream.is_whole = True
            stream.tell("input.done")

    async def close(self) -> None:
        """End all streams."""
        await ended(*self.tasks)
        self.running.clear()
