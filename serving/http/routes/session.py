"""The route WS /v1/audio/speech/stream."""

from __future__ import annotations

from litestar import asgi
from litestar.types import Receive, Scope, Send

from serving.http.handshake import accept, taken_place
from serving.http.session import PATH, Session

SUBPROTOCOL = "speechzoo"


@asgi(PATH, copy_scope=False)
async def speak_in_session(scope: Scope, receive: Receive, send: Send) -> None:
    """Open a session: the client sends text while the server sends speech."""
    if (place := await taken_place(scope, send)) is None:
        return
    with place:
        await accept(scope, receive, send, SUBPROTOCOL)
        server = scope["litestar_app"].state.server
        await Session(server, receive, send, scope["state"].get("request_id")).run()
