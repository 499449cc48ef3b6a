"""How many requests may hold memory at once before the engine has heard of them: bodies that are being read,
and recordings that are being fetched or decoded. Nobody waits at a door: who finds it full comes again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar, cast

from litestar.types import ASGIApp, HTTPReceiveMessage, Receive, Scope, Send

from serving.http.errors import refusal

LARGE_BODY_BYTES = 128 << 10  # more than any request without a recording has
RETRY_S = 1

P = ParamSpec("P")
T = TypeVar("T")

# of its own: it holds up nobody else
READING = ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2), "read")


async def read_beside(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Beside the event loop, after what else is being read."""
    return await asyncio.get_running_loop().run_in_executor(READING, lambda: function(*args, **kwargs))


class Door:
    """`what` is being done by those inside, of whom there are at most `num_places`."""

    def __init__(self, num_places: int, what: str):
        self.num_places, self.what = num_places, what
        self.num_inside = 0

    def enter(self) -> None:
        """Raises the refusal."""
        if self.num_inside >= self.num_places:
            message = f"{self.num_inside} {self.what} already, and more do not fit; try again in {RETRY_S} s"
            raise refusal(503, message, code="server_busy", retry_after_s=RETRY_S)
        self.num_inside += 1

    def leave(self) -> None:
        self.num_inside -= 1

    @contextmanager
    def place(self) -> Iterator[None]:
        """Raises the refusal."""
        self.enter()
        try:
            yield
        finally:
            self.leave()


class LargeBodies:
    """A middleware: a body that may be large has a place until it was read."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_large(scope):
            return await self.app(scope, receive, send)
        # given to each, it would be copied for each route
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
    """Whether a body is large, or does not say."""
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"")
    if length.isdigit():
        return int(length) > LARGE_BODY_BYTES
    return b"transfer-encoding" in headers
