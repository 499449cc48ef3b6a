"""A WebSocket that is already accepted, with the rules that all sessions share: a limit on idle time, and an end
when the server stops.

Close codes: 1012 the server is stopping, 1003 a binary message, 1008 too many wrong messages, 4408 idle.
uvicorn adds 1007 (not UTF-8) and 1009 (too large).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from litestar.exceptions import HTTPException
from litestar.types import Receive, ReceiveMessage, Send

from serving.engine_client import Away
from serving.http.errors import AWAY_RETRY_S, refusal

STOPS, UNSUPPORTED, POLICY, SILENT = 1012, 1003, 1008, 4408
MAX_WRONG = 100  # messages
MAX_REASON_BYTES = 123  # RFC 6455, 5.5
T = TypeVar("T")


class Closed(Exception):
    """The session must close, with a code and a reason."""

    def __init__(self, code: int, reason: str):
        super().__init__(reason)
        self.code, self.reason = code, reason


class Left(Exception):
    """The client has disconnected."""


class Socket:
    """idle_s: how long it may be idle in both directions. is_busy: whether an answer is under way, so that it is
    not idle. when_stopping: called when the server stops."""

    def __init__(
        self,
        receive: Receive,
        send: Send,
        idle_s: float,
        is_busy: Callable[[], bool],
        when_stopping: Callable[[], None],
    ):
        self.receive, self.send = receive, send
        self.idle_s, self.is_busy, self.when_stopping = idle_s, is_busy, when_stopping
        self.is_stopping = False  # answers that have begun may finish
        self.active_s = time.monotonic()  # time of the last message or of the end of the last answer
        self._early: ReceiveMessage | None = None  # arrived while something else was awaited
        self._num_wrong = 0

    async def run(self, *work: Coroutine[Any, Any, None]) -> None:
        """Run until one of the coroutines ends, and end the others. Closed closes the connection."""
        tasks = [asyncio.create_task(each) for each in work]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for index in range(len(tasks)):
                if tasks[index].done():
                    tasks[index].result()
        except Closed as closed:
            await self.close(closed.code, closed.reason)
        except (Left, OSError):
            pass
        finally:
            await ended(*tasks)
            tasks.clear()  # an error's traceback has this frame, and its task has the error

    async def next(self) -> str:
        """Return the next text message. Raises Left, Closed."""
        self.active_s = time.monotonic()
        while True:
            until_s = (time.monotonic() if self.is_busy() else self.active_s) + self.idle_s
            try:
                async with asyncio.timeout(until_s - time.monotonic()):
                    message = await self._receive()
            except TimeoutError:
                if not self.is_busy() and time.monotonic() >= self.active_s + self.idle_s:
                    raise Closed(SILENT, f"the session was idle for {self.idle_s:g} s") from None
                continue
            match message:
                case {"type": "websocket.disconnect"}:
                    raise Left
                case {"type": "websocket.stopping"}:  # listener.py sends it
                    self.stop()
                case {"type": "websocket.receive", "text": str(text)}:
                    return text
                case {"type": "websocket.receive"}:
                    raise Closed(UNSUPPORTED, "messages must be JSON in text messages")

    def stop(self) -> None:
        """The server stops."""
        self.is_stopping = True
        self.when_stopping()

    async def _receive(self) -> ReceiveMessage:
        message, self._early = self._early, None
        return await self.receive() if message is None else message

    async def while_connected(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, and cancel it if the client disconnects. One other message may arrive
        in the meantime; it is handled afterwards. Raises Left, and the errors of `work`."""
        working, arriving = asyncio.create_task(work), asyncio.create_task(self._receive())
        try:
            await asyncio.wait((working, arriving), return_when=asyncio.FIRST_COMPLETED)
            if arriving.done() and arriving.result()["type"] == "websocket.disconnect":
                raise Left
            return await working
        finally:
            if arriving.done():
                self._early = arriving.result()
            await ended(working, arriving)
            del working, arriving  # an error's traceback has this frame, and the task has the error

    def note(self, *, is_wrong: bool) -> None:
        """Count the messages that were wrong in a row. Raises Closed for too many."""
        self._num_wrong = self._num_wrong + 1 if is_wrong else 0
        if self._num_wrong >= MAX_WRONG:
            raise Closed(POLICY, f"{self._num_wrong} messages in a row were wrong")

    async def close(self, code: int, reason: str) -> None:
        reason = reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
        await self.send({"type": "websocket.close", "code": code, "reason": reason})

    async def send_text(self, text: str) -> None:
        await self.send({"type": "websocket.send", "bytes": None, "text": text})

    async def send_bytes(self, data: bytes) -> None:
        await self.send({"type": "websocket.send", "bytes": data, "text": None})


async def ended(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks and wait until they have ended."""
    there = [task for task in tasks if task is not None]
    for task in there:
        task.cancel()
    await asyncio.gather(*there, return_exceptions=True)


def away(error: Away) -> HTTPException:
    return refusal(503, str(error), code="engine_not_ready", retry_after_s=AWAY_RETRY_S)
