"""The WebSockets of ElevenLabs' clients: /v1/text-to-speech/{voice_id}/stream-input and /multi-stream-input."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import parse_qsl

import msgspec
from litestar import asgi
from litestar.exceptions import HTTPException
from litestar.types import Receive, Scope, Send

from serving.engine_client import Away
from serving.http.elevenlabs.bodies import DEFAULT_FORMAT, ElevenLabsRequest
from serving.http.elevenlabs.contexts import Connection
from serving.http.elevenlabs.fields import drop_language, fields_of_speech, their_names
from serving.http.errors import log_refused, refusal
from serving.http.handshake import accept, taken_place
from serving.http.requests import request_of
from serving.http.server import Server
from serving.http.socket import away

MULTI = "/multi-stream-input"
# what parameters that are no text take
TAKES = {
    "seed": "an integer from 0 to 2^63 - 1",
    "apply_text_normalization": "auto, on or off",
    "auto_mode": "true or false",
}


class Query(msgspec.Struct):
    """The query of the address. Other parameters, as inactivity_timeout, have no meaning here."""

    model_id: str | None = None
    output_format: str = DEFAULT_FORMAT
    language_code: str | None = None
    seed: int | None = None
    apply_text_normalization: Literal["auto", "on", "off"] | None = None
    auto_mode: bool = False


@asgi(
    ["/v1/text-to-speech/{voice_id:str}/stream-input", "/v1/text-to-speech/{voice_id:str}" + MULTI],
    copy_scope=False,
)
async def speak_inputs(scope: Scope, receive: Receive, send: Send) -> None:
    """Speak texts while they arrive, for ElevenLabs' clients."""
    if (place := await taken_place(scope, send)) is None:
        return
    with place:
        await accept(scope, receive, send)
        server: Server = scope["litestar_app"].state.server
        id = scope["state"].get("request_id")
        connection = Connection(
            server, receive, send, is_multi=scope["path"].rstrip("/").endswith(MULTI), id=id
        )
        try:
            query = query_of(scope["query_string"])
            config = config_of(scope["path_params"]["voice_id"], query, server)
        except (HTTPException, Away) as error:
            # Clients show what is said here, but not the body of an answer that refuses the connection.
            refused = away(error) if isinstance(error, Away) else error
            return await connection.refuse(log_refused(refused, id=id, path=connection.path))
        await connection.run(config, is_auto=query.auto_mode)


def query_of(query: bytes) -> Query:
    """Raises the refusal."""
    given = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
    try:
        return msgspec.convert(given, Query, strict=False)
    except msgspec.ValidationError as error:
        field = str(error).partition(" - at `$.")[2].rstrip("`")
        raise refusal(400, f"{field} takes {TAKES[field]}", field) from None


def config_of(voice_id: str, query: Query, server: Server) -> dict[str, Any]:
    """Return the session.config for an address. Raises the refusal, Away."""
    data = ElevenLabsRequest(
        text="",
        model_id=query.model_id,
        language_code=query.language_code,
        apply_text_normalization=query.apply_text_normalization,
    )
    own = {} if query.seed is None else {"seed": query.seed}
    with their_names():
        fields = fields_of_speech(voice_id, data, own, {}, query.output_format, server, [])
        request = request_of(fields)
        model, _ = server.chosen_model(request)
    del fields["input"]
    if drop_language(request, model, server):
        del fields["language"]
    if not model.answers:
        has_aligner = server.aligner is not None and not server.aligner.fault
        fields["timestamp_granularities"] = ["word" if has_aligner else "segment"]
    return fields
