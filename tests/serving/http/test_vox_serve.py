"""VoxServe's routes, with a fake engine (fake_engine.py)."""

import asyncio
import io
import threading
import wave

import httpx
import pytest
from fake_engine import CLONER, MODEL, TONE_SAMPLES
from http_server import Server, error, until
from metrics import outcomes
from uploads import recording

from serving.http import text_streams
from serving.settings import Limits

START = "/generate/stream/start"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    limits = Limits(sessions=4, text_idle_s=1.0)
    with Server(tmp_path_factory.mktemp("s"), limits=limits) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_left(server):
    yield
    until(lambda: server.app.state.server.sessions.num_held == 0)


def samples(audio):
    """Return the number of samples in a WAV file, whose header may leave the length open."""
    with wave.open(io.BytesIO(audio)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 24000)
    return (len(audio) - 44) // 2


def asked_last(server):
    return list(server.engine.messages.values())[-1]


def test_a_form_of_either_encoding_is_spoken_as_wav_at_24_khz(server):
    for form in ({"data": {"text": "frames 2"}}, {"files": {"text": (None, "frames 2")}}):
        for streaming in ("true", "false"):
            (kind, fields), *_ = form.items()
            answer = server.http.post(
                "/generate",
                **{kind: {**fields, "streaming": streaming if kind == "data" else (None, streaming)}},
            )
            assert answer.status_code == 200 and answer.headers["content-type"] == "audio/wav"
            assert samples(answer.content) == samples(
                server.speak("frames 2", sample_rate=24000, stream=False).content
            )


def test_the_fields_of_a_form_are_those_of_a_request(server):
    form = {"text": "frames 1", "speaker": "ryan", "language": "English", "instruct": "slowly"}
    assert server.http.post("/generate", data=form).status_code == 200
    request = asked_last(server).request
    assert (request.voice, request.language.lower(), request.instructions) == ("ryan", "english", "slowly")


def test_a_file_is_the_recording_of_a_voice(tmp_path):
    with Server(tmp_path, models=[CLONER]) as server:
        answer = server.http.post(
            "/generate", data={"text": "frames 1", "ref_text": "a"}, files={"audio": recording()}
        )
        assert answer.status_code == 200
        [reference] = asked_last(server).references
        assert reference.transcript == "a"


def test_wrong_forms_get_one_clear_error(server):
    assert error(server.http.post("/generate", data={"text": "a", "x": "1"}), 400)["code"] == "invalid_form"
    assert error(server.http.post("/generate", data={}), 400)["code"] == "invalid_form"
    assert (
        error(server.http.post("/generate", data={"text": "a", "streaming": "maybe"}), 400)["param"]
        == "streaming"
    )
    assert (
        error(server.http.post("/generate", data={"text": "a", "speaker": "carl"}), 400)["param"] == "voice"
    )
    assert error(server.http.post("/generate", json={"text": "a"}), 400)["code"] == "invalid_form"


@pytest.mark.parametrize("path", ["/generate", START, "/generate/stream/req_none/text"])
@pytest.mark.parametrize("boundary", ["", "; boundary=x"])
def test_a_malformed_form_is_refused(server, path, boundary):
    headers = {"content-type": f"multipart/form-data{boundary}"}
    answer = server.http.post(path, content=b"--x\r\n", headers=headers)
    assert error(answer, 400)["code"] == "invalid_form"


def test_a_form_that_the_full_engine_refuses_is_counted(server):
    before = outcomes(server).get("unavailable", 0)
    assert error(server.http.post("/generate", data={"text": "full"}), 503)["code"] == "engine_full"
    assert outcomes(server)["unavailable"] == before + 1


def test_text_is_spoken_while_it_arrives(server):
    id = server.http.post(START, data={"speaker": "ryan"}).json()["request_id"]
    heard = []
    reading = threading.Thread(
        target=lambda: heard.append(httpx.get(f"{server.url}/generate/stream/{id}/audio", timeout=10))
    )
    reading.start()
    for text in ("frames 3 of the first. ", "frames 2"):
        assert (
            server.http.post(f"/generate/stream/{id}/text", data={"text": text}).json()["status"]
            == "accepted"
        )
    assert server.http.post(f"/generate/stream/{id}/end").json() == {"status": "completed", "request_id": id}
    reading.join(10)
    whole = server.speak("frames 5", sample_rate=24000, stream=False).content
    assert heard[0].status_code == 200 and samples(heard[0].content) == samples(whole)
    until(lambda: server.http.post(f"/generate/stream/{id}/end").status_code == 404)


def test_a_wrong_stream_is_refused_at_its_start(server):
    assert error(server.http.post(START, data={"speaker": "carl"}), 400)["param"] == "voice"
    assert error(server.http.post(START, data={"text": "a"}), 400)["code"] == "invalid_form"
    assert error(server.http.get("/generate/stream/req_none/audio"), 404)["code"] == "not_found"


def test_a_client_that_leaves_frees_its_stream(server):
    id = server.http.post(START).json()["request_id"]
    server.http.post(f"/generate/stream/{id}/text", data={"text": "hold 3"})
    server.http.post(f"/generate/stream/{id}/end")
    with server.http.stream("GET", f"/generate/stream/{id}/audio") as answer:
        next(answer.iter_raw())
    until(lambda: id not in server.app.state.streams.running)


def test_a_client_that_leaves_before_any_audio_frees_its_stream(server):
    id = server.http.post(START, data={}).json()["request_id"]
    with pytest.raises(httpx.ReadTimeout):
        httpx.get(f"{server.url}/generate/stream/{id}/audio", timeout=0.3)
    until(lambda: server.app.state.server.sessions.num_held == 0, 5)


def test_a_stream_without_a_reader_ends_by_itself(server, monkeypatch):
    monkeypatch.setattr(text_streams, "UNHEARD_S", 0.3)
    id = server.http.post(START).json()["request_id"]
    assert server.app.state.server.sessions.num_held == 1
    until(lambda: server.app.state.server.sessions.num_held == 0)
    until(lambda: id not in server.app.state.streams.running)


def test_a_slow_reader_gets_all_audio_of_a_stream(server, monkeypatch):
    monkeypatch.setattr(text_streams, "MAX_WAITING", 2)
    id = server.http.post(START, data={}).json()["request_id"]
    server.http.post(f"/generate/stream/{id}/text", data={"text": "tone 25"})
    server.http.post(f"/generate/stream/{id}/end")
    streams = server.app.state.streams

    async def read():
        audio = b""
        async for piece in streams.heard(streams.find(id)):
            audio += piece
            await asyncio.sleep(0.05)
        return audio

    audio = asyncio.run_coroutine_threadsafe(read(), server.loop).result(30)
    assert samples(audio) == 25 * TONE_SAMPLES


def test_a_stream_that_the_server_ends_is_not_taken_for_complete(server):
    id = server.http.post(START, data={}).json()["request_id"]
    server.http.post(f"/generate/stream/{id}/text", data={"text": "hold 3"})
    server.http.post(f"/generate/stream/{id}/end")
    with (
        pytest.raises(httpx.RemoteProtocolError),
        server.http.stream("GET", f"/generate/stream/{id}/audio") as answer,
    ):
        pieces = answer.iter_raw()
        next(pieces)
        server.call(server.app.state.streams.find(id).leave)
        for _ in pieces:
            pass


def test_a_stream_whose_text_stops_coming_ends_with_an_error(server):
    id = server.http.post(START).json()["request_id"]
    server.http.post(f"/generate/stream/{id}/text", data={"text": "a"})
    fault = error(server.http.get(f"/generate/stream/{id}/audio"), 408)
    assert fault["code"] == "idle"


def test_streams_take_the_places_of_sessions(server):
    answers = [server.http.post(START) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [
        200,
        200,
        200,
        503,
    ]  # three quarters for one address
    assert error(answers[3], 503)["code"] == "server_busy"
    for answer in answers[:3]:
        id = answer.json()["request_id"]
        server.http.post(f"/generate/stream/{id}/text", data={"text": "frames 1"})
        server.http.post(f"/generate/stream/{id}/end")
        assert server.http.get(f"/generate/stream/{id}/audio").status_code == 200


def test_a_stream_needs_the_api_key(tmp_path):
    with Server(tmp_path, models=[MODEL], api_key="sk-a") as server:
        assert (
            server.http.post(START).status_code
            == server.http.post("/generate", data={"text": "a"}).status_code
            == 401
        )
