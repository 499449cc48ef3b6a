"""The route POST /v1/audio/speech/batch: several requests, each with its own file or error."""

import asyncio
import base64
import gc
import io
import json
import socket
import time
import wave
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from fake_engine import CLONER, MODEL, FakeEngine, frame
from http_server import Server, error, until
from uploads import recording, upload

from serving.http.decoders import Decoders
from serving.http.errors import refusal
from serving.http.routes import batch
from serving.http.schemas import MAX_BATCH
from serving.http.speech import Speech
from serving.http.voices import Voices
from serving.settings import Limits


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


def test_an_error_in_one_item_does_not_affect_the_others(server, monkeypatch):
    monkeypatch.setattr(batch, "PATIENCE_S", 0)
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
        {"input": "frames 1", "voice": {}},
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
        ("voice", None),
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


@pytest.fixture
def decoded(monkeypatch):
    """The recordings that are decoded during a test."""
    found, decode_now = [], Decoders.decode

    async def noted(self, data, max_s):
        found.append(data)
        return await decode_now(self, data, max_s)

    monkeypatch.setattr(Decoders, "decode", noted)
    return found


def test_items_decode_a_recording_that_they_share_once(server, decoded):
    file = recording()  # once: it holds the second at which it was made
    audio = base64.b64encode(file).decode()
    results = ask(server, *[{"input": "frames 1"}] * MAX_BATCH, model="cloner", ref_audio=audio)
    assert [said(result) for result in results] == [frame(0)] * MAX_BATCH
    assert decoded == [file]
    memory = server.app.state.server.memory
    server.engine.messages.clear()
    until(lambda: memory.num_held == 0)


def test_a_batch_in_an_uploaded_voice_does_not_read_its_recording(server, monkeypatch):
    upload(server, "anna")
    loaded, load = [], Voices.load
    monkeypatch.setattr(Voices, "load", lambda self, name: loaded.append(name) or load(self, name))
    results = ask(server, *[{"input": "frames 1"}] * MAX_BATCH, model="cloner", voice="anna")
    assert [said(result) for result in results] == [frame(0)] * MAX_BATCH and not loaded


def test_items_wait_while_the_engine_is_full(server, monkeypatch):
    monkeypatch.setattr(batch, "RETRY_S", 0.01)
    refused = iter([True, True, False])
    speak = FakeEngine.speak

    async def busy(self, writer, id, words):
        await speak(self, writer, id, ["full"] if next(refused) else words)

    monkeypatch.setattr(FakeEngine, "speak", busy)
    [result] = ask(server, {"input": "frames 2"})
    assert said(result) == frame(0) + frame(1)


def test_an_item_that_waited_is_spoken_as_if_it_were_new(server, monkeypatch):
    """It has its terms replaced once, and the audio of its last try alone."""
    monkeypatch.setattr(batch, "RETRY_S", 0.01)
    take_audio, has_room = Speech.take_audio, iter([True, False])

    async def take(self, pcm, send):
        await take_audio(self, pcm, send)
        if not next(has_room, True):
            raise refusal(503, "there is no memory", code="server_busy")

    monkeypatch.setattr(Speech, "take_audio", take)
    voice = {"audio": base64.b64encode(recording()).decode(), "text": "Hm."}
    words = [{"term": "US", "say": "the US"}]
    item = {"input": "frames 3 in the US", "pronunciations": words, "references": [voice]}
    [result] = ask(server, item, model="cloner")
    assert said(result) == b"".join(map(frame, range(3)))
    assert next(reversed(server.engine.asked.values()))["text"] == "frames 3 in the the US"


def test_each_try_of_an_item_waits_for_its_first_audio(tmp_path, monkeypatch):
    monkeypatch.setattr(batch, "RETRY_S", 0.01)
    monkeypatch.setattr(batch, "PATIENCE_S", 2)
    speak, said_first = FakeEngine.speak, iter([["queued"]])

    async def busy(self, writer, id, words):
        await asyncio.sleep(0.05)
        await speak(self, writer, id, next(said_first, words))

    monkeypatch.setattr(FakeEngine, "speak", busy)
    with Server(tmp_path, limits=Limits(flex_wait_s=0.5)) as server:
        [result] = ask(server, {"input": "frames 1"})
        assert said(result) == frame(0) and len(server.engine.asked) == 2


def test_the_recording_of_a_refused_item_is_not_decoded(server, decoded):
    audio = base64.b64encode(recording()).decode()
    wrong = {"response_format": "opus", "sample_rate": 11025, "model": "cloner", "ref_audio": audio}
    results = ask(server, {"input": "frames 1", **wrong}, {"input": "tone 25"})
    assert results[0]["error"]["param"] == "sample_rate" and said(results[1]) and not decoded


def test_items_that_never_fit_fail_together(server, monkeypatch):
    monkeypatch.setattr(batch, "RETRY_S", 0.01)
    monkeypatch.setattr(batch, "PATIENCE_S", 0.3)
    began_s = time.monotonic()
    results = ask(server, *[{"input": "full"}] * 8)
    assert {result["error"]["code"] for result in results} == {"engine_full"}
    assert 0.3 < time.monotonic() - began_s < 1.5


def test_items_wait_for_a_recording_to_be_decoded(server, monkeypatch):
    monkeypatch.setattr(batch, "RETRY_S", 0.01)
    audio = base64.b64encode(recording()).decode()
    places = server.app.state.server.references.decoding
    with places.take(places.maximum) as held, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, server, {"input": "frames 1"}, model="cloner", ref_audio=audio)
        time.sleep(0.1)
        assert not answer.done()
        held.release()
    assert said(answer.result()[0]) == frame(0)


@pytest.mark.parametrize(("tier", "is_flex"), [("auto", True), ("flex", True), ("default", False)])
def test_items_give_way_to_listeners_unless_the_request_says_otherwise(server, tier, is_flex):
    ask(server, {"input": "frames 1"}, service_tier=tier)
    assert next(reversed(server.engine.messages.values())).listener.is_flexible == is_flex


def test_files_that_do_not_fit_into_memory_are_refused(tmp_path, monkeypatch):
    """The first items take all of it; the last ones would hold what is not there."""
    monkeypatch.setattr(batch, "PATIENCE_S", 0)
    with Server(tmp_path, limits=Limits(memory_bytes=20 << 20)) as server:
        long = {"input": "frames 1" + " word" * 1000, "sample_rate": 48000, "speed": 0.25}
        alone = server.speak(long["input"], stream=False, sample_rate=48000, speed=0.25)
        assert error(alone, 503)["code"] == "server_busy"
        results = ask(server, {"input": "frames 1"}, long)
        assert said(results[0]) == frame(0)
        assert results[1]["error"]["code"] == "server_busy"
        until(lambda: server.app.state.server.memory.num_held == 0)


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
