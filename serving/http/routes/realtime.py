"""The route WS /v1/realtime."""

from __future__ import annotations

from urllib.parse import parse_qs

from litestar import asgi
from litestar.exceptions import HTTPException
from litestar.types import Receive, Scope, Send

from serving.engine_client import Away
from serving.http.errors import error_of
from serving.http.handshake import accept, socket_key
from serving.http.listener import deny
from serving.http.quota import remember_client
from serving.http.realtime.session import PATH, Session
from serving.http.server import Server, check_api_key
from serving.http.socket import away

SUBPROTOCOL = "realtime"  # as OpenAI's browser client offers it


@asgi(PATH, copy_scope=False)
async def converse(scope: Scope, receive: Receive, send: Send) -> None:
    """Open a session: the client speaks and hears the answers."""
    server: Server = scope["litestar_app"].state.server
    try:
        check_api_key(server, socket_key(scope))
        remember_client(scope)
        model = server.answering_model(asked_model(scope))
        place = server.sessions.take()
    except (HTTPException, Away) as error:
        refused = away(error) if isinstance(error, Away) else error
        return await deny(send, refused.status_code, refused.detail, error_of(refused).code)
    with place:
        await accept(scope, receive, send, SUBPROTOCOL)
        await Session(server, model, receive, send).run()


def asked_model(scope: Scope) -> str | None:
    """Return the model that the address names."""
    query = parse_qs(scope["query_string"].decode("latin-1"))
    return next(iter(query.get("model", ())), None)
