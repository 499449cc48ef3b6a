"""Request bodies: which ones are taken, how many large ones are read at once, and the threads that unpack them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar, cast

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.types import ASGIApp, HTTPReceiveMessage, Receive, Scope, Send

from serving.http.errors import UNSUPPORTED, cut, refusal
from serving.http.quota import Quota, Share, remember_client

LARGE_BODY_BYTES = 128 << 10  # larger than any request without a recording

P = ParamSpec("P")
T = TypeVar("T")

# A separate pool, so that reading recordings delays no other work.
READING = ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2), "read")


async def check_encoding(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    """Check that a body is not compressed, as a Litestar guard. Raises the refusal."""
    headers = connection.headers
    coding = ", ".join(headers.getall("transfer-encoding", [])).strip().lower()
    if coding not in ("", "chunked"):
        message = f"the body has the transfer-encoding {cut(coding)!r}, and this server takes chunked alone"
        raise refusal(UNSUPPORTED, message, code="unsupported_encoding")
    encoding = headers.get("content-encoding", "").strip().lower()
    has_body = "content-length" in headers or "transfer-encoding" in headers
    if encoding in ("", "identity") or not has_body:
        return
    message = f"the body has the content-encoding {cut(encoding)!r}, and this server takes none; send it uncompressed"
    refused = refusal(415, message, code="unsupported_encoding")
    refused.headers = {"accept-encoding": "identity"}
    raise refused


async def read_beside(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call the function on the pool for reading, so that the event loop keeps running."""
    return await asyncio.get_running_loop().run_in_executor(READING, lambda: function(*args, **kwargs))


class LargeBodies:
    """Middleware that limits how many large bodies are read at once. A body of unknown length counts once it
    has become large."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        remember_client(scope)
        # From the app's state: Litestar would copy an argument of the middleware for each route.
        quota: Quota = scope["litestar_app"].state.server.bodies
        share = Share(quota, "") if known_bytes(scope) <= LARGE_BODY_BYTES else quota.take()
        num_bytes = 0

        async def read() -> HTTPReceiveMessage:
            nonlocal num_bytes, share
            message = cast(HTTPReceiveMessage, await receive())
            num_bytes += len(message["body"]) if message["type"] == "http.request" else 0
            if not message.get("more_body", False):
                share.release()
            elif num_bytes > LARGE_BODY_BYTES and not share.num:
                share = quota.take()
            return message

        try:
            await self.app(scope, cast(Receive, read), send)
        finally:
            share.release()


def known_bytes(scope: Scope) -> int:
    """Return the length of a body as the client states it; 0 if it states none."""
    length = dict(scope["headers"]).get(b"content-length", b"")
    return int(length) if length.isdigit() else 0
