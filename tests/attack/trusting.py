"""Abuse the server's trust in names, other processes, the disk and its clients' good manners."""

from __future__ import annotations

import io
import json
import os
import resource
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import numpy as np
import soundfile

from compile_cache.artifacts import opened, write_manifest
from tests.attack.flooding import silence
from tests.attack.report import Row
from tests.attack.target import Target, until

PAGE = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "audio"}
FORGED: tuple[dict[str, str], ...] = (
    {"host": "evil.example", "origin": "http://evil.example"},
    {"host": "evil.example:8000"},
    {"host": "localhost.evil.example"},
    {"host": "127.0.0.1.evil.example"},
    {"origin": "http://evil.example"},
    {"origin": "null"},
    PAGE,
    {**PAGE, "sec-fetch-site": "same-site"},
    {**PAGE, "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
)
NUM_BATCHES = 20
SOFT_LIMIT, NUM_OPEN = 256, 600
# Hindi, Tamil, Thai and Arabic have vowel signs; the last letter is a Turkish capital.
NAMES = ("हिन्दी", "தமிழ்", "ภาษาไทย", "مُحَمَّد", "İ")
TINY = (1e-6, 1e-30, 1e-38, 1e-40)


def attack(directory: Path) -> Iterator[Row]:
    with Target("tiny", directory, "--host", "0.0.0.0") as target:
        yield forged_requests(target)
        yield abandoned_batches(target)
        yield tiny_temperatures(target)
    with few_descriptors(), Target("tiny", directory) as target:
        yield many_connections(target)
    with Target("tiny-base", directory) as target:
        yield odd_uploads(target)
    yield full_disk(directory)
    yield planted_code(directory)
    yield read_only_cache(directory)


def forged_requests(target: Target) -> Row:
    """Requests that a hostile page could send through the browser of a user near an open server."""
    paths = ("/v1/models", "/v1/audio/voices", "/metrics", "/")
    statuses = [target.http.get(path, headers=forged).status_code for forged in FORGED for path in paths]
    genuine = [target.http.get(path).status_code for path in paths]
    [count] = metric(target, "zoo_foreign_requests_total")
    logged = sum('"code": "foreign"' in line for line in target.lines)
    is_told = "no API key is set" in target.said
    let_in = len(statuses) - statuses.count(403)
    failed = let_in + len(paths) - genuine.count(200) + (count != len(statuses)) + (logged != count)
    seen = f"{let_in} are let in; {count:.0f} are counted and {logged} logged"
    return Row("requests of foreign pages", len(statuses), failed + (not is_told), seen)


def metric(target: Target, name: str) -> list[float]:
    lines = target.http.get("/metrics").text.splitlines()
    return [float(line.split()[1]) for line in lines if line.split()[0] == name]


def abandoned_batches(target: Target) -> Row:
    """Clients that disconnect from a batch leave no error in the log."""
    items = [{"input": "word " * 200, "voice": "vivian", "max_new_tokens": 200}] * 4
    for _ in range(NUM_BATCHES):
        with suppress(httpx.TimeoutException):
            target.http.post("/v1/audio/speech/batch", json={"items": items}, timeout=0.1)
    is_free = until(lambda: metric(target, 'zoo_requests_running{model="tiny"}') == [0.0], 30)
    errors = num_errors(target)
    return Row("abandoned batches", NUM_BATCHES, errors + (not is_free), f"{errors} errors in the log")


def num_errors(target: Target) -> int:
    lines = [json.loads(line) for line in target.lines if line.startswith("{")]
    return sum(line.get("level") in ("error", "critical") for line in lines)


def tiny_temperatures(target: Target) -> Row:
    """A temperature too small to divide by is greedy."""
    how: dict[str, object] = {"voice": "vivian", "stream": False, "seed": 1, "max_new_tokens": 8}
    greedy = target.speak(temperature=0, **how).content
    wrong = sum(target.speak(temperature=tiny, **how).content != greedy for tiny in TINY)
    return Row("tiny temperatures", len(TINY), wrong, f"{wrong} differ from temperature 0")


@contextmanager
def few_descriptors() -> Iterator[None]:
    """Start processes with a soft limit of SOFT_LIMIT open files in this context."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT_LIMIT, hard))
    with ExitStack() as after:
        after.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        yield


def many_connections(target: Target) -> Row:
    """More half-open connections than the soft limit has descriptors: others are served all the same."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the server has started with fewer
    parts = httpx.URL(target.url)
    clients = [socket.create_connection((parts.host, parts.port or 80)) for _ in range(NUM_OPEN)]
    for client in clients:
        client.sendall(b"GET /hea")
    began = time.monotonic()
    status = target.speak(voice="vivian").status_code
    took_s = time.monotonic() - began
    for client in clients:
        client.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    failed = int(status != 200 or took_s > 3)
    name = f"{NUM_OPEN} connections, {SOFT_LIMIT} descriptors"
    return Row(name, NUM_OPEN, failed, f"another was answered in {took_s:.1f} s")


def odd_uploads(target: Target) -> Row:
    """Every stored voice can be spoken in, with a name of any script; the rest is refused with a reason."""
    well, kind = silence(5, 16000), "audio_sample"
    stored = [upload(target, {"name": name}, [(kind, well)]) for name in NAMES]
    stored.append(upload(target, {"name": "surround"}, [(kind, surround(5))]))
    spoken = [target.speak(voice=name).status_code for name in (*NAMES, "surround")]
    refused = [upload(target, {"name": f"at-{hz}-hz"}, [(kind, silence(200, hz, "WAV"))]) for hz in (1, 100)]
    refused.append(upload(target, {"name": "two"}, [(kind, well)] * 2))
    refused.append(upload(target, {"name": "none"}, []))
    refused.append(upload(target, {"name": "many"}, [(kind, b"x")] * 2000))
    wrong = sum(status != 200 for status in stored + spoken) + sum(status != 400 for status in refused)
    seen = f"{len(stored)} stored, {spoken.count(200)} spoken in, {refused.count(400)} refused"
    return Row("odd uploads", len(stored) + len(refused), wrong, seen)


def upload(target: Target, data: dict[str, str], parts: list[tuple[str, bytes]]) -> int:
    files = [(name, ("voice.flac", content)) for name, content in parts] or {"unused": b""}
    answer = target.http.post("/v1/audio/voices", data=data, files=files)
    is_explained = answer.status_code == 200 or answer.json()["error"]["message"]
    return answer.status_code if is_explained else 0


def surround(seconds: int) -> bytes:
    """Return a recording in 5.1."""
    file = io.BytesIO()
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, (16000 * seconds, 6))
    soundfile.write(file, noise, 16000, format="WAV", subtype="PCM_16")
    return file.getvalue()


def full_disk(directory: Path) -> Row:
    """Deleting a voice works where nothing new can be made. Only root can make such a disk."""
    name, place = "deleting a voice on a full disk", directory / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,nr_inodes=12", "zoo-attack", str(place)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        return Row(name, 0, 0, "not tried: no disk can be mounted here")
    with ExitStack() as after:
        after.callback(subprocess.run, ["umount", str(place)], check=True)
        with Target("tiny-base", directory, "--voices-dir", str(place / "voices")) as target:
            sample = {"audio_sample": ("a.flac", silence(5, 16000))}
            stored = target.http.post("/v1/audio/voices", data={"name": "a"}, files=sample).status_code
            until(lambda: not makes(place / "another"), 5)
            deleted = target.http.delete("/v1/audio/voices/a").status_code
            again = target.http.post("/v1/audio/voices", data={"name": "a"}, files=sample).status_code
    return Row(name, 1, int((stored, deleted) != (200, 200)), f"{stored}, {deleted}, {again}")


def makes(stem: Path) -> bool:
    """Whether a directory could be made."""
    try:
        stem.with_name(f"{stem.name}-{time.monotonic_ns()}").mkdir()
    except OSError:
        return False
    return True


def planted_code(directory: Path) -> Row:
    """An entry of the compile cache that others may have written is never run."""
    plants: dict[str, Callable[[Path], object]] = {"that all may write": lambda place: place.chmod(0o777)}
    if os.getuid() == 0:
        plants["of another user"] = lambda place: os.chown(place, 12345, 12345)
    taken = [name for name, plant in plants.items() if is_taken(directory / "planted" / "a" / "b", plant)]
    return Row("planted compiled code", len(plants), len(taken), f"taken: {', '.join(taken) or 'none'}")


def read_only_cache(directory: Path) -> Row:
    """What is in the compile cache is used where nothing can be written. Only root can mount such a place."""
    name, place = "a compile cache that can only be read", directory / "read-only"
    is_taken(place, lambda entry: None)
    if subprocess.run(["mount", "--bind", str(place), str(place)], capture_output=True).returncode != 0:
        return Row(name, 0, 0, "not tried: nothing can be mounted here")
    with ExitStack() as after:
        after.callback(subprocess.run, ["umount", str(place)], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", str(place)], check=True)
        try:
            with opened(place / "entry") as entry:
                found = (entry.directory / "step.saved").read_bytes() if entry.is_found else b""
        except (OSError, ValueError) as error:
            return Row(name, 1, 1, str(error))
    return Row(name, 1, int(found != b"theirs"), f"{len(found)} bytes are read")


def is_taken(parent: Path, plant: Callable[[Path], object]) -> bool:
    place = parent / "entry"
    with opened(place) as entry:
        if not entry.is_found:
            (entry.directory / "step.saved").write_bytes(b"ours")
    (place / "step.saved").write_bytes(b"theirs")
    write_manifest(place)
    plant(place)
    with opened(place) as entry:
        return entry.is_found
