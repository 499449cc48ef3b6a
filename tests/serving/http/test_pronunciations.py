"""Pronunciations over HTTP and the WebSocket, with a fake engine."""

import json

import pytest
from fake_engine import FEEDER, MODEL
from http_server import Server, error
from sessions import spoken

from serving.http.schemas import Limits

SHARED = [{"term": "once", "say": "one"}, {"term": "twice", "say": "two", "voice": "ryan"}]
OWN = [{"term": "twice", "say": "too"}]
TOO_MANY = [{"term": "a", "say": "b"}] * 1001


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("s") / "words.json"
    path.write_text(json.dumps(SHARED))
    options = {"limits": Limits(text_chars=100), "pronunciations": str(path)}
    with Server(path.parent, models=[MODEL, FEEDER], **options) as server:
        yield server


def asked(server):
    return list(server.engine.asked.values())[-1]["text"]


@pytest.mark.parametrize(
    "fields", [{}, {"stream": False}, {"stream_format": "sse"}, {"text_format": "markdown"}], ids=str
)
def test_the_entries_of_the_server_and_of_the_request_are_read(server, fields):
    server.speak("frames 1 Once, twice", **fields)
    assert asked(server) == "frames 1 one, twice"
    server.speak("frames 1 twice", pronunciations=OWN, **fields)
    assert asked(server) == "frames 1 too"
    server.speak("frames 1 twice", voice="ryan", **fields)
    assert asked(server) == "frames 1 two"


def test_each_item_of_a_batch_has_its_own(server):
    items = [{"input": "frames 1 twice", "pronunciations": OWN}]
    server.http.post("/v1/audio/speech/batch", json={"model": "fake", "items": items})
    assert asked(server) == "frames 1 too"


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("text_format", ["plain", "markdown"])
def test_a_session_replaces_terms_however_the_text_arrives(server, size, text_format):
    text = "frames 1 *twice*. [pause:1ms] frames 2 Once"
    spoken(server, text, size, pronunciations=OWN, text_format=text_format)
    said = [one["text"].replace("*", "") for one in list(server.engine.asked.values())[-2:]]
    assert said == ["frames 1 too.", "frames 2 one"]


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_fed_text_is_replaced_too(server, size):
    words = [{"term": "it is", "say": "one two three"}]
    spoken(server, "so it is. Once it isn't it", size, model="feeder", pronunciations=words)
    fed = "".join(list(server.engine.fed.values())[-1])
    assert fed == "so one two three. one it isn't it"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("a: b", "expected `array | null`"),
        ([{"term": "a"}], "missing required field `say`"),
        ([{"term": "", "say": "b"}], "length >= 1"),
        ([{"term": "a", "say": "b", "ipa": "c"}], "unknown field `ipa`"),
        (TOO_MANY, "length <= 1000"),
        ([{"term": "a", "say": "b" * 101}], "the text has 101 characters with its pronunciations"),
    ],
)
def test_wrong_pronunciations_are_refused(server, words, says):
    fault = error(server.speak("a", pronunciations=words), 400)
    assert fault["param"] == "pronunciations" and says in fault["message"]
