"""The gap between sentences, in requests and in sessions, with a fake engine."""

import json

import msgspec
import pytest
from fake_engine import FEEDER as WHOLE_FEEDER
from fake_engine import MODEL
from http_server import Server, error
from sessions import PATH, spoken
from websockets.sync.client import connect

FEEDER = msgspec.structs.replace(WHOLE_FEEDER, piece_s=45.0)
WHOLE = msgspec.structs.replace(MODEL, id="whole", piece_s=None)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("g"), models=[MODEL, FEEDER, WHOLE]) as server:
        yield server


@pytest.fixture(scope="module")
def with_default(tmp_path_factory):
    models = [MODEL, FEEDER, WHOLE]
    with Server(tmp_path_factory.mktemp("d"), models=models, sentence_gap_s=0.25) as server:
        yield server


def asked(server, **fields):
    id = server.speak("frames 1", **fields).headers["x-request-id"]
    return server.engine.asked[id].get("sentence_gap_s")


def test_a_request_sets_the_gap(server):
    assert asked(server) is None and asked(server, sentence_gap_s=1.5) == 1.5
    assert error(server.speak("frames 1", sentence_gap_s=11), 400)["param"] == "sentence_gap_s"


def test_the_server_s_gap_is_for_requests_that_set_none_and_models_that_cut_texts(with_default):
    assert asked(with_default) == 0.25
    assert asked(with_default, sentence_gap_s=0) == 0
    assert asked(with_default, model="whole") is None
    assert asked(with_default, conversation="a") is None


TEXT = "frames 2 for the first. frames 3 for the second. [pause:1s] frames 1 for the last."


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_in_a_session_the_gap_lies_between_sentences(server, size):
    events, audio = spoken(server, TEXT, size, sentence_gap_s=0.5)
    gap, pause, frame = 12000, 24000, 100
    assert events[-1]["type"] == "audio.done" and len(audio) // 2 == 6 * frame + gap + pause
    assert not any(audio[2 * 2 * frame : 2 * (2 * frame + gap)])
    assert any(audio[2 * (2 * frame + gap) : 2 * (3 * frame + gap)])
    assert len(spoken(server, TEXT, size)[1]) // 2 == 6 * frame + pause


def configured(server, **fields):
    """Return the answer to a session.config."""
    with connect(server.url.replace("http", "ws") + PATH) as socket:
        socket.send(json.dumps({"type": "session.config", "model": "feeder", **fields}))
        return json.loads(socket.recv(timeout=5))


def test_with_a_gap_a_session_goes_by_sentences(server, with_default):
    assert configured(server)["split_granularity"] == "token"
    assert configured(server, sentence_gap_s=1)["split_granularity"] == "sentence"
    assert configured(with_default)["split_granularity"] == "sentence"
    assert configured(with_default, split_granularity="token")["split_granularity"] == "token"
    refused = configured(server, split_granularity="token", sentence_gap_s=1)
    assert refused["error"]["param"] == "split_granularity"
