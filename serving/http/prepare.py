"""The last steps from a request to its answer, for every route that speaks one text."""

from __future__ import annotations

from typing import Any, TypeVar

from litestar import Request
from litestar.openapi.datastructures import ResponseSpec

from serving.http.keys import admit
from serving.http.objects import ErrorBody, Model
from serving.http.requests import check, drop_foreign, options_of
from serving.http.schemas import SpeechRequest
from serving.http.server import LIMITED, REFUSALS, TOO_LARGE, UNKNOWN, WRONG, Server
from serving.http.speech import Speech

AUDIO = "audio in the requested format, sent as it is generated; text/event-stream with stream_format sse"
RESPONSES = {
    200: ResponseSpec(bytes, description=AUDIO, media_type="audio/*", generate_examples=False),
    400: WRONG,
    404: UNKNOWN,
    413: TOO_LARGE,
    422: ResponseSpec(
        ErrorBody,
        description="sample_rate is wrong, or the model generated no audio (code no_audio); the message says "
        "what may help",
    ),
    **LIMITED,
    **REFUSALS,
}

S = TypeVar("S", bound=Speech)


def prepared(
    kind: type[S],
    data: SpeechRequest,
    body: dict[str, Any],
    model: Model,
    warnings: list[str],
    request: Request[Any, Any, Any],
    server: Server,
    *,
    counts: bool = True,
) -> S:
    """Return the answer to a request, of a subclass of Speech. body: has the model's options. counts: whether
    the request counts for its API key. Raises the refusal."""
    request.state.model = model.id  # for the metrics, in case the request is refused
    warnings += drop_foreign(body, model, server)
    options = options_of(body, model)
    check(data, model, server)
    voice = server.chosen_voice(data, model)
    speech = kind(server, data, options, model, voice, request.state.get("request_id"), warnings)
    if counts:
        admit(len(data.input))
    return speech
