"""One client holds as much as it can: recordings in sessions, files of a batch, and places of a limit."""

from __future__ import annotations

import base64
import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.attack.connecting import SPEAK, connected
from tests.attack.flooding import silence
from tests.attack.report import Row
from tests.attack.target import Target, until

MIB = 1 << 20
NUM_SESSIONS, NUM_UTTERANCES = 4, 16
NUM_ITEMS = 32
MEMORY_MIB, FILES_MIB = 256, 64  # --http-memory
SPARE_MIB = 150  # for what no quota counts: bodies, encoders, the allocator
LEFT_MIB = 60  # may stay after the clients have disconnected
OTHER = {"x-forwarded-for": "203.0.113.9"}  # a proxy on this machine names its client
CHUNK = b"20001\r\n" + b" " * 0x20001 + b"\r\n"


def attack(directory: Path) -> Iterator[Row]:
    limit = ("--http-memory", f"{MEMORY_MIB}MiB")
    with Target("tiny-base", directory, *limit) as target:
        target.speak(voice=None, ref_audio=recording(0), x_vector_only_mode=True)
        yield sessions_with_recordings(target)
        yield batch_of_clones(target)
        yield bodies_that_do_not_arrive(target)
    with Target("tiny", directory, "--http-memory", f"{FILES_MIB}MiB") as target:
        target.speak(voice="vivian")
        yield batch_of_long_files(target)


def recording(seed: int) -> str:
    """Return a minute at 48 kHz that is nearly silent: 15 kB of FLAC, and 11 MB of samples."""
    start = np.random.default_rng(seed).integers(-9000, 9000, 2000).astype(np.int16)
    return base64.b64encode(silence(59, 48000, start=start)).decode()


def sessions_with_recordings(target: Target) -> Row:
    """Each utterance has a different recording, and waits for the one before it."""
    before, tried = target.resident_bytes("http"), NUM_SESSIONS * NUM_UTTERANCES
    target.forget_peaks()
    url = target.url.replace("http", "ws") + "/v1/audio/speech/stream"
    with ExitStack() as stack:
        for number in range(NUM_SESSIONS):
            client = stack.enter_context(connect(url, ping_interval=None))  # it reads nothing
            fill(client, number * NUM_UTTERANCES)
        time.sleep(5)
        peak_mib = (target.peak_bytes("http") - before) / MIB
    until(lambda: target.resident_bytes("http") - before < LEFT_MIB * MIB, 10)
    left_mib = (target.resident_bytes("http") - before) / MIB
    failed = (peak_mib > MEMORY_MIB + SPARE_MIB) + (left_mib > LEFT_MIB)
    seen = f"http {peak_mib:+.0f} MiB, and {left_mib:+.0f} MiB afterwards"
    return Row(f"{tried} recordings in {NUM_SESSIONS} sessions", tried, failed, seen)


def fill(client: ClientConnection, first: int) -> None:
    options = {"x_vector_only_mode": True, "max_new_tokens": 100}
    for number in range(first, first + NUM_UTTERANCES):
        config = {"type": "session.config", "ref_audio": recording(number), **options}
        for message in (config, {"type": "input.text", "text": "Hello there. "}, {"type": "input.done"}):
            try:
                client.send(json.dumps(message))
            except ConnectionClosed:
                return


def batch_of_clones(target: Target) -> Row:
    voice = {"ref_audio": base64.b64encode(silence(5, 16000)).decode(), "x_vector_only_mode": True}
    body = {"items": [{"input": "Hello."}] * NUM_ITEMS, "max_new_tokens": 2, **voice}
    answer = target.http.post("/v1/audio/speech/batch", json=body)
    errors = [item["error"]["code"] for item in answer.json()["data"] if item["error"]]
    return Row(f"a batch of {NUM_ITEMS} clones", NUM_ITEMS, len(errors), f"errors: {dict(Counter(errors))}")


def batch_of_long_files(target: Target) -> Row:
    """All files together would take twice the limit: items that do not fit wait a minute and then fail."""
    before = target.resident_bytes("http")
    target.forget_peaks()
    text = "The old man told the children a story about the sea. " * 4
    body = {"response_format": "wav", "sample_rate": 48000, "speed": 0.25, "max_new_tokens": 60}
    items = [{"input": text, "voice": "vivian"}] * NUM_ITEMS
    answer = target.http.post("/v1/audio/speech/batch", json={"items": items, **body}, timeout=200)
    grown_mib = (target.peak_bytes("http") - before) / MIB
    codes = Counter((item["error"] or {"code": "spoken"})["code"] for item in answer.json()["data"])
    wrong = NUM_ITEMS - codes["spoken"] - codes["server_busy"]
    failed = wrong + (grown_mib > FILES_MIB + SPARE_MIB)
    seen = f"{len(answer.content) >> 20} MiB of answer, {dict(codes)}, http {grown_mib:+.0f} MiB"
    return Row(f"a batch of {NUM_ITEMS} long files", NUM_ITEMS, failed, seen)


def bodies_that_do_not_arrive(target: Target) -> Row:
    """Another client still uploads, and small bodies are read whatever their encoding."""
    clients: list[socket.socket] = [connected(target) for _ in range(40)]
    for client in clients:
        client.sendall(SPEAK + b"transfer-encoding: chunked\r\n\r\n" + CHUNK)
    time.sleep(1)
    sample = {"audio_sample": ("a.flac", silence(59, 48000, "WAV"))}
    upload = httpx.post(
        f"{target.url}/v1/audio/voices", data={"name": "waiting"}, files=sample, headers=OTHER, timeout=60
    )
    content = iter([json.dumps({"input": "Hello.", "voice": "waiting", "max_new_tokens": 2}).encode()])
    small = target.http.post("/v1/audio/speech", content=content)
    for client in clients:
        client.close()
    statuses = [upload.status_code, small.status_code]
    failed = sum(status != 200 for status in statuses)
    return Row("40 bodies that do not arrive", 2, failed, f"upload {statuses[0]}, small body {statuses[1]}")
