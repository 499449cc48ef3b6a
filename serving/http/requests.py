"""The body of a speech request, for all routes: null fields, the model's options, and the checks that need
no engine."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec
from litestar import Request
from litestar.exceptions import HTTPException

from serving.audio import encode
from serving.http.errors import SPEECH, cut, refusal, uncapitalized, wrong
from serving.http.foreign_fields import translated
from serving.http.objects import Model
from serving.http.schemas import FIELDS, MAX_OPTION_CHARS, TASK_MODE, SpeechRequest
from serving.http.server import Server

WHOLE: dict[str, Any] = {"stream": False, "stream_format": "audio"}
# Fields of the requests of vLLM-Omni, SGLang-Omni, Kokoro-FastAPI and LibreChat that have no meaning here.
FOREIGN = frozenset(
    (
        *("non_streaming_mode", "initial_codec_chunk_frames", "stage_params", "stage_sampling"),
        *("stream_codec_output", "suppress_bootstrap_silence", "token_count", "duration_tokens"),
        "stream_audio",
        *(
            "lang_code",
            "normalization_options",
            "volume_multiplier",
            "download_format",
            "return_download_link",
        ),
        *("backend",),
    )
)
# developers.openai.com/api/reference/resources/chat: fields that chat completions lack here, with the values that
# change nothing
OPENAI_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
}
MIN_INT, MAX_INT = -(2**63), 2**64 - 1  # what msgpack can carry


class ForgetfulRequest(Request[Any, Any, Any]):
    """A request whose null fields are defaults, whose fields have our names, and that can drop its body: the
    body may have megabytes, and the answer takes minutes."""

    translated: dict[str, Any] | None = None  # the body under our names

    async def json(self) -> Any:
        body = await super().json()
        if isinstance(body, dict) and self._json is not self.translated:
            body = translated(body, is_strict=self.app.state.server.names.is_strict)
            body = {name: value for name, value in body.items() if not self.is_default(name, value)}
            self._json = self.translated = body
        return body

    def is_default(self, name: str, value: object) -> bool:
        return is_default(name, value)

    async def take_json(self) -> Any:
        """Return the body and drop every other reference to it."""
        body = await self.json()
        self._body = self._connection_state.body = b""
        self._json = self.translated = self._connection_state.json = None
        return body


class ConversationRequest(ForgetfulRequest):
    """The same for a conversation. Clients may send OpenAI's default for a field that this server lacks."""

    def is_default(self, name: str, value: object) -> bool:
        return value is None or (name in OPENAI_DEFAULTS and value in OPENAI_DEFAULTS[name])


def request_of(
    fields: dict[str, Any], fixed: dict[str, Any] = WHOLE, *, is_text: bool = False
) -> SpeechRequest:
    """Return a speech request, by default for a whole file. fixed: values that the client cannot choose. is_text:
    all values are texts, as in a URL. Raises the same refusal as for a single request."""
    shared = {name: value for name, value in fields.items() if name in FIELDS[SPEECH]}
    try:
        return msgspec.convert(shared | fixed, SpeechRequest, strict=not is_text)
    except msgspec.ValidationError as error:
        raise wrong_field(str(error)) from None


def wrong_field(message: str) -> HTTPException:
    """Turn msgspec's error about a speech request into a refusal that names the field and what it takes."""
    fields = FIELDS[SPEECH]
    what, _, where = message.partition(" - at `$.")
    if not where and (missing := re.search("missing required field `(.*)`", what)):
        return refusal(400, f"{missing[1]} is missing: {fields[missing[1]]}", missing[1], "missing_field")
    field = re.split(r"[.\[`]", where)[0]
    if field not in fields:
        return refusal(400, f"the request must be an object with the field input: {uncapitalized(message)}")
    return refusal(wrong(field), f"{field}: {uncapitalized(what)}; {field} takes {fields[field]}", field)


def is_default(name: str, value: object) -> bool:
    """Whether a shared field is null, which means its default. `options_of` handles null options."""
    return value is None and name in FIELDS[SPEECH]


def drop_foreign(body: dict[str, Any], model: Model, server: Server) -> list[str]:
    """Remove the fields of other servers' clients from a body, and return a warning for each. A strict server
    leaves them, so that they are refused."""
    if server.names.is_strict:
        return []
    names = sorted(FOREIGN.intersection(body).difference(model.option_names))
    for name in names:
        del body[name]
    return [f"field {name!r} has no meaning here; it is ignored" for name in names]


def options_of(body: dict[str, Any], model: Model) -> dict[str, Any]:
    """Return the model's options in a body. The engine checks types and ranges. Raises the refusal."""
    given = {name: value for name, value in body.items() if name not in FIELDS[SPEECH]}
    possible = {option.name: option for option in model.options if option.name not in FIELDS[SPEECH]}
    for name, value in given.items():
        if name not in possible:
            raise unknown_field(name, model, possible)
        if not is_simple(value):
            raise refusal(400, f"{name} is {str(value)[:80]}; possible: {possible[name].possible}", name)
    return {name: value for name, value in given.items() if value is not None}


def is_simple(value: object) -> bool:
    """Whether a value can be an option's value at all. The engine checks the rest."""
    match value:
        case list() | dict():
            return False
        case str():
            return len(value) <= MAX_OPTION_CHARS
        case int():
            return MIN_INT <= value <= MAX_INT
    return True


def unknown_field(name: str, model: Model, options: Iterable[str]) -> HTTPException:
    own = ", ".join(options) or "none"
    fields = ", ".join(FIELDS[SPEECH])
    possible = f"the fields are: {fields}; the options of model {model.id!r} are: {own}"
    message = f"there is no field {cut(name)!r}; {possible}"
    return refusal(400, message, name, "unknown_field")


def check_words(data: SpeechRequest, server: Server) -> None:
    """Raise the refusal if a request asks for word times that this server cannot give."""
    if "word" not in (data.timestamp_granularities or ()):
        return
    if server.aligner is None:
        message = (
            "this server has no aligner, so it has no word times; an operator chooses one with --aligner DIR"
        )
        raise refusal(400, message, "timestamp_granularities", "no_aligner")
    if server.aligner.fault:
        raise refusal(503, server.aligner.fault, "timestamp_granularities", "aligner_failed")


def check(data: SpeechRequest, model: Model, server: Server, is_session: bool = False) -> None:
    """Check the fields of a request, but not its voice, as far as possible without the engine. Raises the
    refusal. is_session: they are settings of a session, which has no stream_format."""
    text_chars = server.limits.text_chars
    if len(data.input) > text_chars:
        message = f"input has {len(data.input)} characters; this server takes up to {text_chars}"
        raise refusal(400, message, "input")
    if data.stream_format == "sse" and not data.stream:
        message = "stream false and stream_format sse cannot be combined; leave stream or stream_format out"
        raise refusal(400, message, "stream")
    if data.timestamp_granularities and data.stream_format != "sse" and not is_session:
        message = "timestamps need stream_format sse; set it, or leave timestamp_granularities out"
        raise refusal(400, message, "timestamp_granularities")
    if data.timestamp_granularities and model.answers:
        message = (
            f"model {model.id!r} gives no times, since it does not speak the text itself; leave them out"
        )
        raise refusal(400, message, "timestamp_granularities")
    check_words(data, server)
    if data.bit_rate is not None and not encode.FORMATS[data.response_format].has_bit_rate:
        possible = ", ".join(name for name, form in encode.FORMATS.items() if form.has_bit_rate)
        message = f"{data.response_format} has no bit rate; these formats have one: {possible}"
        raise refusal(400, message, "bit_rate")
    if data.task_type is not None and TASK_MODE[data.task_type] not in model.modes:
        possible = ", ".join(task for task, mode in TASK_MODE.items() if mode in model.modes)
        message = f"model {model.id!r} does not support task_type {data.task_type!r}; it supports: {possible}"
        raise refusal(400, message, "task_type")
