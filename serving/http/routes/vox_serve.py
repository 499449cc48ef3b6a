"""VoxServe's routes: POST /generate speaks a form, and /generate/stream takes text while it is spoken."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import msgspec
from litestar import Request, get, post
from litestar.datastructures import FormMultiDict, UploadFile
from litestar.exceptions import HTTPException
from litestar.openapi.datastructures import ResponseSpec
from litestar.response import Stream
from litestar.types import ASGIApp

from serving.http.disconnect import run_while_connected
from serving.http.errors import GENERATE, refusal, uncapitalized
from serving.http.prepare import prepared
from serving.http.requests import request_of
from serving.http.server import REFUSALS, TOO_LARGE, UNKNOWN, WRONG, Server
from serving.http.speech import Speech
from serving.http.text_streams import TextStreams

RATE_HZ = 24_000  # which VoxServe's clients assume
RESPONSES = {
    200: ResponseSpec(bytes, description="a WAV file", media_type="audio/wav", generate_examples=False),
    400: WRONG,
    404: UNKNOWN,
    413: TOO_LARGE,
    **REFUSALS,
}

F = TypeVar("F", bound=msgspec.Struct)


class StartForm(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The form of POST /generate/stream/start. audio: base64 of the recording of a voice."""

    audio: str | None = None
    language: str | None = None
    speaker: str | None = None
    ref_text: str | None = None
    instruct: str | None = None
    x_vector_only_mode: bool | None = None

    def fields(self) -> dict[str, Any]:
        """Return the fields of a speech request."""
        named = {
            "ref_audio": self.audio,
            "ref_text": self.ref_text,
            "language": self.language,
            "voice": self.speaker,
            "instructions": self.instruct,
            "x_vector_only_mode": self.x_vector_only_mode,
        }
        given = {name: value for name, value in named.items() if value is not None and value != ""}
        return {"response_format": "wav", "sample_rate": RATE_HZ, **given}


class GenerateForm(StartForm, forbid_unknown_fields=True, kw_only=True):
    """The form of POST /generate."""

    text: str
    streaming: bool = True


class TextForm(msgspec.Struct, forbid_unknown_fields=True):
    text: str


class Started(msgspec.Struct):
    request_id: str


class Told(msgspec.Struct):
    status: str
    request_id: str


class FormRequest(Request[Any, Any, Any]):
    """A request with a form of either encoding. It can drop the form, which may have megabytes."""

    async def take_form(self, kind: type[F]) -> F:
        """Return the form, empty without a body, and drop every other reference to it. Raises the refusal."""
        given: dict[str, object] = {}
        for name, value in (await self.form()).multi_items():
            if isinstance(value, UploadFile):
                sample = await value.read()
                await value.close()
                value = base64.b64encode(sample).decode()
            given[name] = value
        self._form = FormMultiDict()
        self._connection_state.form = {}
        self._body = self._connection_state.body = b""
        try:
            return msgspec.convert(given, kind, strict=False)
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at `$.")
            raise wrong_form(kind, uncapitalized(what), where.rstrip("`") or None) from None


@post(GENERATE, status_code=200, responses=RESPONSES, request_class=FormRequest, include_in_schema=False)
async def generate(request: FormRequest, server: Server) -> ASGIApp:
    """Speak the text of a form into a WAV file at 24 kHz."""
    form = await request.take_form(GenerateForm)
    fields = form.fields()
    shared = {name: value for name, value in fields.items() if name != "x_vector_only_mode"}
    speech = msgspec.structs.replace(request_of({**shared, "input": form.text}), stream=form.streaming)
    model, warnings = server.chosen_model(speech)
    return prepared(Speech, speech, fields, model, warnings, request, server)


@post(
    "/generate/stream/start",
    status_code=200,
    request_class=FormRequest,
    responses={400: WRONG, **REFUSALS},
    include_in_schema=False,
)
async def start_stream(request: FormRequest, streams: TextStreams) -> Started:
    """Begin a stream that takes text while it is spoken."""
    form = await request.take_form(StartForm)
    return Started(await streams.start(form.fields()))


@post(
    "/generate/stream/{stream_id:str}/text",
    status_code=200,
    request_class=FormRequest,
    responses={400: WRONG, 404: UNKNOWN, **REFUSALS},
    include_in_schema=False,
)
async def add_text(stream_id: str, request: FormRequest, streams: TextStreams) -> Told:
    """Add text to a stream."""
    streams.say(stream_id, (await request.take_form(TextForm)).text)
    return Told("accepted", stream_id)


@get(
    "/generate/stream/{stream_id:str}/audio",
    responses={200: RESPONSES[200], 404: UNKNOWN, **REFUSALS},
    include_in_schema=False,
)
async def hear_stream(stream_id: str, request: Request[Any, Any, Any], streams: TextStreams) -> Stream:
    """Return the audio of a stream as it is generated: a WAV file at 24 kHz."""
    stream = streams.find(stream_id)
    if stream.is_heard:
        raise refusal(409, "another client is already reading this stream", code="stream_heard")
    audio = streams.heard(stream)
    # An error before the first audio is a normal answer. That may take minutes, and the client may leave meanwhile.
    first = await run_while_connected(first_of(audio), request.receive)
    return Stream(joined(first, audio), media_type="audio/wav", headers={"cache-control": "no-store"})


async def first_of(audio: AsyncIterator[bytes]) -> bytes:
    return await anext(audio, b"")


async def joined(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for audio in rest:
        yield audio


@post(
    "/generate/stream/{stream_id:str}/end",
    status_code=200,
    responses={404: UNKNOWN, **REFUSALS},
    include_in_schema=False,
)
async def end_stream(stream_id: str, streams: TextStreams) -> Told:
    """End the text of a stream."""
    streams.end(stream_id)
    return Told("completed", stream_id)


def wrong_form(kind: type[F], what: str, field: str | None) -> HTTPException:
    names = ", ".join(kind.__struct_fields__)
    return refusal(400, f"{field or 'the form'}: {what}; the fields are: {names}", field, "invalid_form")
