"""Work for a client ends when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from litestar.types import Receive

from serving.http.errors import LEFT, refusal

T = TypeVar("T")


async def run_while_connected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Return the result of `work`, and cancel it if the client disconnects first. Raises its errors, and the
    refusal (LEFT) after a disconnect."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(until_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise refusal(LEFT, "the client disconnected before its request was complete")
        return working.result()
    finally:  # a shutdown cancels this task
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
        del working, leaving  # an error's traceback has this frame, and the task has the error


async def until_left(receive: Receive) -> None:
    """Wait until the client has disconnected. uvicorn sends the same message when the answer is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass
