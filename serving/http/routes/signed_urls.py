"""The routes of speech by URL, with `--speech-urls`: GET /v1/audio/speech, and POST /v1/audio/speech/url."""

from __future__ import annotations

from typing import Any

from litestar import Request, get, post
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp

from serving.http.errors import SPEECH
from serving.http.keys import current
from serving.http.prepare import RESPONSES, prepared
from serving.http.quota import remember_client
from serving.http.requests import ForgetfulRequest, request_of
from serving.http.schemas import URLRequest
from serving.http.server import REFUSALS, UNKNOWN, WRONG, Server, check_api_key, given_key
from serving.http.signed_urls import (
    NOT_IN_URLS,
    SIGN,
    Links,
    SignedURL,
    fields_of_query,
    not_in_urls,
    options_from_text,
)
from serving.http.speech import Speech


async def check_link(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    """Check the signature of a URL or, without one, the API key in a header. A server without a key wants the
    signature too: a page of another site can send this request. Raises the refusal."""
    remember_client(connection.scope)
    server: Server = connection.app.state.server
    links: Links = connection.app.state.links
    if server.keys and given_key(connection.headers) is not None:
        return check_api_key(server, given_key(connection.headers))
    name = links.check(list(connection.query_params.multi_items()))
    key = None if name is None else server.keys.named(name)
    if server.keys and key is None:  # removed since the URL was made
        return check_api_key(server, None)
    current.set(key)


@get(SPEECH, responses=RESPONSES, guards=[check_link])
async def speak_link(request: Request[Any, Any, Any], server: Server) -> ASGIApp:
    """Speak the text in a signed URL."""
    if request.state.get("is_head"):
        return ASGIResponse()  # a client that asks whether there is audio gets none
    fields = fields_of_query(list(request.query_params.multi_items()))
    data = request_of(fields, {}, is_text=True)
    model, warnings = server.chosen_model(data)
    return prepared(Speech, data, options_from_text(fields, model), model, warnings, request, server)


@post(SIGN, status_code=200, responses={400: WRONG, 404: UNKNOWN, **REFUSALS}, request_class=ForgetfulRequest)
async def sign_link(data: URLRequest, request: ForgetfulRequest, server: Server) -> SignedURL:
    """Return a URL that speaks this request for a while, without an API key."""
    body: dict[str, Any] = await request.take_json()
    for name in NOT_IN_URLS:
        if name in body:
            raise not_in_urls(name)
    body.pop("expires_in_s", None)
    if (voice := data.voice_name) is not None:
        body["voice"] = voice
    asked = request_of(body, {})
    model, warnings = server.chosen_model(asked)
    prepared(Speech, asked, body, model, warnings, request, server, counts=False)  # so that it is refused now
    links: Links = request.app.state.links
    key = current.get()
    return links.sign(body, data.expires_in_s, None if key is None else key.name)
