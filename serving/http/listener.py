"""uvicorn as this server runs it: an end that no client takes for a whole answer."""

from __future__ import annotations

import asyncio
import socket

import msgspec
import uvicorn
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from serving.engine_client import EngineClient
from serving.http.schemas import Error, ErrorBody

LAST_WORDS_S = 2  # from the end of the grace to the end of the process
STOPPING = "this server is stopping"


class Listener(uvicorn.Server):
    """A shutdown lets open answers end within `grace_s`; what is open then fails, as if the engine had gone."""

    def __init__(self, app: ASGIApp, engine: EngineClient, grace_s: int):
        self.engine, self.grace_s = engine, grace_s
        config = uvicorn.Config(
            Guard(app),
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=grace_s + LAST_WORDS_S,
        )
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(self.grace_s, self.engine.close, STOPPING)
        await super().shutdown(sockets)


class Guard:
    """Around the app: an answer that a shutdown cancels before it began is a 503 in OpenAI's shape."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False

        async def note(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            await self.app(scope, receive, note)
        except asyncio.CancelledError:
            if not is_started:
                await answer(send, 503, STOPPING, "stopping")


async def answer(send: Send, status: int, message: str, code: str) -> None:
    """An error, from where there is no Litestar."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = msgspec.json.encode(ErrorBody(Error(message, kind, None, code)))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
