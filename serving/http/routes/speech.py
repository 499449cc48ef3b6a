"""The route POST /v1/audio/speech."""

from __future__ import annotations

from litestar import post
from litestar.types import ASGIApp

from serving.http.errors import SPEECH
from serving.http.prepare import RESPONSES, prepared
from serving.http.requests import ForgetfulRequest
from serving.http.schemas import SpeechRequest
from serving.http.server import Server
from serving.http.speech import Speech


@post(SPEECH, status_code=200, responses=RESPONSES, request_class=ForgetfulRequest)
async def speak(data: SpeechRequest, request: ForgetfulRequest, server: Server) -> ASGIApp:
    """Speak a text."""
    model, warnings = server.chosen_model(data)
    return prepared(Speech, data, await request.take_json(), model, warnings, request, server)
