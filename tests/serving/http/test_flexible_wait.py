"""A flexible request waits for its first audio, but not for ever."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_engine import frame
from http_server import Server, error, until

from serving.settings import Limits

LIMIT_S = 1.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s"), limits=Limits(flex_wait_s=LIMIT_S)) as server:
        yield server


@pytest.fixture
def held(server):
    """Hold the engine's answers up after their first frame, until the test sets `go`."""
    server.call(server.engine.go.clear)
    yield server
    server.call(server.engine.go.set)


def flexible(server, text="queued", **fields):
    return server.speak(text, service_tier="flex", **fields)


def is_asked(server, text):
    return any(fields["text"] == text for fields in server.engine.asked.values())


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_flexible_request_that_is_not_begun_in_time_gets_503(server, is_stream):
    before = len(server.engine.cancelled)
    answer = flexible(server, stream=is_stream)
    refused = error(answer, 503)
    assert refused["code"] == "engine_full" and "within 1 s" in refused["message"]
    assert answer.headers["retry-after"] == "60"
    until(lambda: len(server.engine.cancelled) == before + 1)


def test_events_that_have_begun_end_with_the_error(held):
    answer = flexible(held, "cold 1", stream_format="sse")
    assert answer.status_code == 200
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line]
    assert [event["type"] for event in events] == ["speech.model.loading", "error"]
    assert events[-1]["error"]["code"] == "engine_full"


def test_a_listener_and_speech_that_has_begun_are_not_cut(held):
    """Both have waited longer than the limit when a later flexible request is refused."""
    with ThreadPoolExecutor(1) as pool, held.stream("frames 2", service_tier="flex") as begun:
        listener = pool.submit(held.speak, "cold 1")
        chunks = begun.iter_raw()
        heard = next(chunks)
        until(lambda: is_asked(held, "cold 1"))
        assert flexible(held).status_code == 503
        held.call(held.engine.go.set)
        assert listener.result().status_code == 200
        assert (heard + b"".join(chunks)).endswith(frame(0) + frame(1))
