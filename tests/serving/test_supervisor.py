"""The supervisor with the real HTTP process and an engine process without a model (fake_engine.py)."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
from fake_engine import CLONER, MODEL, frame

from serving import heartbeat, supervisor
from serving.settings import HTTPArguments, Security, Settings

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ENV = {**os.environ, "PYTHONPATH": str(HERE.parent.parent)}


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(*how) runs a supervisor and yields its task and a client. It ends all processes afterwards."""
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.02)

    @asynccontextmanager
    async def start(*how):
        path = str(tmp_path / "engine.sock")
        with (
            supervisor.bind("127.0.0.1", 0) as listener,
            supervisor.pipe() as (parent_fd, _),
            supervisor.pipe() as (heartbeat_fd, beating_fd),
        ):
            engine = [sys.executable, str(HERE / "fake_engine.py"), path, str(parent_fd), *how]
            arguments = HTTPArguments(Settings(grace_s=1), path, listener.fileno(), parent_fd, beating_fd)
            http = supervisor.command("serving.http.app", arguments)
            fds = [parent_fd, listener.fileno(), beating_fd]
            speaker = supervisor.Child("engine", engine, [parent_fd], ENV, is_proven=False)
            server = supervisor.Child("HTTP process", http, fds, ENV, is_proven=True)
            server.heartbeat_fd = heartbeat_fd
            task = asyncio.create_task(supervisor.run(speaker, server, listener, path))
            try:
                async with httpx.AsyncClient(base_url=supervisor.url(listener), timeout=10) as client:
                    yield task, client
            finally:
                if not task.done():
                    os.kill(os.getpid(), signal.SIGTERM)
                await task

    return start


async def until_ready(client):
    async with asyncio.timeout(10):
        while (await client.get("/ready")).status_code != 200:
            await asyncio.sleep(0.02)


def speak(client, text):
    return client.post("/v1/audio/speech", json={"input": text, "response_format": "wav"})


def children():
    """Return the process ids of the children by name."""
    found = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_text()
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == os.getpid():
            found |= {name: pid for name in ("fake_engine", "serving.http.app") if name in line}
    return found


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")


def test_an_engine_that_dies_is_restarted(start, capfd):
    async def scene():
        async with start() as (task, client):
            await until_ready(client)
            async with client.stream(
                "POST", "/v1/audio/speech", json={"input": "hold 1", "response_format": "wav"}
            ) as answer:
                assert (await speak(client, "die")).status_code == 503
                with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
                    await answer.aread()
            await until_ready(client)
            assert (await speak(client, "frames 2")).content[44:] == frame(0) + frame(1)
            assert not task.done()

    asyncio.run(scene())
    said = capfd.readouterr().err
    assert "zoo: the engine ended by SIGKILL; restarting it in 0.02 s" in said
    assert said.count("zoo: ready on http://127.0.0.1:") == 2 and said.count("curl -N") == 1


@needs_proc
def test_an_http_process_that_dies_is_restarted_on_its_port(start, capfd):
    async def scene():
        async with start() as (_, client):
            await until_ready(client)
            before = children()
            os.kill(before["serving.http.app"], signal.SIGKILL)
            async with asyncio.timeout(10):
                while children().get("serving.http.app") in (None, before["serving.http.app"]):
                    await asyncio.sleep(0.01)
            # The request waits for the new process, because the port was never closed.
            assert (await client.get("/health")).status_code == 200
            await until_ready(client)
            assert children()["fake_engine"] == before["fake_engine"]

    asyncio.run(scene())
    assert "zoo: the HTTP process ended by SIGKILL" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("how", "status", "says"),
    [
        ("refuse", 2, "zoo: this directory holds no model\n"),
        ("crash", 1, "zoo: the engine ended with status 70 before it was ready\n"),
    ],
)
def test_an_engine_that_cannot_start_ends_the_server(start, capfd, how, status, says):
    async def scene():
        async with start(how) as (task, _):
            async with asyncio.timeout(10):
                assert await asyncio.shield(task) == status

    asyncio.run(scene())
    assert capfd.readouterr().err.endswith(says)


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("sleeps_s", [1.0, 60.0])
def test_a_hung_engine_is_restarted_and_a_suspended_one_continues(start, capfd, monkeypatch, sleeps_s):
    monkeypatch.setattr(supervisor, "HUNG_S", 2)

    async def scene():
        async with start() as (_, client):
            await until_ready(client)
            engine = children()["fake_engine"]
            os.kill(engine, signal.SIGSTOP)
            if sleeps_s < supervisor.HUNG_S:
                answer = asyncio.create_task(speak(client, "frames 2"))
                await asyncio.sleep(sleeps_s)
                os.kill(engine, signal.SIGCONT)
                assert (await answer).content[44:] == frame(0) + frame(1)
                await asyncio.sleep(2.5)
                assert children()["fake_engine"] == engine
            else:
                # The engine accepted this request before it was found to hang.
                assert (await speak(client, "frames 1")).status_code == 503
                await until_ready(client)
                assert (await speak(client, "frames 1")).status_code == 200
                assert children()["fake_engine"] != engine

    asyncio.run(scene())
    hung = sleeps_s > supervisor.HUNG_S
    assert ("the engine has been silent for 2 s: killing it" in capfd.readouterr().err) is hung


@pytest.mark.slow
@needs_proc
def test_an_http_process_that_hangs_is_restarted_on_its_port(start, capfd, monkeypatch):
    monkeypatch.setattr(supervisor, "HUNG_S", 2)

    async def scene():
        async with start() as (_, client):
            await until_ready(client)
            before = children()
            await asyncio.sleep(3.5)  # one that works is left alone
            assert children() == before
            os.kill(before["serving.http.app"], signal.SIGSTOP)
            async with httpx.AsyncClient(timeout=20) as other:  # waits for the new process
                assert (await other.get(f"{client.base_url}/health")).status_code == 200
            assert children()["serving.http.app"] != before["serving.http.app"]
            assert children()["fake_engine"] == before["fake_engine"]

    asyncio.run(scene())
    said = capfd.readouterr().err
    assert (
        "the HTTP process has been silent for 2 s: killing it" in said and "the engine has been" not in said
    )


@pytest.mark.slow
def test_an_engine_that_keeps_dying_ends_the_server(start, capfd):
    async def scene():
        async with start() as (task, client):
            while not task.done():
                try:
                    await until_ready(client)
                    await speak(client, "die")
                except (httpx.TransportError, TimeoutError):
                    await asyncio.sleep(0.02)
            assert task.result() == 1

    asyncio.run(scene())
    said = capfd.readouterr().err
    assert said.count("restarting it") == supervisor.MAX_DEATHS
    assert f"after {supervisor.MAX_DEATHS} restarts: giving up" in said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_processes_despite_open_streams(start, number):
    async def scene():
        async with start() as (task, client):
            await until_ready(client)
            async with client.stream(
                "POST", "/v1/audio/speech", json={"input": "hold 1", "response_format": "wav"}
            ) as answer:
                os.kill(os.getpid(), number)
                with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
                    await answer.aread()
            async with asyncio.timeout(5):
                assert await task == 0
            assert not children()

    before = signal.signal(number, signal.SIG_DFL)  # under nohup the tests inherit an ignored SIGHUP
    try:
        asyncio.run(scene())
    finally:
        signal.signal(number, before)


def test_a_hangup_that_is_ignored_stays_ignored(start):
    async def scene():
        async with start() as (task, client):
            await until_ready(client)
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.3)
            assert not task.done() and (await speak(client, "frames 1")).status_code == 200

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asyncio.run(scene())
    finally:
        signal.signal(signal.SIGHUP, before)


@needs_proc
def test_the_children_end_with_a_supervisor_that_is_killed_and_remove_its_directory(tmp_path):
    script = f"""
import asyncio, os, sys
from serving import supervisor
from serving.settings import HTTPArguments, Security, Settings
parent_fd, write_end = os.pipe()
opened = supervisor.socket_directory()
path = opened.__enter__() + "/engine.sock"
listener = supervisor.bind("127.0.0.1", 0)
arguments = HTTPArguments(Settings(), path, listener.fileno(), parent_fd)
engine = [sys.executable, {str(HERE / "fake_engine.py")!r}, path, str(parent_fd)]
http = supervisor.command("serving.http.app", arguments)
engine = supervisor.Child("engine", engine, [parent_fd], dict(os.environ), is_proven=False)
http = supervisor.Child("HTTP process", http, [parent_fd, listener.fileno()], dict(os.environ), is_proven=True)
asyncio.run(supervisor.run(engine, http, listener, path))
"""
    env = ENV | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", script], env=env, stderr=subprocess.PIPE, text=True)
    while "ready on" not in (line := process.stderr.readline()):
        assert line, "the server ended before it was ready"
    url = line.split()[-1]
    assert httpx.get(url + "/health").status_code == 200
    assert len(list(tmp_path.glob("zoo-*/engine.sock"))) == 1
    process.kill()
    process.wait()
    assert process.stderr.read() is not None  # returns only when both children have closed stderr
    with pytest.raises(httpx.ConnectError):
        httpx.get(url + "/health")
    assert not list(tmp_path.glob("zoo-*"))
    process.stderr.close()


@pytest.mark.parametrize(
    ("host", "key", "named", "allowed", "num_lines"),
    [
        ("127.0.0.1", {}, (), (), 0),
        ("127.0.0.1", {"ZOO_API_KEY": "sk"}, (), (), 0),
        ("0.0.0.0", {}, ("zoo",), ("zoo",), 1),
        ("0.0.0.0", {"ZOO_API_KEY": "sk"}, (), ("*",), 0),
        ("0.0.0.0", {"ZOO_API_KEY": "sk"}, ("zoo",), ("zoo",), 0),
    ],
)
def test_an_open_address_without_a_key_is_one_line(capfd, host, key, named, allowed, num_lines):
    settings = Settings(security=Security(allowed_hosts=named))
    with supervisor.bind(host, 0) as listener:
        guarded = supervisor.guarded(listener, settings, key)
    said = capfd.readouterr().err
    assert guarded.security.allowed_hosts == allowed and said.count("\n") == num_lines
    assert num_lines == 0 or said.startswith("zoo: no API key is set: everyone who can reach 0.0.0.0")


def test_a_server_may_have_as_many_descriptors_as_the_system_allows():
    script = "import resource as r; from serving.supervisor import raise_descriptor_limit as f; f(); "
    script += "print(*r.getrlimit(r.RLIMIT_NOFILE))"
    command = f"ulimit -S -n 200; ulimit -H -n 900; exec {sys.executable} -c '{script}'"
    done = subprocess.run(["sh", "-c", command], cwd=HERE.parent.parent, capture_output=True, text=True)
    assert done.stdout == "900 900\n", done.stderr


def test_a_port_in_use_is_one_clear_line():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=rf"cannot listen on 127\.0\.0\.1 port {port}: Address"):
            supervisor.bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1", "\x00"])
def test_an_address_of_another_machine_is_one_clear_line(host):
    with pytest.raises(ValueError, match="cannot listen on"):
        supervisor.bind(host, 0)


def test_an_empty_address_is_one_line_that_says_what_is_possible():
    with pytest.raises(
        ValueError, match=r"--host is empty; use 127\.0\.0\.1 for this machine, or 0\.0\.0\.0"
    ):
        supervisor.bind("", 0)


def test_a_directory_that_cannot_hold_a_socket_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with (
        pytest.raises(ValueError, match="set TMPDIR to a writable directory"),
        supervisor.socket_directory(),
    ):
        pass
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(ValueError, match="too long"), supervisor.socket_directory():
        pass
    assert not list(long.iterdir())


def test_a_server_removes_the_directories_of_servers_that_were_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (killed := tmp_path / "zoo-sockets-killed").mkdir()
    (killed / "engine.sock").touch()
    (other := tmp_path / "zoo-other").mkdir()
    with supervisor.socket_directory() as first, supervisor.socket_directory() as second:
        assert {*map(str, tmp_path.iterdir())} == {str(other), first, second}
    assert list(tmp_path.iterdir()) == [other]


def test_the_url_is_one_that_a_browser_can_open():
    with supervisor.bind("0.0.0.0", 0) as listener:
        assert supervisor.url(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_deaths_far_apart_do_not_count_as_in_a_row(monkeypatch):
    """A child that lived long starts with a clean record."""
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.0)
    monkeypatch.setattr(supervisor, "STEADY_S", 0.0)

    async def scene():
        child = supervisor.Child(
            "child", [sys.executable, "-c", "raise SystemExit(7)"], [], ENV, is_proven=True
        )
        task = asyncio.create_task(child.supervise())
        began = time.monotonic()
        seen = set()
        while len(seen) <= supervisor.MAX_DEATHS + 1 and time.monotonic() - began < 20:
            if child.process is not None:
                seen.add(child.process.pid)
            await asyncio.sleep(0.005)
        assert not task.done()
        await child.stop(5)
        await task
        return len(seen)

    assert asyncio.run(scene()) > supervisor.MAX_DEATHS + 1


def test_the_example_command_fits_the_model():
    designer = msgspec.structs.replace(CLONER, modes=["design"], reference_s=None)
    lines = [supervisor.try_it("http://here", [model]).splitlines() for model in (MODEL, designer, CLONER)]
    assert [len(line) for line in lines] == [1, 1, 2]
    assert '"voice": "vivian"' in lines[0][0] and '"instructions"' in lines[1][0]
    assert "-F name=me" in lines[2][0] and '"voice": "me"' in lines[2][1]
    assert not any('"model"' in line for pair in lines for line in pair)
    assert '"model": "fake", ' in supervisor.try_it("http://here", [MODEL, CLONER])


def test_a_heart_stops_when_the_supervisor_has_ended():
    """Otherwise its error would end the orderly stop of the HTTP process."""
    heard_fd, beating_fd = os.pipe()
    os.close(heard_fd)
    try:
        asyncio.run(heartbeat.beat(beating_fd))
    finally:
        os.close(beating_fd)
