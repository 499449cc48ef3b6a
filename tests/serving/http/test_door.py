"""Limits on the memory of requests that have not reached the engine."""

import asyncio
import base64
import gc
import json
import socket
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from fake_engine import CLONER, MODEL
from http_server import Server, error, until
from uploads import recording, upload

from serving.http import decode
from serving.http.door import LARGE_BODY_BYTES, Door, LargeBodies
from serving.http.schemas import Limits

BASE64 = base64.b64encode(recording()).decode()
CLONE = {"model": "cloner", "ref_audio": BASE64}


@pytest.fixture
def server(tmp_path):
    with Server(tmp_path, models=[MODEL, CLONER], limits=Limits(num_reading=2)) as server:
        yield server


@pytest.fixture
def decoding(monkeypatch):
    """Return an event that decoding waits for."""
    go, decode_now = threading.Event(), decode.decode

    def slow(data, max_s):
        go.wait(10)
        return decode_now(data, max_s)

    monkeypatch.setattr("serving.http.references.decode", slow)
    yield go
    go.set()


def test_over_the_limit_recordings_are_refused_and_texts_are_not(server, decoding):
    with ThreadPoolExecutor(2) as pool:
        inside = [pool.submit(server.speak, "frames 1", **CLONE) for _ in range(2)]
        door = server.app.state.server.references.decoding
        until(lambda: door.num_inside == 2)
        for answer in (server.speak("frames 1", **CLONE), upload(server)):
            fault = error(answer, 503)
            assert fault["code"] == "server_busy" and answer.headers["retry-after"] == "1"
            says = "too many recordings are being decoded (limit: 2); try again in 1 s"
            assert fault["message"] == says
        assert server.speak("frames 1").status_code == 200
        decoding.set()
        assert [answer.result().status_code for answer in inside] == [200, 200]
    until(lambda: door.num_inside == 0)
    assert server.speak("frames 1", **CLONE).status_code == upload(server).status_code == 200


@pytest.mark.parametrize("how", [b"content-length: 1000000", b"transfer-encoding: chunked"])
def test_a_large_body_that_does_not_arrive_takes_one_place(server, how):
    head = b"POST /v1/audio/speech HTTP/1.1\r\nhost: x\r\n" + how + b"\r\n\r\n"
    large = "x" * LARGE_BODY_BYTES
    clients = [socket.create_connection(server.listener.getsockname()) for _ in range(2)]
    for client in clients:
        client.sendall(head)
    until(lambda: server.app.state.server.bodies.num_inside == 2)
    answer = server.speak(large)
    assert error(answer, 503)["message"].startswith("too many large bodies are being read (limit: 2)")
    assert server.speak("frames 1").status_code == 200
    for client in clients:
        client.close()
    until(lambda: not server.app.state.server.bodies.num_inside)
    assert error(server.speak(large), 400)["param"] == "input"


def test_a_place_is_free_once_the_body_is_read():
    """It is not held until the answer ends."""
    door, seen = Door(1, "bodies"), []

    async def app(scope, receive, send):
        while (await receive())["more_body"]:
            seen.append(door.num_inside)
        seen.append(door.num_inside)

    async def scene():
        messages = [{"type": "http.request", "body": b"x", "more_body": more} for more in (True, True, False)]

        async def receive():
            return messages.pop(0)

        here = SimpleNamespace(state=SimpleNamespace(server=SimpleNamespace(bodies=door)))
        scope = {"headers": [(b"content-length", b"1000000")], "litestar_app": here}
        await LargeBodies(app)(scope, receive, None)

    asyncio.run(scene())
    assert seen == [1, 1, 0] and door.num_inside == 0


def test_an_open_answer_holds_no_recording(server):
    """The server drops the body, its base64 and the samples; only the engine has them."""
    noise = np.random.default_rng(1).uniform(-0.5, 0.5, 20 * 44_100).astype(np.float32)
    clone = {"model": "cloner", "ref_audio": base64.b64encode(recording(noise, 44_100)).decode()}
    server.speak("frames 1", **clone)
    body = json.dumps(server.body("hold 1", **clone)).encode()
    server.engine.messages.clear()
    gc.collect()
    tracemalloc.start()
    with server.http.stream("POST", "/v1/audio/speech", content=body) as answer:
        chunks = answer.iter_raw()  # keep the iterator: dropping it would close the answer
        next(chunks)
        server.speak("frames 1")  # replaces the last message, which the fake engine still holds
        server.engine.messages.clear()
        gc.collect()
        held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held_bytes < len(body) / 2, f"{held_bytes} bytes are held; the body has {len(body)}"
