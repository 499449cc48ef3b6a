"""The figures of device.py over HTTP: the warm engine of a part, served as `zoo serve` does it.

    zoo load, its workers ── HTTP ── HTTP process ── Unix socket ── this process, with the warm engine

The engine is not loaded or compiled a second time: this process opens the engine's socket itself, and starts the
project's HTTP process and `zoo load` next to it. Both end with this process, however it ends.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serving.engine.engine import Engine
    from zoo.request import Request

ROOT = Path(__file__).parent.parent
# What must be importable. typer, which reads a command's options, imports pydantic only then.
PARTS = "serving.http.app", "serving.cli.load", "serving.tools.load.worker", "pydantic"
FORMAT = "pcm"  # needs no FFmpeg
SHOWN = (
    *("requests", "failed", "failures", "failure_examples"),
    *("ttfa_p50_ms", "ttfa_p90_ms", "ttfa_p95_ms", "ttfa_p99_ms"),
    *("audio_s_per_s", "stream_viability", "chunk_viability", "c50", "underruns"),
    *("client_cpu_share", "client_limits"),
)
READY_S = 60.0  # for the HTTP process, which starts in one or two
LOOK_S = 0.5  # how often it is looked after meanwhile


class Failed(RuntimeError):
    """A process of this part did not do its work; the message has what it wrote last."""


def environment() -> dict[str, str]:
    """Return the environment of the other processes, which find this checkout's packages."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path}


def why_not() -> str | None:
    """Return why the processes cannot be started here, or None: which package cannot be imported."""
    found = subprocess.run(
        [sys.executable, "-c", f"import {', '.join(PARTS)}"],
        env=environment(),
        capture_output=True,
        text=True,
    )
    return None if found.returncode == 0 else last_line(found.stderr)


def last_line(text: str) -> str:
    return next(reversed(text.strip().splitlines()), "it wrote nothing")


def over_http(
    engine: Engine,
    streams: Sequence[int],
    rates: Sequence[float],
    frames: int,
    seconds: float,
    put: Callable[[str, Any], None],
) -> None:
    """Report what listeners over HTTP notice of a running engine with one model: closed loops of `streams`, and
    random arrivals at `rates`, of `seconds` each. A model without a voice of its own gets a recording, which the
    server needs `av` for. Raises Failed."""
    from serving.tools.requests import first_request

    [model] = engine.models.values()
    request = first_request(model.family)
    if request.references and importlib.util.find_spec("av") is None:
        return put(
            "over HTTP", "left out: the model needs a recording, and av, which reads it, is not installed"
        )
    with served(engine) as url, tempfile.TemporaryDirectory() as directory:
        ask = partial(
            measured, url, [*of_voice(request, Path(directory)), "-O", f"max_new_tokens={frames}"], seconds
        )
        if streams:
            for run in ask("streams", streams):
                put(f"{run['streams']} streams, each followed by the next, over HTTP", shown(run))
        for rate in rates:
            [run] = ask("rate", [rate])
            put(f"{rate:g} requests a second, over HTTP", shown(run))


def of_voice(request: Request, directory: Path) -> list[str]:
    """Return the flags of `zoo load` for the voice of a request. directory: where its recording may lie."""
    from serving.audio.pcm import pcm16, wav_header

    flags = [] if request.voice is None else ["--voice", request.voice]
    if request.instructions is not None:
        flags += ["-O", f"instructions={request.instructions}"]
    if request.references:
        [reference] = request.references
        pcm = pcm16(reference.clip.samples)
        recording = directory / "voice.wav"
        recording.write_bytes(wav_header(reference.clip.sample_rate_hz, len(pcm)) + pcm)
        flags += ["--reference", str(recording)]
        if reference.transcript is not None:
            flags += ["--reference-text", reference.transcript]
    return flags


def shown(run: dict[str, Any]) -> dict[str, Any]:
    """Return the figures that stand next to the engine's own. Shares are from 0 to 1."""
    values = {name: run[name] for name in SHOWN}
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in values.items()}


def measured(
    url: str, flags: Sequence[str], seconds: float, kind: str, values: Sequence[float]
) -> list[dict[str, Any]]:
    """Run `zoo load` with flags and a ladder of streams or rates, and return its runs. Raises Failed."""
    command = [sys.executable, "-m", "serving", "load", url, "--json", "--format", FORMAT]
    command += ["--duration", f"{seconds:g}", *flags]
    command += [part for value in values for part in (f"--{kind}", f"{value:g}")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    try:
        runs: list[dict[str, Any]] = json.loads(done.stdout)["runs"]
    except (ValueError, KeyError):
        raise Failed(f"zoo load ended with status {done.returncode}: {last_line(done.stderr)}") from None
    return runs


@contextmanager
def served(engine: Engine) -> Iterator[str]:
    """Serve an engine that runs on another thread of this process, and yield the address. Raises Failed."""
    from serving.engine.connections import Bridge
    from serving.engine.engine_process import SWITCH_S
    from serving.engine.wire import describe
    from serving.supervisor import bind, pipe, socket_directory

    switch_s, after_turn = sys.getswitchinterval(), engine.after_turn
    with bind("127.0.0.1", 0) as listener, socket_directory() as directory, pipe() as (parent_fd, _):
        path = f"{directory}/engine.sock"
        bridge = Bridge()
        bridge.listen(path)
        sys.setswitchinterval(SWITCH_S)  # as the engine's process
        try:
            bridge.open(engine, [describe(name, model.family.spec) for name, model in engine.models.items()])
            with http_process(path, listener.fileno(), parent_fd):
                yield "http://{}:{}".format(*listener.getsockname()[:2])
        finally:
            engine.after_turn = after_turn
            sys.setswitchinterval(switch_s)
            bridge.pool.shutdown()
            bridge.slow_pool.shutdown()
            bridge.loop.call_soon_threadsafe(bridge.loop.stop)


@contextmanager
def http_process(path: str, listening_fd: int, parent_fd: int) -> Iterator[None]:
    """Run the HTTP process for the engine's socket at `path`, from the time that it is ready. Raises Failed."""
    from serving.settings import HTTPArguments, Settings
    from serving.supervisor import command

    with tempfile.TemporaryDirectory() as voices, tempfile.TemporaryFile("w+") as said:
        arguments = HTTPArguments(Settings(voices_dir=voices), path, listening_fd, parent_fd)
        process = subprocess.Popen(
            command("serving.http.app", arguments),
            pass_fds=[listening_fd, parent_fd],
            env=environment(),
            stderr=said,
        )
        try:
            wait_until_ready(process, listening_fd, said.fileno())
            yield
        finally:
            process.terminate()
            try:
                process.wait(READY_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], listening_fd: int, said_fd: int) -> None:
    """Raises Failed if the process ends first, or is not ready within READY_S."""
    with socket.socket(fileno=os.dup(listening_fd)) as listener:
        host, port = listener.getsockname()[:2]
    ends_s = time.monotonic() + READY_S
    while time.monotonic() < ends_s:
        if process.poll() is not None:
            written = os.pread(said_fd, 1 << 20, 0).decode(errors="replace")
            raise Failed(f"the HTTP process ended with status {process.returncode}: {last_line(written)}")
        connection = HTTPConnection(host, port, timeout=LOOK_S)  # it waits for a process that accepts
        try:
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:  # it does not answer yet
            pass
        finally:
            connection.close()
        time.sleep(0.1)
    raise Failed(f"the HTTP process was not ready within {READY_S:g} s")
