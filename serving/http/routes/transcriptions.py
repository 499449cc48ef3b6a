"""The route POST /v1/audio/transcriptions."""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Request, post
from litestar.enums import RequestEncodingType
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import Body
from litestar.types import ASGIApp

from serving.http.errors import TRANSCRIPTIONS
from serving.http.keys import admit
from serving.http.schemas import TranscriptionRequest
from serving.http.server import LIMITED, REFUSALS, TOO_LARGE, UNKNOWN, WRONG, Server
from serving.http.transcription import Transcription, check, drop_ignored
from serving.http.uploads import check_size

RESPONSES = {
    200: ResponseSpec(dict[str, Any], description="OpenAI's transcription, or with stream its events"),
    400: WRONG,
    404: UNKNOWN,
    413: TOO_LARGE,
    **LIMITED,
    **REFUSALS,
}


@post(TRANSCRIPTIONS, status_code=200, responses=RESPONSES)
async def transcribe(
    data: Annotated[TranscriptionRequest, Body(media_type=RequestEncodingType.MULTI_PART)],
    request: Request[Any, Any, Any],
    server: Server,
) -> ASGIApp:
    """Write the words of a recording, with a model that can (`transcript` in its `outputs`)."""
    model, warnings = server.transcribing_model(data.model)
    request.state.model = model.id  # for the metrics, in case the request is refused
    form = await request.form()
    check(data, form)
    warnings += drop_ignored(data, dict.fromkeys(form), model, server)
    admit(0)
    file = await data.file.read()
    check_size(file, "file", server)
    return Transcription(server, data, file, model, request.state.get("request_id"), warnings)
