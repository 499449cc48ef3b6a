"""A WebSocket's handshake: its API key, its place among the sessions, and its subprotocol."""

from __future__ import annotations

from typing import cast

from litestar.connection import ASGIConnection
from litestar.exceptions import HTTPException
from litestar.types import Receive, Scope, Send, WebSocketScope

from serving.http.errors import error_of
from serving.http.listener import deny
from serving.http.quota import Share, remember_client
from serving.http.server import Server, check_api_key, given_key

# A page can set no header of a WebSocket but its subprotocols, so the key comes in one, as in OpenAI's API.
KEY = "openai-insecure-api-key."


async def taken_place(scope: Scope, send: Send) -> Share | None:
    """Check the API key, and return a place among the sessions; None if the client was refused."""
    server: Server = scope["litestar_app"].state.server
    try:
        check_api_key(server, socket_key(scope))
        remember_client(scope)
        return server.sessions.take()
    except HTTPException as error:
        await deny(send, error.status_code, error.detail, error_of(error).code)
        return None


async def accept(scope: Scope, receive: Receive, send: Send, subprotocol: str = "") -> None:
    """Accept the connection. subprotocol: the server's own."""
    await receive()  # websocket.connect
    name = chosen(offered(scope), subprotocol)
    await send({"type": "websocket.accept", "subprotocol": name, "headers": []})


def socket_key(scope: Scope) -> str | None:
    """Return the API key in the headers or, without one, in the subprotocols."""
    keys = [name.removeprefix(KEY) for name in offered(scope) if name.startswith(KEY)]
    return given_key(ASGIConnection(scope).headers) or next(iter(keys), None)


def offered(scope: Scope) -> list[str]:
    return cast(WebSocketScope, scope)["subprotocols"]


def chosen(subprotocols: list[str], own: str) -> str | None:
    """Return one of the offered subprotocols: a browser closes the connection if the server chooses none. The
    key goes back to its sender only if nothing else is offered."""
    possible = [name for name in subprotocols if not name.startswith(KEY)] or subprotocols
    return own if own in possible else next(iter(possible), None)
