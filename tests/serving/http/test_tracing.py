"""Traces of requests, collected by OpenTelemetry's in-memory exporter."""

import gzip
import http.server
import json
import threading
import time

import httpx
import pytest
from http_server import Server, until
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import (
    client_attributes,
    error_attributes,
    http_attributes,
    network_attributes,
    server_attributes,
    url_attributes,
    user_agent_attributes,
)
from opentelemetry.trace import SpanKind, StatusCode
from websockets.sync.client import connect

from serving.http.tracing import Tracing, exporter

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CONVENTIONS = (
    gen_ai_attributes,
    client_attributes,
    error_attributes,
    http_attributes,
    network_attributes,
    server_attributes,
    url_attributes,
    user_agent_attributes,
)
STANDARD = {value for part in CONVENTIONS for value in vars(part).values() if isinstance(value, str)}


@pytest.fixture
def spans():
    return InMemorySpanExporter()


@pytest.fixture
def server(tmp_path, spans):
    with Server(tmp_path, tracing=Tracing(SimpleSpanProcessor(spans))) as server:
        yield server


def pair(spans):
    """Wait for the two spans of a speech request, and return the server's and the model's."""
    until(lambda: len(spans.get_finished_spans()) == 2)
    server, model = sorted(spans.get_finished_spans(), key=lambda span: span.kind is not SpanKind.SERVER)
    assert model.parent.span_id == server.context.span_id
    return server, model


def test_a_speech_request_has_a_server_span_and_a_model_span(server, spans):
    answer = server.speak("frames 3", voice="ryan", temperature=0.5)
    asked, model = pair(spans)
    port = int(server.url.rpartition(":")[2])
    assert asked.name == "POST /v1/audio/speech" and asked.kind is SpanKind.SERVER and asked.parent is None
    assert asked.resource.attributes["service.name"] == "speechzoo"
    expected = {
        "http.request.method": "POST",
        "http.route": "/v1/audio/speech",
        "http.response.status_code": 200,
        "url.path": "/v1/audio/speech",
        "url.scheme": "http",
        "server.address": "127.0.0.1",
        "server.port": port,
        "client.address": "127.0.0.1",
    }
    assert expected.items() <= dict(asked.attributes).items()
    assert model.name == "generate_content fake" and model.status.status_code is StatusCode.UNSET
    facts = dict(model.attributes)
    expected = {
        "gen_ai.output.type": "speech",
        "gen_ai.request.model": "fake",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.response.id": answer.headers["x-request-id"],
        "gen_ai.usage.output_tokens": 3,
        "zoo.frames": 3,
        "zoo.audio_s": 300 / 24000,
        "zoo.voice": "ryan",
        "zoo.text_chars": len("frames 3"),
    }
    assert expected.items() <= facts.items()
    assert 0 < facts["gen_ai.response.time_to_first_chunk"] < 5
    assert model.start_time >= asked.start_time and model.end_time <= asked.end_time


def test_attribute_names_follow_the_conventions(server, spans):
    server.speak("frames 1")
    server.http.get("/v1/models/nothing")
    until(lambda: len(spans.get_finished_spans()) == 3)
    names = {name for span in spans.get_finished_spans() for name in span.attributes}
    assert {name for name in names if not name.startswith("zoo.")} <= STANDARD
    # No span has the text.
    assert not any("frames 1" in str(span.attributes) for span in spans.get_finished_spans())


def test_a_clients_trace_continues(server, spans):
    server.http.post("/v1/audio/speech", json=server.body("frames 1"), headers={"traceparent": PARENT})
    asked, _ = pair(spans)
    assert (
        f"{asked.context.trace_id:032x}" == PARENT[3:35] and f"{asked.parent.span_id:016x}" == PARENT[36:52]
    )


@pytest.mark.parametrize(
    ("text", "status", "kind"),
    [("silent", 422, "no_audio"), ("full", 503, "engine_full"), ("reject voice", 400, "400")],
)
def test_a_refused_request_sets_the_error_type(server, spans, text, status, kind):
    assert server.speak(text).status_code == status
    asked, model = pair(spans)
    assert asked.attributes["http.response.status_code"] == status
    assert model.attributes["error.type"] == kind
    assert (model.status.status_code is StatusCode.ERROR) == (status >= 500)
    assert (asked.status.status_code is StatusCode.ERROR) == (status >= 500)


def test_a_trace_names_the_replicas_that_were_asked(server, spans):
    assert server.speak("offered a b").status_code == 200
    _, model = pair(spans)
    assert model.attributes["zoo.replicas"] == ("a", "b")


def test_a_failed_stream_is_an_error(server, spans):
    with pytest.raises(httpx.RemoteProtocolError):
        server.speak("fail 1")
    _, model = pair(spans)
    assert model.attributes["error.type"] == "failed" and model.status.status_code is StatusCode.ERROR
    assert model.attributes["zoo.frames"] == 1


def test_a_disconnect_is_not_an_error(server, spans):
    with server.stream("hold 1") as answer:
        next(answer.iter_raw())
    _, model = pair(spans)
    assert model.attributes["gen_ai.response.finish_reasons"] == ("cancelled",)
    assert model.status.status_code is StatusCode.UNSET


def test_monitoring_routes_are_not_traced(server, spans):
    for path in ("/health", "/ready", "/metrics", "/schema/openapi.json", "/"):
        assert server.http.get(path).status_code == 200
    server.http.get("/v1/models")
    until(lambda: spans.get_finished_spans())
    assert [span.name for span in spans.get_finished_spans()] == ["GET /v1/models"]


def test_the_name_of_a_span_contains_no_id(server, spans):
    server.http.get("/v1/models/fake")
    until(lambda: spans.get_finished_spans())
    [span] = spans.get_finished_spans()
    assert span.name == "GET /v1/models/{model_id}" and span.attributes["url.path"] == "/v1/models/fake"


class Collector(http.server.BaseHTTPRequestHandler):
    """A collector that records what is posted to it."""

    def do_POST(self):
        self.server.posted.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_a_collector_gets_the_spans_when_the_server_stops(tmp_path, monkeypatch):
    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as collector:
        collector.posted = []
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "voices-of-the-house")
        with Server(tmp_path, tracing=Tracing(exporter())) as server:
            server.speak("frames 1")
        collector.shutdown()
    [(path, body)] = collector.posted
    assert path == "/v1/traces"
    read = ExportTraceServiceRequest.FromString(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
    [resource] = read.resource_spans
    names = {span.name for scope in resource.scope_spans for span in scope.spans}
    assert names == {"POST /v1/audio/speech", "generate_content fake"}
    service = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert service["service.name"] == "voices-of-the-house"


def test_an_unreachable_collector_does_not_delay_the_shutdown(tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    with Server(tmp_path, tracing=Tracing(exporter())) as server:
        assert server.speak("frames 1").status_code == 200
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 4


def test_a_session_is_a_span_that_contains_its_utterances(server, spans):
    with connect(server.url.replace("http", "ws") + "/v1/audio/speech/stream") as socket:
        for message in ({"type": "input.text", "text": "frames 3"}, {"type": "input.done"}):
            socket.send(json.dumps(message))
        until_done(socket)
    until(lambda: len(spans.get_finished_spans()) == 2)
    model, session = spans.get_finished_spans()
    assert (
        session.name == "GET /v1/audio/speech/stream"
        and session.attributes["http.response.status_code"] == 101
    )
    assert model.parent.span_id == session.context.span_id and model.attributes["zoo.frames"] == 3


def until_done(socket):
    while not (isinstance(message := socket.recv(timeout=5), str) and '"audio.done"' in message):
        pass


def test_every_item_of_a_batch_has_a_span(server, spans):
    items = [{"input": "frames 2"}, {"input": "silent"}]
    server.http.post("/v1/audio/speech/batch", json={"items": items, "response_format": "wav"})
    until(lambda: len(spans.get_finished_spans()) == 3)
    *models, batch = spans.get_finished_spans()
    assert batch.name == "POST /v1/audio/speech/batch"
    assert {model.parent.span_id for model in models} == {batch.context.span_id}
    assert sorted(model.attributes.get("error.type", "") for model in models) == ["", "no_audio"]
