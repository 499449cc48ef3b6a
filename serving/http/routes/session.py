"""The route WS /v1/audio/speech/stream."""

from __future__ import annotations

from litestar import asgi
from litestar.exceptions import HTTPException
from litestar.types import Receive, Scope, Send

from serving.http.errors import error_of
from serving.http.handshake import chosen, offered, socket_key
from serving.http.listener import deny
from serving.http.quota import remember_client
from serving.http.server import Server, check_api_key
from serving.http.session import PATH, Session

SUBPROTOCOL = "speechzoo"


@asgi(PATH, copy_scope=False)
async def speak_in_session(scope: Scope, receive: Receive, send: Send) -> None:
    """Open a session: the client sends text while the server sends speech."""
    server: Server = scope["litestar_app"].state.server
    try:
        check_api_key(server, socket_key(scope))
        remember_client(scope)
        place = server.sessions.take()
    except HTTPException as error:
        return await deny(send, error.status_code, error.detail, error_of(error).code)
    with place:
        await receive()  # websocket.connect
        await send(
            {"type": "websocket.accept", "subprotocol": chosen(offered(scope), SUBPROTOCOL), "headers": []}
        )
        await Session(server, receive, send, scope["state"].get("request_id")).run()
