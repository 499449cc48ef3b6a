"""The route POST /v1/audio/speech/batch: several requests, each with its own file or error."""

import base64
import gc
import io
import json
import socket
import time
import wave

import openai
import pytest
from fake_engine import CLONER, MODEL, frame
from http_server import Server, error, until
from uploads import recording

from serving.http.schemas import MAX_BATCH


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s"), models=[MODEL, CLONER]) as server:
        yield server


def ask(server, *items, **shared):
    shared = {"model": "fake", "response_format": "pcm", **shared}
    answer = server.http.post("/v1/audio/speech/batch", json={"items": items, **shared})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["object"] == "audio.speech.batch"
    assert [result["index"] for result in body["data"]] == list(range(len(items)))
    return body["data"]


def said(result):
    return base64.b64decode(result["audio"])


def test_each_item_is_a_file_with_its_own_fields(server):
    results = ask(
        server,
        {"input": "frames 3"},
        {"input": "frames 1", "response_format": "wav", "seed": 7, "voice": "ryan", "cfg_scale": 3.0},
        voice="vivian",
        seed=5,
    )
    assert said(results[0]) == b"".join(map(frame, range(3)))
    with wave.open(io.BytesIO(said(results[1]))) as file:
        assert file.readframes(1000) == frame(0)
    told = [(r["response_format"], r["sample_rate"], r["seed"], r["finish_reason"]) for r in results]
    assert told == [("pcm", 24000, 5, "stop"), ("wav", 24000, 7, "stop")]
    assert results[0]["usage"]["output_tokens"] == 3 and not any(result["error"] for result in results)
    asked = [server.engine.asked[id] for id in list(server.engine.asked)[-2:]]
    assert sorted((one["voice"], one.get("options")) for one in asked) == [
        ("ryan", {"cfg_scale": 3.0}),
        ("vivian", None),
    ]


def test_an_error_in_one_item_does_not_affect_the_others(server):
    results = ask(
        server,
        {"input": "frames 1"},
        {"input": "frames 1", "voice": "carl"},
        {"input": "frames 1", "temperature": 9},
        {"input": "frames 1", "sede": 1},
        {"input": ""},
        {"input": None},
        {"input": "fail 1"},
        {"input": "silent"},
        {"input": "full"},
        {"input": "frames 1", "model": "nobody"},
        {"input": "frames 1", "model": "cloner", "ref_audio": "!"},
        {"input": "frames 2"},
    )
    faults = [(r["error"]["param"], r["error"]["code"]) if r["error"] else None for r in results]
    assert faults == [
        None,
        ("voice", None),
        ("temperature", None),
        ("sede", "unknown_field"),
        ("input", None),
        ("input", "missing_field"),
        (None, "engine_failed"),
        (None, "no_audio"),
        (None, "engine_full"),
        ("model", "model_not_found"),
        ("ref_audio", None),
        None,
    ]
    assert "a number from 0 (greedy) to 2" in results[2]["error"]["message"]
    assert said(results[0]) == frame(0) and said(results[-1]) == frame(0) + frame(1)
    assert all(result["audio"] is None for result in results if result["error"])


def test_a_recording_in_an_item_is_its_voice(server):
    audio = base64.b64encode(recording()).decode()
    [result] = ask(server, {"input": "frames 1", "ref_audio": audio, "ref_text": "Hm."}, model="cloner")
    [reference] = next(reversed(server.engine.messages.values())).references
    assert said(result) == frame(0) and reference.transcript == "Hm."


def test_items_are_reproducible_and_ignore_stream_fields(server):
    ask(server, {"input": "frames 1", "stream": True, "stream_format": "sse"}, stream_format="sse")
    assert next(reversed(server.engine.messages.values())).listener.is_reproducible


def test_a_warning_is_in_its_items_result(tmp_path):
    with Server(tmp_path) as server:
        [result] = ask(server, {"input": "frames 1"}, model="tts-1")
        assert "'fake' is used instead" in result["warning"] and said(result) == frame(0)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "items"),
        ({"items": []}, "items"),
        ({"items": [{"input": "frames 1"}] * (MAX_BATCH + 1)}, "items"),
        ({"items": ["frames 1"]}, "items"),
        ({"items": None}, "items"),
        ({"items": [{"input": "frames 1"}], "speed": 9}, "speed"),
    ],
)
def test_an_invalid_batch_is_refused_as_a_whole(server, body, param):
    assert error(server.http.post("/v1/audio/speech/batch", json=body), 400)["param"] == param


def test_a_disconnect_cancels_all_items_and_logs_no_error(server, caplog):
    before = len(server.engine.cancelled)
    items = [{"input": "hold 1", "model": "fake"}] * 3 + [{"input": "frames 1", "model": "fake"}]
    body = json.dumps({"items": items}).encode()
    with socket.create_connection(server.listener.getsockname()) as client:
        head = b"POST /v1/audio/speech/batch HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        client.sendall(head + body)
        until(lambda: sum(one["text"] == "hold 1" for one in server.engine.asked.values()) == 3)
        assert len(server.engine.cancelled) == before
    until(lambda: len(server.engine.cancelled) == before + 3)
    server.call(gc.collect)  # a future that nobody awaited is logged when it is freed
    time.sleep(0.2)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_an_engine_that_dies_fails_the_items_that_it_had(tmp_path):
    with Server(tmp_path) as server:
        results = ask(server, {"input": "hold 1"}, {"input": "die"})
        assert {result["error"]["code"] for result in results} == {"engine_stopped"}
        answer = server.http.post("/v1/audio/speech/batch", json={"items": [{"input": "frames 1"}]})
        assert error(answer, 503)["code"] == "engine_not_ready"


def test_a_batch_needs_the_api_key(tmp_path):
    with Server(tmp_path, api_key="sk") as server:
        answer = server.http.post("/v1/audio/speech/batch", json={"items": [{"input": "frames 1"}]})
        assert error(answer, 401)["code"] == "invalid_api_key"


def test_openais_client_can_send_a_batch(server):
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    body = {"model": "fake", "items": [{"input": "frames 1", "response_format": "pcm"}]}
    answer = client.post("/audio/speech/batch", cast_to=object, body=body)
    assert base64.b64decode(answer["data"][0]["audio"]) == frame(0)
