"""Concurrency limits for requests that hold memory before they reach the engine: large bodies being read, and
recordings being fetched or decoded. There is no queue: over the limit, the client gets 503 immediately."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar, cast

from litestar.types import ASGIApp, HTTPReceiveMessage, Receive, Scope, Send

from serving.http.errors import refusal

LARGE_BODY_BYTES = 128 << 10  # larger than any request without a recording
RETRY_S = 1

P = ParamSpec("P")
T = TypeVar("T")

# A pool of its own, so that reading recordings delays no other work.
READING = ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2), "read")


async def read_beside(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call the function on the pool for reading, so that the event loop keeps running."""
    return await asyncio.get_running_loop().run_in_executor(READING, lambda: function(*args, **kwargs))


class Door:
    """A limit of `num_places` on requests that do one thing at once. `what` says what they do, for the error
    message: "recordings are being decoded"."""

    def __init__(self, num_places: int, what: str):
        self.num_places, self.what = num_places, what
        self.num_inside = 0

    def enter(self) -> None:
        """Take a place. Raises the refusal (503) if all places are taken."""
        if self.num_inside >= self.num_places:
            message = f"too many {self.what} (limit: {self.num_places}); try again in {RETRY_S} s"
            raise refusal(503, message, code="server_busy", retry_after_s=RETRY_S)
        self.num_inside += 1

    def leave(self) -> None:
        self.num_inside -= 1

    @contextmanager
    def place(self) -> Iterator[None]:
        """Hold a place within the `with` block. Raises the refusal."""
        self.enter()
        try:
            yield
        finally:
            self.leave()


class LargeBodies:
    """Middleware that limits how many large bodies are read at once."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_large(scope):
            return await self.app(scope, receive, send)
        # From the app's state: Litestar would copy an argument of the middleware for each route.
        door: Door = scope["litestar_app"].state.server.bodies
        door.enter()
        is_inside = True

        def leave() -> None:
            nonlocal is_inside
            if is_inside:
                door.leave()
            is_inside = False

        async def read() -> HTTPReceiveMessage:
            message = cast(HTTPReceiveMessage, await receive())
            if not message.get("more_body", False):
                leave()
            return message

        try:
            await self.app(scope, cast(Receive, read), send)
        finally:
            leave()


def is_large(scope: Scope) -> bool:
    """Whether a request's body is large or of unknown length."""
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"")
    if length.isdigit():
        return int(length) > LARGE_BODY_BYTES
    return b"transfer-encoding" in headers
