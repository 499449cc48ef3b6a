"""A `zoo serve` that a benchmark starts and ends, and what it holds while it is idle."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread

from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parent.parent
SETTLE_S = 3.0  # after this time, metrics (at most a second old) describe an idle server
IDLE = ("running", "waiting", "preparing", "held", "paused")

told = partial(print, file=sys.stderr, flush=True)


class Server:
    """A running `zoo serve` that is ready.

    stages: the lines that it printed, with seconds since its start."""

    def __init__(self, process: subprocess.Popen[str], began_s: float):
        self.process, self.began_s = process, began_s
        self.stages: list[tuple[float, str]] = []
        assert process.stderr is not None
        for line in process.stderr:
            self.stages.append((time.monotonic() - began_s, line.strip()))
            if "ready on" in line:
                break
        else:
            raise RuntimeError(
                "the server ended before it was ready: " + " | ".join(line for _, line in self.stages)
            )
        self.url = line.split()[-1]
        Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would block the server

    @property
    def ready_s(self) -> float:
        return self.stages[-1][0]

    def metrics(self) -> dict[str, float]:
        """Return each metric by name, summed over the models."""
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            text = answer.read().decode()
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def holds(self) -> dict[str, float]:
        """Return the resources that an idle server holds: equal before and after a load, if nothing leaks."""
        metrics, held = self.metrics(), {"descriptors": 0, "threads": 0, "resident_mib": 0.0}
        for pid in descendants(self.process.pid):
            status = Path(f"/proc/{pid}/status").read_text()
            held["descriptors"] += len(os.listdir(f"/proc/{pid}/fd"))
            held["threads"] += int(re.findall(r"Threads:\s+(\d+)", status)[0])
            held["resident_mib"] += round(int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024, 1)
        held |= {name: metrics[f"zoo_requests_{name}"] for name in IDLE}
        held["pages_taken"] = metrics["zoo_pages"] - metrics["zoo_pages_free"]
        held["reference_bytes"] = metrics["zoo_reference_bytes"]
        return held


@contextmanager
def serving(options: argparse.Namespace, *more: str, models: Sequence[str] = ()) -> Iterator[Server]:
    command = [sys.executable, "-m", "serving", "serve", *(models or [options.model]), "--port", "0", *more]
    command += ["--device", "cpu"] if "--device" not in options.serve else []
    env = os.environ | {"ZOO_CACHE_DIR": str(options.cache), "ZOO_LOG": "text"}
    began_s = time.monotonic()
    process = subprocess.Popen(command + options.serve, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=env)
    try:
        server = Server(process, began_s)
        told(f"{' '.join(more) or 'zoo serve'}: ready in {server.ready_s:.1f} s")
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def descendants(pid: int) -> list[int]:
    """Return the process id, its children and their descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in descendants(int(child)))]


def offered(server: Server) -> list[str]:
    """Return the voices of the server's first model."""
    with urllib.request.urlopen(f"{server.url}/v1/models") as answer:
        return json.load(answer)["data"][0]["voices"]


def demo(directory: Path, size: str) -> Path:
    command = ["demo-checkpoint", "qwen3_tts", str(directory), "--size", size]
    subprocess.run(
        [sys.executable, "-m", "serving", *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
    )
    return directory
