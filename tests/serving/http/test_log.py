"""The log has one line for each speech request."""

import json

import httpx
import pytest
from fake_engine import CLONER, MODEL
from http_server import Server, until
from structlog.testing import capture_logs
from uploads import recording
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from serving.http.routes import batch


@pytest.fixture
def server(tmp_path):
    with capture_logs() as lines, Server(tmp_path, models=[MODEL, CLONER]) as server:
        server.lines = lines
        yield server


def line(server):
    until(lambda: server.lines)
    [found] = server.lines
    server.lines.clear()
    return found


def test_the_line_of_a_request_has_its_facts(server):
    answer = server.speak("frames 3", voice="vivian")
    found = line(server)
    assert found["id"] == answer.headers["x-request-id"]
    assert 0 < found.pop("ttfa_ms") < 5000 and found.pop("rtf") > 0 and found.pop("took_s") >= 0
    assert found == {
        "event": "speech",
        "log_level": "info",
        "id": answer.headers["x-request-id"],
        "given_id": None,
        "model": "fake",
        "voice": "vivian",
        "format": "wav",
        "chars": 8,
        "frames": 3,
        "audio_s": 0.013,
        "status": 200,
        "reason": "stop",
    }


def test_a_session_that_breaks_is_logged(server, monkeypatch):
    def breaks(*_):
        raise ZeroDivisionError("broken")

    monkeypatch.setattr("serving.http.session.request_of", breaks)
    with connect(server.url.replace("http", "ws") + "/v1/audio/speech/stream") as client:
        client.send('{"type": "session.config", "model": "fake"}')
        with pytest.raises(ConnectionClosed):
            client.recv(timeout=10)
    found = line(server)
    assert found["event"] == "unexpected" and found["log_level"] == "error"
    assert isinstance(found["exc_info"], ZeroDivisionError)


def test_a_client_that_leaves_after_a_wrong_message_is_no_error(server):
    for _ in range(20):
        with connect(server.url.replace("http", "ws") + "/v1/audio/speech/stream") as client:
            client.send(b"not text")
            client.socket.close()
    until(lambda: server.app.state.server.sessions.num_held == 0)
    assert [found for found in server.lines if found["log_level"] == "error"] == []


def test_every_outcome_is_one_line(server):
    server.speak("silent")
    assert line(server)["reason"] == "no_audio"
    server.speak("full")
    assert line(server).items() >= {"event": "refused", "model": "fake", "reason": "unavailable"}.items()
    server.http.post("/v1/audio/speech", content=b"{")
    assert line(server).items() >= {"event": "refused", "model": None, "reason": "refused"}.items()
    with pytest.raises(httpx.RemoteProtocolError):
        server.speak("fail 2")
    assert line(server).items() >= {"reason": "failed", "frames": 2, "error": "the codec broke"}.items()
    with server.stream("hold 1") as answer:
        next(answer.iter_raw())
    assert line(server).items() >= {"reason": "cancelled", "status": 499, "frames": 1}.items()


def test_an_unexpected_failure_is_logged_with_the_id_of_its_answer(server, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("serving.http.routes.speech.prepared", broken)
    answer = server.speak("frames 1")
    assert answer.status_code == 500
    until(lambda: server.lines and server.lines[-1]["event"] == "refused")
    ids = {found["id"] for found in server.lines}
    server.lines.clear()
    assert ids == {answer.headers["x-request-id"]}


@pytest.mark.parametrize("id", ["mine", None])
def test_every_refused_item_of_a_batch_is_one_line(server, monkeypatch, id):
    monkeypatch.setattr(batch, "PATIENCE_S", 0)
    items = [{"input": "full"}, {"input": "frames 1"}]
    items += [{"input": "frames 1", name: "nobody"} for name in ("voice", "model")]
    shared = {"model": "fake", "response_format": "pcm", "items": items}
    sent = {} if id is None else {"x-request-id": id}
    answer = server.http.post("/v1/audio/speech/batch", json=shared, headers=sent)
    assert answer.status_code == 200 and id in (None, answer.headers["x-request-id"])
    until(lambda: len(server.lines) == 4)
    refused = sorted(
        (line for line in server.lines if line["event"] == "refused"), key=lambda line: line["item"]
    )
    server.lines.clear()
    facts = [(line["item"], line["model"], line["status"], line["reason"]) for line in refused]
    assert facts == [(0, "fake", 503, "unavailable"), (2, "fake", 400, "refused"), (3, None, 404, "refused")]
    told = [result["error"]["message"] for result in answer.json()["data"] if result["error"]]
    assert [line["error"] for line in refused] == told
    id = answer.headers["x-request-id"]
    assert all(line["id"] == id and line["path"] == "/v1/audio/speech/batch" for line in refused)


@pytest.mark.parametrize(
    "ask",
    [
        lambda server: server.speak(""),
        lambda server: server.speak("full"),
        lambda server: server.speak("frames 1", voice="nobody"),
        lambda server: server.http.post("/v1/audio/voices"),
        lambda server: server.http.get("/nothing"),
        lambda server: server.http.post("/v1/audio/speech/batch", json={"items": [{"input": ""}]}),
    ],
    ids=["by its fields", "by the engine", "by the voice", "upload", "route", "item"],
)
def test_a_refused_request_is_logged_with_the_id_of_its_answer(server, ask):
    answer = ask(server)
    assert line(server).items() >= {"event": "refused", "id": answer.headers["x-request-id"]}.items()


def test_a_refused_utterance_of_a_session_is_one_line(server):
    url = server.url.replace("http", "ws") + "/v1/audio/speech/stream"
    with connect(url, additional_headers={"x-request-id": "mine"}) as socket:
        for message in (
            {"type": "session.config", "model": "fake", "voice": "vivian"},
            {"type": "input.text", "text": "full"},
            {"type": "input.done"},
        ):
            socket.send(json.dumps(message))
        while (event := json.loads(socket.recv(timeout=5)))["type"] != "error":
            pass
    found = line(server)
    assert found.items() >= {"event": "refused", "id": "mine", "model": "fake", "status": 503}.items()
    assert found["utterance"] == 1 and found["error"] == event["error"]["message"]
    assert found["reason"] == "unavailable" and found["path"] == "/v1/audio/speech/stream"


def test_the_voice_of_a_recording_is_not_a_name(server):
    import base64

    sample = base64.b64encode(recording()).decode()
    answer = server.speak("frames 1", model="cloner", ref_audio=sample, ref_text="Hm.")
    assert answer.status_code == 200
    assert line(server).items() >= {"model": "cloner", "voice": "(recording)"}.items()
