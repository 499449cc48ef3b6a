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


@pytest.mark.parametrize("name", ["", "x" * 257, 3])
def test_other_names_are_refused(talking, name):
    fault = error(talking.speak("frames 1", model="talker", conversation=name), 400)
    assert fault["param"] == "conversation"


def test_models_say_whether_they_continue_conversations(talking):
    models = talking.http.get("/v1/models").json()["data"]
    assert {model["id"]: model["shares_turns"] for model in models} == {"talker": True, "fake": False}
    assert describe("csm", family("csm").spec).shares_turns
