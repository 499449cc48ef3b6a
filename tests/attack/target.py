"""A `zoo serve` to attack, with tiny demo checkpoints, in separate processes on a loopback port."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import httpx

ROOT = Path(__file__).parents[2]
START_S = 120.0
CHILDREN = {"engine": "serving.engine.engine_process", "http": "serving.http.app"}


class Target:
    """A server that runs while the context is active. `said` is its output on stderr so far."""

    start_s = START_S
    modules = CHILDREN  # of the supervisor's children, by the names that `signal` and `pids` use

    def __init__(self, models: str, directory: Path, *options: str, **env: str):
        self.models, self.directory, self.options = models.split(), directory, options
        self.env = {"OMP_NUM_THREADS": "1", **os.environ, "ZOO_CACHE_DIR": str(directory / "cache"), **env}
        self.lines: list[str] = []
        self.url = ""

    def __enter__(self) -> Target:
        self.process = subprocess.Popen(
            self.command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=self.env
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        until(lambda: "ready on" in self.said or self.process.poll() is not None, self.start_s)
        assert self.process.poll() is None, self.said
        match = re.search(r"ready on (http[^\s\"]+)", self.said)
        assert match is not None, self.said
        self.url = match[1]
        self.http = httpx.Client(base_url=self.url, timeout=120, limits=httpx.Limits(max_connections=None))
        self.pids = {name: self._pid(module) for name, module in self.modules.items()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.http.close()
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for name in self.pids:
            self.signal(name, signal.SIGCONT)
        self.reader.join(20)

    @property
    def command(self) -> list[str]:
        demos = [self.directory / model for model in self.models]
        for demo in demos:
            if not demo.exists():
                write_demo(demo, demo.name)
        quick = ["--no-compile", "--no-warm", "--device", "cpu", "--port", "0"]
        voices = ["--voices-dir", str(self.directory / "voices")]
        return [sys.executable, "-m", "serving", "serve", *map(str, demos), *quick, *voices, *self.options]

    @property
    def said(self) -> str:
        return "".join(self.lines)

    def _read(self) -> None:
        assert self.process.stderr is not None, "stderr is not a pipe"
        for line in self.process.stderr:
            self.lines.append(line)

    def _pid(self, module: str) -> int:
        """Return the newest child that runs a module."""
        found = [pid for pid in children(self.process.pid) if module in command_line(pid)]
        return max(found)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to `engine`, `http` or `supervisor` if it exists."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid if name == "supervisor" else self.pids[name], number)

    def resident_bytes(self, name: str) -> int:
        return self._memory_bytes(name, "VmRSS")

    def peak_bytes(self, name: str) -> int:
        """Return the peak since `forget_peaks`."""
        return self._memory_bytes(name, "VmHWM")

    def forget_peaks(self) -> None:
        for pid in self.pids.values():
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def _memory_bytes(self, name: str, field: str) -> int:
        status = Path(f"/proc/{self.pids[name]}/status").read_text()
        match = re.search(rf"{field}:\s+(\d+) kB", status)
        assert match is not None, status
        return int(match[1]) << 10

    def speak(
        self, text: str = "Hello.", client: httpx.Client | None = None, **fields: object
    ) -> httpx.Response:
        body = {
            "model": self.models[0],
            "input": text,
            "response_format": "wav",
            "max_new_tokens": 2,
            **fields,
        }
        return (client or self.http).post("/v1/audio/speech", json=body)


def write_demo(directory: Path, size: str) -> None:
    script = "import sys; from zoo.qwen3_tts import write_demo; write_demo(sys.argv[1], sys.argv[2])"
    subprocess.run([sys.executable, "-c", script, str(directory), size], cwd=ROOT, check=True)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def until(fact: Callable[[], bool], seconds: float) -> bool:
    """Return whether a fact came true in time."""
    end = time.monotonic() + seconds
    while not fact():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
