"""Limits on a client's connection: before the API key is checked, and after the answer has begun."""

import json
import os
import resource
import socket
import subprocess
import sys
import time

import httpx
import pytest
from http_server import Server, error, until
from metrics import outcomes, samples
from structlog.testing import capture_logs
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from serving.http.listener import MAX_HEAD_BYTES

pytestmark = pytest.mark.slow

SPEAK = b"POST /v1/audio/speech HTTP/1.1\r\nhost: x\r\n"


@pytest.fixture
def server(tmp_path, monkeypatch):
    for name in ("HEAD_S", "BODY_S", "WRITE_S"):
        monkeypatch.setattr(f"serving.http.listener.{name}", 0.5)
    with Server(tmp_path, api_key="sk-test") as server:
        server.http.headers["authorization"] = "Bearer sk-test"
        yield server


def connected(server):
    return socket.create_connection(server.listener.getsockname(), timeout=5)


def rest(client):
    """Return all data until the server closes the connection."""
    data = b""
    while True:
        try:
            piece = client.recv(1 << 16)
        except ConnectionResetError:
            return data
        if not piece:
            return data
        data += piece


def refused(data, status):
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), data[:200]
    return json.loads(body)["error"]


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"G", b"GET /health HTTP/1.1\r\n", SPEAK + b"x-a: b"])
def test_an_incomplete_head_times_out(server, sent):
    with connected(server) as client:
        client.sendall(sent)
        began = time.monotonic()
        assert refused(rest(client), 408)["code"] == "too_slow"
        assert time.monotonic() - began < 3


def test_a_head_sent_byte_by_byte_times_out(server):
    with connected(server) as client:
        began = time.monotonic()
        try:
            while time.monotonic() - began < 3:
                client.sendall(b"x")
                time.sleep(0.1)
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert time.monotonic() - began < 3


@pytest.mark.parametrize("how", [b"content-length: 100", b"transfer-encoding: chunked"])
def test_an_incomplete_body_times_out(server, how):
    with connected(server) as client:
        client.sendall(SPEAK + b"authorization: Bearer sk-test\r\n" + how + b"\r\n\r\n")
        assert refused(rest(client), 408)["message"] == "the body did not arrive within 0.5 s"
    until(lambda: outcomes(server, "").get("cancelled") == 1)


@pytest.mark.parametrize("line", [b"x-many: %s\r\n" % (b"y" * 500), b"z" * 500], ids=["many", "one"])
def test_headers_have_a_size_limit(server, line):
    with connected(server) as client:
        client.sendall(SPEAK)
        sent = 0
        try:
            while sent < 20 << 20:
                client.sendall(line * 100)
                sent += len(line) * 100
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert sent < 8 << 20  # includes the buffers of the operating system
    assert server.http.get("/health", headers={"x-long": "y" * (MAX_HEAD_BYTES - 1000)}).status_code == 200


def test_trailers_have_a_size_limit(server):
    with connected(server) as client:
        client.sendall(SPEAK + b"transfer-encoding: chunked\r\n\r\n0\r\n")
        sent = 0
        try:
            while sent < 20 << 20:
                client.sendall(b"x-many: %s\r\n" % (b"y" * 500) * 100)
                sent += 50_000
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert sent < 8 << 20


def test_a_client_that_stops_reading_is_disconnected_and_counts_as_cancelled(server):
    server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        client.connect(server.listener.getsockname())
        body = json.dumps({"input": "frames 5000", "response_format": "pcm"}).encode()
        client.sendall(
            SPEAK + b"authorization: Bearer sk-test\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        until(lambda: outcomes(server).get("cancelled") == 1)
        assert outcomes(server)["stop"] == 0
        assert len(rest(client)) < 500_000


def test_the_engine_is_told_what_clients_have_read(server):
    # "hold" keeps the request open: the engine is told nothing about finished ones.
    with server.http.stream("POST", "/v1/audio/speech", json=server.body("hold 30")):
        until(lambda: list(server.engine.heard.values()) == [30])
    body = server.body("frames 5000", response_format="pcm")
    server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    with server.http.stream("POST", "/v1/audio/speech", json=body):
        until(lambda: len(server.engine.heard) == 2)
        assert list(server.engine.heard.values())[1] < 5000


def test_a_slow_client_that_disconnects_counts_as_cancelled(server, monkeypatch):
    monkeypatch.setattr("serving.http.listener.WRITE_S", 60)
    server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        client.connect(server.listener.getsockname())
        body = json.dumps({"input": "frames 5000", "response_format": "pcm"}).encode()
        client.sendall(
            SPEAK + b"authorization: Bearer sk-test\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        time.sleep(0.5)
    until(lambda: outcomes(server).get("cancelled") == 1)
    assert outcomes(server)["stop"] == 0


@pytest.mark.slow
def test_a_slow_reader_stays_connected(server):
    body = server.body("frames 3000", response_format="pcm")
    heard = 0
    with server.http.stream("POST", "/v1/audio/speech", json=body) as answer:
        for chunk in answer.iter_raw(1 << 14):
            heard += len(chunk)
            time.sleep(0.05)
    assert heard == 3000 * 200


def test_deadlines_of_a_request_do_not_affect_its_answer(server):
    """The answer may take longer than any deadline of the request. An extra line end after a body, which
    old clients send, starts no deadline either."""
    with connected(server) as client:
        for text, wait_s in (("tone 60", 1.0), ("frames 1", 0.0)):
            body = json.dumps({"input": text, "response_format": "pcm"}).encode()
            head = SPEAK + b"authorization: Bearer sk-test\r\ncontent-length: %d\r\n\r\n" % len(body)
            client.sendall(head + body + b"\r\n")
            data = b""
            while not data.endswith(b"0\r\n\r\n"):
                piece = client.recv(1 << 16)
                assert piece, "the answer is incomplete"
                data += piece
            assert data.startswith(b"HTTP/1.1 200 ") and len(data) > 60 * 3840 * (wait_s > 0)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": ""}, 200),
        ({"origin": "https://good.example"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "LOCALHOST:8000"}, 200),
        ({"host": "127.0.0.1"}, 200),
        ({"host": "[::1]:8000", "origin": "http://[::1]:8000"}, 200),
        ({"host": "192.168.1.7:8000"}, 200),
        ({"host": "named:8000"}, 200),
        ({"host": "1.2.3.4.evil.example"}, 403),
        ({"host": "[evil.example]"}, 403),
        ({"host": "localhost.evil.example"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "audio"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}, 200),
        ({"sec-fetch-site": "cross-site", "origin": "https://good.example"}, 200),
    ],
)
def test_a_page_of_another_site_is_refused(tmp_path, headers, status):
    """So is a request for a name that may be an attacker's."""
    with Server(tmp_path, cors_origins=["https://good.example"], hosts=["named"]) as server:
        answer = server.http.get("/v1/models", headers=headers)
        assert answer.status_code == status
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        if status == 403:
            assert error(answer, 403)["code"] == "foreign" and "x-request-id" in answer.headers
        if headers.get("origin") == "https://good.example":
            assert answer.headers["access-control-allow-origin"] == "https://good.example"
            asked = {"origin": "https://good.example", "access-control-request-method": "POST"}
            asked["access-control-request-headers"] = "authorization, content-type"
            assert server.http.options("/v1/audio/speech", headers=asked).status_code == 204


def test_a_refused_page_is_logged_and_counted(tmp_path):
    with capture_logs() as lines, Server(tmp_path, hosts=[]) as server:
        answer = server.http.get("/v1/models", headers={"host": "evil.example"})
        with pytest.raises(InvalidStatus) as refused:
            connect(
                f"{server.url.replace('http', 'ws')}/v1/audio/speech/stream", origin="http://evil.example"
            )
        answers = (answer, refused.value.response)
        ids = [one.headers["x-request-id"] for one in answers]
        assert [(line["event"], line["path"], line["code"], line["id"]) for line in lines] == [
            ("refused", "/v1/models", "foreign", ids[0]),
            ("refused", "/v1/audio/speech/stream", "foreign", ids[1]),
        ]
        assert samples(server)["zoo_foreign_requests_total",] == 2


def test_every_site_may_use_a_server_that_allows_all(tmp_path):
    with Server(tmp_path, cors_origins=["*"]) as server:
        answer = server.http.get("/v1/models", headers={"sec-fetch-site": "cross-site"})
        assert answer.status_code == 200 and "cross-origin-resource-policy" not in answer.headers


def test_connections_beyond_the_descriptor_limit_wait_and_are_counted(tmp_path, monkeypatch):
    """The clients are in a process of their own, which keeps its limit."""
    monkeypatch.setattr("serving.http.accepting.RETRY_S", 0.05)
    with capture_logs() as lines, Server(tmp_path) as server:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = len(os.listdir("/proc/self/fd")) + 20
        script = """
import socket, sys, time
clients = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(60)]
sys.stdin.read()
"""
        command = [sys.executable, "-c", script, server.url.rpartition(":")[2]]
        flood = subprocess.Popen(command, stdin=subprocess.PIPE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            until(lambda: any(line["event"] == "accept" for line in lines))
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert server.http.get("/health").status_code == 200
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            flood.communicate()
        [line] = [line for line in lines if line["event"] == "accept"]
        assert line["error"] == "Too many open files" and line["max_descriptors"] == limit
        assert samples(server)["zoo_accept_failures_total",] >= 1


def test_a_stream_that_fails_leaves_no_error_in_the_log(server, caplog):
    with pytest.raises(httpx.RemoteProtocolError):
        server.speak("fail 2")
    until(lambda: outcomes(server)["failed"] == 1)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
