"""The one line that each speech request leaves in the log."""

import httpx
import pytest
from fake_engine import CLONER, MODEL
from http_server import Server, until
from structlog.testing import capture_logs
from uploads import recording


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


def test_what_a_line_says(server):
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


def test_each_end_is_one_line(server):
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


def test_a_recording_is_no_name(server):
    import base64

    sample = base64.b64encode(recording()).decode()
    answer = server.speak("frames 1", model="cloner", ref_audio=sample, ref_text="Hm.")
    assert answer.status_code == 200
    assert line(server).items() >= {"model": "cloner", "voice": "(recording)"}.items()
