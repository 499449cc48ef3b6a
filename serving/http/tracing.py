"""Traces of requests (`zoo serve --otel`, needs the extra `otel`): a server span for each request under
/v1, and for speech a span of the model inside it.

    POST /v1/audio/speech            http.* url.* server.* client.*
      generate_content NAME          gen_ai.*, and zoo.* for facts that only speech has

The names are OpenTelemetry's semantic conventions for HTTP and for generative AI. A span contains neither the
text nor a recording. A client's own trace (`traceparent`) continues. OpenTelemetry's variables, such as
OTEL_EXPORTER_OTLP_ENDPOINT, set everything else: where spans go, how many are kept, the name of the service.

OpenTelemetry's own ASGI instrumentation is not used: it is beta, does not know Litestar's routes, and uses
the old names by default.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

from litestar.exceptions import HTTPException
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send
from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from serving.audio.playback import Playback
from serving.http.errors import error_of
from serving.http.objects import Model, Usage
from serving.http.schemas import SpeechRequest
from serving.http.voice_choice import VoiceChoice

TRACED = "/v1/"  # monitoring polls /health, /ready and /metrics every few seconds, so they are not traced
# ASGI messages that set the status of the answer.
STATUS = ("http.response.start", "websocket.http.response.start", "websocket.accept")
SWITCHED = 101  # the status of an opened WebSocket
FINISH = "gen_ai.response.finish_reasons"
CLOSE_S = 2.0
GOOD = ("stop", "length", "cancelled")  # outcomes that are not errors


class Answer(Protocol):
    """The facts of a speech request that its span reports. `Speech` has them."""

    id: str
    model: Model
    request: SpeechRequest
    outcome: str | None
    ttfa_s: float | None
    num_frames: int
    playback: Playback
    replicas: list[str]
    voice: VoiceChoice

    @property
    def usage(self) -> Usage | None: ...

    @property
    def audio_s(self) -> float: ...


def exporter() -> SpanProcessor:
    """Return a processor that sends spans to a collector in batches, on its own thread. It drops spans when
    its queue is full."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return BatchSpanProcessor(OTLPSpanExporter())


class Tracing:
    """Makes spans and passes them to a processor."""

    def __init__(self, processor: SpanProcessor) -> None:
        os.environ.setdefault("OTEL_SERVICE_NAME", "speechzoo")
        self.provider = TracerProvider(resource=Resource.create(), shutdown_on_exit=False)
        self.provider.add_span_processor(processor)
        self.tracer = self.provider.get_tracer("speechzoo", importlib.metadata.version("speechzoo"))

    def close(self) -> None:
        """Send the remaining spans, for at most CLOSE_S. The exporter retries an unreachable collector for
        longer, which must not delay the end of the server."""
        ending = threading.Thread(target=self.provider.shutdown, daemon=True)
        ending.start()
        ending.join(CLOSE_S)

    def around(self, app: ASGIApp) -> ASGIApp:
        """Return the app with a server span for each request under /v1. The span of a WebSocket lasts while
        it is open."""

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] not in ("http", "websocket") or not scope["path"].startswith(TRACED):
                return await app(scope, receive, send)
            asked = attributes_of(cast(HTTPScope, scope))
            with self.tracer.start_as_current_span(
                asked["http.request.method"], extract(headers_of(scope)), SpanKind.SERVER, asked
            ) as span:

                async def answering(message: Message) -> None:
                    if message["type"] in STATUS:
                        status = cast(dict[str, Any], message).get("status", SWITCHED)
                        take_answer(span, asked["http.request.method"], scope, status)
                    await send(message)

                await app(scope, receive, answering)

        return traced

    @contextmanager
    def speech(self, speech: Answer) -> Iterator[None]:
        """Make the model's span for a request. The attributes of the result are set when the request ends."""
        name = f"generate_content {speech.model.id}"
        with self.tracer.start_as_current_span(
            name, attributes=asked(speech), record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield
            except asyncio.CancelledError:
                span.set_attributes({FINISH: ["cancelled"]})
                raise
            except HTTPException as refused:
                fail(span, error_of(refused).code or str(refused.status_code), refused.status_code >= 500)
                raise
            finally:
                span.set_attributes(made(speech))
                if speech.outcome is not None and speech.outcome not in GOOD:
                    fail(span, speech.outcome, True)


def headers_of(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


def attributes_of(scope: HTTPScope) -> dict[str, Any]:
    """Return the attributes of a new request: https://opentelemetry.io/docs/specs/semconv/http/http-spans."""
    headers = headers_of(scope)
    host, _, port = headers.get("host", "").rpartition(":")
    known = {
        "http.request.method": scope.get("method", "GET"),  # a WebSocket begins with a GET
        "url.path": scope["path"],
        "url.scheme": scope["scheme"],
        "network.protocol.version": scope["http_version"],
        "server.address": host if port.isdigit() else headers.get("host"),
        "server.port": int(port) if port.isdigit() and host else None,
        "client.address": scope["client"][0] if scope["client"] else None,
        "user_agent.original": headers.get("user-agent"),
    }
    return {name: value for name, value in known.items() if value}


def take_answer(span: Span, method: str, scope: Scope, status: int) -> None:
    """Set the status, and name the span after the route: names of spans must not contain IDs."""
    if route := cast(dict[str, Any], scope).get("path_template"):
        span.update_name(f"{method} {route}")
        span.set_attribute("http.route", route)
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        fail(span, str(status), True)


def asked(speech: Answer) -> dict[str, Any]:
    """Return the attributes of a speech request:
    https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans."""
    request = speech.request
    known = {
        "gen_ai.operation.name": "generate_content",
        "gen_ai.provider.name": "speechzoo",
        "gen_ai.output.type": "speech",
        "gen_ai.request.model": speech.model.id,
        "gen_ai.request.stream": request.stream,
        "gen_ai.request.max_tokens": request.max_new_tokens,
        "gen_ai.request.temperature": request.temperature,
        "gen_ai.request.top_k": request.top_k,
        "gen_ai.request.top_p": request.top_p,
        "zoo.text_chars": len(request.input),
        "zoo.response_format": request.response_format,
        "zoo.voice": speech.voice.label,
    }
    return {name: value for name, value in known.items() if value is not None}


def made(speech: Answer) -> dict[str, Any]:
    """Return the attributes of a speech result."""
    known = {
        "gen_ai.response.id": speech.id,
        "gen_ai.response.model": speech.model.id,
        FINISH: [speech.outcome] if speech.outcome else None,
        "gen_ai.response.time_to_first_chunk": speech.ttfa_s,
        "gen_ai.usage.input_tokens": speech.usage.input_tokens if speech.usage else None,
        "gen_ai.usage.output_tokens": speech.usage.output_tokens if speech.usage else None,
        "zoo.frames": speech.num_frames,
        "zoo.audio_s": speech.audio_s,
        "zoo.underrun_s": speech.playback.underrun_s,
        "zoo.replicas": speech.replicas or None,
    }
    return {name: value for name, value in known.items() if value is not None}


def fail(span: Span, kind: str, is_ours: bool) -> None:
    """Mark a span as failed. is_ours: the server is at fault, not the client."""
    span.set_attribute("error.type", kind)
    if is_ours:
        span.set_status(Status(StatusCode.ERROR))
