"""Wrong requests, failures and shutdowns over HTTP, with a fake engine (fake_engine.py)."""

import asyncio
import gzip
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fake_engine import READY, frame
from http_server import Server, error, until
from metrics import outcomes

from serving import protocol
from serving.http import listener
from serving.settings import Limits

WITHIN_S = 30.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s"), limits=Limits(text_chars=100)) as server:
        yield server


@pytest.fixture
def mortal(tmp_path):
    """A server whose engine or whole process the test may stop."""
    with Server(tmp_path) as server:
        yield server


BAD_FIELDS = [
    ({"input": ""}, "input", "^input is empty$"),
    ({"input": " \n\t"}, "input", "^input is empty$"),
    ({"input": "x" * 101}, "input", "101 characters; this server takes up to 100"),
    ({"input": 5}, "input", "expected `str`"),
    (
        {"input": "x", "response_format": "wma"},
        "response_format",
        "mp3 .*, opus .*, webm .*, wav, pcm .*, ulaw .* or alaw",
    ),
    ({"input": None}, "input", "input is missing"),
    ({"input": "x", "sample_rate": 7999}, "sample_rate", "from 8000 to 48000"),
    ({"input": "x", "sample_rate": 44100.5}, "sample_rate", "from 8000 to 48000"),
    ({"input": "x", "sample_rate": 9000}, "sample_rate", "does not support 9000 Hz; use one of 8000, 11025"),
    (
        {"input": "x", "sample_rate": 24000, "response_format": "opus"},
        "sample_rate",
        "always decodes to 48000 Hz, not 24000 Hz",
    ),
    ({"input": "x", "bit_rate": 7999}, "bit_rate", "from 8000 to 192000"),
    (
        {"input": "x", "bit_rate": 64000, "response_format": "flac"},
        "bit_rate",
        "flac has no bit rate; these formats have one: mp3, opus, webm, aac, m4a, ogg$",
    ),
    ({"input": "x", "speed": 0.24}, "speed", "takes the speed.* from 0.25 to 4"),
    ({"input": "x", "speed": 4.1}, "speed", "from 0.25 to 4"),
    ({"input": "x", "speed": "fast"}, "speed", "from 0.25 to 4"),
    ({"input": "x", "stream_format": "ndjson"}, "stream_format", "takes audio .* or sse"),
    ({"input": "x", "stream_format": "sse", "stream": False}, "stream", "leave stream or stream_format out"),
    (
        {"input": "x", "task_type": "Base"},
        "task_type",
        "does not support task_type 'Base'; it supports: CustomVoice",
    ),
    ({"input": "x", "task_type": "clone"}, "task_type", "VoiceDesign"),
    ({"input": "x", "codec_chunk_frames": 1}, "codec_chunk_frames", "no field"),
    (
        {"input": "x", "response_format": "MP3"},
        "response_format",
        "invalid enum value 'MP3'; response_format",
    ),
    ({"input": "x", "voice": "carl"}, "voice", "no voice 'carl'; available voices: vivian, ryan$"),
    ({"input": "x", "stream": "maybe"}, "stream", "true .* false"),
    (
        {"input": "x", "text_mode": ["full"]},
        "text_mode",
        r"text_mode is \['full'\]; possible: full, interleaved$",
    ),
    ({"input": "x", "cfg_scale": {}}, "cfg_scale", "possible: a number from 0 to 100"),
    (
        {"input": "x", "depth_top_k": 1},
        "depth_top_k",
        "the options of model 'fake' are: text_mode, cfg_scale, solver_steps$",
    ),
    ({"input": "x", "x_vector_only_mode": True}, "x_vector_only_mode", "no field 'x_vector_only_mode'"),
    ({"input": "x", "layout": None}, "layout", "no field 'layout'"),
    ({"input": "x", "temperature": -0.1}, "temperature", "0 .* to 2"),
    ({"input": "x", "temperature": 2.1}, "temperature", "0 .* to 2"),
    ({"input": "x", "temperature": "hot"}, "temperature", "0 .* to 2"),
    ({"input": "x", "top_p": 0}, "top_p", "above 0"),
    ({"input": "x", "top_p": 1.01}, "top_p", "up to 1"),
    ({"input": "x", "top_k": -1}, "top_k", "0 .off."),
    ({"input": "x", "top_k": 1.5}, "top_k", "an integer"),
    ({"input": "x", "repetition_penalty": 0.5}, "repetition_penalty", "above 0.5"),
    ({"input": "x", "repetition_penalty": 3}, "repetition_penalty", "up to 2"),
    ({"input": "x", "max_new_tokens": 0}, "max_new_tokens", "from 1"),
    ({"input": "x", "seed": -1}, "seed", "from 0"),
    ({"input": "x", "seed": 2**63}, "seed", "2.63"),
    ({"input": "x", "seed": 2**80}, "seed", "2.63"),
    ({"input": "x", "voice": 7}, "voice", "name of a voice"),
    ({"input": "x", "voice": {"name": "vivian"}}, "voice", "name of a voice"),
    (
        {"input": "x", "temprature": 1},
        "temprature",
        "no field 'temprature'; the fields are: input, model, voice",
    ),
    ({"voice": "vivian"}, "input", "input is missing"),
    ({"input": "x", "instructions": "x" * 4097}, "instructions", "length <= 4096.*in up to 4096 characters"),
    ({"input": "x", "ref_audio": "", "ref_text": "x" * 4097}, "ref_text", "length <= 4096"),
    ({"input": "x", "references": [{"audio": "", "text": "x" * 4097}]}, "references", "length <= 4096"),
    ({"input": "x", "references": [{"audio": "", "speaker": "x" * 257}]}, "references", "length <= 256"),
    ({"input": "x", "language": "x" * 257}, "language", "length <= 256"),
    ({"input": "x", "voice": "x" * 257}, "voice", "length <= 256"),
    ({"input": "x", "voice": {"id": "x" * 257}}, "voice", "length <= 256"),
    ({"input": "x", "model": "x" * 257}, "model", "length <= 256"),
    ({"input": "x", "text_mode": "x" * 1001}, "text_mode", "possible: full, interleaved"),
    (
        {"input": "x", "y" * 9_000_000: 1},
        "y" * 100 + "...",
        r"no field 'yyy.*\.\.\.'; the fields are: input",
    ),
]


def test_markdown_is_read_as_words(server):
    text = "**frames** [2](https://a.b) 🎉\n\n```\ncode\n```"
    answer = server.speak(text, text_format="markdown")
    assert server.engine.asked[answer.headers["x-request-id"]]["text"] == "frames 2"
    items = [{"input": text}, {"input": "frames 1 **x**", "text_format": "plain"}]
    server.http.post("/v1/audio/speech/batch", json={"text_format": "markdown", "items": items})
    texts = [asked["text"] for asked in list(server.engine.asked.values())[-2:]]
    assert sorted(texts) == ["frames 1 **x**", "frames 2"]
    assert error(server.speak("```\ncode\n```", text_format="markdown"), 400)["message"] == "input is empty"


@pytest.mark.parametrize(
    ("body", "param", "says"), BAD_FIELDS, ids=[f"{param}-{i}" for i, (_, param, _) in enumerate(BAD_FIELDS)]
)
def test_a_wrong_field_is_named_with_its_possible_values(server, body, param, says):
    status = 422 if param == "sample_rate" else 400
    fault = error(server.http.post("/v1/audio/speech", json=body), status)
    assert fault["param"] == param and len(fault["message"]) < 1500
    with pytest.raises(ValueError, match=says):
        raise ValueError(fault["message"])


BAD_BODIES = [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"input": "\\ud800"}', b"[" * 5000]
BAD_NUMBERS = [
    b'{"input": "x", "temperature": NaN}',
    b'{"input": "x", "top_p": Infinity}',
    b'{"input": "x", "top_p": 1e999}',
]


@pytest.mark.parametrize("body", BAD_BODIES + BAD_NUMBERS)
def test_a_body_that_is_not_a_json_object_is_a_400(server, body):
    assert error(server.http.post("/v1/audio/speech", content=body), 400)["message"]


def test_an_empty_body_is_called_empty(server):
    for method, path in (("POST", "/v1/audio/speech"), ("PUT", "/v1/audio/pronunciations")):
        assert "the body is empty" in error(server.http.request(method, path), 400)["message"]


def test_a_body_over_the_limit_is_a_413(server):
    body = json.dumps({"input": "x" * Limits().speech_body_bytes}).encode()
    assert error(server.http.post("/v1/audio/speech", content=body), 413)["code"] == "body_too_large"
    # without a content-length
    assert error(server.http.post("/v1/audio/speech", content=iter([body])), 413)["code"] == "body_too_large"


@pytest.mark.parametrize("path", ["/v1/audio/speech", "/v1/audio/voices", "/v1/chat/completions"])
def test_a_compressed_body_is_a_415_that_says_what_is_possible(server, path):
    body = gzip.compress(b'{"input": "frames 1"}')
    answer = server.http.post(path, content=body, headers={"content-encoding": "gzip"})
    refused = error(answer, 415)
    assert refused["code"] == "unsupported_encoding" and "uncompressed" in refused["message"]
    assert answer.headers["accept-encoding"] == "identity"


def test_a_body_that_is_not_compressed_may_say_so(server):
    headers = {"content-encoding": "identity"}
    assert (
        server.http.post("/v1/audio/speech", json={"input": "frames 1"}, headers=headers).status_code == 200
    )
    assert server.http.get("/v1/models", headers={"content-encoding": "gzip"}).status_code == 200


@pytest.mark.parametrize("half", [r"\ud800", r"\udc00", r"\uD83D"])
def test_half_of_a_character_in_a_body_is_named(server, half):
    body = r'{"input": "one \ud83d\ude00 ' + half + ' two"}'
    refused = error(server.http.post("/v1/audio/speech", content=body), 400)
    assert refused["message"] == f"the body is not valid JSON: {half} is half of a character"
    whole = error(server.http.post("/v1/audio/speech", content=r'{"input": "\ud83d\ude00"'), 400)
    assert "half" not in whole["message"]


@pytest.mark.parametrize("coding", ["gzip, chunked", "gzip\r\ntransfer-encoding: chunked"])
def test_a_transfer_coding_other_than_chunked_is_a_501(server, coding):
    head = f"POST /v1/audio/speech HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: {coding}\r\n\r\n"
    with socket.create_connection(server.listener.getsockname(), timeout=5) as client:
        client.sendall(head.encode() + b"2\r\n{}\r\n0\r\n\r\n")
        answer = client.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 501 ") and b'"unsupported_encoding"' in answer
    assert outcomes(server, "").keys() == {"refused"}


def test_unknown_routes_and_methods(server):
    assert error(server.http.get("/v1/nothing"), 404)["code"] == "not_found"
    answer = server.http.get("/v1/audio/speech")
    assert "POST" in answer.headers["allow"]
    wrong = error(answer, 405)
    assert (wrong["code"], wrong["message"]) == (
        "method_not_allowed",
        "this route does not support the method; use POST",
    )


def test_an_unknown_path_below_the_schema_is_an_error_like_any_other(server):
    assert error(server.http.get("/schema/nothing"), 404)["code"] == "not_found"
    assert server.http.get("/schema/openapi.json").status_code == 200


def test_an_unknown_model_is_a_404_that_names_the_served_one(server):
    fault = error(server.speak("frames 1", model="tts-2"), 404)
    assert (fault["param"], fault["code"]) == ("model", "model_not_found") and "fake" in fault["message"]
    assert error(server.http.get("/v1/models/tts-2"), 404)["code"] == "model_not_found"


def test_a_rejection_by_the_engine_is_a_400(server):
    for param in ("voice", "cfg_scale", "temperature"):
        fault = error(server.speak(f"reject {param}"), 400)
        assert (fault["param"], fault["message"]) == (param, f"{param} is not possible")


@pytest.mark.parametrize(
    ("param", "name"), [("text", "input"), ("max_frames", "max_new_tokens"), ("text_mode", "text_mode")]
)
def test_a_rejection_by_the_engine_uses_the_clients_field_names(server, param, name):
    fault = error(server.speak(f"reject {param}"), 400)
    assert (fault["param"], fault["message"]) == (name, f"{name} is not possible")


@pytest.mark.parametrize(("text", "retry_after"), [("full", "7"), ("late", "30")])
def test_a_full_engine_sends_retry_after(server, text, retry_after):
    """Also if it accepted the request and became too slow for it."""
    answer = server.speak(text)
    assert error(answer, 503)["code"] == "engine_full" and answer.headers["retry-after"] == retry_after
    assert answer.headers["x-request-id"] in server.engine.asked


def test_a_failure_before_any_audio_is_a_500(server):
    assert "codec" in error(server.speak("fail 0"), 500)["message"]
    assert "codec" in error(server.speak("fail 2", stream=False), 500)["message"]


def test_a_failure_after_audio_cuts_the_connection(server):
    heard = b""
    with server.stream("fail 2") as answer, pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
        assert answer.status_code == 200
        for chunk in answer.iter_raw():
            heard += chunk
    assert heard[44:] in (b"", frame(0), frame(0) + frame(1))


def test_health_and_readiness_follow_the_engine(server):
    server.call(server.engine.tell, protocol.Status("warming", 0.5, "step, 4 slots"))
    until(lambda: server.http.get("/ready").status_code == 503)
    assert server.http.get("/ready").json() == {
        "state": "warming",
        "progress": 0.5,
        "detail": "step, 4 slots",
    }
    assert server.http.get("/health").status_code == 200
    answer = server.speak("frames 1")
    assert error(answer, 503)["code"] == "engine_not_ready" and answer.headers["retry-after"] == "1"
    server.call(server.engine.tell, READY)
    until(lambda: server.http.get("/ready").status_code == 200)
    assert server.speak("frames 1").status_code == 200


def test_a_silent_engine_gets_no_requests_and_loses_none(mortal, monkeypatch):
    monkeypatch.setattr("serving.engine_client.SILENT_S", 0.5)
    mortal.call(mortal.engine.go.clear)
    with mortal.stream("frames 2") as answer:
        chunks = answer.iter_raw()
        heard = next(chunks)
        mortal.engine.is_awake = False
        until(lambda: mortal.http.get("/ready").status_code == 503)
        assert "has not answered for" in mortal.http.get("/ready").json()["detail"]
        assert error(mortal.speak("frames 1"), 503)["code"] == "engine_not_ready"
        mortal.engine.is_awake = True
        until(lambda: mortal.http.get("/ready").status_code == 200)
        mortal.call(mortal.engine.go.set)
        assert (heard + b"".join(chunks))[44:] == frame(0) + frame(1)
    assert mortal.speak("frames 1").status_code == 200


def test_the_server_works_again_after_an_engine_restart(mortal):
    with mortal.stream("hold 2") as answer, pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
        chunks = answer.iter_raw()
        next(chunks)
        mortal.call(mortal.engine.away)
        list(chunks)
    assert error(mortal.speak("frames 1"), 503)["code"] == "engine_not_ready"
    assert mortal.http.get("/ready").json()["state"] == "away"
    assert mortal.http.get("/health").status_code == 200
    mortal.start_engine()
    assert mortal.speak("frames 1").content[44:] == frame(0)


def test_an_engine_that_dies_before_any_audio_is_a_503(mortal):
    answer = mortal.speak("die")
    assert error(answer, 503)["code"] == "engine_stopped" and "retry-after" in answer.headers


def test_a_shutdown_cuts_streams_that_outlast_the_grace_period(mortal):
    with mortal.stream("hold 1") as answer, pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
        chunks = answer.iter_raw()
        next(chunks)
        mortal.uvicorn.should_exit = True
        list(chunks)
    until(lambda: not mortal.thread.is_alive())


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"stream": False}, {"stream_format": "sse"}])
def test_a_shutdown_refuses_requests_still_queued_after_the_grace_period(mortal, caplog, fields):
    waiting = ThreadPoolExecutor(1).submit(mortal.speak, "queued", **fields)
    until(lambda: mortal.engine.asked)
    mortal.uvicorn.should_exit = True
    answer = waiting.result(10)
    assert error(answer, 503)["message"] == "this server is stopping" and answer.headers["retry-after"] == "1"
    until(lambda: not mortal.thread.is_alive())
    assert "Traceback" not in caplog.text and "Exception" not in caplog.text


def test_a_shutdown_ends_events_with_an_error(mortal):
    with mortal.stream("hold 1", stream_format="sse") as answer:
        lines = answer.iter_lines()
        assert "speech.audio.delta" in next(lines)
        mortal.uvicorn.should_exit = True
        assert '"this server is stopping"' in [line for line in lines if line][-1]


def test_a_shutdown_refuses_an_incomplete_file(mortal):
    waiting = ThreadPoolExecutor(1).submit(mortal.speak, "hold 2", stream=False)
    until(lambda: mortal.engine.asked)
    mortal.uvicorn.should_exit = True
    assert error(waiting.result(10), 503)["code"] == "engine_stopped"


def test_a_shutdown_cancels_requests_that_have_not_reached_the_engine(tmp_path, monkeypatch, caplog):
    """A request whose reference is still being read is cancelled and gets 503 too."""

    async def find(self, voice, request, model):
        await asyncio.sleep(60)

    monkeypatch.setattr("serving.http.listener.LAST_WORDS_S", 0)
    monkeypatch.setattr("serving.http.references.References.find", find)
    with Server(tmp_path) as mortal:
        waiting = ThreadPoolExecutor(1).submit(mortal.speak, "frames 1")
        time.sleep(0.3)
        mortal.uvicorn.should_exit = True
        assert error(waiting.result(10), 503)["message"] == "this server is stopping"
    assert "Traceback" not in caplog.text


def test_a_shutdown_lets_a_stream_finish_within_the_grace_period(mortal):
    mortal.call(mortal.engine.go.clear)
    with mortal.stream("frames 2") as answer:
        chunks = answer.iter_raw()
        heard = next(chunks)
        mortal.uvicorn.should_exit = True
        mortal.loop.call_soon_threadsafe(mortal.loop.call_later, 0.2, mortal.engine.go.set)
        assert (heard + b"".join(chunks))[44:] == frame(0) + frame(1)


@pytest.mark.parametrize("upgrade", ["", "connection: upgrade\r\nupgrade: websocket\r\n"])
def test_a_head_that_comes_in_one_read_has_the_size_limit_too(server, monkeypatch, upgrade):
    monkeypatch.setattr(listener, "MAX_HEAD_BYTES", 4096)
    for num_bytes, is_possible in ((3000, True), (5000, False)):
        with socket.create_connection(server.listener.getsockname(), timeout=5) as client:
            head = f"GET /health HTTP/1.1\r\nhost: x\r\n{upgrade}x-long: {'y' * num_bytes}\r\n\r\n"
            client.sendall(head.encode())
            assert client.recv(1000).startswith(b"HTTP/1.1 431 ") != is_possible


# Requests as bytes


def asking(text, more=b"", version=b"1.1", **fields):
    """Return a request for raw samples. more: headers."""
    body = json.dumps({"input": text, "response_format": "pcm", **fields}).encode()
    head = b"POST /v1/audio/speech HTTP/%s\r\nhost: x\r\n%scontent-length: %d\r\n\r\n"
    return head % (version, more, len(body)) + body


def connected(server):
    return socket.create_connection(server.listener.getsockname(), timeout=WITHIN_S)


def to_end(client):
    """Return all that a connection has until the server closes it."""
    data = b""
    while piece := client.recv(1 << 16):
        data += piece
    return data


def read_until(client, expected):
    """Read until the answer holds these bytes, which may come in several pieces."""
    data = b""
    while expected not in data:
        piece = client.recv(1 << 16)
        assert piece, data
        data += piece


def replies(server, sent):
    with connected(server) as client:
        client.sendall(sent)
        return to_end(client)


CLOSE = b"connection: close\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        b"BANANA / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n",
        "GET /v1/audio/voices/größe/preview HTTP/1.1\r\nhost: x\r\n\r\n".encode(),
        b"POST /v1/audio/speech HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n{}",
        b"POST /v1/audio/speech HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    ],
)
def test_a_request_that_is_not_http_gets_an_error_like_any_other(server, sent):
    head, _, body = replies(server, sent).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"content-type: application/json" in head
    assert json.loads(body)["error"]["code"] == "invalid_http"


def test_a_tunnel_is_refused_once(server):
    answers = replies(
        server, b"CONNECT /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /health HTTP/1.1\r\n\r\n"
    )
    assert answers.count(b"HTTP/1.1 ") == 1 and answers.startswith(b"HTTP/1.1 405 ")


def test_a_url_that_cannot_be_read_is_an_error_on_a_used_connection_too(server):
    with connected(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        read_until(client, b"alive")
        client.sendall(b"GET http:// HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b'"invalid_http"' in to_end(client)


def test_bytes_after_a_request_that_are_not_http_do_not_change_its_answer(server):
    answers = replies(server, asking("frames 2") + b"garbage garbage\r\n\r\n")
    assert answers.startswith(b"HTTP/1.1 200 ") and answers.endswith(frame(1) + b"\r\n0\r\n\r\n")
    assert answers.count(b"HTTP/1.1 ") == 1


def test_a_client_that_leaves_cancels_its_answer_although_another_request_waits(mortal):
    with connected(mortal) as client:
        client.sendall(asking("tone 1000") + asking("frames 1"))
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    until(lambda: mortal.engine.cancelled == list(mortal.engine.asked))
    assert len(mortal.engine.asked) == 1


def test_a_request_whose_turn_has_not_come_may_take_its_time(mortal, monkeypatch):
    """While its predecessor is answered, uvicorn reads nothing, so its body cannot arrive."""
    monkeypatch.setattr(listener, "BODY_S", 0.2)
    second = asking("frames 1", CLOSE)
    with connected(mortal) as client:
        client.sendall(asking("tone 30") + second[:-5])
        time.sleep(0.4)
        client.sendall(second[-5:])
        answers = to_end(client)
    assert answers.count(b"HTTP/1.1 200 ") == 2 == answers.count(b"HTTP/1.1 ")
    assert answers.endswith(frame(0) + b"\r\n0\r\n\r\n")


def test_http_1_0_gets_no_chunks(server):
    head, _, body = replies(server, asking("frames 3", version=b"1.0")).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and body == frame(0) + frame(1) + frame(2)
    head, _, body = replies(server, asking("frames 3", version=b"1.0", stream=False)).partition(b"\r\n\r\n")
    assert b"content-length: 600" in head and len(body) == 600


def test_http_1_0_does_not_take_a_stream_that_failed_for_a_whole_one(server):
    with pytest.raises(ConnectionResetError):
        replies(server, asking("fail 2", version=b"1.0"))


@pytest.mark.parametrize("pause_s", [0.0, 0.1])
def test_a_wish_for_http_2_is_ignored(server, pause_s):
    """Java's client sends it with its first request. pause_s: before the body."""
    wish = (
        b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
    )
    head, _, body = asking("frames 1", wish).partition(b"\r\n\r\n")
    with connected(server) as client:
        client.sendall(head + b"\r\n\r\n")
        time.sleep(pause_s)
        client.sendall(body + asking("frames 2", CLOSE))
        answers = to_end(client)
    assert answers.count(b"HTTP/1.1 200 ") == 2 == answers.count(b"HTTP/1.1 ")
    assert answers.count(frame(0)) == 2 and answers.endswith(frame(1) + b"\r\n0\r\n\r\n")
