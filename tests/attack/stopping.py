"""Stop the server, or one of its processes, while it answers: a cut answer must never look complete."""

from __future__ import annotations

import base64
import json
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.attack.report import Row
from tests.attack.target import Target

OPEN = 16
KINDS: tuple[dict[str, object], ...] = ({}, {"stream_format": "sse"}, {"stream": False})
FRAMES = 240
STOPS = {
    "SIGTERM to the engine": [("engine", signal.SIGTERM)],
    "SIGKILL to the engine": [("engine", signal.SIGKILL)],
    "SIGTERM to all": [(name, signal.SIGTERM) for name in ("engine", "http", "supervisor")],
    "SIGTERM to the supervisor": [("supervisor", signal.SIGTERM)],
    "SIGHUP to the supervisor": [("supervisor", signal.SIGHUP)],
    "SIGKILL to the supervisor": [("supervisor", signal.SIGKILL)],
    "SIGKILL to the HTTP process": [("http", signal.SIGKILL)],
}


def attack(directory: Path) -> Iterator[Row]:
    with Target("tiny", directory) as target, ThreadPoolExecutor(OPEN) as pool:
        whole = list(pool.map(lambda seed: listen(target.url, seed), range(OPEN)))
    for name, signals in STOPS.items():
        yield stop(name, signals, directory, whole)


def stop(name: str, signals: list[tuple[str, signal.Signals]], directory: Path, whole: list[str]) -> Row:
    with Target("tiny", directory, "--max-slots", "4", "--grace-s", "1") as target:
        with ThreadPoolExecutor(OPEN) as pool:
            answers = [pool.submit(listen, target.url, seed) for seed in range(OPEN)]
            time.sleep(0.6)
            for who, number in signals:
                target.signal(who, number)
            ends = [answer.result() for answer in answers]
        time.sleep(0.2)
        num_tracebacks = target.said.count("Traceback")
    short = [end for end, all in zip(ends, whole, strict=True) if end.startswith("whole") and end != all]
    wrong = [end for end in ends if end.startswith("BAD")] + short
    counts = Counter(end.split(":")[0] for end in ends)
    seen = [f"{count} {end}" for end, count in sorted(counts.items())]
    if num_tracebacks:
        seen.append(f"{num_tracebacks} tracebacks")
    return Row(f"{name}, {OPEN} open", OPEN, len(wrong) + num_tracebacks, ", ".join(seen + wrong[:1]))


def listen(url: str, seed: int) -> str:
    """Return how one answer ended for its client.

    "whole: BYTES" is an answer that looks complete, and "BAD ..." is neither that nor an error."""
    kind = KINDS[seed % len(KINDS)]
    text = "Hello out there, this goes on and on. " * 20
    body = {
        "input": text,
        "voice": "vivian",
        "response_format": "pcm",
        "seed": seed,
        "max_new_tokens": FRAMES,
    }
    data = b""
    try:
        with httpx.stream("POST", url + "/v1/audio/speech", json=body | kind, timeout=60) as answer:
            for chunk in answer.iter_raw():
                data += chunk
    except httpx.TransportError:
        return "broken"
    if answer.status_code != 200:
        is_shaped = answer.status_code == 503 and data.startswith(b'{"error":{"message"')
        return "503" if is_shaped else f"BAD {answer.status_code} {data[:40]!r}"
    return events(data) if "stream_format" in kind else f"whole: {len(data)}"


def events(data: bytes) -> str:
    said = [json.loads(line.removeprefix("data: ")) for line in data.decode().splitlines() if line]
    if not said or said[-1]["type"] not in ("speech.audio.done", "error"):
        return "BAD events without a last event"
    if said[-1]["type"] == "error":
        return "sse error"
    deltas = [event["audio"] for event in said if event["type"] == "speech.audio.delta"]
    return f"whole: {sum(len(base64.b64decode(delta)) for delta in deltas)}"
