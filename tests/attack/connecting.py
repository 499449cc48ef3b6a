"""Attack with connections that send too much, send too slowly, or do not read.

Some of them have no API key.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from tests.attack.report import Row
from tests.attack.target import Target, until

MIB = 1 << 20
KEY = "sk-attack"
SPEAK = b"POST /v1/audio/speech HTTP/1.1\r\nhost: 127.0.0.1\r\n"
HALF = (b"", b"GET /hea", SPEAK, SPEAK + b"content-length: 100\r\n\r\n{")
NUM_HALF = 1200
NUM_DEAF = 40
# seconds of 48 kHz PCM: what the system's buffers hold of an answer that the client does not read
HELD_S = 8.0
SHORT_S = 0.2  # the one answer before them was shorter


def attack(directory: Path) -> Iterator[Row]:
    with Target("tiny", directory, ZOO_API_KEY=KEY) as target:
        target.http.headers["authorization"] = f"Bearer {KEY}"
        yield headers_without_end(target)
        yield half_a_request(target)
        yield readers_that_stop(target)


def connected(target: Target) -> socket.socket:
    parts = urlsplit(target.url)
    assert parts.hostname is not None and parts.port is not None, target.url
    return socket.create_connection((parts.hostname, parts.port), timeout=30)


def headers_without_end(target: Target) -> Row:
    before, sent = target.resident_bytes("http"), 0
    with connected(target) as client:
        client.sendall(SPEAK)
        try:
            while sent < 300 * MIB:
                sent += client.send(b"x-many: %s\r\n" % (b"y" * 4000) * 64)
        except OSError:
            pass
    grown = (target.resident_bytes("http") - before) / MIB
    return Row(
        "300 MiB of headers",
        1,
        int(sent > 8 * MIB),
        f"{sent / MIB:.1f} MiB were accepted, http {grown:+.0f} MiB",
    )


def half_a_request(target: Target) -> Row:
    """Leave requests half sent. Heads time out after 10 s, bodies after a minute.

    Other requests are served meanwhile."""
    clients = [connected(target) for _ in range(NUM_HALF)]
    for i, client in enumerate(clients):
        client.sendall(HALF[i % len(HALF)])
    began = time.monotonic()
    status = target.speak(voice="vivian").status_code
    took_s = time.monotonic() - began
    time.sleep(70)
    num_open = sum(map(is_open, clients))
    for client in clients:
        client.close()
    failed = num_open + (status != 200) + (took_s > 3)
    return Row(
        f"{NUM_HALF} half-sent requests",
        NUM_HALF,
        failed,
        f"{num_open} open after 70 s; another request took {took_s:.1f} s",
    )


def is_open(client: socket.socket) -> bool:
    """Return whether the connection is open and has received nothing."""
    client.setblocking(False)
    try:
        client.recv(1)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def readers_that_stop(target: Target) -> Row:
    body = {
        "input": "word " * 200,
        "voice": "vivian",
        "response_format": "pcm",
        "sample_rate": 48000,
        "max_new_tokens": 400,
    }
    content = json.dumps(body).encode()
    clients = [connected(target) for _ in range(NUM_DEAF)]
    for client in clients:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = SPEAK + b"authorization: Bearer %s\r\ncontent-length: %d\r\n\r\n" % (
            KEY.encode(),
            len(content),
        )
        client.sendall(head + content)
    began = time.monotonic()
    until(lambda: len(ends(target)) + num_refused(clients) == NUM_DEAF, 200)
    took_s, refused = time.monotonic() - began, num_refused(clients)
    for client in clients:
        client.close()
    short = [audio_s for reason, audio_s in ends(target) if reason == "stop" and audio_s < HELD_S]
    left = [audio_s for reason, audio_s in ends(target) if reason == "cancelled"]
    seen = (
        f"{refused} refused, {len(left)} disconnected within {took_s:.0f} s, {len(short)} fit into the system's "
        "buffers"
    )
    return Row(f"{NUM_DEAF} readers that stop", NUM_DEAF, NUM_DEAF - refused - len(left) - len(short), seen)


def num_refused(clients: list[socket.socket]) -> int:
    """Return how many clients were told that the server is full."""
    return sum(beginning(client) == b"HTTP/1.1 503" for client in clients)


def beginning(client: socket.socket) -> bytes:
    """Return the first bytes that a client has received, which it reads later."""
    try:
        return client.recv(12, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:  # nothing has come, or the connection is gone
        return b""


def ends(target: Target) -> list[tuple[str, float]]:
    """Return (reason, seconds of audio) of each answer that is longer than SHORT_S."""
    logged = [json.loads(line) for line in target.lines if '"event": "speech"' in line]
    return [(line["reason"], line["audio_s"]) for line in logged if line["audio_s"] > SHORT_S]
