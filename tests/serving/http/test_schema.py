"""Tests generated from the OpenAPI schema: no request breaks the server, whether the schema allows it or not,
and all answers match the schema."""

import json

import pytest
import schemathesis
from fake_engine import CLONER, MODEL
from http_server import Server
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks

CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
ROUTES = [
    ("POST", "/v1/audio/speech"),
    ("POST", "/v1/audio/speech/batch"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/audio/transcriptions"),
    ("POST", "/v1/text-to-speech/{voice_id}"),
    ("POST", "/v1/text-to-speech/{voice_id}/stream"),
    ("POST", "/v1/text-to-speech/{voice_id}/with-timestamps"),
    ("POST", "/v1/text-to-speech/{voice_id}/stream/with-timestamps"),
    ("GET", "/v1/voices"),
    ("GET", "/v2/voices"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model_id}"),
    ("GET", "/v1/audio/models"),
    ("GET", "/v1/audio/voices"),
    ("POST", "/v1/audio/voices"),
    ("DELETE", "/v1/audio/voices/{voice_id}"),
    ("PATCH", "/v1/audio/voices/{voice_id}"),
    ("GET", "/v1/audio/voices/{voice_id}/preview"),
    ("GET", "/v1/audio/pronunciations"),
    ("PUT", "/v1/audio/pronunciations"),
    ("GET", "/v1/audio/works"),
    ("POST", "/v1/audio/works"),
    ("GET", "/v1/audio/works/{work_id}"),
    ("DELETE", "/v1/audio/works/{work_id}"),
    ("POST", "/v1/audio/works/{work_id}/resume"),
    ("GET", "/v1/audio/works/{work_id}/book.m4b"),
    ("GET", "/v1/audio/works/{work_id}/chapters/{number}"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
]
SETTINGS = settings(
    max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def schema(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s"), models=[MODEL, CLONER]) as server:
        yield schemathesis.openapi.from_url(server.url + "/schema/openapi.json")


@pytest.mark.slow
def test_every_route_is_tested(schema):
    assert sorted((one.ok().method.upper(), one.ok().path) for one in schema.get_all_operations()) == sorted(
        ROUTES
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_behaves_as_the_schema_says(schema, method, path, mode):
    operation = schema[path][method]
    if mode is GenerationMode.NEGATIVE and not operation.body:  # any text is valid in a path
        pytest.skip("there is no invalid input")

    @SETTINGS
    @given(case=operation.as_strategy(generation_mode=mode))
    def tried(case):
        case.call_and_validate(checks=CHECKS, timeout=10)

    tried()


def test_the_schema_describes_the_events(tmp_path):
    with Server(tmp_path) as server:
        page = server.http.get("/schema/openapi.json").json()
        answer = server.speak("pieces 1", stream_format="sse", timestamp_granularities=["segment"])
    content = page["paths"]["/v1/audio/speech"]["post"]["responses"]["200"]["content"]
    assert set(content) == {"audio/*", "text/event-stream"}
    data = content["text/event-stream"]["schema"]["properties"]["data"]
    known = {}
    for one in data["contentSchema"]["oneOf"]:
        schema = page["components"]["schemas"][one["$ref"].rpartition("/")[2]]
        known[schema["properties"]["type"]["enum"][0]] = schema
    events = [json.loads(line[5:]) for line in answer.text.splitlines() if line.startswith("data:")]
    assert {event["type"] for event in events} == {*known} - {
        "error",
        "speech.audio.words",  # needs an aligner
        "speech.model.loading",  # needs a model on demand
    }
    for event in events:
        assert set(event) == set(known[event["type"]]["required"]) | {"type"}


def test_options_of_every_path_names_the_methods_of_the_schema(tmp_path):
    with Server(tmp_path, speech_urls=True) as server:
        paths = server.http.get("/schema/openapi.json").json()["paths"]
        named = {path: server.http.options(path.replace("{number}", "1")).headers["allow"] for path in paths}
    assert "HEAD" in named["/v1/audio/works"] and "POST" in named["/v1/audio/speech"]
    for path, operations in paths.items():
        methods = {"OPTIONS", *map(str.upper, operations)}
        assert named[path] == ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))
