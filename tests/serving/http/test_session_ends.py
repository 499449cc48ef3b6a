"""How sessions end, what they hold, and who may open one."""

import asyncio
import base64
import gc
import json
import random
import socket
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from fake_engine import FEEDER, MODEL, frame
from http_server import Server, until
from sessions import CHANCE, PATH, closed, session
from uploads import recording
from uvicorn.protocols.utils import ClientDisconnected
from websockets.exceptions import ConnectionClosed, InvalidStatus

from serving.http import listener
from serving.http.events import MAX_MESSAGE_BYTES
from serving.http.socket import MAX_WRONG
from serving.settings import Limits


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    limits = Limits(text_chars=2000)
    with Server(tmp_path_factory.mktemp("s"), models=[MODEL, FEEDER, CHANCE], limits=limits) as server:
        yield server


# The end of a session


def test_a_binary_message_closes_the_session(server):
    with session(server) as client:
        client.socket.send(b"\x00")
        assert closed(client) == (1003, "messages must be JSON in text messages")


def test_too_many_wrong_messages_close_the_session(server):
    with session(server) as client:
        for _ in range(MAX_WRONG):
            client.socket.send("{")
        assert closed(client)[0] == 1008


def test_a_too_large_message_closes_the_session(server):
    with session(server) as client:
        # the header alone: unread content would reset the connection, and the reason could be lost
        header = bytes([0x81, 0xFF]) + (MAX_MESSAGE_BYTES + 1).to_bytes(8, "big") + bytes(4)
        client.socket.socket.sendall(header)
        assert closed(client)[0] == 1009


def test_the_fragments_of_a_message_are_joined_as_they_come(server):
    """A message of two million fragments took 75 MB."""
    text = json.dumps({"type": "input.text", "text": "frames 2 of it."}).encode()
    fragments = [
        b"\x01\x80" + bytes(4),
        *(b"\x00\x81" + bytes(4) + text[i : i + 1] for i in range(len(text))),
    ]
    with session(server) as client:
        client.configure()
        client.socket.socket.sendall(b"".join(fragments) + 1000 * (b"\x00\x80" + bytes(4)))
        [connection] = [
            each for each in server.uvicorn.server_state.connections if isinstance(each, listener.Socket)
        ]
        until(lambda: b"".join(connection.frames) == text)
        assert len(connection.frames) == 1
        client.socket.socket.sendall(b"\x80\x80" + bytes(4))
        client.send("input.done")
        assert client.heard()[1] == frame(0) + frame(1)


@pytest.mark.parametrize("model", ["fake", "feeder"])
def test_an_idle_utterance_closes_the_session_and_frees_its_slot(tmp_path, model):
    limits = Limits(text_idle_s=0.3)
    with Server(tmp_path, models=[MODEL, FEEDER], limits=limits) as server, session(server) as client:
        client.configure(model=model)
        client.say("frames", " 1 of it", done=False)
        began_s = time.monotonic()
        if model == "feeder":
            client.event("audio.start"), [client.audio() for _ in range(4)]
        assert client.error(1)["code"] == "idle"
        assert closed(client)[0] == 4408 and 0.2 < time.monotonic() - began_s < 2
        assert (len(server.engine.cancelled) == 1) == (model == "feeder")


@pytest.mark.slow
def test_an_idle_session_is_closed_but_not_during_a_long_speech(tmp_path):
    with Server(tmp_path, limits=Limits(session_idle_s=0.4)) as server, session(server) as client:
        client.configure()
        client.say("tone 40 of it all.")  # 0.8 s
        client.heard()
        began_s = time.monotonic()
        assert closed(client)[0] == 4408 and 0.3 < time.monotonic() - began_s < 2


def test_a_stopping_server_closes_the_session_with_an_error(tmp_path):
    with Server(tmp_path) as server:
        with session(server) as client:
            client.configure()
            client.say("hold 1 of it all.")
            client.event("audio.start"), client.audio()
            server.uvicorn.should_exit = True
            assert client.error(1)["message"] == "this server is stopping"  # when the grace period is over
            assert closed(client)[0] == 1012
        server.thread.join(5)
        assert not server.thread.is_alive()


def test_utterances_that_have_begun_may_finish_within_the_grace_period(tmp_path):
    with Server(tmp_path) as server, session(server) as client, session(server) as other:
        other.configure()
        client.configure()
        server.call(server.engine.go.clear)
        client.say("frames 3 of it all.")
        start = client.event("audio.start")
        server.uvicorn.should_exit = True
        assert closed(other)[0] == 1012  # it had no utterance
        client.say("frames 1 more.", done=False)
        assert client.audio() == frame(0) and start["utterance"] == 1
        refused = client.error()
        assert refused["code"] == "stopping" and refused["message"] == "this server is stopping"
        server.call(server.engine.go.set)
        assert client.audio() == frame(1)
        while isinstance(message := client.receive(), bytes):
            pass
        assert json.loads(message)["type"] == "audio.done"
        assert closed(client)[0] == 1012


def test_an_incomplete_utterance_is_closed_after_the_grace_period(tmp_path):
    with Server(tmp_path) as server, session(server) as client:
        client.configure()
        client.say("tone 1", done=False)
        server.uvicorn.should_exit = True
        assert closed(client)[0] == 1012


def test_a_session_outlives_the_deadlines_of_a_request(tmp_path, monkeypatch):
    monkeypatch.setattr(listener, "HEAD_S", 0.2)
    monkeypatch.setattr(listener, "BODY_S", 0.2)
    with Server(tmp_path) as server, session(server) as client:
        time.sleep(0.6)
        client.configure()
        client.say("frames 1 of more.")
        assert client.heard()[1] == frame(0)


# Memory


@contextmanager
def no_collection():
    """Turn the garbage collector off. Objects that are freed then are in no reference cycle."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def clone(seed):
    """Return settings with a recording that differs by seed: 128 kB of samples."""
    noise = np.random.default_rng(seed).uniform(-0.5, 0.5, 32_000).astype(np.float32)
    return {"model": "chance", "voice": None, "ref_audio": base64.b64encode(recording(noise)).decode()}


def test_a_session_frees_its_recordings_when_it_ends(server):
    memory = server.app.state.server.memory
    with no_collection():
        with session(server) as client:
            for seed in range(5):
                client.configure(**clone(seed))
                client.say("queued.")
            until(lambda: memory.num_held == 5 * 128_000)
        server.engine.messages.clear()
        until(lambda: memory.num_held == 0)


def test_a_recording_is_held_once_however_many_sessions_use_it(server):
    memory = server.app.state.server.memory
    server.engine.messages.clear()
    with session(server) as first, session(server) as second:
        for client in (first, second, first):
            client.configure(**clone(7))
            client.say("queued.")
        # the third utterance waits for the first one
        until(lambda: len(server.engine.messages) == 2 and memory.num_held == 128_000)
    server.engine.messages.clear()
    until(lambda: memory.num_held == 0)


def test_recordings_over_the_memory_limit_are_refused(tmp_path):
    with Server(tmp_path, models=[CHANCE], limits=Limits(reference_s=3, memory_bytes=1_000_000)) as server:
        memory = server.app.state.server.memory
        with session(server) as client:
            for seed in range(2):
                client.configure(**clone(seed))
                client.say("queued.")
            client.send("session.config", **clone(2))
            assert client.error()["code"] == "server_busy"
            assert memory.num_held == 2 * 128_000
            client.send("input.cancel")


# Access to sessions


def denied(server, headers=None, **options):
    with pytest.raises(InvalidStatus) as refused, session(server, headers, **options):
        pass
    answer = refused.value.response
    return answer.status_code, json.loads(answer.body)["error"]["code"]


def test_a_session_needs_the_api_key(tmp_path):
    with Server(tmp_path, api_key="sk-a") as server:
        assert denied(server) == (401, "invalid_api_key")
        assert denied(server, {"authorization": "Bearer sk-b"}) == (401, "invalid_api_key")
        assert denied(server, subprotocols=["openai-insecure-api-key.sk-b"]) == (401, "invalid_api_key")
        for how in (
            {"headers": {"authorization": "Bearer sk-a"}},
            {"headers": {"authorization": "bearer sk-a"}},
            {"headers": {"api-key": "sk-a"}},
            {"subprotocols": ["speechzoo", "openai-insecure-api-key.sk-a"]},
        ):
            with session(server, **how) as client:
                client.configure()


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [
        (["openai-insecure-api-key.sk-a"], "openai-insecure-api-key.sk-a"),
        (["openai-insecure-api-key.sk-a", "realtime"], "realtime"),
        (["openai-insecure-api-key.sk-a", "realtime", "speechzoo"], "speechzoo"),
    ],
)
def test_a_browser_gets_one_of_the_subprotocols_that_it_offered(tmp_path, offered, chosen):
    """Otherwise it closes the connection. The key comes back only if nothing else was offered."""
    with (
        Server(tmp_path, api_key="sk-a") as server,
        session(server, subprotocols=offered) as client,
    ):
        assert client.socket.subprotocol == chosen
        client.configure()


def test_pages_of_other_sites_cannot_open_a_session(tmp_path):
    with Server(tmp_path, cors_origins=["https://good.example"]) as server:
        assert denied(server, origin="https://evil.example") == (403, "foreign")
        for origin in (server.url, "https://good.example"):
            with session(server, origin=origin) as client:
                client.configure()


def test_the_number_of_open_sessions_is_limited(tmp_path):
    with Server(tmp_path, limits=Limits(sessions=1)) as server:
        with session(server) as client:
            client.configure()
            assert denied(server) == (503, "server_busy")
            assert "zoo_sessions 1.0" in server.http.get("/metrics").text
        until(lambda: server.app.state.server.sessions.num_held == 0)
        with session(server) as client:
            client.configure()


def test_a_plain_get_request_gets_426(server):
    answer = server.http.get(PATH)
    assert answer.status_code == 426 and answer.json()["error"]["code"] == "upgrade_required"


# Limits


def test_a_slow_reader_is_paused_by_backpressure_and_then_disconnected(tmp_path):
    with Server(tmp_path, stall_s=1.0) as server, session(server, max_queue=1, close_timeout=0.1) as client:
        client.configure()
        client.say("flood 60 of it all.")
        until(lambda: server.engine.heard)
        [id] = server.engine.heard
        until(lambda: id in server.engine.cancelled, 10)  # it read nothing for a second
        assert server.engine.heard[id] < 50  # as much as fits into the buffers of two sockets
        with session(server) as other:
            other.configure()
            other.say("frames 1 of more.")
            assert other.heard()[1] == frame(0)


@pytest.mark.slow
def test_random_messages_leave_the_server_working_and_clean(server):
    draw = random.Random(1)
    texts = [
        "frames 1 of it. ",
        "hold 1 of it. ",
        "fail 1 of it. ",
        "x",
        "",
        " ",
        "reject voice. ",
        "\u0000",
        "a" * 500,
    ]
    values = [None, 1, -1, 1e300, "", "vivian", "fake", "feeder", True, [], {}, "mp3", "x" * 300]
    names = [
        "model",
        "voice",
        "seed",
        "speed",
        "response_format",
        "audio",
        "barge_in",
        "temperature",
        "type",
        "input",
    ]

    def message():
        kind = draw.choice(["session.config", "input.text", "input.text", "input.done", "input.cancel", "?"])
        fields = {draw.choice(names): draw.choice(values) for _ in range(draw.randrange(3))}
        if draw.random() < 0.9:
            fields["type"] = kind
        if kind == "input.text" and draw.random() < 0.9:
            fields["text"] = draw.choice(texts)
        body = json.dumps(fields)
        return body if draw.random() < 0.9 else body[: draw.randrange(len(body) + 1)]

    for _ in range(30):
        with session(server, max_queue=None, close_timeout=1) as client:
            try:
                client.send("session.config", model=draw.choice(["fake", "feeder"]))
                for _ in range(draw.randrange(60)):
                    client.socket.send(message())
                    if draw.random() < 0.2:
                        client.socket.recv(timeout=0.02)
            except (ConnectionClosed, TimeoutError):
                pass
    until(lambda: server.app.state.server.sessions.num_held == 0)
    assert server.http.get("/health").status_code == 200
    with session(server) as client:
        client.configure()
        client.say("frames 1 of more.")
        assert client.heard()[1] == frame(0)
    client_inboxes = server.app.state.server.engine._inboxes
    until(lambda: not client_inboxes)


def test_a_client_that_leaves_within_the_handshake_is_disconnected():
    """The connection is closing before the server has accepted it. Otherwise the session would run, and
    uvicorn would log an error when it ends."""
    early = object.__new__(listener.Socket)
    early.transport = SimpleNamespace(is_closing=lambda: True)
    early.handshake_complete = False
    with pytest.raises(ClientDisconnected):
        asyncio.run(early.send({"type": "websocket.accept", "subprotocol": None, "headers": []}))


HANDSHAKE = f"GET {PATH} HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
KEY = "sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (f"{HANDSHAKE}{KEY}cookie: {'x' * 9000}\r\n\r\n", b"431", "invalid_handshake"),
        (HANDSHAKE + KEY + 200 * "x: y\r\n" + "\r\n", b"431", "invalid_handshake"),
        (f"{HANDSHAKE}{KEY}content-length: 2\r\n\r\n{{}}", b"400", "invalid_handshake"),
        (f"{HANDSHAKE}\r\n", b"400", "invalid_handshake"),
        (f"{HANDSHAKE}{KEY}\r\n".replace("GET", "POST"), b"405", "invalid_handshake"),
        (f"{HANDSHAKE}{KEY}\r\n".replace(PATH, "/v1/models"), b"404", "not_found"),
    ],
    ids=["long", "many", "body", "no key", "post", "no session"],
)
def test_a_handshake_that_is_not_possible_gets_an_error_at_once(server, sent, status, code):
    with socket.create_connection(server.listener.getsockname(), timeout=30) as client:
        client.sendall(sent.encode())
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status) and b"application/json" in head
    error = json.loads(body)["error"]
    assert error["code"] == code and error["message"]
