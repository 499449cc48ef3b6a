"""Errors as HTTP answers, always in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import errno
import math
import re
import uuid
from typing import Any, overload

import structlog
from litestar import Request, Response
from litestar.enums import RequestEncodingType
from litestar.exceptions import (
    ClientException,
    HTTPException,
    InternalServerException,
    SerializationException,
    ValidationException,
)
from litestar.types import Scope
from uvicorn.protocols.utils import ClientDisconnected

from serving.engine_client import Away
from serving.http import schemas
from serving.http.elevenlabs import bodies as elevenlabs
from serving.http.objects import Error, ErrorBody
from serving.http.works import schemas as works

AWAY_RETRY_S = 1
SPEECH, CHAT, TRANSCRIPTIONS = "/v1/audio/speech", "/v1/chat/completions", "/v1/audio/transcriptions"
GENERATE = "/generate"
SESSION, REALTIME = "/v1/audio/speech/stream", "/v1/realtime"
SOCKETS = (SESSION, REALTIME, elevenlabs.ONE_INPUT, elevenlabs.MANY_INPUTS)
# routes whose requests are counted and logged
ANSWERS = (SPEECH, CHAT, TRANSCRIPTIONS, GENERATE, *elevenlabs.PATHS)
FIELDS = schemas.FIELDS | elevenlabs.FIELDS | works.FIELDS
UNSUPPORTED = 501  # RFC 9112, 6.1: the body has a transfer coding that the server does not know
LEFT = 499  # the client has disconnected: this status is only for the log and the metrics
# Litestar's complaints
GIVEN_TWICE = "Unsupported type: <class 'list'>"  # two files with one name
NO_FILE = "Unsupported type: <class 'str'>"  # a text in a field that takes a file
NO_BODY = "'data'"
NO_FORM, NO_BOUNDARY = "Invalid multipart/form-data", "multipart boundary missing in Content-Type"
# an escaped half of a surrogate pair without the other one
HALF_PAIR = re.compile(r"\\u[dD](?:[89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..\\u[dD])[c-fC-F]..)")
MAX_ECHO_CHARS = 100
MAX_MESSAGE_CHARS = 4000

log = structlog.get_logger()


def new_id() -> str:
    """Return a new request ID."""
    return f"req_{uuid.uuid4().hex}"


def refusal(
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    *,
    retry_after_s: float | None = None,
    request_id: str | None = None,
) -> HTTPException:
    """Return an exception that becomes an error in OpenAI's shape. The header Retry-After is rounded up to
    whole seconds."""
    headers = {}
    if retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    if request_id is not None:
        headers["x-request-id"] = request_id
    return HTTPException(
        status_code=status, detail=message, headers=headers, extra={"param": param, "code": code}
    )


def error_of(refused: HTTPException) -> Error:
    """Return the error object for the body of the answer."""
    extra = refused.extra if isinstance(refused.extra, dict) else {}
    kind = "invalid_request_error" if refused.status_code < 500 else "server_error"
    return Error(cut(refused.detail, MAX_MESSAGE_CHARS), kind, cut(extra.get("param")), extra.get("code"))


@overload
def cut(text: str, max_chars: int = ...) -> str: ...


@overload
def cut(text: None, max_chars: int = ...) -> None: ...


def cut(text: str | None, max_chars: int = MAX_ECHO_CHARS) -> str | None:
    """Shorten a text from a client before it goes into an answer or the log."""
    return text if text is None or len(text) <= max_chars else text[:max_chars] + "..."


def answer_error(request: Request[Any, Any, Any], error: Exception) -> Response[ErrorBody]:
    """Turn any exception of a route into an answer, and log it."""
    path = request.scope.get("path_template") or request.url.path.rstrip("/")
    id = id_of(request, error)
    match error:
        case InternalServerException(detail="client disconnected prematurely"):
            error = refusal(LEFT, "the client disconnected before its request was complete")
        case Away():
            error = refusal(503, str(error), code="engine_not_ready", retry_after_s=AWAY_RETRY_S)
        case ClientException() if error.detail in (NO_FORM, NO_BOUNDARY):
            fields = f" with the fields {', '.join(FIELDS[path])}" if path in FIELDS else ""
            error = refusal(
                400, f"the body must be a form (multipart/form-data){fields}", code="invalid_form"
            )
        case ValidationException():
            is_form = request.content_type[0] == RequestEncodingType.MULTI_PART
            error = explain(error, FIELDS[path], is_form)
        case ClientException(__cause__=SerializationException()):
            read = request._connection_state.body
            text = read.decode(errors="replace") if isinstance(read, bytes) else ""
            why = json_fault(text, error.detail)
            error = refusal(400, f"the body is not valid JSON: {why}", code="invalid_json")
        case RecursionError(args=("maximum recursion depth exceeded while deserializing an object",)):
            error = refusal(400, "the body is nested too deeply", code="invalid_json")
        case HTTPException(status_code=400, detail="Request Entity Too Large"):
            error = refusal(400, "the form has too many parts", code="invalid_form")
        # Text that is not UTF-8, or names an unknown charset.
        case UnicodeDecodeError() | LookupError() if type(error) in (UnicodeDecodeError, LookupError):
            where = "a field of the form" if path in FIELDS and path != SPEECH else "the request"
            error = refusal(400, f"{where} is not text in UTF-8")
        case HTTPException(status_code=404, extra=None):
            error = refusal(
                404,
                f"{cut(request.url.path)} does not exist; GET /schema lists all routes",
                code="not_found",
            )
        case HTTPException(status_code=405, extra=None, headers={"allow": allowed} as headers):
            possible = ", ".join(sorted({*allowed.split(", ")} - {"OPTIONS"}))
            error = refusal(
                405, f"this route does not support the method; use {possible}", code="method_not_allowed"
            )
            error.headers = headers
        case HTTPException(status_code=413, extra=None):
            max_bytes = request.route_handler.resolve_request_max_body_size()
            error = refusal(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            log.error("disk", id=id, path=cut(path), error=str(error))
            error = refusal(507, "this server's disk is full", code="no_room")
        case OSError():
            log.error("disk", id=id, path=cut(path), error=str(error))
            error = refusal(503, "this server cannot read or write its files; see its log", code="disk")
    if not isinstance(error, HTTPException):
        log.error("unexpected", id=id, path=cut(path), exc_info=error)
        error = refusal(500, "internal server error; see the server's log")
    facts = {"id": id, "path": cut(path)}
    if path in ANSWERS:
        facts |= {"model": request.state.get("model"), "reason": outcome_of(error)}
    body = log_refused(error, **facts)
    if path in ANSWERS:
        request.app.state.server.metrics.ended(request.state.get("model", ""), outcome_of(error))
    headers = {**(error.headers or {}), "x-request-id": id}
    return Response(ErrorBody(body), status_code=error.status_code, headers=headers)


def id_of(request: Request[Any, Any, Any], error: Exception) -> str:
    """Return the ID of a request that ended in an error, for its answer and its log line. It is the client's, else
    the one that the engine knows, else a new one."""
    known = error.headers.get("x-request-id") if isinstance(error, HTTPException) and error.headers else None
    return request.state.get("request_id") or known or new_id()


def log_refused(error: HTTPException, **facts: Any) -> Error:
    """Log a refused request, batch item or utterance, and return the error object for the client."""
    body = error_of(error)
    log.info(
        "refused",
        **facts,
        status=error.status_code,
        error=body.message,
        param=body.param,
        code=body.code,
    )
    return body


def outcome_of(error: HTTPException) -> str:
    """Return the metrics' outcome for a speech request that ended in this error."""
    if error_of(error).code == "no_audio":
        return "no_audio"
    if error.status_code == LEFT:
        return "cancelled"
    if error.status_code == 503:
        return "unavailable"
    return "refused" if error.status_code < 500 or error.status_code == UNSUPPORTED else "failed"


async def log_lost_session(error: Exception, scope: Scope) -> None:
    """Log an exception that ends a WebSocket session: Litestar closes the socket, and says nothing. A client
    that has disconnected is not an error, and neither is a path that is not a WebSocket."""
    if scope["type"] == "websocket" and not isinstance(error, ClientDisconnected | ClientException):
        log.error("unexpected", path=scope["path"], exc_info=error)


def explain(error: ValidationException, fields: dict[str, str], is_form: bool) -> HTTPException:
    """Turn Litestar's first validation error into one that names the field and what it takes."""
    complaint: dict[str, str] = error.extra[0]  # type: ignore[index]
    message, key = complaint["message"], complaint["key"]
    field = re.split(r"[.\[]", key)[0]
    if field in fields and (message == GIVEN_TWICE or (is_form and message.endswith("got `array`"))):
        return refusal(400, f"{field} is given more than once", field)
    if field in fields and message.endswith("got `UploadFile`"):
        return refusal(400, f"{field} is a file, not a text; {field} takes {fields[field]}", field)
    if field in fields and message == NO_FILE:
        return refusal(400, f"{field} is a text, not a file; {field} takes {fields[field]}", field)
    if field in fields:
        text = f"{key}: {uncapitalized(message)}; {field} takes {fields[field]}"
        return refusal(wrong(field), text, field)
    if unknown := re.search("unknown field `(.*)`", message):
        return refusal(
            400,
            f"there is no field {cut(unknown[1])!r}; the fields are: {', '.join(fields)}",
            unknown[1],
            "unknown_field",
        )
    if missing := re.search("missing required field `(.*)`", message):
        return refusal(400, f"{missing[1]} is missing: {fields[missing[1]]}", missing[1], "missing_field")
    name = next(iter(fields))
    if message == NO_BODY:
        return refusal(400, f"the body is empty; it must be an object with the field {name}: {fields[name]}")
    return refusal(400, f"the body must be an object with the field {name}: {uncapitalized(message)}")


def json_fault(text: str, error: object) -> str:
    """Return why a text is not valid JSON. msgspec says of half a character that the text was cut off."""
    half = HALF_PAIR.search(text)
    return str(error) if half is None else f"{half[0]} is half of a character"


def wrong(field: str) -> int:
    """Return the status for a wrong value: 400 as from OpenAI, but speaches' clients expect 422 for its own
    field."""
    return 422 if field == "sample_rate" else 400


def uncapitalized(message: str) -> str:
    """Return a message of a library so that it can stand within ours. Text of the client keeps its case."""
    return message[:1].lower() + message[1:]
