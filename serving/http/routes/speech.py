"""The route POST /v1/audio/speech."""

from __future__ import annotations

from litestar import post
from litestar.openapi.datastructures import ResponseSpec
from litestar.types import ASGIApp

from serving.http.errors import SPEECH
from serving.http.requests import ForgetfulRequest, check, drop_foreign, options_of
from serving.http.schemas import ErrorBody, SpeechRequest
from serving.http.server import REFUSALS, TOO_LARGE, UNKNOWN, WRONG, Server
from serving.http.speech import Speech

AUDIO = "audio in the requested format, sent as it is generated; text/event-stream with stream_format sse"
RESPONSES = {
    200: ResponseSpec(bytes, description=AUDIO, media_type="audio/*", generate_examples=False),
    400: WRONG,
    404: UNKNOWN,
    413: TOO_LARGE,
    422: ResponseSpec(
        ErrorBody, description="the model generated no audio (code no_audio); the message says what may help"
    ),
    **REFUSALS,
}


@post(SPEECH, status_code=200, responses=RESPONSES, request_class=ForgetfulRequest)
async def speak(data: SpeechRequest, request: ForgetfulRequest, server: Server) -> ASGIApp:
    """Speak a text."""
    model, warnings = server.chosen_model(data)
    request.state.model = model.id  # for the metrics, in case the request is refused
    body = await request.take_json()
    warnings += drop_foreign(body, model, server)
    options = options_of(body, model)
    check(data, model, server)
    voice = server.chosen_voice(data, model)
    return Speech(server, data, options, model, voice, request.state.get("request_id"), warnings)
