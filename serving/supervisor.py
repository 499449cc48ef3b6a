"""`zoo serve`: runs the engine and HTTP in two processes, so that one can crash without the other.

            supervisor --- holds the HTTP port, restarts a child that dies
             /       \\
    engine process   HTTP process         (a Unix socket between them)

With several replicas, or with models on demand, a gateway is in the engine's place.

The supervisor restarts a child that dies or falls silent: the engine's messages and the HTTP process's
heartbeat (heartbeat.py) show that they still work. It restarts an engine only if it was ready before: an
engine that dies while loading would die again. Children end with the supervisor, even if it is killed,
because it holds the write end of a pipe they wait on.
"""

from __future__ import annotations

import asyncio
import fcntl
import ipaddress
import json
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from serving import heartbeat, logs, protocol
from serving.settings import EngineArguments, HTTPArguments, Settings
from serving.status_line import StatusLine

REFUSED = 2  # exit status of a child that has printed its own error message
HUNG_S = 30  # a child that has worked and stays silent this long is hung
STEADY_S = 60.0  # a child that lived this long starts with a clean record
MAX_DEATHS = 5
FIRST_BACKOFF_S = 0.5
GRACE_S = 5  # for open answers to finish when the server stops
# A few seconds of audio. This limits the memory that a client can hold when it stops reading.
SEND_BUFFER_BYTES = 256 << 10
SOCKETS = "zoo-sockets-"  # begins the name of a directory of sockets
OWN_LINE = "zoo: "  # begins a line for people that a child writes before it ends
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MAX_LINE_BYTES = 64 << 10  # a longer line of a child is split
KEY = "ZOO_API_KEY"  # the environment variable of the API key
KILL_AFTER_S = 5  # for a child to exit after SIGTERM


def log_line(line: str) -> None:
    """Write a line to stderr. With `--log json` it is JSON too, so that programs can parse every line."""
    text = f"zoo: {line}\n"
    if os.environ.get(logs.VARIABLE) == "json":
        at = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        event = line.partition("\n")[0]  # the example command below it is for people
        fields = {"process": "supervisor", "event": event, "level": "info", "timestamp": at}
        text = json.dumps(fields) + "\n"
    logs.write(text)  # one write, because three processes share stderr


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address. Raises ValueError."""
    if not host:
        raise ValueError("--host is empty; use 127.0.0.1 for this machine, or 0.0.0.0 for every interface")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit the buffer size.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(address)
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"cannot listen on {host} port {port}: {getattr(error, 'strerror', None) or error}"
        ) from None
    return listener


@contextmanager
def socket_directory() -> Iterator[str]:
    """Create a private directory for Unix sockets in this context, and yield its path. Raises ValueError.

    A lock on it is held until this process ends. All processes of a server may be killed at once, so that none can
    remove its directory: the next one does.
    """
    try:
        remove_abandoned(Path(tempfile.gettempdir()))
        directory, lock = locked_directory()
    except OSError as error:
        raise ValueError(
            f"cannot create a directory for the engine's socket: {error}; set TMPDIR to a writable directory"
        ) from None
    try:
        if len(directory) > 90:  # a Unix socket address has at most 108 bytes, 104 on some systems
            raise ValueError(
                f"{directory} is too long for the address of a Unix socket; set TMPDIR to a shorter path"
            )
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def locked_directory() -> tuple[str, int]:
    """Create a directory, and return its path and the descriptor that holds its lock. Raises OSError."""
    while True:
        directory = tempfile.mkdtemp(prefix=SOCKETS)
        with suppress(FileNotFoundError):  # another server took it for abandoned before the lock
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_SH)  # NFS gives an exclusive lock only to a file that is written
            if os.path.exists(directory):
                return directory, lock
            os.close(lock)


def remove_abandoned(parent: Path) -> None:
    """Remove the directories of sockets that no process has locked any more."""
    for directory in parent.glob(f"{SOCKETS}*"):
        with suppress(OSError):  # it belongs to another user, is in use, or another server was first
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory)
            finally:
                os.close(lock)


class Child:
    """A child process that the supervisor restarts when it dies, up to MAX_DEATHS times in a row."""

    def __init__(
        self, name: str, command: Sequence[str], fds: Sequence[int], env: dict[str, str], *, is_proven: bool
    ):
        self.name = name
        self.command = command
        self.fds = fds
        self.env = env
        self.is_proven = is_proven  # whether it has worked before, so that a restart makes sense
        self.process: asyncio.subprocess.Process | None = None
        self.is_stopping = False
        self.silent_s: int | None = None  # seconds without a message; None while no message is expected
        self.heartbeat_fd: int | None = None  # where its heartbeat arrives, if it has one
        self.is_relayed = False  # whether the supervisor relays its stderr, to protect the status line
        self.last_line = ""  # the last one for people that it wrote, if it is relayed

    async def supervise(self) -> int:
        """Run and restart the process until it ends for good. Returns the server's exit status."""
        deaths = 0
        while not self.is_stopping:
            began = time.monotonic()
            status = await self.run()
            if self.is_stopping:
                break
            if status == REFUSED:
                return REFUSED
            how = how_it_ended(status)
            if not self.is_proven:
                log_line(f"the {self.name} ended {how} before it was ready")
                return 1
            deaths = deaths + 1 if time.monotonic() - began < STEADY_S else 1
            if deaths > MAX_DEATHS:
                log_line(f"the {self.name} ended {how} after {MAX_DEATHS} restarts: giving up")
                return 1
            delay_s = FIRST_BACKOFF_S * 2 ** (deaths - 1)
            log_line(f"the {self.name} ended {how}; restarting it in {delay_s:g} s")
            await asyncio.sleep(delay_s)
        return 0

    async def run(self) -> int:
        """Run the process once. Returns its exit status."""
        self.silent_s = None  # until it has started
        self.process = await asyncio.create_subprocess_exec(
            *self.command,
            pass_fds=self.fds,
            env=self.env,
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE if self.is_relayed else None,
            start_new_session=True,  # only the supervisor handles Ctrl-C
        )
        if self.process.stderr is not None:
            await relay(self.process.stderr, self.note)
        return await self.process.wait()

    def note(self, lines: str) -> None:
        """Note the last line in the process's own words from its relayed stderr: it says why the process
        ends."""
        for line in lines.splitlines():
            if line.startswith(OWN_LINE):
                self.last_line = line.removeprefix(OWN_LINE)

    def heard(self) -> None:
        """Note a sign of life."""
        self.silent_s = 0

    async def stop(self, patience_s: float) -> None:
        self.is_stopping = True
        if self.process is None or self.process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            self.process.terminate()
        try:
            async with asyncio.timeout(patience_s):
                await self.process.wait()
        except TimeoutError:
            log_line(f"the {self.name} did not stop within {patience_s:g} s: killing it")
            self.kill()
            await self.process.wait()

    def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.kill()


def how_it_ended(status: int) -> str:
    return f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"


async def relay(reader: asyncio.StreamReader, note: Callable[[str], None]) -> None:
    """Copy a child's stderr to ours, line by line, until it ends. note: is told the lines."""
    unfinished = b""
    while data := await reader.read(MAX_LINE_BYTES):
        whole, newline, unfinished = (unfinished + data).rpartition(b"\n")
        if len(unfinished) > MAX_LINE_BYTES:
            whole, newline, unfinished = unfinished, b"\n", b""
        lines = (whole + newline).decode(errors="replace")
        note(lines)
        logs.write(lines)
    if unfinished:
        logs.write(unfinished.decode(errors="replace") + "\n")


def serve(settings: Settings, env: dict[str, str], status_line: StatusLine | None = None) -> int:
    """Run the server until a signal ends it. Returns the exit status; raises ValueError.

    env: the environment of both children.
    status_line: the line to show below the log. All log lines then pass through it.
    """
    raise_descriptor_limit()
    with (
        bind(settings.host, settings.port) as listener,
        socket_directory() as directory,
        pipe() as (parent_fd, _),
        pipe() as (heartbeat_fd, beating_fd),
    ):
        settings = guarded(listener, settings, env)
        path = f"{directory}/engine.sock"
        name, module = engine_process(settings)
        engine = command(module, EngineArguments(settings, path, parent_fd))
        arguments = HTTPArguments(settings, path, listener.fileno(), parent_fd, beating_fd)
        http = command("serving.http.app", arguments)
        http_fds = [parent_fd, listener.fileno(), beating_fd]
        speaker = Child(name, engine, [parent_fd], env, is_proven=False)
        server = Child("HTTP process", http, http_fds, env, is_proven=True)
        server.heartbeat_fd = heartbeat_fd
        with nullcontext() if status_line is None else status_line.open():
            return asyncio.run(run(speaker, server, listener, path, settings.grace_s, status_line))


def engine_process(settings: Settings) -> tuple[str, str]:
    """Return the name and the module of the process that speaks the engine's protocol: the engine, or a gateway in
    its place."""
    if settings.replicas.are_on_ray:
        return "gateway", "serving.cluster.gateway_process"
    if settings.on_demand is not None:
        return "gateway", "serving.on_demand.gateway_process"
    return "engine", "serving.engine.engine_process"


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    """Open a pipe in this context: its read end and its write end."""
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


def raise_descriptor_limit() -> None:
    """Let this process and its children have as many open files and connections as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # where the system allows less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def guarded(listener: socket.socket, settings: Settings, env: dict[str, str]) -> Settings:
    """Warn about an open address without an API key. With a key, allow every Host there unless the user names
    some: a page that rebinds its name to the address does not know the key."""
    address = listener.getsockname()[0].partition("%")[0]
    if ipaddress.ip_address(address).is_loopback:
        return settings
    if KEY not in env and settings.security.api_keys is None:
        log_line(f"no API key is set: everyone who can reach {address} can use this server; see --api-key")
        return settings
    hosts = settings.security.allowed_hosts or ("*",)
    security = msgspec.structs.replace(settings.security, allowed_hosts=hosts)
    return msgspec.structs.replace(settings, security=security)


def command(module: str, arguments: EngineArguments | HTTPArguments) -> list[str]:
    """Return the command that runs a child, with its arguments as JSON."""
    return [sys.executable, "-m", module, msgspec.json.encode(arguments).decode()]


async def run(
    engine: Child,
    http: Child,
    listener: socket.socket,
    path: str,
    grace_s: int = GRACE_S,
    status_line: StatusLine | None = None,
) -> int:
    """Run both children until a signal arrives or one ends for good. Returns the exit status. path: of the
    engine's socket."""
    engine.is_relayed = http.is_relayed = status_line is not None
    if http.heartbeat_fd is not None:
        heartbeat.listen(http.heartbeat_fd, http.heard)
    signalled = asyncio.Event()

    def stop() -> None:
        if signalled.is_set():  # a second signal kills the children immediately
            http.kill()
            engine.kill()
        signalled.set()

    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP; keep it ignored
            asyncio.get_running_loop().add_signal_handler(number, stop)
    endings = [asyncio.create_task(child.supervise()) for child in (engine, http)]
    watching = [
        asyncio.create_task(watch(path, engine, url(listener), status_line)),
        asyncio.create_task(kill_if_hung(engine)),
        asyncio.create_task(kill_if_hung(http)),
    ]
    waiting = asyncio.create_task(signalled.wait())
    done, pending = await asyncio.wait([*endings, *watching, waiting], return_when=asyncio.FIRST_COMPLETED)
    if waiting in done:
        log_line("stopping")
    listener.close()
    await http.stop(grace_s + KILL_AFTER_S)  # before the engine, so that open answers can finish
    await engine.stop(KILL_AFTER_S)
    for task in pending:
        task.cancel()
    return next((task.result() for task in (*endings, *watching) if task in done), 0)


async def watch(path: str, engine: Child, url: str, status_line: StatusLine | None = None) -> int:
    """Log the engine's progress, and an example request once it is ready. Runs until cancelled."""
    models: list[protocol.ModelInfo] = []
    greeted = False
    while True:
        try:
            reader, writer = await asyncio.open_unix_connection(path)
        except OSError:  # the engine does not listen yet
            await asyncio.sleep(0.1)
            continue
        shown = ""
        async for message in protocol.read(reader, protocol.to_http):
            if engine.silent_s is not None:
                engine.heard()
            match message:
                case protocol.Stats() if status_line is not None:
                    status_line.show(message, time.monotonic())
                case protocol.Models():
                    models = message.models
                case protocol.Status(state, progress, detail):
                    line = f"{state} {round(10 * progress) * 10:3d} %" + (f"  {detail}" if detail else "")
                    if state == "ready":
                        engine.is_proven = True
                        engine.heard()
                        log_line(f"ready on {url}" + ("" if greeted else f"\n\n    {try_it(url, models)}\n"))
                        greeted = True
                    elif line != shown:
                        log_line(line)
                    shown = line
        engine.silent_s = None
        if status_line is not None:
            status_line.hide()
        writer.close()


async def kill_if_hung(child: Child) -> int:
    """Kill a child that stays silent, so that it is restarted. Runs until cancelled.

    It counts only the seconds for which this process was awake: after a suspend the child is not hung.
    """
    while True:
        await asyncio.sleep(1)
        if child.silent_s is None:
            continue
        child.silent_s += 1
        if child.silent_s > HUNG_S:
            log_line(f"the {child.name} has been silent for {HUNG_S} s: killing it")
            child.silent_s = None
            child.kill()


def url(listener: socket.socket) -> str:
    """Return the URL at which a browser on this machine reaches the socket."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def try_it(url: str, models: Sequence[protocol.ModelInfo]) -> str:
    """Return a shell command that speaks with the first model, after one that uploads a voice if needed."""
    model, upload = models[0], ""
    if model.voices:
        voice = f'"voice": "{model.voices[0]}"'
    elif "design" in model.modes:
        voice = '"instructions": "A calm, low voice."'
    else:
        voice = '"voice": "me"'
        upload = f"curl {url}/v1/audio/voices -F name=me -F audio_sample=@me.wav -F ref_text='What I say in me.wav.'\n    "
    chosen = f'"model": {json.dumps(model.id)}, ' if len(models) > 1 else ""
    body = f'{{{chosen}"input": "Hello from the zoo.", {voice}}}'
    return (
        f"{upload}curl -N {url}/v1/audio/speech -H 'content-type: application/json' -d '{body}' -o hello.mp3"
    )
