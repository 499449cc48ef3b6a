"""Requests over HTTP that continue a conversation: the engine gets its name, and models say whether they
can."""

import msgspec
import pytest
from fake_engine import CLONER, MODEL
from http_server import Server, error
from models import family

from serving.engine.wire import describe, request_of

TALKER = msgspec.structs.replace(CLONER, id="talker", shares_turns=True)


@pytest.fixture(scope="module")
def talking(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("c"), models=[TALKER, MODEL]) as server:
        yield server


def test_the_engine_gets_the_name_of_the_conversation(talking):
    answer = talking.speak("frames 1", model="talker", conversation="anna and bert")
    assert answer.status_code == 200, answer.text
    message = talking.engine.messages[answer.headers["x-request-id"]]
    assert request_of(message).conversation == "anna and bert"
    message = talking.engine.messages[talking.speak("frames 1", model="talker").headers["x-request-id"]]
    assert request_of(message).conversation is None


def known_as(server, name, key):
    """Return the name by which the engine knows a conversation."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {"input": "frames 1", "conversation": name}
    answer = server.http.post("/v1/audio/speech", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return request_of(server.engine.messages[answer.headers["x-request-id"]]).conversation


def test_a_name_under_another_key_is_another_conversation(tmp_path):
    """Servers with different keys may share replicas, and those of one key must agree where a conversation
    goes on."""
    names = []
    for index, key in enumerate(("sk-a", "sk-a", "sk-b", None)):
        (directory := tmp_path / str(index)).mkdir()
        with Server(directory, models=[TALKER], api_key=key) as server:
            names.append([known_as(server, name, key) for name in ("one", "two")])
    first, same, other, shared = names
    assert first == same and shared == ["one", "two"]
    assert len({*first, *other, *shared}) == 6
    assert not any("sk-" in name for name in (*first, *other))


@pytest.mark.parametrize("name", ["", "x" * 257, 3])
def test_other_names_are_refused(talking, name):
    fault = error(talking.speak("frames 1", model="talker", conversation=name), 400)
    assert fault["param"] == "conversation"


def test_models_say_whether_they_continue_conversations(talking):
    models = talking.http.get("/v1/models").json()["data"]
    assert {model["id"]: model["shares_turns"] for model in models} == {"talker": True, "fake": False}
    assert describe("csm", family("csm").spec).shares_turns
