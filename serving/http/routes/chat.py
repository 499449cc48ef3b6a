"""The route POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from litestar import post
from litestar.openapi.datastructures import ResponseSpec
from litestar.types import ASGIApp

from serving.http.chat import Chat, check
from serving.http.continuation import Continuation
from serving.http.errors import CHAT
from serving.http.keys import admit
from serving.http.requests import ConversationRequest
from serving.http.schemas import ChatRequest
from serving.http.server import LIMITED, REFUSALS, TOO_LARGE, UNKNOWN, WRONG, Server

RESPONSES = {
    200: ResponseSpec(
        dict[str, Any], description="OpenAI's chat.completion; with stream, its chunks as events"
    ),
    400: WRONG,
    404: UNKNOWN,
    413: TOO_LARGE,
    **LIMITED,
    **REFUSALS,
}


@post(CHAT, status_code=200, responses=RESPONSES, request_class=ConversationRequest)
async def complete(data: ChatRequest, request: ConversationRequest, server: Server) -> ASGIApp:
    """Answer a conversation in text, or in text and speech; or continue a text or a clip."""
    model, warnings = server.writing_model(data.model)
    request.state.model = model.id  # for the metrics, in case the request is refused
    await request.take_json()
    check(data, model)
    make = Chat if model.answers else Continuation
    chat = make(server, data, model, request.state.get("request_id"), warnings)
    admit(chat.num_chars)
    return chat
