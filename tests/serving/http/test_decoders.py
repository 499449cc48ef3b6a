"""Decoder processes: audio files are decoded outside the HTTP process, within limits."""

import asyncio
import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from fake_engine import CLONER
from hostile_files import fragmented_mp4, matroska, mp4
from http_server import Server, error, until
from litestar.exceptions import HTTPException
from uploads import RATE_HZ, recording, upload
from websockets.sync.client import connect

from serving.http import decode_worker, decoders
from serving.http.decode import decode
from serving.http.decoders import EXCEEDED, Decoders

NOISE = np.random.default_rng(5).uniform(-0.5, 0.5, 3 * RATE_HZ).astype(np.float32)
LONG = 80_000_000  # samples
FILES = {"a table": mp4(LONG), "a fragment": fragmented_mp4(LONG), "blocks of another track": matroska(900)}


def run(scene, num_processes=1):
    """Run a scene with a pool of decoders."""

    async def whole():
        pool = Decoders(num_processes)
        try:
            return await scene(pool)
        finally:
            await pool.close()

    return asyncio.run(whole())


def children(pid=None):
    """Return the IDs of this process's decoders. Other tests may have left children of another kind, such as
    Inductor's."""
    pid = pid or os.getpid()
    found = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return {int(child) for each in found for child in each if is_decoder(child)}


def is_decoder(pid):
    try:
        return decode_worker.__name__ in Path(f"/proc/{pid}/cmdline").read_text()
    except FileNotFoundError:  # it has ended
        return False


def test_a_process_decodes_as_the_function_does_and_stays():
    async def scene(pool):
        for data in (recording(NOISE), recording(NOISE, kind="FLAC", subtype="PCM_16")):
            assert await pool.decode(data, 60) == decode(data, 60)
        [process] = children()
        with pytest.raises(ValueError, match="format is not supported"):
            await pool.decode(b"Good morning.", 60)
        with pytest.raises(ValueError, match="longer than the maximum of 2 s"):
            await pool.decode(recording(NOISE), 2)
        assert children() == {process}

    run(scene)
    assert not children()


@pytest.mark.parametrize("data", FILES.values(), ids=FILES)
def test_a_hostile_file_is_refused_within_the_limits(data):
    async def scene(pool):
        with pytest.raises(ValueError, match=f"{EXCEEDED}|contains no audio"):
            await pool.decode(data, 60)
        assert await pool.decode(recording(NOISE), 60) == decode(recording(NOISE), 60)
        [process] = children()
        return int(Path(f"/proc/{process}/status").read_text().split("VmHWM:")[1].split()[0]) >> 10

    before = peak_mib()
    assert run(scene) < 600 and peak_mib() < before + 50


def peak_mib():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10


def test_cancelling_ends_the_process_and_the_next_file_is_decoded():
    async def scene(pool):
        await pool.decode(recording(NOISE), 60)
        [process] = children()
        decoding = asyncio.create_task(pool.decode(matroska(900), 60))
        await asyncio.sleep(0.2)
        began_s = time.monotonic()
        decoding.cancel()
        await asyncio.gather(decoding, return_exceptions=True)
        assert time.monotonic() - began_s < 0.2 and decoding.cancelled()
        assert await pool.decode(recording(NOISE), 60) == decode(recording(NOISE), 60)
        assert children() and process not in children()

    run(scene)


def test_a_process_that_hangs_is_replaced(monkeypatch):
    async def scene(pool):
        await pool.decode(recording(NOISE), 60)
        [process] = children()
        os.kill(process, signal.SIGSTOP)
        monkeypatch.setattr(decoders, "MAX_WAIT_S", 0.3)
        with pytest.raises(HTTPException, match=r"503: a decoder .* within 0\.3 s"):
            await pool.decode(recording(NOISE), 60)
        monkeypatch.undo()
        assert await pool.decode(recording(NOISE), 60) == decode(recording(NOISE), 60)
        assert process not in children()

    run(scene)


def test_a_process_that_is_killed_with_a_file_is_not_the_files_fault():
    async def scene(pool):
        await pool.decode(recording(NOISE), 60)
        [process] = children()
        os.kill(process, signal.SIGSTOP)
        decoding = asyncio.create_task(pool.decode(recording(NOISE), 60))
        await asyncio.sleep(0.1)
        os.kill(process, signal.SIGKILL)  # as the system does when memory is full
        with pytest.raises(HTTPException, match="503: a decoder of this server was killed"):
            await decoding
        assert await pool.decode(recording(NOISE), 60) == decode(recording(NOISE), 60)

    run(scene)


def test_a_process_that_was_killed_while_idle_is_replaced_unnoticed():
    async def scene(pool):
        await pool.decode(recording(NOISE), 60)
        [process] = children()
        os.kill(process, signal.SIGKILL)
        while process in children():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert await pool.decode(recording(NOISE), 60) == decode(recording(NOISE), 60)

    run(scene)


def test_the_number_of_processes_is_bounded_and_nothing_is_left():
    num_files = len(os.listdir("/proc/self/fd"))

    async def scene(pool):
        files = [recording(NOISE), b"no audio", mp4(LONG)] * 5
        answers = await asyncio.gather(*(pool.decode(data, 60) for data in files), return_exceptions=True)
        assert len(children()) == 2
        assert [answer == decode(recording(NOISE), 60) for answer in answers] == [True, False, False] * 5

    run(scene, num_processes=2)
    assert not children() and len(os.listdir("/proc/self/fd")) <= num_files + 1


def test_an_answer_that_is_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(decoders, "max_clip_bytes", lambda max_s: 1000)

    async def scene(pool):
        with pytest.raises(ValueError, match="takes more than"):
            await pool.decode(recording(NOISE), 60)

    run(scene)


def test_the_api_key_is_not_in_a_decoders_environment(monkeypatch):
    monkeypatch.setenv("ZOO_API_KEY", "sk-secret")
    assert "sk-secret" not in decoders.environment().values()


def test_a_decoder_ends_with_the_server():
    """Its socket then has no other end, however the server ended."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", decode_worker.__name__, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    ours.close()
    assert process.wait(20) == 0


# In the server


@pytest.fixture
def server(tmp_path):
    with Server(tmp_path, models=[CLONER]) as server:
        yield server


def clone(data):
    return {"ref_audio": base64.b64encode(data).decode()}


def test_the_server_starts_its_decoders_before_the_first_recording(server):
    until(lambda: children(), 20)


def test_a_hostile_recording_is_a_400(server):
    fault = error(server.speak("frames 1", **clone(fragmented_mp4(LONG))), 400)
    assert fault["message"] == f"ref_audio cannot be used: {EXCEEDED}" and fault["param"] == "ref_audio"


def test_a_disconnect_frees_the_decoder_at_once(server):
    assert server.speak("frames 1", **clone(recording())).status_code == 200
    [process] = children()
    for send in (
        lambda: server.speak("frames 1", **clone(matroska(900))),
        lambda: upload(server, sample=matroska(900)),
    ):
        server.http.timeout = httpx.Timeout(0.5)
        with pytest.raises(httpx.ReadTimeout):
            send()
        server.http.timeout = httpx.Timeout(10)
        until(lambda gone=process: gone not in children())
        assert server.speak("frames 1", **clone(recording())).status_code == 200
        [process] = children()
    until(lambda: server.app.state.server.references.decoding.num_held == 0)


def test_a_session_that_disconnects_frees_the_decoder_at_once(server):
    url = server.url.replace("http", "ws") + "/v1/audio/speech/stream"
    server.speak("frames 1", **clone(recording()))
    [process] = children()
    with connect(url, compression=None) as client:
        client.send(json.dumps({"type": "session.config", **clone(matroska(60))}))
        time.sleep(0.2)
        assert process in children()
    until(lambda: process not in children())


def test_a_decoder_whose_server_is_killed_writes_nothing():
    """The server has not read the answer, so the connection is reset."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "serving.http.decode_worker", str(theirs.fileno())]
    worker = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
    theirs.close()
    data = recording()
    ours.sendall(decode_worker.JOB.pack(5.0, len(data)) + data)
    ours.recv(1)  # the answer has begun
    ours.close()
    assert worker.communicate(timeout=30)[1] == b"" and worker.returncode == 0
