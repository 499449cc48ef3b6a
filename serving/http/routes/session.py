"""The route WS /v1/audio/speech/stream."""

from __future__ import annotations

from typing import cast

from litestar import asgi
from litestar.connection import ASGIConnection
from litestar.exceptions import HTTPException
from litestar.types import Receive, Scope, Send, WebSocketScope

from serving.http.errors import error_of, refusal
from serving.http.listener import deny
from serving.http.quota import remember_client
from serving.http.server import Server, check_api_key, given_key
from serving.http.session import PATH, Session

SUBPROTOCOL = "speechzoo"
# A page can set no header of a WebSocket but its subprotocols, so the key comes in one, as in OpenAI's API.
KEY = "openai-insecure-api-key."


@asgi(PATH, copy_scope=False)
async def speak_in_session(scope: Scope, receive: Receive, send: Send) -> None:
    """Open a session: the client sends text while the server sends speech."""
    if scope["type"] != "websocket":
        raise refusal(426, f"{PATH} is a WebSocket; connect with ws:// or wss://", code="upgrade_required")
    server: Server = scope["litestar_app"].state.server
    try:
        check_api_key(server, socket_key(scope))
        remember_client(scope)
        place = server.sessions.take()
    except HTTPException as error:
        return await deny(send, error.status_code, error.detail, error_of(error).code)
    with place:
        await receive()  # websocket.connect
        await send({"type": "websocket.accept", "subprotocol": chosen(offered(scope)), "headers": []})
        await Session(server, receive, send, scope["state"].get("request_id")).run()


def socket_key(scope: Scope) -> str | None:
    """Return the API key in the headers or, without one, in the subprotocols."""
    keys = [name.removeprefix(KEY) for name in offered(scope) if name.startswith(KEY)]
    return given_key(ASGIConnection(scope).headers) or next(iter(keys), None)


def offered(scope: Scope) -> list[str]:
    return cast(WebSocketScope, scope)["subprotocols"]


def chosen(subprotocols: list[str]) -> str | None:
    """Return one of the offered subprotocols: a browser closes the connection if the server chooses none. The
    key goes back to its sender only if nothing else is offered."""
    possible = [name for name in subprotocols if not name.startswith(KEY)] or subprotocols
    return SUBPROTOCOL if SUBPROTOCOL in possible else next(iter(possible), None)
