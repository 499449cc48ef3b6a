"""The API key and the subprotocol in a WebSocket's handshake."""

from __future__ import annotations

from typing import cast

from litestar.connection import ASGIConnection
from litestar.types import Scope, WebSocketScope

from serving.http.server import given_key

# A page can set no header of a WebSocket but its subprotocols, so the key comes in one, as in OpenAI's API.
KEY = "openai-insecure-api-key."


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
