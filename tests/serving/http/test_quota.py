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
from litestar.exceptions import HTTPException
from uploads import recording, upload

from serving.http.bodies import LARGE_BODY_BYTES, LargeBodies
from serving.http.decoders import Decoders
from serving.http.held_body import Chunks
from serving.http.quota import Quota, client_address, site_of
from serving.http.speech import Speech
from serving.settings import Limits

BASE64 = base64.b64encode(recording()).decode()
CLONE = {"model": "cloner", "ref_audio": BASE64}


@pytest.fixture
def server(tmp_path):
    with Server(tmp_path, models=[MODEL, CLONER], limits=Limits(reading=4)) as server:
        yield server


@pytest.fixture
def decoding(monkeypatch):
    """Return an event that decoding waits for."""
    go, decode_now = threading.Event(), Decoders.decode

    async def slow(self, data, max_s):
        while not go.is_set():
            await asyncio.sleep(0.01)
        return await decode_now(self, data, max_s)

    monkeypatch.setattr(Decoders, "decode", slow)
    yield go
    go.set()


def test_over_the_limit_recordings_are_refused_and_texts_are_not(server, decoding):
    with ThreadPoolExecutor(3) as pool:
        inside = [pool.submit(server.speak, "frames 1", **CLONE) for _ in range(3)]
        quota = server.app.state.server.references.decoding
        until(lambda: quota.num_held == 3)
        for answer in (server.speak("frames 1", **CLONE), upload(server)):
            fault = error(answer, 503)
            assert fault["code"] == "server_busy" and answer.headers["retry-after"] == "1"
            says = "too many recordings are being decoded for one client (limit: 4); try again in 1 s"
            assert fault["message"] == says
        assert server.speak("frames 1").status_code == 200
        decoding.set()
        assert [answer.result().status_code for answer in inside] == [200, 200, 200]
    until(lambda: quota.num_held == 0)
    assert server.speak("frames 1", **CLONE).status_code == upload(server).status_code == 200


CHUNK = b"%x\r\n%s\r\n" % (LARGE_BODY_BYTES, b" " * LARGE_BODY_BYTES)
UNFINISHED = {
    "with a length": b"content-length: 1000000\r\n\r\n",
    "in chunks": b"transfer-encoding: chunked\r\n\r\n" + CHUNK + b"1\r\n \r\n",
}


@pytest.mark.parametrize("body", UNFINISHED.values(), ids=UNFINISHED)
def test_a_large_body_that_does_not_arrive_takes_one_place(server, body):
    head = b"POST /v1/audio/speech HTTP/1.1\r\nhost: x\r\n"
    large = "x" * LARGE_BODY_BYTES
    clients = [socket.create_connection(server.listener.getsockname()) for _ in range(3)]
    for client in clients:
        client.sendall(head + body)
    until(lambda: server.app.state.server.bodies.num_held == 3)
    answer = server.speak(large)
    says = "too many large bodies are being read for one client (limit: 4)"
    assert error(answer, 503)["message"].startswith(says)
    other = {"x-forwarded-for": "203.0.113.9"}  # a proxy on this machine names its client
    answer = server.http.post("/v1/audio/speech", json=server.body(large), headers=other)
    assert error(answer, 400)["param"] == "input"
    assert server.speak("frames 1").status_code == 200
    for client in clients:
        client.close()
    until(lambda: not server.app.state.server.bodies.num_held)
    assert error(server.speak(large), 400)["param"] == "input"


def test_small_bodies_in_chunks_are_read_while_no_place_is_free(server):
    head = b"POST /v1/audio/speech HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n"
    clients = [socket.create_connection(server.listener.getsockname()) for _ in range(6)]
    for client in clients:
        client.sendall(head)
    body = json.dumps(server.body("frames 1")).encode()
    answer = server.http.post("/v1/audio/speech", content=iter([body]))
    assert answer.status_code == 200 and not server.app.state.server.bodies.num_held
    for client in clients:
        client.close()


def test_a_place_is_free_once_the_body_is_read():
    """It is not held until the answer ends."""
    quota, seen = Quota(1, "bodies"), []

    async def app(scope, receive, send):
        while (await receive())["more_body"]:
            seen.append(quota.num_held)
        seen.append(quota.num_held)

    async def scene():
        chunks = [{"type": "http.request", "body": b"x", "more_body": more} for more in (True, True, False)]

        async def receive():
            return chunks.pop(0)

        here = SimpleNamespace(state=SimpleNamespace(server=SimpleNamespace(bodies=quota)))
        scope = {"headers": [(b"content-length", b"1000000")], "litestar_app": here, "client": None}
        await LargeBodies(app)(scope, receive, None)

    asyncio.run(scene())
    assert seen == [1, 1, 0] and quota.num_held == 0


@pytest.mark.slow
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


def test_a_whole_answer_counts_as_its_peak_until_it_is_sent(server):
    memory = server.app.state.server.memory
    with ThreadPoolExecutor(1) as pool:
        server.loop.call_soon_threadsafe(server.engine.go.clear)
        answer = pool.submit(server.speak, "frames 2" + " word" * 100, stream=False)
        until(lambda: memory.num_held > 0)
        assert memory.num_held > 2 * MODEL.sample_rate_hz * 40  # bytes: 40 s of PCM
        server.loop.call_soon_threadsafe(server.engine.go.set)
        assert answer.result().status_code == 200
    until(lambda: memory.num_held == 0)


def test_a_whole_answer_that_is_longer_than_expected_counts_as_it_grows(server):
    memory = server.app.state.server.memory
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.speak, "tone 25", stream=False, max_new_tokens=1)
        until(lambda: memory.num_held > 2 * MODEL.sample_rate_hz)  # bytes: 1 s of PCM
        assert answer.result().status_code == 200
    until(lambda: memory.num_held == 0)


@pytest.mark.parametrize("path", ["/v1/audio/voices/anna/preview", "/v1/audio/pronunciations"])
def test_stored_files_count_until_they_are_sent(server, path):
    assert upload(server, "anna").status_code == 200
    memory = server.app.state.server.memory
    until(lambda: gc.collect() >= 0 and memory.num_held == 0)
    with memory.take(memory.maximum):
        assert error(server.http.get(path), 503)["code"] == "server_busy"
    answer = server.http.get(path)
    assert answer.status_code == 200 and int(answer.headers["content-length"]) == len(answer.content)
    until(lambda: memory.num_held == 0)


def test_a_body_counts_until_its_last_chunk_or_until_it_is_dropped():
    memory = Quota(1 << 20, "bytes", is_bytes=True)

    async def scene():
        body = bytes(range(256)) * 1024
        sent = [chunk async for chunk in chunks_of(body) if memory.num_held == len(body)]
        return b"".join(sent) == body

    def chunks_of(body):
        return Chunks(body, memory.take(len(body)))

    assert asyncio.run(scene()) and memory.num_held == 0
    chunks = chunks_of(b"a body that is never sent")
    assert memory.num_held > 0
    del chunks
    assert memory.num_held == 0


@pytest.mark.slow
def test_refused_requests_leave_nothing_in_a_reference_cycle(server):
    gc.collect()
    gc.disable()
    try:
        for text in ("reject ref_audio", "full", "fail 0", "frames 1"):
            server.speak(text, **CLONE, stream=False)
        server.http.get("/health")  # the connection holds its latest request
        server.engine.messages.clear()
        until(lambda: server.app.state.server.memory.num_held == 0)
        until(lambda: not any(isinstance(known, Speech) for known in gc.get_objects()))
    finally:
        gc.enable()


# Quotas


def take_all(quota, address):
    """Return the shares that an address gets, one unit each."""
    client_address.set(address)
    shares = []
    with pytest.raises(HTTPException):
        while True:
            shares.append(quota.take())
    return shares


def test_one_address_cannot_take_all_places_of_a_limit():
    quota = Quota(16, "bodies")
    shares = [take_all(quota, address) for address in ("a", "b", "c", "d")]
    assert [len(own) for own in shares] == [12, 3, 1, 0]
    for share in shares[0]:
        share.release()
    assert quota.num_held == 4 and len(take_all(quota, "d")) == 9


@pytest.mark.parametrize("maximum", [1, 2, 3])
def test_small_limits_leave_a_place_if_there_are_two(maximum):
    quota = Quota(maximum, "bodies")
    assert len(take_all(quota, "a")) == max(1, maximum - 1)
    assert len(take_all(quota, "b")) == (maximum > 1)


def test_a_share_can_grow_and_is_given_back_once():
    client_address.set("a")
    quota = Quota(100 << 20, "bytes", is_bytes=True)
    with quota.take(10 << 20) as share:
        share.resize(70 << 20)
        with pytest.raises(HTTPException, match=r"too many bytes for one client \(limit: 100 MiB\)"):
            share.resize(80 << 20)
        assert quota.num_held == 70 << 20
        share.release()
    assert quota.num_held == 0


@pytest.mark.parametrize(
    ("address", "site"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("", ""),
    ],
)
def test_an_ipv6_subnet_counts_as_one_client(address, site):
    assert site_of(address) == site
